// Sessions, tenants and roles, through the state machine.
#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;

const std::vector<int32_t> kTokens = {1, 2, 3, 4, 5, 6, 7, 8};

TEST_CASE("a session that said goodbye leaves free and cached blocks behind") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(8)).pool;
  const auto blocks = driver.allocate(session, pool, 3);
  driver.publish(session, pool, kTokens, {blocks[0], blocks[1]});
  const Effects effects = driver.apply(CloseSession{session, FenceClass::kFenced});
  CHECK(effects_of<FenceSession>(effects).empty());
  const auto words = effects_of<SetOwnerWord>(effects);
  REQUIRE(words.size() == 1);
  CHECK(words[0].block == 2);
  CHECK(words[0].word == owner_word(OwnerState::kNone));
  CHECK(driver.group_stats(pool).cached == 2);
  CHECK(driver.group_stats(pool).free == 6);
  CHECK(driver.pool_stats(pool).num_sessions == 0);
  CHECK(driver.machine.session_stats().empty());
}

TEST_CASE("what a killed session has published outlives it; what it had open is quarantined") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(4)).pool;
  const auto blocks = driver.allocate(session, pool, 3);
  driver.publish(session, pool, kTokens, {blocks[0], blocks[1]});
  const Effects closed = driver.apply(CloseSession{session, FenceClass::kPidfd});
  REQUIRE(closed.size() == 2);
  CHECK(std::get<SetOwnerWord>(closed[0]).word == owner_word(OwnerState::kNone));
  CHECK(std::get<FenceSession>(closed[1]).session == session);
  CHECK(driver.group_stats(pool).quarantined == 1);

  const SessionId next = driver.open_session();
  CHECK(!driver.open_pool(next, small_pool(4)).created);
  CHECK(driver.look_up(next, pool, kTokens).hit_tokens == 8);
  check_status(driver.refused(Allocate{0, next, pool, 0, 4}), kResourceExhausted, {"available 3"});
  CHECK(driver.apply(SessionFenced{session}).empty());
  CHECK(driver.group_stats(pool).quarantined == 0);
  CHECK(driver.apply(SessionFenced{session}).empty());
  CHECK(driver.allocate(next, pool, 4).size() == 4);
}

TEST_CASE("a killed session with nothing open is fenced as well, for it may have memory mapped") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(4)).pool;
  const auto blocks = driver.allocate(session, pool, 1);
  driver.publish(session, pool, {1, 2, 3, 4}, blocks);
  const Effects closed = driver.apply(CloseSession{session, FenceClass::kPidfd});
  REQUIRE(closed.size() == 1);
  CHECK(std::get<FenceSession>(closed[0]).session == session);
  CHECK(std::get<FenceSession>(closed[0]).fence == FenceClass::kPidfd);
  CHECK(driver.group_stats(pool).cached == 1);
  CHECK(driver.apply(SessionFenced{session}).empty());
  CHECK(driver.machine.unfenced_sessions().empty());
}

TEST_CASE("daemon-made events for things that are gone or never were are ignored") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  driver.open_pool(session, small_pool(4));
  const std::string before = driver.snapshot();
  CHECK(driver.apply(CloseSession{SessionId{99}, FenceClass::kPidfd}).empty());
  CHECK(driver.apply(SessionFenced{SessionId{99}}).empty());
  CHECK(driver.apply(SessionFenced{session}).empty());  // it is still there
  CHECK(driver.apply(SegmentCreated{SegmentId{99}, {}}).empty());
  CHECK(driver.apply(SegmentCreated{SegmentId{1}, {}}).empty());
  CHECK(driver.apply(SegmentCreated{SegmentId{1}, Status(kInternal, "late")}).empty());
  CHECK(driver.apply(CopyDone{99, {}}).empty());
  CHECK(driver.snapshot() == before);
}

TEST_CASE("requests of an unknown session are STALE_SESSION") {
  MachineDriver driver;
  const SessionId gone = driver.open_session();
  const PoolId pool = driver.open_pool(gone, small_pool(4)).pool;
  driver.apply(CloseSession{gone, FenceClass::kFenced});
  const std::vector<Status> refusals = {
      driver.refused(OpenPool{0, gone, small_pool(4)}),
      driver.refused(ClosePool{0, gone, pool}),
      driver.refused(DestroyPool{0, gone, pool}),
      driver.refused(Allocate{0, gone, pool, 0, 1}),
      driver.refused(Release{0, gone, pool, 0, {}}),
      driver.refused(Publish{0, gone, pool, "", {}, {}, {}}),
      driver.refused(Lookup{0, gone, pool, "", {}, {}, true}),
      driver.refused(Copy{0, gone, pool, 0, {}, {}}),
  };
  for (const Status& status : refusals) check_status(status, kStaleSession, {"session 1"});
}

