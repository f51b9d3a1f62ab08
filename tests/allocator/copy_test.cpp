#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;

struct Fixture {
  explicit Fixture(int64_t num_blocks = 8) {
    session = driver.open_session();
    pool = driver.open_pool(session, small_pool(num_blocks)).pool;
    blocks = driver.allocate(session, pool, 4);
  }
  // Starts a copy and returns its number.
  uint64_t start(std::vector<BlockRef> from, std::vector<BlockRef> to) {
    const auto copies = effects_of<RunCopy>(
        driver.apply(Copy{++last_copy, session, pool, 0, std::move(from), std::move(to)}));
    REQUIRE(copies.size() == 1);
    return copies[0].copy;
  }
  Status refused(std::vector<BlockRef> from, std::vector<BlockRef> to) {
    return driver.refused(Copy{0, session, pool, 0, std::move(from), std::move(to)});
  }
  MachineDriver driver;
  SessionId session{};
  PoolId pool{};
  std::vector<BlockRef> blocks;
  uint64_t last_copy = 200;  // number of a request
};

TEST_CASE("a copy is run first and answered when it is done") {
  Fixture f;
  const Effects effects = f.driver.apply(
      Copy{100, f.session, f.pool, 0, {f.blocks[0], f.blocks[0]}, {f.blocks[1], f.blocks[2]}});
  REQUIRE(effects.size() == 1);
  const RunCopy run = std::get<RunCopy>(effects[0]);
  CHECK(run.from == std::vector<int32_t>{0, 0});
  CHECK(run.to == std::vector<int32_t>{1, 2});
  const auto replies = effects_of<Reply>(f.driver.apply(CopyDone{run.copy, {}}));
  REQUIRE(replies.size() == 1);
  CHECK(replies[0].request == 100);
  CHECK(std::holds_alternative<Done>(replies[0].body));
  CHECK(f.driver.apply(CopyDone{run.copy, {}}).empty());
  f.driver.release(f.session, f.pool, f.blocks);
}

TEST_CASE("a copy that failed is answered with the reason, and its blocks stay open") {
  Fixture f;
  const uint64_t copy = f.start({f.blocks[0]}, {f.blocks[1]});
  const auto replies =
      effects_of<Reply>(f.driver.apply(CopyDone{copy, Status(kUnavailable, "no executor")}));
  REQUIRE(replies.size() == 1);
  check_status(std::get<Status>(replies[0].body), kUnavailable, {"no executor"});
  CHECK(f.driver.group_stats(f.pool).open == 4);
  f.driver.release(f.session, f.pool, f.blocks);
}

TEST_CASE("copies that name blocks wrongly are refused") {
  Fixture f;
  const auto& b = f.blocks;
  check_status(f.refused({b[0]}, {b[1], b[2]}), kInvalidArgument, {"1 blocks", "2"});
  check_status(f.refused({b[0], b[1]}, {b[2], b[2]}), kInvalidArgument, {"block 2", "twice"});
  check_status(f.refused({b[0], b[1]}, {b[2], b[0]}), kInvalidArgument, {"block 0", "both"});
  check_status(f.refused({b[0]}, {{7, 1}}), kNotFound, {"block 7"});
  check_status(f.refused({{7, 1}}, {b[0]}), kNotFound, {"block 7"});
  check_status(f.refused({b[0]}, {{1, 8}}), kStaleGeneration, {"block 1"});
  f.driver.publish(f.session, f.pool, {1, 2, 3, 4}, {b[0]});
  check_status(f.refused({b[1]}, {b[0]}), kInvalidArgument, {"block 0", "published"});
  CHECK(std::holds_alternative<Done>(f.driver.ask(Copy{0, f.session, f.pool, 0, {}, {}})));
}

TEST_CASE("blocks in a running copy are busy for the session that copies") {
  Fixture f;
  const auto& b = f.blocks;
  f.driver.publish(f.session, f.pool, {1, 2, 3, 4}, {b[0]});
  const uint64_t copy = f.start({b[0], b[1]}, {b[2], b[3]});
  for (const BlockRef& block : b)
    check_status(f.driver.refused(Release{0, f.session, f.pool, 0, {block}}), kBusy,
                 {"block " + std::to_string(block.id)});
  check_status(f.driver.refused(ClosePool{0, f.session, f.pool}), kBusy, {"4 blocks"});
  const std::vector<int32_t> tokens = {1, 2, 3, 4, 5, 6, 7, 8};
  check_status(f.driver.refused(Publish{0, f.session, f.pool, "", tokens, {b[0], b[2]}, {}}), kBusy,
               {"block 2"});
  const auto extra = f.driver.allocate(f.session, f.pool, 1);
  check_status(f.refused({b[2]}, extra), kBusy, {"block 2"});
  check_status(f.refused({b[0]}, {b[1]}), kBusy, {"block 1"});
  const uint64_t second = f.start({b[0]}, extra);  // a source may be read twice
  f.driver.apply(CopyDone{copy, {}});
  check_status(f.driver.refused(Release{0, f.session, f.pool, 0, {b[0]}}), kBusy, {"block 0"});
  f.driver.apply(CopyDone{second, {}});
  f.driver.release(f.session, f.pool, b);
}

TEST_CASE("another session may drop its hold on a source, which stays until the copy is done") {
  Fixture f(4);
  f.driver.publish(f.session, f.pool, {1, 2, 3, 4}, {f.blocks[0]});
  const SessionId other = f.driver.open_session();
  f.driver.open_pool(other, small_pool(4));
  const auto held = f.driver.look_up(other, f.pool, {1, 2, 3, 4}, true).blocks;
  const uint64_t copy = f.start({f.blocks[0]}, {f.blocks[1]});
  f.driver.release(other, f.pool, held);
  f.driver.apply(CloseSession{f.session, FenceClass::kFenced});
  // The source is cached but pinned, the target waits for the copy, and two blocks came free.
  CHECK(f.driver.group_stats(f.pool).cached == 1);
  CHECK(f.driver.group_stats(f.pool).quarantined == 1);
  check_status(f.driver.refused(Allocate{0, other, f.pool, 0, 3}), kResourceExhausted,
               {"available 2"});
  CHECK(effects_of<Reply>(f.driver.apply(CopyDone{copy, {}})).empty());
  CHECK(f.driver.allocate(other, f.pool, 4).size() == 4);
}

TEST_CASE("open blocks of a dead session wait for both the fence and the copy") {
  for (const bool copy_first : {true, false}) {
    CAPTURE(copy_first);
    Fixture f;
    const uint64_t copy = f.start({f.blocks[0]}, {f.blocks[1]});
    const Effects closed = f.driver.apply(CloseSession{f.session, FenceClass::kPidfd});
    CHECK(effects_of<FenceSession>(closed).size() == 1);
    CHECK(f.driver.group_stats(f.pool).quarantined == 4);
    if (copy_first) {
      f.driver.apply(CopyDone{copy, {}});
      CHECK(f.driver.group_stats(f.pool).quarantined == 4);
      f.driver.apply(SessionFenced{f.session});
    } else {
      f.driver.apply(SessionFenced{f.session});
      CHECK(f.driver.group_stats(f.pool).quarantined == 2);
      f.driver.apply(CopyDone{copy, {}});
    }
    CHECK(f.driver.group_stats(f.pool).free == 8);
  }
}

}  // namespace
}  // namespace larder
