// Growth that fails, is given up, or goes on for hundreds of rounds; and what granularity costs.
#include <algorithm>

#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"
#include "tests/support/random.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;
using Blocks = std::vector<BlockRef>;

constexpr int64_t kMiB = int64_t{1} << 20;
const Status kNoMemory(kResourceExhausted, "the device is out of memory");

struct Fixture {
  explicit Fixture(int64_t num_blocks = 4, int64_t max_blocks = 16) {
    session = driver.open_session();
    pool = driver.open_pool(session, growing_pool(num_blocks, max_blocks)).pool;
  }
  // The segments that an allocation asks for.
  std::vector<SegmentId> start(uint64_t request, int64_t count) {
    std::vector<SegmentId> segments;
    for (const CreateSegment& create :
         effects_of<CreateSegment>(driver.apply(Allocate{request, session, pool, 0, count})))
      segments.push_back(create.segment);
    return segments;
  }
  std::vector<Reply> created(SegmentId segment, const Status& status = {}) {
    return effects_of<Reply>(driver.apply(SegmentCreated{segment, status}));
  }
  void cache(const Blocks& blocks) {
    for (const BlockRef& block : blocks)
      driver.publish(session, pool, {block.id, 0, 0, 0}, {block});
    driver.release(session, pool, blocks);
  }
  MachineDriver driver;
  SessionId session{};
  PoolId pool{};
};

TEST_CASE("a growth that fails is told to those who wait for it, with the reason") {
  Fixture f;
  const auto segments = f.start(1, 8);
  REQUIRE(segments.size() == 1);
  const auto replies = f.created(segments[0], kNoMemory);
  REQUIRE(replies.size() == 1);
  check_status(std::get<Status>(replies[0].body), kResourceExhausted,
               {"requested 8", "available 4", "growing failed: the device is out of memory"});
  CHECK(f.driver.machine.physical_bytes() == 4 * kMiB);
  // It can be tried again, in the same place.
  const auto again =
      effects_of<CreateSegment>(f.driver.apply(Allocate{2, f.session, f.pool, 0, 8}));
  REQUIRE(again.size() == 1);
  CHECK(again[0].index == 1);
  CHECK(again[0].segment > segments[0]);
  CHECK(f.created(again[0].segment).size() == 1);
}

TEST_CASE("where growing fails, those who wait are served by eviction") {
  Fixture f;
  f.cache(f.driver.allocate(f.session, f.pool, 4));
  const auto segments = f.start(1, 4);
  REQUIRE(segments.size() == 1);
  const auto replies = f.created(segments[0], kNoMemory);
  REQUIRE(replies.size() == 1);
  CHECK(std::get<BlocksAllocated>(replies[0].body).blocks.size() == 4);
  CHECK(f.driver.pool_stats(f.pool).evicted_blocks_total == 4);
}

TEST_CASE("one of several extents fails: what came is used, and nobody waits for ever") {
  Fixture f;
  const auto segments = f.start(1, 12);
  REQUIRE(segments.size() == 2);
  CHECK(f.created(segments[0]).empty());
  const auto replies = f.created(segments[1], kNoMemory);
  REQUIRE(replies.size() == 1);
  check_status(std::get<Status>(replies[0].body), kResourceExhausted, {"available 8"});
  CHECK(f.driver.allocate(f.session, f.pool, 8).size() == 8);
}

TEST_CASE("requests that wait together are served in their order") {
  Fixture f;
  const auto first = f.start(1, 6);
  CHECK(first.size() == 1);
  CHECK(f.start(2, 6).empty());  // what is free and what comes seems enough for it
  const Effects effects = f.driver.apply(SegmentCreated{first[0], {}});
  const auto replies = effects_of<Reply>(effects);
  REQUIRE(replies.size() == 1);
  CHECK(replies[0].request == 1);
  const auto creates = effects_of<CreateSegment>(effects);  // for the second one
  REQUIRE(creates.size() == 1);
  const auto later = f.created(creates[0].segment);
  REQUIRE(later.size() == 1);
  CHECK(later[0].request == 2);
  CHECK(std::get<BlocksAllocated>(later[0].body).blocks.front() == BlockRef{6, 1});
}

TEST_CASE("the failure of one pool's growth is not told to another's requests") {
  MachineDriver driver(12 * kMiB);
  const SessionId a = driver.open_session("a");
  const SessionId b = driver.open_session("b");
  const PoolId pool_a = driver.open_pool(a, growing_pool(4, 16)).pool;
  const PoolId pool_b = driver.open_pool(b, growing_pool(4, 16)).pool;
  const auto creates = effects_of<CreateSegment>(driver.apply(Allocate{1, a, pool_a, 0, 8}));
  REQUIRE(creates.size() == 1);
  check_status(driver.refused(Allocate{0, b, pool_b, 0, 5}), kResourceExhausted, {"available 4"});
  const auto replies =
      effects_of<Reply>(driver.apply(SegmentCreated{creates[0].segment, kNoMemory}));
  REQUIRE(replies.size() == 1);
  CHECK(driver.settle(Allocate{2, b, pool_b, 0, 5}).size() == 8);  // extent, 5 words, reply
}

