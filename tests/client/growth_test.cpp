// Pools that grow: what replies name is mapped, what larderd asks back is unmapped and
// acknowledged.
#include <optional>

#include <doctest/doctest.h>

#include "tests/client/growing_pool.h"

namespace larder::test {
namespace {

TEST_CASE("a growing pool maps what is there, and what a reply names before the call returns") {
  Growing f;
  std::optional<Pool> pool(f.open());
  CHECK(pool->num_blocks() == 4);
  CHECK(pool->max_blocks() == 16);
  std::byte* const base = pool->data().value();
  CHECK(is_readable(base + kExtent - 1));
  CHECK_FALSE(is_readable(base + kExtent));

  f.add(2);
  f.add(3);
  auto allocating = f.allocate(*pool, {{1, 1}, {9, 1}, {13, 1}, {10, 1}});
  f.serve_segments(2, 2);
  CHECK(allocating.get().ok());
  CHECK(pool->data().value() == base);
  CHECK_FALSE(is_readable(base + 2 * kExtent - 1));
  base[2 * kExtent + 5] = std::byte{42};
  base[3 * kExtent] = std::byte{43};
  CHECK(f.byte_of(2, 5) == std::byte{42});
  CHECK(f.byte_of(3, 0) == std::byte{43});

  // All mapped: nothing is asked for.
  CHECK(f.allocate(*pool, {{14, 2}, {3, 1}}).get().ok());
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE("a prefix and a published block are mapped like allocated ones") {
  Growing f;
  std::optional<Pool> pool(f.open());
  std::byte* const base = pool->data().value();
  const std::vector<int32_t> tokens(32, 1);
  f.add(1);
  f.add(3);
  auto looking = beside([&] { return pool->lookup(tokens); });
  f.peer.answer<protocol::Lookup>(protocol::Prefix{32, {{4, 1}, {5, 1}}});
  f.serve_segments(1, 1);
  CHECK(looking.get().value().hit_tokens == 32);
  CHECK(is_readable(base + kExtent));

  const std::vector<BlockHandle> own = {{0, 1}, {1, 1}};
  auto publishing = beside([&] { return pool->publish(tokens, own); });
  f.peer.answer<protocol::Publish>(protocol::Published{{{{}, {0, 1}}, {{}, {12, 1}}}});
  f.serve_segments(3, 1);
  CHECK(publishing.get().value().at(1).block == BlockHandle{12, 1});
  CHECK(is_readable(base + 3 * kExtent));

  // Blocks that nothing holds may be gone again before their segment is asked for.
  auto peeking = beside([&] { return pool->lookup(tokens, false); });
  f.peer.answer<protocol::Lookup>(protocol::Prefix{16, {{8, 1}}});
  f.serve_segments(2, 1);
  CHECK(peeking.get().value().hit_tokens == 16);
  CHECK_FALSE(is_readable(base + 2 * kExtent));
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE(
    "a segment that larderd wants back is unmapped before it is acknowledged, then mapped anew") {
  Growing f;
  std::optional<Pool> pool(f.open());
  std::byte* const base = pool->data().value();
  f.add(1);
  auto allocating = f.allocate(*pool, {{6, 1}});
  f.serve_segments(1, 1);
  CHECK(allocating.get().ok());
  base[kExtent] = std::byte{1};

  f.peer.notify(protocol::Unmap{kPool, 0, 1});
  const protocol::NoticeAck ack = f.peer.next_ack();
  CHECK(ack.pool == kPool);
  CHECK(ack.group == 0);
  CHECK(ack.index == 1);
  CHECK(is_readable(base));
  CHECK_FALSE(is_readable(base + kExtent));

  // Another one at the same place.
  f.extents.erase(1);
  f.add(1);
  auto again = f.allocate(*pool, {{7, 1}});
  f.serve_segments(1, 1);
  CHECK(again.get().ok());
  CHECK(base[kExtent] == std::byte{0});
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE(
    "every mapping of a pool is unmapped for one acknowledgement, and a closed pool's at once") {
  Growing f;
  std::optional<Pool> first(f.open());
  std::optional<Pool> second(f.open());
  std::byte* const base = first->data().value();
  std::byte* const other = second->data().value();
  CHECK(base != other);
  f.peer.notify(protocol::Unmap{kPool, 0, 0});
  CHECK(f.peer.next_ack().index == 0);
  CHECK_FALSE(is_readable(base));
  CHECK_FALSE(is_readable(other));
  CHECK_FALSE(f.peer.has_ack());
  second.reset();  // not the last: larderd is told nothing
  f.close(first);
  // What is not mapped at all: a closed pool, another pool, an index past the end.
  for (const protocol::Unmap& unmap :
       {protocol::Unmap{kPool, 0, 0}, protocol::Unmap{77, 3, 9}, protocol::Unmap{kPool, 0, 4000}}) {
    f.peer.notify(unmap);
    CHECK(f.peer.next_ack().index == unmap.index);
  }
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE(
    "a segment that is asked back while its fd is on the way is not mapped, but asked for anew") {
  Growing f;
  std::optional<Pool> pool(f.open());
  std::byte* const base = pool->data().value();
  f.add(1);
  auto allocating = f.allocate(*pool, {{4, 1}});
  const auto [request, asked] = f.peer.expect<protocol::OpenSegments>();
  // The reply has left in larderd's order, but the notice is read first.
  f.peer.notify(protocol::Unmap{kPool, 0, 1});
  CHECK(f.peer.next_ack().index == 1);
  f.send_segments(request.id, 1, 1);
  const auto [second, asked_again] = f.peer.expect<protocol::OpenSegments>();
  CHECK(asked_again.first == 1);
  CHECK_FALSE(is_readable(base + kExtent));
  f.send_segments(second.id, 1, 1);
  CHECK(allocating.get().ok());
  CHECK(is_readable(base + kExtent));
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE("a segment of a pool of fixed size comes and goes no differently, and a refusal passes") {
  Growing f;
  PoolOptions options = growing_pool();
  options.num_blocks = options.max_blocks = 4;
  options.execution = Execution::kInProcess;
  auto opening = beside([&] { return f.client.open_pool(options); });
  protocol::GroupLayout layout{kBlock, kBlock, kBlock, 4, {kExtent}};
  f.peer.answer<protocol::OpenPool>(protocol::PoolOpened{kPool, true, {layout}});
  f.serve_segments(0, 1);
  std::optional<Pool> pool(opening.get().value());
  std::byte* const base = pool->data().value();
  f.peer.notify(protocol::Unmap{kPool, 0, 0});
  CHECK(f.peer.next_ack().index == 0);
  auto allocating = f.allocate(*pool, {{1, 1}});
  f.peer.answer<protocol::OpenSegments>(Status(ErrorCode::kBusy, "later"));
  f.peer.answer<protocol::Release>(protocol::Done{});
  check_status(allocating.get().status(), ErrorCode::kBusy, "later");
  CHECK_FALSE(is_readable(base));
  auto again = f.allocate(*pool, {{1, 2}});
  f.serve_segments(0, 1);
  CHECK(again.get().ok());
  CHECK(is_readable(base));
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE("notices that are not understood are left alone, and the next one is served") {
  Growing f;
  std::optional<Pool> pool(f.open());
  std::byte* const base = pool->data().value();
  f.peer.notify(protocol::Notice{protocol::ShuttingDown{}});
  f.peer.notify(protocol::Bytes(17, std::byte{255}));
  f.peer.notify(protocol::Unmap{kPool, 0, 0});
  CHECK(f.peer.next_ack().index == 0);
  CHECK_FALSE(is_readable(base));
  CHECK_FALSE(f.peer.has_ack());
  CHECK(f.client.resumes() == 0);
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE("mappings stay as they are over a resume, and notices come over the new socket") {
  Growing f;
  std::optional<Pool> pool(f.open());
  std::byte* const base = pool->data().value();
  base[7] = std::byte{7};
  { const Peer gone = std::move(f.peer); }
  CHECK(base[7] == std::byte{7});
  f.peer = f.daemon.accept_resume();
  CHECK(base[7] == std::byte{7});
  f.peer.notify(protocol::Unmap{kPool, 0, 0});
  CHECK(f.peer.next_ack().index == 0);
  CHECK_FALSE(is_readable(base));
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

TEST_CASE("resize and evict say what they changed") {
  Growing f;
  std::optional<Pool> pool(f.open());
  auto resizing = beside([&] { return pool->resize(12); });
  const auto resize =
      f.peer.answer<protocol::ResizePool>(protocol::Resized{4, 12, kExtent, 3 * kExtent});
  CHECK(resize.pool == kPool);
  CHECK(resize.group == 0);
  CHECK(resize.num_blocks == 12);
  const ResizeResult resized = resizing.get().value();
  CHECK(resized.blocks_before == 4);
  CHECK(resized.blocks_after == 12);
  CHECK(resized.bytes_before == kExtent);
  CHECK(resized.bytes_after == 3 * kExtent);

  auto evicting = beside([&] { return pool->evict(3); });
  const auto evict = f.peer.answer<protocol::Evict>(protocol::Resized{5, 2, kExtent, kExtent});
  CHECK(evict.pool == kPool);
  CHECK(evict.num_blocks == 3);
  CHECK(evicting.get().value().blocks_after == 2);

  auto refused = beside([&] { return pool->resize(17); });
  f.peer.answer<protocol::ResizePool>(Status(ErrorCode::kInvalidArgument, "num_blocks is 17"));
  check_status(refused.get().status(), ErrorCode::kInvalidArgument, "num_blocks is 17");
  f.close(pool);
  ScriptedDaemon::end(std::move(f.client), f.peer);
}

}  // namespace
}  // namespace larder::test
