// Session: what larderd knows of one client, beside what the state machine knows.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <set>
#include <string>
#include <tuple>

#include "allocator/mapped_range.h"
#include "allocator/segment.h"
#include "allocator/state_machine.h"
#include "daemon/attachment.h"
#include "daemon/connection.h"
#include "daemon/fd_watch.h"
#include "daemon/peer.h"
#include "protocol/arena.h"

namespace larder::daemon {

// The session's arena as larderd sees it: made here, mapped by client, executor and larderd.
class SessionArena {
 public:
  explicit SessionArena(uint64_t size_bytes);  // throws SystemError
  // One that an earlier larderd has made. Throws SystemError.
  SessionArena(OwnFd arena, OwnFd eventfd, uint64_t size_bytes);
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

// A connection that has not said which session it is.
struct Guest {
  std::shared_ptr<Connection> connection;  // shared with its handlers on the loop
  PeerIdentity peer;
  OwnFd pidfd;  // invalid where the kernel gives none
  int64_t connected_at_us = 0;
};

struct Session {
  SessionId id;
  SessionRecord record;
  std::string tenant;
  Role role = Role::kRead;
  std::shared_ptr<Connection> connection;  // null while the session is absent
  uint64_t connection_number = 0;
  int64_t connected_at_us = 0;
  int64_t absent_until_us = 0;  // of an absent one
  OwnFd pidfd;
  OwnFd lifeline;                  // invalid where the client wants no notices
  std::optional<FdWatch> process;  // its end
  std::shared_ptr<Connection> notices;
  std::optional<SessionArena> arena;
  std::set<PoolId> pools;
  std::string ring_device;  // whose executor serves the ring
  // Memory of the client that its records may name; fd invalid for IPC handles.
  struct Import {
    protocol::RegisterImport memory;
    OwnFd fd;
    uint64_t request = 0;  // unanswered until the executor has said that it has it
  };
  std::map<uint64_t, Import> imports;
  bool mapped = false;        // has been sent segments: its process may write until it is gone
  bool goodbye = false;       // says that it has unmapped everything
  uint64_t last_request = 0;  // on this connection
  size_t num_pending = 0;
  // What it has been asked to unmap, and until when.
  using Place = std::tuple<uint64_t, uint32_t, uint32_t>;  // pool, group, extent
  struct Unmapping {
    SegmentId segment;
    int64_t deadline_us;
  };
  std::map<Place, Unmapping> unmapping;
  uint32_t head_at_death = 0;  // the ring's head when an executor last died, and since when so
  int deaths_at_head = 0;

  bool is_connected() const { return connection != nullptr && connection->is_open(); }
};

// A session that has ended while something of it may still write.
struct ClosingSession {
  SessionId id;
  FenceClass fence = FenceClass::kUnprovable;
  SessionRecord record;
  std::string tenant;
  int64_t since_us = 0;
  bool drained = false;  // the executor has nothing of it
  bool exited = false;   // its process is gone
  bool let_go = false;   // no process has its end of the lifeline, or of the socket
  std::optional<FdWatch> process;
  std::optional<FdWatch> lifeline;
};

}  // namespace larder::daemon
