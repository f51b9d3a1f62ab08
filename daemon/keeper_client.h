// larderd's side of the keeper: deposit, drop, list.
//
// Calls are synchronous, with a deadline, on the loop thread: a deposit must be acknowledged before
// anything may be told about it, and the keeper does nothing that takes time. Thread rule: one
// thread.
#pragma once

#include <array>
#include <chrono>
#include <cstdint>
#include <optional>
#include <string>

#include "larder/own_fd.h"
#include "larder/status.h"
#include "protocol/keeper_record.h"

namespace larder::daemon {

class KeeperClient {
 public:
  static constexpr auto kDeadline = std::chrono::milliseconds(500);

  // UNAVAILABLE when nobody listens at `path`, BUSY when another larderd owns the keeper.
  static Result<KeeperClient> connect(const std::string& path);

  Status put(uint64_t key, int fd, const std::array<uint8_t, 64>& metadata);
  // Dropping what is not there is fine.
  Status drop(uint64_t key);
  // Drops everything.
  Status clear();
  struct Entry {
    uint64_t key;
    std::array<uint8_t, 64> metadata;
    OwnFd fd;
  };
  // The entry with the smallest key >= `from`; empty when there is none.
  Result<std::optional<Entry>> next(uint64_t from);

  int64_t pid() const { return pid_; }
  uint64_t num_entries() const { return num_entries_; }  // as of the last call
  // Whether the connection stands, as far as can be seen without a call.
  bool connected() const;

 private:
  struct Answer {
    protocol::KeeperReply reply;
    OwnFd fd;
  };
  KeeperClient(OwnFd socket, int64_t pid);
  Result<Answer> call(protocol::KeeperOp op, uint64_t key, const std::array<uint8_t, 64>& metadata,
                      int fd);

  OwnFd socket_;
  int64_t pid_;
  uint64_t epoch_ = 0;
  uint64_t num_entries_ = 0;
};

}  // namespace larder::daemon
