// A session's ring without the client library, for records that the library would not make.
#pragma once

#include <chrono>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "allocator/mapped_range.h"
#include "client/control_connection.h"
#include "client/request_ring.h"
#include "protocol/limits.h"
#include "tests/support/node.h"

namespace larder::test {

struct RawSession {
  explicit RawSession(const Node& node)
      : control([&] {
          protocol::Connect hello;
          hello.tenant = "default";
          hello.role = "append";
          hello.arena_bytes = protocol::kMinArenaBytes;
          return ControlConnection::connect(node.socket(), hello, std::chrono::seconds(10)).value();
        }()),
        fds(control.take_fds()),
        mapping(SharedMapping::map(fds.at(0).get(),
                                   static_cast<int64_t>(control.session().arena_bytes), true)),
        ring(RequestRing::open(std::move(fds), control.session().arena_bytes).value()) {}

  Status run(const protocol::Submission& record) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    REQUIRE(ring.start(deadline).ok());
    return ring.run(record, deadline);
  }

  protocol::ArenaHeader& header() const {
    return *reinterpret_cast<protocol::ArenaHeader*>(mapping.data());
  }

  ControlConnection control;
  std::vector<OwnFd> fds;  // until the ring has taken them
  SharedMapping mapping;   // a second look at the arena
  RequestRing ring;
};

// A pool of one attention group with one KV head, dim 64 and 8 blocks.
inline protocol::PoolSpec raw_pool(const std::string& format, int32_t num_layers,
                                   int32_t block_tokens) {
  protocol::AttentionGroup attention;
  attention.num_layers = num_layers;
  attention.num_kv_heads = 1;
  attention.k_dim = attention.v_dim = 64;
  attention.k_format = attention.v_format = format;
  protocol::GroupSpec spec;
  spec.name = "attention";
  spec.block_tokens = block_tokens;
  spec.num_blocks = 8;
  spec.kind = attention;
  return {"p", "test", {spec}};
}

}  // namespace larder::test
