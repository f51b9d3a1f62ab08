// larderd's side of the keeper: deposit, drop, list.
//
// Calls are synchronous, with a deadline, on the loop thread: a deposit must be acknowledged before
// anything may be told about it, and the keeper does nothing that takes time. Thread rule: one
// thread.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <string>
#include <vector>

#include "larder/own_fd.h"
#include "larder/status.h"
#include "protocol/keeper_record.h"

namespace larder::daemon {

class KeeperClient {
 public:
  static constexpr auto kDeadline = std::chrono::milliseconds(500);  // of each exchange

  // UNAVAILABLE when nobody listens at `path`, BUSY when another larderd owns the keeper.
  static Result<KeeperClient> connect(const std::string& path);

  // Keys are made by protocol::keeper_key(). Each call answers UNAVAILABLE when the keeper is gone
  // or does not answer in time, after which it is unknown whether it did what was asked, and this
  // connection is over; any other code is the keeper's refusal, which has changed nothing:
  // RESOURCE_EXHAUSTED when it is full, PERMISSION_DENIED when another larderd has become the
  // owner.
  Status put(uint64_t key, int fd, const std::array<uint8_t, 64>& metadata);
  // Dropping what is not there is fine.
  Status drop(uint64_t key);
  // Drops everything.
  Status clear();
  struct Entry {
    uint64_t key;
    std::array<uint8_t, 64> metadata;
    OwnFd fd;  // a duplicate
  };
  // All entries, in the order of their keys. This process needs as many free descriptors.
  Result<std::vector<Entry>> list();

  int64_t pid() const { return pid_; }
  uint64_t num_entries() const { return num_entries_; }  // as of the last call
  // Whether the connection stands, as far as can be seen without a call.
  bool connected() const;

 private:
  struct Answer {
    protocol::KeeperReply reply;
    std::vector<OwnFd> fds;
  };
  KeeperClient(OwnFd socket, int64_t pid);
  Result<Answer> call(protocol::KeeperOp op, uint64_t key,
                      const std::array<uint8_t, 64>& metadata = {}, int fd = -1);
  // The entries with the smallest keys >= `from`; fewer than a message's worth are the last.
  Result<std::vector<Entry>> list_some(uint64_t from);
  Status lost(const std::string& why);

  OwnFd socket_;
  int64_t pid_;
  uint64_t epoch_ = 0;
  uint64_t num_entries_ = 0;
};

}  // namespace larder::daemon
