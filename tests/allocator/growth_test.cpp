// How groups grow and shrink, and how memory is unmapped before it is dropped.
#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;
using Blocks = std::vector<BlockRef>;

constexpr int64_t kMiB = int64_t{1} << 20;

// One session and a pool of extents of 4 blocks of 1 MiB.
struct Fixture {
  explicit Fixture(int64_t num_blocks = 4, int64_t max_blocks = 16,
                   int64_t memory_bytes = 1024 * kMiB)
      : driver(memory_bytes), spec(growing_pool(num_blocks, max_blocks)) {
    session = driver.open_session();
    pool = driver.open_pool(session, spec).pool;
  }
  Blocks allocate(int64_t count) {
    const ReplyBody body = driver.ask_and_settle(Allocate{0, session, pool, 0, count});
    if (const auto* status = std::get_if<Status>(&body)) FAIL(status->to_string());
    return std::get<BlocksAllocated>(body).blocks;
  }
  ReplyBody resize(int64_t num_blocks) {
    return driver.ask_and_settle(ResizePool{0, session, pool, 0, num_blocks});
  }
  void check_resized(int64_t num_blocks, Resized expected) {
    const ReplyBody body = resize(num_blocks);
    REQUIRE(std::holds_alternative<Resized>(body));
    const Resized& actual = std::get<Resized>(body);
    CHECK(actual.blocks_before == expected.blocks_before);
    CHECK(actual.blocks_after == expected.blocks_after);
    CHECK(actual.bytes_before == expected.bytes_before * kMiB);
    CHECK(actual.bytes_after == expected.bytes_after * kMiB);
  }
  void cache(const Blocks& blocks) {
    for (const BlockRef& block : blocks)
      driver.publish(session, pool, {block.id, 0, 0, 0}, {block});
    driver.release(session, pool, blocks);
  }
  std::vector<SegmentId> map(SessionId by, int64_t first, int64_t count) {
    return driver.expect<ExtentsMapped>(MapExtents{0, by, pool, 0, first, count}).segments;
  }
  SessionId attach() {
    const SessionId other = driver.open_session();
    driver.open_pool(other, spec);
    return other;
  }
  GroupStats stats() { return driver.group_stats(pool); }
  MachineDriver driver;
  PoolSpec spec;
  SessionId session{};
  PoolId pool{};
};

TEST_CASE("a pool starts with whole extents for its blocks and says what it can become") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const Effects effects = driver.settle(OpenPool{1, session, growing_pool(5, 14)});
  CHECK(effects_of<CreateSegment>(effects).size() == 2);
  const GroupLayout layout =
      std::get<PoolOpened>(effects_of<Reply>(effects).at(0).body).groups.at(0);
  CHECK(layout.segment_bytes == std::vector<int64_t>{4 * kMiB, 4 * kMiB, 4 * kMiB, 2 * kMiB});
  CHECK(layout.first_extents == 2);
  CHECK(layout.num_blocks == 14);
  const GroupStats stats = driver.group_stats(PoolId{1});
  CHECK(stats.capacity == 8);
  CHECK(stats.max_blocks == 14);
  CHECK(stats.physical_bytes == 8 * kMiB);
}

TEST_CASE("an allocation grows the group by the extents that it lacks") {
  Fixture f;
  const Effects asked = f.driver.apply(Allocate{1, f.session, f.pool, 0, 10});
  CHECK(asked.size() == 2);
  const auto creates = effects_of<CreateSegment>(asked);
  REQUIRE(creates.size() == 2);
  CHECK(creates[0].index == 1);
  CHECK(creates[1].index == 2);
  CHECK(creates[0].size_bytes == 4 * kMiB);
  CHECK(f.stats().physical_bytes == 12 * kMiB);
  CHECK(f.stats().capacity == 4);
  // What is free is not kept from others meanwhile.
  CHECK(f.driver.allocate(f.attach(), f.pool, 1) == Blocks{{0, 1}});
  const Effects first = f.driver.apply(SegmentCreated{creates[1].segment, {}});
  REQUIRE(first.size() == 1);
  CHECK(std::get<ExtentAdded>(first[0]).index == 2);
  CHECK(std::get<ExtentAdded>(first[0]).segment == creates[1].segment);
  CHECK(std::get<ExtentAdded>(first[0]).size_bytes == 4 * kMiB);
  const Effects second = f.driver.apply(SegmentCreated{creates[0].segment, {}});
  CHECK(second.size() == 12);  // the extent, ten words and the reply
  CHECK(std::holds_alternative<ExtentAdded>(second[0]));
  const auto replies = effects_of<Reply>(second);
  REQUIRE(replies.size() == 1);
  CHECK(std::get<BlocksAllocated>(replies[0].body).blocks.back() == BlockRef{10, 1});
}

