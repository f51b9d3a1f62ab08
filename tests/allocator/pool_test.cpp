// Creating, attaching to, leaving and destroying pools, through the state machine.
#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;

constexpr int64_t kMiB = int64_t{1} << 20;

// 30,000 blocks of 18,432 bytes: segments of 252, 252 and 24 MiB.
PoolSpec three_segments() { return small_pool(30000); }

std::vector<SegmentId> start_creation(MachineDriver& driver, uint64_t request, SessionId session) {
  std::vector<SegmentId> segments;
  const Effects effects = driver.apply(OpenPool{request, session, three_segments()});
  for (const CreateSegment& create : effects_of<CreateSegment>(effects))
    segments.push_back(create.segment);
  CHECK(segments.size() == effects.size());
  REQUIRE(segments.size() == 3);
  return segments;
}

TEST_CASE("a pool is there when its last segment is; opens that came meanwhile are answered then") {
  MachineDriver driver;
  const SessionId creator = driver.open_session();
  const SessionId waiting = driver.open_session();
  const Effects started = driver.apply(OpenPool{1, creator, three_segments()});
  const auto creates = effects_of<CreateSegment>(started);
  REQUIRE(creates.size() == 3);
  CHECK(started.size() == 3);
  CHECK(creates[2].index == 2);
  CHECK(creates[2].size_bytes == 24 * kMiB);
  CHECK(driver.machine.physical_bytes() == 528 * kMiB);
  CHECK(driver.pool_stats(PoolId{1}).creating);
  CHECK(driver.apply(OpenPool{2, waiting, three_segments()}).empty());
  check_status(driver.refused(Allocate{0, creator, PoolId{1}, 0, 1}), kNotFound, {"not open"});

  CHECK(driver.apply(SegmentCreated{creates[1].segment, {}}).empty());
  CHECK(driver.apply(SegmentCreated{creates[1].segment, {}}).empty());
  CHECK(driver.apply(SegmentCreated{creates[0].segment, {}}).empty());
  const Effects effects = driver.apply(SegmentCreated{creates[2].segment, {}});
  REQUIRE(effects.size() == 3);
  CHECK(std::get<PoolCreated>(effects[0]).pool == PoolId{1});
  CHECK(std::get<Reply>(effects[1]).request == 1);
  const PoolOpened opened = std::get<PoolOpened>(std::get<Reply>(effects[1]).body);
  CHECK(opened.created);
  CHECK(opened.groups.at(0) == lay_out_group(GroupSize{18432, 30000}).value());
  CHECK(std::get<Reply>(effects[2]).request == 2);
  CHECK(!std::get<PoolOpened>(std::get<Reply>(effects[2]).body).created);
  CHECK(driver.pool_stats(PoolId{1}).num_sessions == 2);
}

TEST_CASE("a creation that fails at any segment is undone, and can be tried again") {
  for (size_t failing = 0; failing < 3; ++failing) {
    CAPTURE(failing);
    MachineDriver driver(600 * kMiB);
    const SessionId creator = driver.open_session();
    const SessionId waiting = driver.open_session();
    const auto segments = start_creation(driver, 1, creator);
    driver.apply(OpenPool{2, waiting, three_segments()});
    for (size_t i = 0; i < failing; ++i)
      CHECK(driver.apply(SegmentCreated{segments[i], {}}).empty());

    const Status reason(kResourceExhausted, "out of device memory");
    const Effects undone = driver.apply(SegmentCreated{segments[failing], reason});
    CHECK(effects_of<DropSegment>(undone).size() == failing);
    const auto replies = effects_of<Reply>(undone);
    REQUIRE(replies.size() == 2);
    for (const Reply& reply : replies)
      check_status(std::get<Status>(reply.body), kResourceExhausted, {"out of device memory"});
    CHECK(driver.machine.pool_stats().empty());

    // Segments that come late are dropped, and charged until then.
    for (size_t i = failing + 1; i < 3; ++i) {
      CHECK(driver.machine.physical_bytes() > 0);
      const Effects late = driver.apply(SegmentCreated{segments[i], {}});
      REQUIRE(late.size() == 1);
      CHECK(std::get<DropSegment>(late[0]).segment == segments[i]);
    }
    CHECK(driver.machine.physical_bytes() == 0);
    CHECK(driver.open_pool(creator, three_segments()).created);
  }
}