TEST_CASE("another tenant's pool does not exist, in the same words as one that never did") {
  MachineDriver driver;
  const SessionId owner = driver.open_session("a");
  const PoolId pool = driver.open_pool(owner, small_pool(4)).pool;
  const SessionId stranger = driver.open_session("b", Role::kAdmin);
  for (const PoolId asked : {pool, PoolId{77}}) {
    const std::string sentence = "pool " + std::to_string(value(asked)) + " does not exist";
    check_status(driver.refused(Allocate{0, stranger, asked, 0, 1}), kNotFound, {sentence});
    check_status(driver.refused(ClosePool{0, stranger, asked}), kNotFound, {sentence});
    check_status(driver.refused(DestroyPool{0, stranger, asked}), kNotFound, {sentence});
    check_status(driver.refused(Lookup{0, stranger, asked, "", {}, {}, true}), kNotFound,
                 {sentence});
  }
  // The same name is another pool, and the same tokens are another key.
  const PoolOpened own = driver.open_pool(stranger, small_pool(4));
  CHECK(own.created);
  CHECK(own.pool != pool);
  const auto publish = [&](SessionId session, PoolId in) {
    return driver
        .expect<BlocksPublished>(
            Publish{0, session, in, "", {1, 2, 3, 4}, driver.allocate(session, in, 1), {}})
        .keys;
  };
  CHECK(publish(owner, pool) != publish(stranger, own.pool));
}

TEST_CASE("a session uses only pools that it has open") {
  MachineDriver driver;
  const SessionId creator = driver.open_session();
  const PoolId pool = driver.open_pool(creator, small_pool(4)).pool;
  const SessionId other = driver.open_session();
  check_status(driver.refused(Allocate{0, other, pool, 0, 1}), kNotFound,
               {"pool 1", "\"pool\"", "not open"});
  check_status(driver.refused(ClosePool{0, other, pool}), kNotFound, {"not open"});
  check_status(driver.refused(ResizePool{0, other, pool, 0, 4}), kNotFound, {"not open"});
  check_status(driver.refused(EvictBlocks{0, other, pool, 4}), kNotFound, {"not open"});
}

TEST_CASE("an admin resizes pools and evicts prefixes without opening them, in its tenant") {
  MachineDriver driver;
  const SessionId admin = driver.open_session("a", Role::kAdmin);
  const SessionId creator = driver.open_session();
  PoolSpec spec = small_pool(1024);  // a segment of 18 MiB has 1024 blocks of 18432 bytes
  spec.groups[0].max_blocks = 2048;
  driver.apply(OpenPool{1, creator, spec});
  check_status(driver.refused(ResizePool{0, admin, PoolId{1}, 0, 1024}), kBusy,
               {"still being created"});
  driver.apply(SegmentCreated{SegmentId{1}, {}});
  const PoolId pool{1};
  driver.publish(creator, pool, {1, 2, 3, 4}, driver.allocate(creator, pool, 1));
  driver.expect<Done>(ClosePool{0, creator, pool});
  const auto evicted = driver.expect<Resized>(EvictBlocks{0, admin, pool, 8});
  CHECK(evicted.blocks_before == 1);
  CHECK(evicted.blocks_after == 0);
  const auto shrunk = driver.expect<Resized>(ResizePool{0, admin, pool, 0, 0});
  CHECK(shrunk.blocks_before == 1024);
  CHECK(shrunk.blocks_after == 0);
  const SessionId stranger = driver.open_session("b", Role::kAdmin);
  check_status(driver.refused(ResizePool{0, stranger, pool, 0, 1024}), kNotFound,
               {"does not exist"});
}

TEST_CASE("a reader attaches, looks up, holds and releases, and nothing else") {
  MachineDriver driver;
  const SessionId writer = driver.open_session();
  const SessionId reader = driver.open_session("a", Role::kRead);
  check_status(driver.refused(OpenPool{0, reader, small_pool(4)}), kPermissionDenied,
               {"role read", "create pools", "append"});
  const PoolId pool = driver.open_pool(writer, small_pool(4)).pool;
  CHECK(driver.open_pool(reader, small_pool(4)).pool == pool);
  driver.publish(writer, pool, {1, 2, 3, 4}, driver.allocate(writer, pool, 1));
  const auto held = driver.look_up(reader, pool, {1, 2, 3, 4}, true).blocks;
  CHECK(held.size() == 1);
  check_status(driver.refused(Allocate{0, reader, pool, 0, 1}), kPermissionDenied, {"role read"});
  check_status(driver.refused(Publish{0, reader, pool, "", {}, {}, {}}), kPermissionDenied, {});
  check_status(driver.refused(Copy{0, reader, pool, 0, {}, {}}), kPermissionDenied, {});
  check_status(driver.refused(DestroyPool{0, reader, pool}), kPermissionDenied, {"admin"});
  check_status(driver.refused(DestroyPool{0, writer, pool}), kPermissionDenied,
               {"role append", "admin"});
  driver.release(reader, pool, held);
  driver.expect<Done>(ClosePool{0, reader, pool});
}

TEST_CASE("a tenant that is not configured opens no pool") {
  MachineDriver driver;
  const SessionId session = driver.open_session("nobody");
  check_status(driver.refused(OpenPool{0, session, small_pool(4)}), kPermissionDenied,
               {"\"nobody\""});
}

}  // namespace
}  // namespace larder