TEST_CASE("two tenants that want more than there is do not take it from each other for ever") {
  MachineDriver driver(12 * kMiB);
  const SessionId a = driver.open_session("a");
  const SessionId b = driver.open_session("b");
  const PoolId pool_a = driver.open_pool(a, growing_pool(4, 16)).pool;
  const PoolId pool_b = driver.open_pool(b, growing_pool(4, 16)).pool;
  Effects all = driver.apply(Allocate{1, a, pool_a, 0, 8});
  for (Effect& effect : driver.apply(Allocate{1, b, pool_b, 0, 8})) all.push_back(effect);
  for (size_t i = 0; i < all.size() && i < 100; ++i)
    if (const auto* create = std::get_if<CreateSegment>(&all[i]))
      for (Effect& effect : driver.apply(SegmentCreated{create->segment, {}}))
        all.push_back(effect);
  const auto replies = effects_of<Reply>(all);
  REQUIRE(replies.size() == 2);
  check_status(std::get<Status>(replies[0].body), kResourceExhausted, {"requested 8"});
  CHECK(replies[1].session == a);
  CHECK(std::get<BlocksAllocated>(replies[1].body).blocks.size() == 8);
}

TEST_CASE("a resize that waits: growth that fails, and a shrink that has to wait its turn") {
  Fixture f;
  const auto grown =
      effects_of<CreateSegment>(f.driver.apply(ResizePool{1, f.session, f.pool, 0, 12}));
  REQUIRE(grown.size() == 2);
  CHECK(f.driver.apply(ResizePool{2, f.session, f.pool, 0, 2}).empty());
  CHECK(f.created(grown[0].segment).empty());
  const auto replies = f.created(grown[1].segment, kNoMemory);
  REQUIRE(replies.size() == 2);
  check_status(std::get<Status>(replies[0].body), kResourceExhausted, {"out of memory"});
  const auto& shrunk = std::get<Resized>(replies[1].body);
  CHECK(shrunk.blocks_before == 4);
  CHECK(shrunk.blocks_after == 4);
  CHECK(shrunk.bytes_before == 12 * kMiB);
  CHECK(shrunk.bytes_after == 4 * kMiB);
}

TEST_CASE("a resize that grows never takes back what others have grown meanwhile") {
  Fixture f(4, 20);
  f.driver.apply(ResizePool{1, f.session, f.pool, 0, 8});
  const auto more = f.start(2, 18);  // 4 free and 4 to come: 12 more
  REQUIRE(more.size() == 3);
  for (const SegmentId segment : more) f.created(segment);
  const auto replies = f.created(SegmentId{2});
  REQUIRE(replies.size() == 2);
  CHECK(std::get<Resized>(replies[0].body).blocks_after == 20);
  CHECK(std::get<BlocksAllocated>(replies[1].body).blocks.size() == 18);
}

TEST_CASE("a resize that waits for a place is told when its pool goes") {
  Fixture f(8, 12);
  const SessionId admin = f.driver.open_session("a", Role::kAdmin);
  f.driver.expect<ExtentsMapped>(MapExtents{0, f.session, f.pool, 0, 0, 2});
  f.driver.expect<Resized>(ResizePool{0, admin, f.pool, 0, 4});
  // Twelve blocks take the place that the session has still to unmap.
  CHECK(f.driver.apply(ResizePool{1, admin, f.pool, 0, 12}).empty());
  CHECK(effects_of<Reply>(f.driver.apply(CloseSession{f.session, FenceClass::kPidfd})).empty());
  const auto replies = effects_of<Reply>(f.driver.apply(DestroyPool{2, admin, f.pool}));
  REQUIRE(replies.size() == 2);
  CHECK(replies[0].request == 2);
  CHECK(replies[1].request == 1);
  check_status(std::get<Status>(replies[1].body), kNotFound, {"pool 1"});
}

TEST_CASE("a request whose deadline has passed is not carried out, and not answered") {
  Fixture f;
  const auto segments = f.start(1, 8);
  CHECK(f.driver.apply(CancelRequest{f.session, 2}).empty());
  CHECK(f.driver.machine.record().empty());
  CHECK(f.driver.apply(CancelRequest{f.session, 1}).empty());
  CHECK(!f.driver.machine.record().empty());
  CHECK(f.created(segments[0]).empty());
  CHECK(f.driver.group_stats(f.pool).free == 8);
  CHECK(f.driver.apply(CancelRequest{SessionId{99}, 1}).empty());
  // An open that waits for another one's creation is no longer attached.
  const SessionId other = f.driver.open_session("b");
  const Effects opening = f.driver.apply(OpenPool{1, other, growing_pool(4, 16)});
  f.driver.apply(CancelRequest{other, 1});
  CHECK(f.created(effects_of<CreateSegment>(opening).at(0).segment).empty());
  CHECK(f.driver.session_stats(other).num_pools == 0);
}

