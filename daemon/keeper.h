// Keeper: holds file descriptors for larderd, and nothing else.
//
// An fd is memory that stays as long as somebody holds it; the keeper is that somebody while
// larderd is replaced. It knows fixed-size records (protocol/keeper_record.h), one owner at a time,
// and no meaning of what it holds. Whatever a client sends is that client's misfortune alone. When
// the keeper ends, by SIGTERM too, all that only it held is gone.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <vector>

#include "larder/own_fd.h"
#include "larder/status.h"
#include "protocol/keeper_record.h"

namespace larder::daemon {

// What is held and for whom. Thread rule: one thread.
class Keeper {
 public:
  struct Answer {
    protocol::KeeperReply reply;
    std::vector<int> fds;  // list: of the entries; the keeper's own, good until its next call
    OwnFd dropped;         // what is held no longer; closing it may free much memory and take long
  };

  // Who asks: a connection (any number that is unique among living ones) of a process.
  struct Asker {
    int connection;
    int64_t pid;  // 0 where it cannot be seen
    int pidfd;    // -1 where it cannot be had
  };

  explicit Keeper(size_t max_entries = protocol::kMaxKeeperEntries) : max_entries_(max_entries) {}

  // `fds` are what came with the message. A refusal changes nothing.
  Answer handle(const Asker& asker, const protocol::KeeperRequest& request, std::vector<OwnFd> fds);
  // The connection has closed. The owner stays the owner until its process has exited; without a
  // pidfd of it, the end of its connection is all that can be seen.
  void connection_closed(int connection);

  bool is_owner(int connection) const { return connection == owner_; }
  size_t num_entries() const { return entries_.size(); }

 private:
  struct Entry {
    OwnFd fd;
    std::array<uint8_t, 64> metadata;
  };

  Status check(const Asker& asker, const protocol::KeeperRequest& request, size_t num_fds) const;
  Status hello(const Asker& asker);
  Status put(const protocol::KeeperRequest& request, OwnFd fd, Answer& answer);
  Status drop(uint64_t key, Answer& answer);
  void list(uint64_t from, Answer& answer) const;
  bool owner_lives() const;

  size_t max_entries_;
  std::map<uint64_t, Entry> entries_;
  uint64_t epoch_ = 0;
  int owner_ = -1;  // connection, -1 when it has closed
  int64_t owner_pid_ = 0;
  OwnFd owner_pidfd_;  // of the process that said hello last
};

// Serves a listening socket until SIGTERM or SIGINT. Returns the exit code: 0 then, 1 when the
// limit of descriptors (RLIMIT_NOFILE) leaves no room for entries. Throws SystemError.
int serve_keeper(int listener);

}  // namespace larder::daemon