TEST_CASE("several segments of one creation may fail") {
  MachineDriver driver;
  const auto segments = start_creation(driver, 1, driver.open_session());
  const Status reason(kInternal, "broken");
  CHECK(effects_of<Reply>(driver.apply(SegmentCreated{segments[2], reason})).size() == 1);
  CHECK(driver.apply(SegmentCreated{segments[0], reason}).empty());
  CHECK(driver.apply(SegmentCreated{segments[1], reason}).empty());
  CHECK(driver.machine.physical_bytes() == 0);
}

TEST_CASE("a creation goes on when its session ends, without a reply") {
  MachineDriver driver;
  const SessionId creator = driver.open_session();
  const SessionId waiting = driver.open_session();
  const auto segments = start_creation(driver, 1, creator);
  driver.apply(OpenPool{2, waiting, three_segments()});
  CHECK(driver.apply(CloseSession{creator, FenceClass::kFenced}).empty());
  driver.apply(SegmentCreated{segments[0], {}});
  driver.apply(SegmentCreated{segments[1], {}});
  const Effects effects = driver.apply(SegmentCreated{segments[2], {}});
  REQUIRE(effects_of<Reply>(effects).size() == 1);
  CHECK(effects_of<Reply>(effects)[0].request == 2);
  CHECK(driver.pool_stats(PoolId{1}).num_sessions == 1);
}

TEST_CASE(
    "opening again returns the same pool; another description is refused by its first field") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolOpened first = driver.open_pool(session, small_pool(8));
  const PoolOpened again = driver.open_pool(session, small_pool(8));
  CHECK(first.created);
  CHECK(!again.created);
  CHECK(again.pool == first.pool);
  CHECK(again.groups == first.groups);
  CHECK(driver.pool_stats(first.pool).num_sessions == 1);

  const auto refusal = [&](auto change) {
    PoolSpec spec = small_pool(8);
    change(spec);
    return driver.refused(OpenPool{0, session, spec});
  };
  const auto code = kInvalidArgument;
  check_status(refusal([](PoolSpec& s) { s.model = "x"; }), code,
               {"model", "\"model@1\"", "\"x\""});
  check_status(refusal([](PoolSpec& s) { s.identity[1].second = "40"; }), code,
               {"\"layers\"", "\"36\"", "\"40\""});
  check_status(refusal([](PoolSpec& s) { s.identity[0].first = "v_format"; }), code,
               {"k_format", "v_format"});
  check_status(refusal([](PoolSpec& s) { s.identity.pop_back(); }), code, {"layers", "absent"});
  check_status(refusal([](PoolSpec& s) {
                 s.identity.push_back({"window", "0"});
               }),
               code, {"window", "absent"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].name = "y"; }), code, {"\"main\"", "\"y\""});
  check_status(refusal([](PoolSpec& s) { s.groups[0].block_bytes = 1; }), code,
               {"block_bytes", "18432", "1 in the request"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].num_blocks = 16; }), code,
               {"num_blocks", "8 in the pool", "16 in the request"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].block_tokens = 16; }), code,
               {"block_tokens", "4", "16"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].one_segment = true; }), code,
               {"one_segment", "false", "true"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].reserve_block_zero = true; }), code,
               {"reserve_block_zero"});
}

TEST_CASE("descriptions that no pool can have are refused, naming the field") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const auto refusal = [&](auto change) {
    PoolSpec spec = small_pool(8);
    change(spec);
    return driver.refused(OpenPool{0, session, spec});
  };
  check_status(refusal([](PoolSpec& s) { s.name = ""; }), kInvalidArgument, {"name", "0 bytes"});
  check_status(refusal([](PoolSpec& s) { s.name = std::string(129, 'x'); }), kInvalidArgument,
               {"name", "129", "128"});
  check_status(refusal([](PoolSpec& s) { s.groups.clear(); }), kInvalidArgument,
               {"groups has 0", "1 to 16"});
  check_status(refusal([](PoolSpec& s) { s.groups.resize(17, s.groups[0]); }), kInvalidArgument,
               {"groups has 17", "1 to 16"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].block_tokens = 0; }), kInvalidArgument,
               {"block_tokens is 0"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].block_bytes = 0; }), kInvalidArgument,
               {"block_bytes is 0"});
  check_status(refusal([](PoolSpec& s) { s.groups[0].num_blocks = -1; }), kInvalidArgument,
               {"num_blocks is -1"});
  check_status(refusal([](PoolSpec& s) {
                 s.groups[0].num_blocks = 1;
                 s.groups[0].reserve_block_zero = true;
               }),
               kInvalidArgument, {"num_blocks is 1"});
  PoolSpec longest = small_pool(8);
  longest.name = std::string(128, 'x');
  CHECK(driver.open_pool(session, longest).created);
}

