// Allocating and releasing, through the state machine.
#include <chrono>
#include <set>

#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;

TEST_CASE("allocated blocks are open, belong to the session, and come lowest first") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(8)).pool;
  const auto blocks = driver.allocate(session, pool, 3);
  CHECK(blocks == std::vector<BlockRef>{{0, 1}, {1, 1}, {2, 1}});
  const auto words = effects_of<SetOwnerWord>(driver.effects);
  REQUIRE(words.size() == 3);
  CHECK(words[2].block == 2);
  CHECK(words[2].word == owner_word(OwnerState::kOpen, session));
  CHECK(driver.group_stats(pool).open == 3);
  CHECK(driver.group_stats(pool).free == 5);
  CHECK(driver.session_stats(session).open_blocks == 3);
  CHECK(driver.pool_stats(pool).allocated_blocks_total == 3);
}

TEST_CASE("an allocation that does not fit takes nothing and says what is available") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(8)).pool;
  check_status(driver.refused(Allocate{0, session, pool, 0, 9}), kResourceExhausted,
               {"requested 9", "available 8"});
  CHECK(driver.allocate(session, pool, 8).size() == 8);
  check_status(driver.refused(Allocate{0, session, pool, 0, 1}), kResourceExhausted,
               {"requested 1", "available 0"});
  check_status(driver.refused(Allocate{0, session, pool, 0, 0}), kInvalidArgument,
               {"num_blocks is 0"});
  check_status(driver.refused(Allocate{0, session, pool, 0, -1}), kInvalidArgument,
               {"num_blocks is -1"});
  check_status(driver.refused(Allocate{0, session, pool, 0, INT64_MAX}), kResourceExhausted,
               {"9223372036854775807"});
  // A part of a request that does not fit as a whole takes nothing.
  check_status(driver.refused(Allocate{0, session, pool, 0, 1, INT64_MAX}), kResourceExhausted,
               {"requested 9223372036854775807"});
  check_status(driver.refused(Allocate{0, session, pool, 1, 1}), kNotFound, {"group 1"});
}

TEST_CASE("eight clients that want a fifth of a pool each: five get it") {
  MachineDriver driver;
  std::vector<SessionId> sessions;
  PoolId pool{};
  for (int i = 0; i < 8; ++i) {
    sessions.push_back(driver.open_session());
    pool = driver.open_pool(sessions.back(), small_pool(50)).pool;
  }
  int succeeded = 0;
  for (SessionId session : sessions) {
    const ReplyBody body = driver.ask(Allocate{0, session, pool, 0, 10});
    succeeded += std::holds_alternative<BlocksAllocated>(body) ? 1 : 0;
  }
  CHECK(succeeded == 5);
}

TEST_CASE("a released open block is free again, under the next generation") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(8)).pool;
  const auto blocks = driver.allocate(session, pool, 2);
  driver.release(session, pool, {blocks[0]});
  REQUIRE(driver.effects.size() == 2);
  const auto words = effects_of<SetOwnerWord>(driver.effects);
  REQUIRE(words.size() == 1);  // and the Reply comes after it
  CHECK(words[0].word == owner_word(OwnerState::kNone));
  CHECK(driver.group_stats(pool).free == 7);
  CHECK(driver.allocate(session, pool, 1) == std::vector<BlockRef>{{0, 2}});
}

TEST_CASE("a second release is refused as a whole, naming the block") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(8)).pool;
  const auto b = driver.allocate(session, pool, 4);
  driver.release(session, pool, {b[1], b[2]});
  check_status(driver.refused(Release{0, session, pool, 0, {b[3], b[2]}}), kStaleGeneration,
               {"block 2", "generation 2", "generation 1"});
  check_status(driver.refused(Release{0, session, pool, 0, {b[3], b[3]}}), kNotFound,
               {"block 3", "2 times", "1 holds"});
  driver.release(session, pool, {b[3]});
  std::set<int32_t> ids = {b[0].id};
  for (const BlockRef& block : driver.allocate(session, pool, 7)) ids.insert(block.id);
  CHECK(ids.size() == 8);
}

TEST_CASE("ids that nobody or somebody else holds are refused") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const SessionId other = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(8)).pool;
  driver.open_pool(other, small_pool(8));
  const auto theirs = driver.allocate(other, pool, 1);
  const auto release = [&](BlockRef block) {
    return driver.refused(Release{0, session, pool, 0, {block}});
  };
  check_status(release(theirs[0]), kNotFound, {"block 0", "not held"});
  check_status(release({5, 1}), kNotFound, {"block 5", "not held"});
  check_status(release({5, 0}), kStaleGeneration, {"block 5"});
  check_status(release({-1, 0}), kNotFound, {"block -1", "8 blocks"});
  check_status(release({8, 1}), kNotFound, {"block 8", "8 blocks"});
  check_status(release({INT32_MAX, 1}), kNotFound, {"2147483647"});
}

TEST_CASE("a reserved block zero is never handed out and not part of the capacity") {
  MachineDriver driver;
  PoolSpec spec = small_pool(4);
  spec.groups[0].reserve_block_zero = true;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, spec).pool;
  CHECK(driver.group_stats(pool).capacity == 3);
  CHECK(driver.allocate(session, pool, 3) == std::vector<BlockRef>{{1, 1}, {2, 1}, {3, 1}});
  check_status(driver.refused(Allocate{0, session, pool, 0, 1}), kResourceExhausted, {});
  check_status(driver.refused(Release{0, session, pool, 0, {{0, 1}}}), kNotFound, {"null block"});
  CHECK(driver.machine.owner_words(pool, 0)[0] == owner_word(OwnerState::kNone));
}

TEST_CASE("used and slack add up to the physical bytes") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(1000)).pool;
  driver.allocate(session, pool, 10);
  const GroupStats stats = driver.group_stats(pool);
  CHECK(stats.physical_bytes == 18 << 20);
  CHECK(stats.used_bytes == 10 * 18432);
  CHECK(stats.used_bytes + stats.slack_bytes == stats.physical_bytes);
  CHECK(driver.machine.physical_bytes() == stats.physical_bytes);
}

TEST_CASE("a pool of a million blocks is opened in no time and serves blocks quickly") {
  StateMachine machine;
  machine.apply(two_tenants(int64_t{1} << 40), 0);
  const SessionId session{1};
  const PoolId pool{1};
  const auto start = std::chrono::steady_clock::now();
  machine.apply(OpenSession{session, "a", Role::kAppend}, 0);
  const Effects opened = machine.apply(OpenPool{1, session, small_pool(1 << 20)}, 0);
  for (const CreateSegment& create : effects_of<CreateSegment>(opened))
    machine.apply(SegmentCreated{create.segment, {}}, 0);
  const auto open_time = std::chrono::steady_clock::now() - start;
  CHECK(open_time < std::chrono::seconds(1));
  const Effects allocated = machine.apply(Allocate{2, session, pool, 0, 1 << 20}, 0);
  auto blocks = std::get<BlocksAllocated>(effects_of<Reply>(allocated).at(0).body).blocks;
  CHECK(blocks.size() == 1 << 20);
  machine.apply(Release{3, session, pool, 0, std::move(blocks)}, 0);
  CHECK(machine.pool_stats().at(0).groups.at(0).free == 1 << 20);
  MESSAGE("open " << std::chrono::duration<double>(open_time).count() << " s, all "
                  << std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count()
                  << " s");
  machine.check_consistency();
}

}  // namespace
}  // namespace larder
