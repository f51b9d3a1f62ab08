// SimProcess: a process that can be killed, and what others can see of it.
#pragma once

#include <cstdint>

#include "tests/simulation/memories.h"

namespace larder::sim {

// A process runs -> is dying (SIGKILL was sent; what its GPU had queued goes on writing) -> has
// exited -> is gone, which is the same unless it had forked a child that still has its memory and
// its sockets.
class SimProcess {
 public:
  explicit SimProcess(uint64_t pid) : pid_(pid), pidfd_(make_signal()), gone_fd_(make_signal()) {}

  uint64_t pid() const { return pid_; }
  bool runs() const { return runs_; }
  bool exited() const { return exited_; }
  bool has_child() const { return has_child_; }
  bool gone() const { return exited_ && !has_child_; }
  int pidfd() const { return pidfd_.get(); }
  // Readable once it is gone: what the fencing of its sessions waits for.
  int gone_fd() const { return gone_fd_.get(); }

  void fork() { has_child_ = true; }
  void kill() { runs_ = false; }
  void exit() {
    runs_ = false;
    exited_ = true;
    signal(pidfd_.get());
    if (gone()) signal(gone_fd_.get());
  }
  void child_exits() {
    has_child_ = false;
    if (gone()) signal(gone_fd_.get());
  }

 private:
  uint64_t pid_;
  OwnFd pidfd_;
  OwnFd gone_fd_;
  bool runs_ = true;
  bool exited_ = false;
  bool has_child_ = false;
};

}  // namespace larder::sim
