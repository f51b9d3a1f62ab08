// Session: what larderd knows of one connection, beside what the state machine knows.
#pragma once

#include <array>
#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <string>

#include "allocator/mapped_range.h"
#include "allocator/segment.h"
#include "allocator/state_machine.h"
#include "daemon/connection.h"
#include "daemon/peer.h"
#include "protocol/arena.h"

namespace larder::daemon {

// The session's arena as larderd sees it: made here, mapped by client, executor and larderd.
class SessionArena {
 public:
  explicit SessionArena(uint64_t size_bytes);  // throws SystemError
  int fd() const { return segment_.fd.get(); }
  int eventfd() const { return eventfd_.get(); }
  uint64_t size_bytes() const { return static_cast<uint64_t>(segment_.size_bytes); }
  // Whether the client has submitted what the executor has not completed yet. The client can make
  // this lie: nobody's safety may rest on it.
  bool busy() const;
  // Copies 4-byte values out. INVALID_ARGUMENT, naming the field, when the range is not in the
  // arena's data part.
  Result<std::vector<int32_t>> read_tokens(const protocol::ArenaRange& range) const;
  Result<std::vector<float>> read_floats(const char* field,
                                         const protocol::ArenaRange& range) const;
  // Answers everything that is queued. Only while no executor serves the session.
  void fail_outstanding(const Status& status);
  const protocol::ArenaHeader& header() const { return arena_.header(); }

 private:
  template <typename T>
  Result<std::vector<T>> read(const char* field, const protocol::ArenaRange& range) const;

  Segment segment_;
  SharedMapping mapping_;
  protocol::Arena arena_;
  OwnFd eventfd_;
};

struct Session {
  SessionId id;
  std::shared_ptr<Connection> connection;  // shared with its handlers on the loop
  PeerIdentity peer;
  OwnFd pidfd;  // invalid where the kernel gives none
  int64_t connected_at_us = 0;
  bool connected = false;  // the handshake is done; the rest is valid from then on
  std::string tenant;
  std::string client_name;
  Role role = Role::kRead;
  std::array<uint8_t, 32> token = {};
  std::optional<SessionArena> arena;
  std::set<PoolId> pools;
  bool mapped = false;   // has been sent segments: its process may write until it is gone
  bool goodbye = false;  // says that it has unmapped everything
  size_t num_pending = 0;
  uint32_t head_at_death = 0;  // the ring's head when an executor last died, and since when so
  int deaths_at_head = 0;
};

}  // namespace larder::daemon
