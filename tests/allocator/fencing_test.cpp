// What happens to the blocks and mappings of a session that has ended, by what is known of it.
#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;
using enum FenceClass;

constexpr int64_t kMiB = int64_t{1} << 20;

// A session with three open blocks of a pool of 8.
struct Fixture {
  Fixture() {
    session = driver.open_session();
    pool = driver.open_pool(session, small_pool(8)).pool;
    blocks = driver.allocate(session, pool, 3);
  }
  SessionId attach(const std::string& name = "pool") {
    const SessionId other = driver.open_session();
    PoolSpec spec = small_pool(8);
    spec.name = name;
    driver.open_pool(other, spec);
    return other;
  }
  int64_t quarantined(FenceClass fence) {
    return driver.group_stats(pool).by_fence[static_cast<int>(fence)];
  }
  int64_t free() { return driver.group_stats(pool).free; }
  MachineDriver driver;
  SessionId session{};
  PoolId pool{};
  std::vector<BlockRef> blocks;
};

TEST_CASE("a session that is known to write no more leaves free blocks and nothing to prove") {
  Fixture f;
  const Effects closed = f.driver.apply(CloseSession{f.session, kFenced});
  CHECK(effects_of<SetOwnerWord>(closed).size() == 3);
  CHECK(closed.size() == 3);
  CHECK(f.free() == 8);
  CHECK(f.driver.machine.unfenced_sessions().empty());
}

TEST_CASE("every other class quarantines what was open until somebody can tell") {
  for (const FenceClass fence : {kExecutorOnly, kPidfd, kMps}) {
    CAPTURE(fence_class_name(fence));
    Fixture f;
    const Effects closed = f.driver.apply(CloseSession{f.session, fence});
    REQUIRE(closed.size() == 4);
    for (int i = 0; i < 3; ++i)
      CHECK(std::get<SetOwnerWord>(closed[i]).word == owner_word(OwnerState::kNone));
    CHECK(std::get<FenceSession>(closed[3]).session == f.session);
    CHECK(std::get<FenceSession>(closed[3]).fence == fence);
    CHECK(f.quarantined(fence) == 3);
    CHECK(f.driver.group_stats(f.pool).quarantined == 3);
    CHECK(f.free() == 5);
    const auto unfenced = f.driver.machine.unfenced_sessions();
    REQUIRE(unfenced.size() == 1);
    CHECK(unfenced[0].session == f.session);
    CHECK(unfenced[0].fence == fence);
    // Its requests are refused, and its holds on published blocks are gone.
    check_status(f.driver.refused(Release{0, f.session, f.pool, 0, {f.blocks[0]}}), kStaleSession,
                 {});
    // The words say already that nobody may touch the blocks: nothing more is to be told.
    CHECK(f.driver.apply(SessionFenced{f.session}).empty());
    CHECK(f.quarantined(fence) == 0);
    CHECK(f.free() == 8);
    CHECK(f.driver.apply(SessionFenced{f.session}).empty());
    CHECK(f.driver.machine.record().empty());
    CHECK(f.driver.allocate(f.attach(), f.pool, 1) == std::vector<BlockRef>{{0, 2}});
  }
}

TEST_CASE("what cannot be proved is settled when nobody else is attached") {
  Fixture f;
  const SessionId other = f.attach();
  f.driver.apply(CloseSession{f.session, kUnprovable});
  CHECK(f.quarantined(kUnprovable) == 3);
  const SessionId late = f.attach();
  f.driver.expect<Done>(ClosePool{0, other, f.pool});
  CHECK(f.quarantined(kUnprovable) == 3);
  f.driver.apply(CloseSession{late, kFenced});
  CHECK(f.free() == 8);
  CHECK(f.driver.machine.unfenced_sessions().empty());
}

TEST_CASE("an only session that cannot be proved is settled at once") {
  Fixture f;
  const Effects closed = f.driver.apply(CloseSession{f.session, kUnprovable});
  CHECK(effects_of<FenceSession>(closed).size() == 1);
  CHECK(f.free() == 8);
  CHECK(f.driver.apply(SessionFenced{f.session}).empty());
}

TEST_CASE("one that is closing and can be proved is waited for, two that cannot are not") {
  Fixture f;
  const SessionId second = f.attach();
  const SessionId third = f.attach();
  f.driver.allocate(third, f.pool, 2);
  f.driver.apply(CloseSession{f.session, kUnprovable});
  f.driver.apply(CloseSession{second, kPidfd});
  f.driver.apply(CloseSession{third, kUnprovable});
  CHECK(f.quarantined(kUnprovable) == 5);
  f.driver.apply(SessionFenced{second});
  CHECK(f.free() == 8);
  CHECK(f.driver.machine.unfenced_sessions().empty());
}

TEST_CASE("one that cannot be proved waits for all the pools that it had open") {
  Fixture f;
  const SessionId other = f.attach("second pool");
  PoolSpec spec = small_pool(8);
  spec.name = "second pool";
  f.driver.open_pool(f.session, spec);
  f.driver.apply(CloseSession{f.session, kUnprovable});
  CHECK(f.quarantined(kUnprovable) == 3);
  f.driver.apply(CloseSession{other, kFenced});
  CHECK(f.free() == 8);
}

TEST_CASE("the operator can settle what cannot be proved") {
  Fixture f;
  f.attach();
  f.driver.apply(CloseSession{f.session, kUnprovable});
  f.driver.apply(SessionFenced{f.session});
  CHECK(f.free() == 8);
}