TEST_CASE("a group grows to its short last extent and no further") {
  Fixture f(4, 10);
  CHECK(f.allocate(10).size() == 10);
  CHECK(f.stats().physical_bytes == 10 * kMiB);
  check_status(f.driver.refused(Allocate{0, f.session, f.pool, 0, 1}), kResourceExhausted,
               {"available 0", "of 10", "can grow to 10"});
  check_status(f.driver.refused(Allocate{0, f.session, f.pool, 0, 11}), kResourceExhausted,
               {"requested 11"});
}

TEST_CASE("a group grows before it evicts") {
  Fixture f;
  f.cache(f.allocate(4));
  CHECK(f.allocate(1) == Blocks{{4, 1}});
  CHECK(f.stats().cached == 4);
  // 16 wanted: 3 free, 8 by growth, and the rest by eviction.
  CHECK(f.allocate(15).size() == 15);
  CHECK(f.stats().cached == 0);
  CHECK(f.stats().capacity == 16);
}

TEST_CASE("a pool is resized by whole extents, both ways") {
  Fixture f;
  f.check_resized(9, {4, 12, 4, 12});
  f.check_resized(12, {12, 12, 12, 12});
  f.check_resized(8, {12, 8, 12, 8});
  f.check_resized(0, {8, 0, 8, 0});
  check_status(f.driver.refused(ResizePool{0, f.session, f.pool, 0, 17}), kInvalidArgument,
               {"num_blocks is 17", "0 to 16"});
  check_status(f.driver.refused(ResizePool{0, f.session, f.pool, 0, -1}), kInvalidArgument,
               {"num_blocks is -1"});
  check_status(f.driver.refused(ResizePool{0, f.session, f.pool, 1, 4}), kNotFound, {"group 1"});
  f.check_resized(16, {0, 16, 0, 16});
  CHECK(f.allocate(16).size() == 16);
}

TEST_CASE("a short last extent counts for the blocks that it has") {
  Fixture f(4, 10);
  f.check_resized(10, {4, 10, 4, 10});
  f.check_resized(8, {10, 8, 10, 8});  // the short one alone is too many
  f.check_resized(10, {8, 10, 8, 10});
  // With the first extent in use, 4 blocks are the two others gone.
  const Blocks blocks = f.allocate(1);
  f.check_resized(4, {10, 4, 10, 4});
  f.driver.release(f.session, f.pool, blocks);
  f.check_resized(10, {4, 10, 4, 10});
  // A hole in front: the extents 1 and 2 hold 6 blocks, and 7 take one more.
  f.allocate(10);
  f.driver.release(f.session, f.pool, {{0, 2}, {1, 1}, {2, 1}, {3, 1}});
  f.check_resized(6, {10, 6, 10, 6});
  f.check_resized(7, {6, 10, 6, 10});
}

TEST_CASE("a pool of a fixed size is not resized") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(8)).pool;
  check_status(driver.refused(ResizePool{0, session, pool, 0, 4}), kUnsupported,
               {"fixed size of 8 blocks", "max_blocks"});
}