TEST_CASE("blocks that do not divide the granularity: 113 to 2 MiB, or whole ones in 18 MiB") {
  // A pool of 113 blocks of 18,432 bytes is one segment of 2 MiB with 14,336 bytes to spare.
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId fixed = driver.open_pool(session, small_pool(113)).pool;
  driver.allocate(session, fixed, 113);
  CHECK(driver.group_stats(fixed).physical_bytes == 2 * kMiB);
  CHECK(driver.group_stats(fixed).used_bytes == 113 * 18432);
  CHECK(driver.group_stats(fixed).slack_bytes == 14336);
  PoolSpec spec = small_pool(114);
  spec.name = "larger";
  CHECK(driver.group_stats(driver.open_pool(session, spec).pool).physical_bytes == 4 * kMiB);

  // 18,432 = 9 * 2^11: whole blocks fill extents of 9 * 2 MiB, and no block straddles two.
  spec = small_pool(1024);
  spec.name = "growing";
  spec.groups[0].max_blocks = 4096;
  spec.groups[0].segment_bytes = 2 * kMiB;
  check_status(driver.refused(OpenPool{0, session, spec}), kInvalidArgument,
               {"segment_bytes is 2097152", "multiple of 18874368"});
  spec.groups[0].segment_bytes = 18 * kMiB;
  const PoolId pool = driver.open_pool(session, spec).pool;
  driver.expect<Resized>(ResizePool{0, session, pool, 0, 1024});
  const ReplyBody body = driver.ask_and_settle(Allocate{0, session, pool, 0, 4096});
  const Blocks blocks = std::get<BlocksAllocated>(body).blocks;
  CHECK(driver.group_stats(pool).slack_bytes == 0);

  // Of four full extents all but one block of each is given back, and that one is cached.
  Blocks kept;
  Blocks released;
  for (const BlockRef& block : blocks) (block.id % 1024 == 7 ? kept : released).push_back(block);
  driver.release(session, pool, released);
  for (const BlockRef& block : kept) driver.publish(session, pool, {block.id, 0, 0, 0}, {block});
  check_status(driver.refused(ResizePool{0, session, pool, 0, 4}), kBusy, {"only 0", "4 held"});
  driver.release(session, pool, kept);
  const auto shrunk = driver.expect<Resized>(ResizePool{0, session, pool, 0, 4});
  CHECK(shrunk.bytes_after == 18 * kMiB);
  CHECK(driver.group_stats(pool).cached == 1);
  CHECK(driver.machine.physical_bytes() == (18 + 2 + 4) * kMiB);
}

TEST_CASE("an extent of a pool that grows from little is as small as whole blocks allow") {
  const GroupLayout layout = lay_out_group(GroupSize{18432, 1, 1 << 20}).value();
  CHECK(layout.extent_bytes == 18 * kMiB);
  CHECK(layout.num_extents() == 1024);
  CHECK(layout.first_extents == 1);
  // A start of 100 MiB makes extents of the largest multiple of 18 MiB below it.
  CHECK(lay_out_group(GroupSize{18432, 5700, 1 << 20}).value().extent_bytes == 90 * kMiB);
}

TEST_CASE("500 rounds of allocating, freeing, shrinking and growing leave every figure right") {
  INFO("seed " << seed());
  auto random = random_engine(62);
  const auto below = [&](int64_t limit) {
    return static_cast<int64_t>(random() % static_cast<uint64_t>(limit));
  };
  Fixture f(16, 62);  // the last extent is short
  Blocks held;
  for (int round = 0; round < 500; ++round) {
    CAPTURE(round);
    f.driver.now_us += 1;
    const GroupStats before = f.driver.group_stats(f.pool);
    const int64_t wanted = before.capacity * (60 + below(31)) / 100 - std::ssize(held);
    if (wanted > 0) {
      const ReplyBody body = f.driver.ask_and_settle(Allocate{0, f.session, f.pool, 0, wanted});
      if (const auto* allocated = std::get_if<BlocksAllocated>(&body))
        held.insert(held.end(), allocated->blocks.begin(), allocated->blocks.end());
    }
    if (below(2) == 0) f.driver.expect<ExtentsMapped>(MapExtents{0, f.session, f.pool, 0, 0, 16});
    std::shuffle(held.begin(), held.end(), random);
    const Blocks freed(held.begin() + std::ssize(held) / 2, held.end());
    held.resize(held.size() / 2);
    below(2) == 0 ? f.cache(freed) : f.driver.release(f.session, f.pool, freed);
    const ReplyBody resized =
        f.driver.ask_and_settle(ResizePool{0, f.session, f.pool, 0, below(63)});
    if (const auto* status = std::get_if<Status>(&resized)) CHECK(status->code() == kBusy);
    for (const UnmapSegment& unmap : effects_of<UnmapSegment>(f.driver.effects))
      CHECK(f.driver.apply(SegmentUnmapped{unmap.segment, f.session}).size() == 1);
    if (below(20) == 0) f.driver.expect<Resized>(EvictBlocks{0, f.session, f.pool, below(30)});
    const GroupStats after = f.driver.group_stats(f.pool);
    REQUIRE(after.physical_bytes == f.driver.machine.physical_bytes());
    REQUIRE(after.capacity * kMiB == after.physical_bytes);
  }
}

}  // namespace
}  // namespace larder
