// Keeper: holds file descriptors for larderd, and nothing else.
//
// An fd is memory that stays as long as somebody holds it; the keeper is that somebody while
// larderd is replaced. It knows fixed-size records (protocol/keeper_record.h), one owner at a time,
// and no meaning of what it holds. Thread rule: one thread.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "larder/own_fd.h"
#include "larder/status.h"
#include "protocol/keeper_record.h"

namespace larder::daemon {

class Keeper {
 public:
  struct Answer {
    protocol::KeeperReply reply;
    OwnFd fd;  // list: a duplicate of the entry's fd
  };

  // Who asks: a connection (any number that is unique among living ones) of a process.
  struct Asker {
    int connection;
    int64_t pid;
    int pidfd;  // -1 where it cannot be had
  };
  // `fds` are what came with the message.
  Answer handle(const Asker& asker, const protocol::KeeperRequest& request, std::vector<OwnFd> fds);
  // The connection has closed. The owner stays the owner until its process has exited.
  void connection_closed(int connection);

  size_t num_entries() const { return entries_.size(); }

 private:
  struct Entry {
    OwnFd fd;
    std::array<uint8_t, 64> metadata;
  };

  Status hello(const Asker& asker);
  Status put(const protocol::KeeperRequest& request, std::vector<OwnFd> fds);
  bool owner_lives() const;

  std::map<uint64_t, Entry> entries_;
  uint64_t epoch_ = 0;
  int owner_ = -1;  // connection, -1 when it has closed
  int64_t owner_pid_ = 0;
  OwnFd owner_pidfd_;  // of the process that said hello last
};

// Serves a listening socket until SIGTERM or SIGINT. Returns the exit code.
int serve_keeper(int listener);

}  // namespace larder::daemon