TEST_CASE("shrinking gives back the emptiest extents and evicts what is cached there") {
  Fixture f(16, 20);
  const Blocks blocks = f.allocate(16);
  f.cache({blocks.begin() + 4, blocks.end()});
  f.driver.release(f.session, f.pool, {blocks[1], blocks[2], blocks[3]});
  // Extent 0 has an open block; 1 to 3 have 4 cached ones each; the cheapest are the last.
  f.check_resized(8, {16, 8, 16, 8});
  const auto removed = effects_of<ExtentRemoved>(f.driver.effects);
  REQUIRE(removed.size() == 2);
  CHECK(removed[0].index == 3);
  CHECK(removed[1].index == 2);
  CHECK(f.stats().cached == 4);
  CHECK(f.stats().free == 3);
  // An extent that needs less eviction goes first.
  f.check_resized(16, {8, 16, 8, 16});
  f.cache(f.allocate(4));
  f.check_resized(12, {16, 12, 16, 12});
  CHECK(effects_of<ExtentRemoved>(f.driver.effects).at(0).index == 3);
  CHECK(f.stats().cached == 8);
}

TEST_CASE("a group that is in use says so with the numbers, and keeps everything") {
  Fixture f;
  const Blocks blocks = f.allocate(16);
  f.cache({blocks[0], blocks[1], blocks[2], blocks[3]});
  f.driver.publish(f.session, f.pool, {9, 9, 9, 9}, {blocks[4]});
  check_status(f.driver.refused(ResizePool{0, f.session, f.pool, 0, 8}), kBusy,
               {"num_blocks is 8", "2 extents would have to go", "only 1", "of 16 blocks",
                "11 are open", "1 held", "0 quarantined"});
  f.check_resized(12, {16, 12, 16, 12});
  CHECK(effects_of<ExtentRemoved>(f.driver.effects).at(0).index == 0);
}

TEST_CASE("a prefix that goes on from an extent is evicted with it") {
  Fixture f;
  const Blocks blocks = f.allocate(8);
  const std::vector<int32_t> tokens(32, 1);  // one chain, from the first extent to the second
  f.driver.publish(f.session, f.pool, tokens, blocks);
  f.driver.release(f.session, f.pool, blocks);
  f.allocate(4);  // by growth
  f.check_resized(8, {12, 8, 12, 8});
  CHECK(effects_of<ExtentRemoved>(f.driver.effects).at(0).index == 1);
  CHECK(f.driver.look_up(f.session, f.pool, tokens).hit_tokens == 16);
  f.check_resized(4, {8, 4, 8, 4});
  CHECK(f.driver.look_up(f.session, f.pool, tokens).hit_tokens == 0);
}

TEST_CASE("a segment is dropped when the last session has unmapped it, and its place waits") {
  Fixture f(8, 8 + 4);
  const SessionId other = f.attach();
  const auto segments = f.map(f.session, 0, 3);
  CHECK(segments == std::vector<SegmentId>{SegmentId{1}, SegmentId{2}, SegmentId{0}});
  f.map(other, 1, 1);
  f.check_resized(4, {8, 4, 8, 4});
  CHECK(effects_of<UnmapSegment>(f.driver.effects).size() == 2);
  CHECK(effects_of<UnmapSegment>(f.driver.effects)[0].segment == segments[1]);
  CHECK(effects_of<DropSegment>(f.driver.effects).empty());
  CHECK(f.stats().leaving_bytes == 4 * kMiB);
  CHECK(f.driver.machine.physical_bytes() == 8 * kMiB);
  CHECK(f.driver.machine.segments().size() == 2);
  CHECK(f.driver.machine.segments().back().leaving);
  CHECK(f.map(other, 1, 1) == std::vector<SegmentId>{SegmentId{0}});

  // Growth meanwhile takes the next place.
  const Effects grown = f.driver.settle(Allocate{1, f.session, f.pool, 0, 5});
  CHECK(effects_of<CreateSegment>(grown).at(0).index == 2);
  CHECK(f.driver.apply(SegmentUnmapped{segments[1], f.session}).empty());
  CHECK(f.driver.apply(SegmentUnmapped{segments[1], f.session}).empty());
  CHECK(f.driver.apply(SegmentUnmapped{SegmentId{1}, other}).empty());  // not asked for
  const Effects last = f.driver.apply(SegmentUnmapped{segments[1], other});
  REQUIRE(last.size() == 1);
  CHECK(std::get<DropSegment>(last[0]).segment == segments[1]);
  CHECK(f.stats().leaving_bytes == 0);
  const Effects again = f.driver.settle(Allocate{2, f.session, f.pool, 0, 7});
  CHECK(effects_of<CreateSegment>(again).at(0).index == 1);
}