TEST_CASE("a goodbye during a copy leaves the copy's blocks to it") {
  Fixture f;
  const auto copies = effects_of<RunCopy>(
      f.driver.apply(Copy{1, f.session, f.pool, 0, {f.blocks[0]}, {f.blocks[1]}}));
  REQUIRE(copies.size() == 1);
  CHECK(f.driver.apply(CloseSession{f.session, kFenced}).size() == 3);
  CHECK(f.quarantined(kFenced) == 2);
  CHECK(f.free() == 6);
  CHECK(f.driver.apply(CopyDone{copies[0].copy, {}}).empty());
  CHECK(f.free() == 8);
}

TEST_CASE("a copy's blocks change to waiting for the copy when their session is fenced") {
  for (const FenceClass fence : {kExecutorOnly, kPidfd, kMps, kUnprovable}) {
    CAPTURE(fence_class_name(fence));
    Fixture f;
    f.driver.apply(Copy{1, f.session, f.pool, 0, {f.blocks[0]}, {f.blocks[1]}});
    f.driver.apply(CloseSession{f.session, fence});
    f.driver.apply(SessionFenced{f.session});
    CHECK(f.quarantined(kFenced) == 2);
    CHECK(f.free() == 6);
    CHECK(f.driver.apply(CopyDone{1, Status(kUnavailable, "no executor")}).empty());
    CHECK(f.free() == 8);
  }
}

TEST_CASE("after a restart, what was to be fenced and copied is asked for again") {
  Fixture f;
  const SessionId other = f.attach();
  f.driver.apply(Copy{1, f.session, f.pool, 0, {f.blocks[0]}, {f.blocks[1]}});
  f.driver.apply(CloseSession{f.session, kPidfd});
  const Effects effects = f.driver.apply(Recovered{});
  REQUIRE(effects.size() == 2);
  CHECK(std::get<RunCopy>(effects[0]).copy == 1);
  CHECK(std::get<RunCopy>(effects[0]).from == std::vector<int32_t>{0});
  CHECK(std::get<RunCopy>(effects[0]).to == std::vector<int32_t>{1});
  CHECK(std::get<FenceSession>(effects[1]).session == f.session);
  CHECK(std::get<FenceSession>(effects[1]).fence == kPidfd);
  CHECK(f.driver.session_stats(other).absent);
  // A session that does not come back ends like any other.
  f.driver.apply(CloseSession{other, kPidfd});
  CHECK(f.driver.machine.unfenced_sessions().size() == 2);
}

TEST_CASE("a pool may go while a dead session maps it, and its bytes stay charged") {
  MachineDriver driver;
  const SessionId admin = driver.open_session("a", Role::kAdmin);
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, growing_pool(8, 16)).pool;
  driver.expect<ExtentsMapped>(MapExtents{0, session, pool, 0, 0, 1});
  driver.publish(session, pool, {1, 2, 3, 4}, driver.allocate(session, pool, 1));
  driver.apply(CloseSession{session, kPidfd});
  driver.expect<Done>(DestroyPool{0, admin, pool});
  // The second segment was mapped by nobody.
  REQUIRE(driver.effects.size() == 3);
  CHECK(std::get<PoolDestroyed>(driver.effects[0]).pool == pool);
  CHECK(std::get<DropSegment>(driver.effects[1]).segment == SegmentId{2});
  CHECK(driver.machine.physical_bytes() == 4 * kMiB);
  CHECK(driver.machine.tenant_stats().at(0).leaving_bytes == 4 * kMiB);
  CHECK(driver.machine.segments().size() == 1);
  // The name is free again.
  CHECK(driver.open_pool(admin, growing_pool(8, 16)).pool != pool);
  const Effects fenced = driver.apply(SessionFenced{session});
  REQUIRE(fenced.size() == 1);
  CHECK(std::get<DropSegment>(fenced[0]).segment == SegmentId{1});
  CHECK(driver.machine.physical_bytes() == 8 * kMiB);
}

TEST_CASE("an extent is not given back while a dead session may write to its open block") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const SessionId other = driver.open_session();
  const PoolId pool = driver.open_pool(session, growing_pool(8, 16)).pool;
  driver.open_pool(other, growing_pool(8, 16));
  driver.allocate(session, pool, 5);
  driver.apply(CloseSession{session, kMps});
  check_status(driver.refused(ResizePool{0, other, pool, 0, 4}), kBusy,
               {"only 0", "5 quarantined"});
  driver.apply(SessionFenced{session});
  CHECK(driver.expect<Resized>(ResizePool{0, other, pool, 0, 4}).blocks_after == 4);
}

TEST_CASE("prefixes of a dead session can be evicted, but their memory waits for its end") {
  MachineDriver driver(12 * kMiB);
  const SessionId session = driver.open_session("a");
  const SessionId stranger = driver.open_session("b");
  const PoolId pool = driver.open_pool(session, growing_pool(8, 16)).pool;
  const auto blocks = driver.allocate(session, pool, 8);
  for (const BlockRef& block : blocks) driver.publish(session, pool, {block.id, 1, 1, 1}, {block});
  driver.expect<ExtentsMapped>(MapExtents{0, session, pool, 0, 0, 2});
  const PoolId theirs = driver.open_pool(stranger, growing_pool(4, 16)).pool;
  driver.apply(CloseSession{session, kPidfd});
  const Effects asked = driver.apply(Allocate{1, stranger, theirs, 0, 8});
  CHECK(effects_of<ExtentRemoved>(asked).size() == 1);
  CHECK(effects_of<UnmapSegment>(asked).empty());  // there is nobody to ask
  const Effects fenced = driver.settle(SessionFenced{session});
  const auto replies = effects_of<Reply>(fenced);
  REQUIRE(replies.size() == 1);
  CHECK(std::get<BlocksAllocated>(replies[0].body).blocks.size() == 8);
}

}  // namespace
}  // namespace larder
