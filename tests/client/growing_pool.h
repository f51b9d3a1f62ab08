// A scripted larderd with a pool that grows, and a client of it.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include <doctest/doctest.h>

#include "allocator/host_memory.h"
#include "allocator/mapped_range.h"
#include "tests/support/scripted_daemon.h"

namespace larder::test {

inline constexpr int64_t kExtent = 16384;
inline constexpr int64_t kBlock = 4096;  // four in an extent
inline constexpr uint64_t kPool = 5;

// One bf16 layer of 64 + 64 values: 16 tokens are 4096 bytes.
inline PoolOptions growing_pool() {
  PoolOptions options;
  options.name = "p";
  options.model = "m";
  options.geometry = {1, 1, 16, 64, 64, KvFormat::kBf16, KvFormat::kBf16};
  options.num_blocks = 4;
  options.max_blocks = 16;
  options.segment_bytes = kExtent;
  return options;
}

// A scripted larderd with a growing pool: extent 0 is there, more come and go.
struct Growing {
  ScriptedDaemon daemon;
  ScriptedDaemon::Joined joined = daemon.join();
  Client& client = joined.client;
  Peer& peer = joined.peer;
  std::map<uint32_t, Segment> extents;

  Growing() { add(0); }

  void add(uint32_t index) { extents.emplace(index, create_host_segment("extent", kExtent)); }

  // The next request asks for these segments, and gets what is there.
  void serve_segments(uint32_t first, uint32_t count) {
    const auto [request, asked] = peer.expect<protocol::OpenSegments>();
    CHECK(asked.pool == kPool);
    CHECK(asked.group == 0);
    CHECK(asked.first == first);
    CHECK(asked.count == count);
    send_segments(request.id, first, count);
  }
  void send_segments(uint64_t id, uint32_t first, uint32_t count) {
    protocol::Segments reply;
    std::vector<int> fds;
    for (uint32_t index = first; index < first + count; ++index) {
      const auto found = extents.find(index);
      reply.size_bytes.push_back(found == extents.end() ? 0 : kExtent);
      if (found != extents.end()) fds.push_back(found->second.fd.get());
    }
    peer.reply(id, reply, fds);
  }

  Pool open() {
    auto opening = beside([&] { return client.open_pool(growing_pool()); });
    const auto [request, asked] = peer.expect<protocol::OpenPool>();
    const protocol::GroupSpec& group = asked.spec.groups.at(0);
    CHECK(group.num_blocks == 4);
    CHECK(group.max_blocks == 16);
    CHECK(group.segment_bytes == kExtent);
    protocol::GroupLayout layout{kBlock, kBlock, kBlock, 4, std::vector<int64_t>(4, kExtent),
                                 16,     kExtent};
    peer.reply(request.id, protocol::PoolOpened{kPool, true, {layout}});
    serve_segments(0, 4);
    auto pool = opening.get();
    REQUIRE_MESSAGE(pool.ok(), pool.status().to_string());
    return std::move(*pool);
  }

  // An allocation whose blocks lie in extents that are mapped already.
  auto allocate(Pool& pool, std::vector<protocol::Block> blocks) {
    auto allocating = beside([&] { return pool.allocate(static_cast<int64_t>(blocks.size())); });
    peer.answer<protocol::Allocate>(protocol::Blocks{blocks});
    return allocating;
  }

  void close(std::optional<Pool>& pool) {
    auto closing = beside([&] { pool.reset(); });
    peer.answer<protocol::ClosePool>(protocol::Done{});
    closing.get();
  }

  std::byte byte_of(uint32_t index, int64_t offset) {
    const auto mapping = SharedMapping::map(extents.at(index).fd.get(), kExtent, false);
    return mapping.data()[offset];
  }
};

}  // namespace larder::test
