// Requests that come again: each is carried out once and answered as before.
#include <doctest/doctest.h>

#include "tests/support/effect_text.h"
#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;
using Blocks = std::vector<BlockRef>;

constexpr int64_t kMiB = int64_t{1} << 20;
const std::vector<int32_t> kTokens = {1, 2, 3, 4};

// An admin with a pool of 16 blocks of 1 MiB, which may be 40.
struct Fixture {
  Fixture() {
    session = driver.open_session("a", Role::kAdmin);
    pool = driver.open_pool(session, growing_pool(16, 40)).pool;
  }
  // The request as such, then once more: the same answer, and nothing happens.
  template <typename Request>
  ReplyBody twice(Request request) {
    request.request = ++last;
    const std::vector<std::string> first = effect_texts(driver.settle(request));
    const std::vector<std::byte> state = saved(driver.machine);
    const Effects again = driver.apply(request);
    CHECK(driver.machine.record().empty());
    CHECK(saved(driver.machine) == state);
    REQUIRE(again.size() == 1);
    CHECK(effect_texts(again)[0] == first.back());
    return std::get<Reply>(again[0]).body;
  }
  MachineDriver driver;
  SessionId session{};
  PoolId pool{};
  uint64_t last = 0;  // number of a request
};

TEST_CASE("every request that comes again has the answer that it had") {
  Fixture f;
  const SessionId s = f.session;
  const PoolId p = f.pool;
  const Blocks blocks = std::get<BlocksAllocated>(f.twice(Allocate{0, s, p, 0, 3})).blocks;
  CHECK(f.driver.group_stats(p).open == 3);
  CHECK(std::get<BlocksAllocated>(f.twice(Allocate{0, s, p, 0, 16})).blocks.size() == 16);
  f.twice(Publish{0, s, p, "", kTokens, {blocks[0]}, {}});
  f.twice(Lookup{0, s, p, "", kTokens, {}, true});
  CHECK(f.driver.session_stats(s).holds == 2);
  f.twice(Release{0, s, p, 0, {blocks[0]}});
  CHECK(f.driver.session_stats(s).holds == 1);
  f.twice(MapExtents{0, s, p, 0, 0, 2});
  f.twice(ResizePool{0, s, p, 0, 32});
  f.twice(ResizePool{0, s, p, 0, 24});
  f.twice(SetQuota{0, s, "a", 64 * kMiB, 0});
  f.driver.release(s, p, {blocks[0]});
  const auto evicted = std::get<Resized>(f.twice(EvictBlocks{0, s, p, 1}));
  CHECK(evicted.blocks_before == 1);
  CHECK(evicted.blocks_after == 0);
  PoolSpec second = growing_pool(4, 40);
  second.name = "second";
  const auto opened = std::get<PoolOpened>(f.twice(OpenPool{0, s, second}));
  CHECK(opened.created);
  CHECK(!std::get<PoolOpened>(f.twice(OpenPool{0, s, second})).created);
  f.twice(ClosePool{0, s, opened.pool});
  f.twice(DestroyPool{0, s, opened.pool});
  CHECK(f.driver.machine.pool_stats().size() == 1);
}

TEST_CASE("a copy that comes again while it runs is not started again, and is answered once") {
  Fixture f;
  const Blocks blocks = f.driver.allocate(f.session, f.pool, 2);
  const Copy copy = {1, f.session, f.pool, 0, {blocks[0]}, {blocks[1]}};
  CHECK(effects_of<RunCopy>(f.driver.apply(copy)).size() == 1);
  CHECK(f.driver.apply(copy).empty());
  CHECK(effects_of<Reply>(f.driver.apply(CopyDone{1, {}})).size() == 1);
  const auto again = effects_of<Reply>(f.driver.apply(copy));
  REQUIRE(again.size() == 1);
  CHECK(std::holds_alternative<Done>(again[0].body));
}

TEST_CASE("a request that waits and comes again is answered once") {
  Fixture f;
  const Allocate allocate = {1, f.session, f.pool, 0, 20};
  const ResizePool resize = {2, f.session, f.pool, 0, 24};
  PoolSpec second = growing_pool(4, 40);
  second.name = "second";
  const OpenPool open = {3, f.session, second};
  Effects all;
  for (const Event& event : std::vector<Event>{allocate, resize, open})
    for (Effect& effect : f.driver.apply(event)) all.push_back(effect);
  for (const Event& event : std::vector<Event>{open, resize, allocate})
    CHECK(f.driver.apply(event).empty());
  const auto creates = effects_of<CreateSegment>(all);
  REQUIRE(creates.size() == 2);
  for (const CreateSegment& create : creates)
    for (Effect& effect : f.driver.settle(SegmentCreated{create.segment, {}}))
      all.push_back(effect);
  std::vector<uint64_t> answered;
  for (const Reply& reply : effects_of<Reply>(all)) answered.push_back(reply.request);
  std::sort(answered.begin(), answered.end());
  CHECK(answered == std::vector<uint64_t>{1, 2, 3});
  CHECK(f.driver.group_stats(f.pool).open == 20);
  for (const Event& event : std::vector<Event>{open, resize, allocate})
    CHECK(effects_of<Reply>(f.driver.apply(event)).size() == 1);
  CHECK(f.driver.group_stats(f.pool).open == 20);
}