TEST_CASE("what ends a session's mapping ends the wait for it") {
  for (const std::string how : {"close pool", "goodbye", "fenced"}) {
    CAPTURE(how);
    Fixture f(8, 12);
    const SessionId other = f.attach();
    const auto segments = f.map(other, 0, 2);
    f.check_resized(4, {8, 4, 8, 4});
    Effects effects;
    if (how == "close pool") {
      f.driver.expect<Done>(ClosePool{0, other, f.pool});
      effects = f.driver.effects;
    } else if (how == "goodbye") {
      effects = f.driver.apply(CloseSession{other, FenceClass::kFenced});
    } else {
      CHECK(effects_of<DropSegment>(f.driver.apply(CloseSession{other, FenceClass::kMps})).empty());
      CHECK(f.stats().leaving_bytes == 4 * kMiB);
      effects = f.driver.apply(SessionFenced{other});
    }
    REQUIRE(effects_of<DropSegment>(effects).size() == 1);
    CHECK(effects_of<DropSegment>(effects)[0].segment == segments[1]);
    CHECK(f.driver.machine.physical_bytes() == 4 * kMiB);
  }
}

TEST_CASE("a session that is absent is asked to unmap when it comes back") {
  Fixture f(8, 12);
  const SessionId other = f.attach();
  const auto segments = f.map(other, 1, 1);
  f.driver.apply(Recovered{});
  CHECK(f.driver.session_stats(other).absent);
  CHECK(f.driver.apply(ResumeSession{f.session}).empty());
  f.check_resized(4, {8, 4, 8, 4});
  CHECK(effects_of<UnmapSegment>(f.driver.effects).empty());
  const Effects resumed = f.driver.apply(ResumeSession{other});
  REQUIRE(resumed.size() == 1);
  CHECK(std::get<UnmapSegment>(resumed[0]).segment == segments[0]);
  CHECK(f.driver.apply(ResumeSession{other}).empty());
}

TEST_CASE(
    "a mapping that is asked for again is of what is there then, not of what was answered once") {
  Fixture f(8, 12);
  const SessionId other = f.attach();
  const MapExtents map{77, other, f.pool, 0, 1, 1};
  CHECK(f.driver.apply(map).size() == 1);  // nobody has read the answer
  f.driver.apply(Recovered{});
  f.driver.apply(ResumeSession{f.session});
  f.check_resized(4, {8, 4, 8, 4});
  CHECK(effects_of<UnmapSegment>(f.driver.apply(ResumeSession{other})).size() == 1);
  // Its segment is leaving: whoever maps it now is not waited for.
  const auto again = effects_of<Reply>(f.driver.apply(map));
  REQUIRE(again.size() == 1);
  CHECK(std::get<ExtentsMapped>(again[0].body).segments == std::vector<SegmentId>{SegmentId{0}});
}

TEST_CASE("mappings are of extents that the group can have") {
  Fixture f;
  const auto refused = [&](int64_t first, int64_t count) {
    return f.driver.refused(MapExtents{0, f.session, f.pool, 0, first, count});
  };
  check_status(refused(-1, 1), kInvalidArgument, {"segments -1", "count 1", "has 4"});
  check_status(refused(0, 0), kInvalidArgument, {"count 0"});
  check_status(refused(4, 1), kInvalidArgument, {"segments 4"});
  check_status(refused(0, 5), kInvalidArgument, {"count 5"});
  check_status(refused(INT64_MAX, INT64_MAX), kInvalidArgument, {"9223372036854775807"});
  const SessionId reader = f.driver.open_session("a", Role::kRead);
  f.driver.open_pool(reader, f.spec);
  check_status(f.driver.refused(MapExtents{0, reader, f.pool, 0, 0, 1}), kPermissionDenied,
               {"map memory"});
}

}  // namespace
}  // namespace larder