TEST_CASE("a pool that passes the memory limit is refused with both sizes") {
  MachineDriver driver(20 * kMiB);
  const SessionId session = driver.open_session("a", Role::kAdmin);
  const PoolId first = driver.open_pool(session, small_pool(1000)).pool;
  PoolSpec second = small_pool(500);
  second.name = "second";
  check_status(driver.refused(OpenPool{0, session, second}), kResourceExhausted,
               {"10485760", "2097152"});
  driver.expect<Done>(ClosePool{0, session, first});
  driver.expect<Done>(DestroyPool{0, session, first});
  CHECK(driver.open_pool(session, second).created);
}

TEST_CASE("a pool past the number of pools is refused, and one that goes makes room") {
  MachineDriver driver(int64_t{1} << 40, 1);
  const SessionId session = driver.open_session("a", Role::kAdmin);
  const PoolId first = driver.open_pool(session, small_pool(8)).pool;
  PoolSpec second = small_pool(8);
  second.name = "second";
  check_status(driver.refused(OpenPool{0, session, second}), kResourceExhausted,
               {"there are 1 pools", "at most 1"});
  driver.expect<Done>(ClosePool{0, session, first});
  driver.expect<Done>(DestroyPool{0, session, first});
  CHECK(driver.open_pool(session, second).created);
}

TEST_CASE("closing a pool releases what the session holds in it, and the pool stays") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const PoolId pool = driver.open_pool(session, small_pool(4)).pool;
  const auto blocks = driver.allocate(session, pool, 2);
  driver.publish(session, pool, {1, 2, 3, 4}, {blocks[0]});
  driver.expect<Done>(ClosePool{0, session, pool});
  CHECK(effects_of<SetOwnerWord>(driver.effects).size() == 1);
  CHECK(driver.group_stats(pool).free == 3);
  CHECK(driver.group_stats(pool).cached == 1);
  CHECK(driver.session_stats(session).num_pools == 0);
  check_status(driver.refused(ClosePool{0, session, pool}), kNotFound, {"not open"});
  driver.open_pool(session, small_pool(4));
  CHECK(driver.look_up(session, pool, {1, 2, 3, 4}).hit_tokens == 4);
}

TEST_CASE("destroying a pool waits for its sessions and its quarantined blocks") {
  MachineDriver driver;
  const SessionId admin = driver.open_session("a", Role::kAdmin);
  const SessionId session = driver.open_session();
  const SessionId other = driver.open_session();
  const PoolId pool = driver.open_pool(session, three_segments()).pool;
  driver.open_pool(other, three_segments());
  driver.allocate(session, pool, 3);
  check_status(driver.refused(DestroyPool{0, admin, pool}), kBusy,
               {"2 attached sessions", "0 quarantined"});
  driver.apply(CloseSession{session, FenceClass::kPidfd});
  driver.apply(CloseSession{other, FenceClass::kPidfd});
  check_status(driver.refused(DestroyPool{0, admin, pool}), kBusy,
               {"0 attached sessions", "3 quarantined"});
  driver.apply(SessionFenced{session});  // the other one had no blocks and may still be there
  driver.expect<Done>(DestroyPool{0, admin, pool});
  REQUIRE(driver.effects.size() == 5);
  CHECK(std::get<PoolDestroyed>(driver.effects[0]).pool == pool);
  CHECK(effects_of<DropSegment>(driver.effects).size() == 3);
  CHECK(driver.machine.physical_bytes() == 0);
  CHECK(driver.machine.owner_words(pool, 0).empty());
  check_status(driver.refused(DestroyPool{0, admin, pool}), kNotFound, {"pool 1"});
  CHECK(driver.open_pool(admin, three_segments()).pool != pool);
}

TEST_CASE("a pool that is being created is busy") {
  MachineDriver driver;
  const SessionId admin = driver.open_session("a", Role::kAdmin);
  start_creation(driver, 1, admin);
  check_status(driver.refused(DestroyPool{0, admin, PoolId{1}}), kBusy, {"still being created"});
}

}  // namespace
}  // namespace larder