TEST_CASE("a refusal is not kept: a request that comes again may be admitted then") {
  Fixture f;
  const Allocate allocate = {1, f.session, f.pool, 0, 41};
  CHECK(effects_of<Reply>(f.driver.apply(allocate)).size() == 1);
  Allocate smaller = allocate;
  smaller.num_blocks = 4;
  CHECK(std::holds_alternative<BlocksAllocated>(
      effects_of<Reply>(f.driver.apply(smaller)).at(0).body));
}

TEST_CASE("numbers belong to their session") {
  Fixture f;
  const SessionId other = f.driver.open_session();
  f.driver.open_pool(other, growing_pool(16, 40));
  for (const SessionId session : {f.session, other})
    CHECK(f.driver.settle(Allocate{1, session, f.pool, 0, 1}).size() == 2);
  CHECK(f.driver.group_stats(f.pool).open == 2);
}

TEST_CASE("answers that have arrived are forgotten, and no others") {
  Fixture f;
  for (uint64_t request = 1; request <= 3; ++request)
    f.driver.apply(Allocate{request, f.session, f.pool, 0, 1});
  f.driver.apply(Allocate{4, f.session, f.pool, 0, 1, 0, 3});
  CHECK(f.driver.group_stats(f.pool).open == 4);
  CHECK(f.driver.apply(Allocate{3, f.session, f.pool, 0, 1}).size() == 1);
  CHECK(f.driver.apply(Allocate{4, f.session, f.pool, 0, 1}).size() == 1);
  CHECK(f.driver.group_stats(f.pool).open == 4);
  f.driver.apply(Allocate{2, f.session, f.pool, 0, 1});
  CHECK(f.driver.group_stats(f.pool).open == 5);
}

TEST_CASE("a session keeps 64 answers, and so many that they name 16384 things") {
  Fixture f;
  for (uint64_t request = 1; request <= 65; ++request)
    f.driver.apply(Release{request, f.session, f.pool, 0, {}});
  f.driver.apply(Release{2, f.session, f.pool, 0, {}});
  CHECK(f.driver.machine.record().empty());
  f.driver.apply(Release{1, f.session, f.pool, 0, {}});
  CHECK(!f.driver.machine.record().empty());

  // Answers that name 10000 segments each: two of them are too many.
  MachineDriver driver;
  const SessionId session = driver.open_session();
  PoolSpec spec = growing_pool(4, 40000);
  const PoolId pool = driver.open_pool(session, spec).pool;
  const auto map = [&](uint64_t request, int64_t count) {
    driver.apply(MapExtents{request, session, pool, 0, 0, count});
    return !driver.machine.record().empty();
  };
  CHECK(map(1, 10000));
  CHECK(!map(1, 10000));
  const SessionId other = driver.open_session();
  driver.apply(OpenPool{1, other, spec});
  CHECK(driver.machine.record().size() > 0);
  driver.apply(OpenPool{2, other, spec});
  driver.apply(OpenPool{2, other, spec});
  CHECK(driver.machine.record().empty());
  driver.apply(OpenPool{1, other, spec});
  CHECK(!driver.machine.record().empty());
}

TEST_CASE("a session that comes back after a restart finds its answers and what it waits for") {
  Fixture f;
  const Allocate done = {1, f.session, f.pool, 0, 2};
  f.driver.apply(done);
  const Allocate waiting = {2, f.session, f.pool, 0, 20};
  PoolSpec second = growing_pool(4, 40);
  second.name = "second";
  const OpenPool opening = {3, f.session, second};
  CHECK(effects_of<CreateSegment>(f.driver.apply(waiting)).size() == 2);
  CHECK(effects_of<CreateSegment>(f.driver.apply(opening)).size() == 1);
  CHECK(f.driver.machine.physical_bytes() == 28 * kMiB);

  // The creations are undone; what waits for growth asks for it again, under new numbers.
  const Effects recovered = f.driver.apply(Recovered{});
  const auto creates = effects_of<CreateSegment>(recovered);
  REQUIRE(creates.size() == 2);
  CHECK(recovered.size() == 2);
  CHECK(creates[0].segment == SegmentId{8});
  CHECK(f.driver.machine.pool_stats().size() == 1);
  CHECK(f.driver.machine.physical_bytes() == 24 * kMiB);
  CHECK(f.driver.apply(SegmentCreated{SegmentId{5}, {}}).empty());  // of before
  CHECK(f.driver.apply(ResumeSession{f.session}).empty());
  CHECK(effects_of<Reply>(f.driver.apply(done)).size() == 1);
  CHECK(f.driver.apply(waiting).empty());
  CHECK(effects_of<CreateSegment>(f.driver.apply(opening)).size() == 1);
  f.driver.apply(SegmentCreated{creates[0].segment, {}});
  const auto replies = effects_of<Reply>(f.driver.apply(SegmentCreated{creates[1].segment, {}}));
  REQUIRE(replies.size() == 1);
  CHECK(replies[0].request == 2);
  CHECK(f.driver.group_stats(f.pool).open == 22);
}

}  // namespace
}  // namespace larder
