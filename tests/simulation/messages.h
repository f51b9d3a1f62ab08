// What clients and larderd tell each other in the simulation, and the connection that carries it.
#pragma once

#include <deque>
#include <variant>
#include <vector>

#include "allocator/effects.h"
#include "allocator/events.h"
#include "tests/simulation/memories.h"

namespace larder::sim {

class Client;

struct Hello {
  uint64_t cache;     // 0: never had one
  SessionId session;  // 0: a new one
};
struct Request {
  uint64_t number;
  Event event;
};
struct Unmapped {
  SegmentId segment;
};
struct Goodbye {};
using ToDaemon = std::variant<Hello, Request, Unmapped, Goodbye>;

struct Welcome {
  uint64_t cache;
  SessionId session;
  bool resumed;
};
struct Stale {};  // the session is not known (any more)
struct Answer {
  uint64_t number;
  ReplyBody body;
  std::vector<Memory*> memories;  // of MapExtents: what the fds name, null where there is none
  bool again = false;             // the client has asked more than once
};
struct PleaseUnmap {
  PoolId pool;
  uint32_t group;
  uint32_t index;
  SegmentId segment;
};
using ToClient = std::variant<Welcome, Stale, Answer, PleaseUnmap>;

struct Connection {
  Client* client;
  std::deque<ToDaemon> to_daemon;
  std::deque<ToClient> to_client;
  bool client_end = true;  // false: it was closed, what has been sent is still read
  bool daemon_end = true;
};

}  // namespace larder::sim
