// What tenants are guaranteed, what they may take beyond it, and how they get it.
#include <numeric>

#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;
using Blocks = std::vector<BlockRef>;

constexpr int64_t kMiB = int64_t{1} << 20;

// 40 MiB: 16 are guaranteed to a, which may have 24, and 8 to b. Nothing is guaranteed to c.
struct Fixture {
  Fixture() {
    driver.apply(Configure{40 * kMiB,
                           16,
                           {{"a", "salt of a", 16 * kMiB, 24 * kMiB},
                            {"b", "salt of b", 8 * kMiB, 0},
                            {"c", "salt of c", 0, 0}}});
  }
  struct Client {
    SessionId session;
    PoolId pool;
  };
  // A session with a pool of its tenant that starts with 4 blocks of 1 MiB.
  Client client(const std::string& tenant, int64_t max_blocks = 40) {
    const SessionId session = driver.open_session(tenant);
    return {session, driver.open_pool(session, growing_pool(4, max_blocks)).pool};
  }
  Blocks allocate(const Client& of, int64_t count) {
    const ReplyBody body = driver.ask_and_settle(Allocate{0, of.session, of.pool, 0, count});
    if (const auto* status = std::get_if<Status>(&body)) FAIL(status->to_string());
    return std::get<BlocksAllocated>(body).blocks;
  }
  Status refused(const Client& of, int64_t count) {
    return driver.refused(Allocate{0, of.session, of.pool, 0, count});
  }
  // Published, each under a key of its own, and released.
  void cache(const Client& of, const Blocks& blocks) {
    for (const BlockRef& block : blocks)
      driver.publish(of.session, of.pool, {block.id, 0, 0, 0}, {block});
    driver.release(of.session, of.pool, blocks);
  }
  // Maps all extents and returns their segments.
  std::vector<SegmentId> map_all(const Client& of) {
    return driver.expect<ExtentsMapped>(MapExtents{0, of.session, of.pool, 0, 0, 10}).segments;
  }
  TenantStats stats(const std::string& tenant) {
    for (const TenantStats& one : driver.machine.tenant_stats())
      if (one.name == tenant) return one;
    FAIL("no such tenant");
    return {};
  }
  MachineDriver driver;
};

TEST_CASE("a guarantee is kept free for its tenant, and never lent") {
  Fixture f;
  const auto c = f.client("c");
  CHECK(f.allocate(c, 16).size() == 16);
  // 40 MiB less the 24 that a and b are guaranteed.
  check_status(f.refused(c, 1), kResourceExhausted,
               {"requested 1 blocks", "available 0 (0 free, 0 evictable) of 16",
                "can grow to 40 by 4194304 bytes", "available 0; limit 16777216 of 41943040 bytes",
                "used 16777216"});
  const auto a = f.client("a");
  CHECK(f.allocate(a, 16).size() == 16);
  const auto b = f.client("b");
  CHECK(f.allocate(b, 8).size() == 8);
  CHECK(f.driver.machine.physical_bytes() == 40 * kMiB);
  check_status(f.refused(a, 1), kResourceExhausted, {"limit 16777216 of 41943040"});
  CHECK(f.stats("b").used_bytes == 8 * kMiB);
  CHECK(f.stats("b").guaranteed_bytes == 8 * kMiB);
}

TEST_CASE("above its guarantee a tenant takes what is free, up to its maximum") {
  Fixture f;
  const auto a = f.client("a");
  CHECK(f.allocate(a, 24).size() == 24);
  check_status(f.refused(a, 1), kResourceExhausted,
               {"available 0; limit 25165824 bytes (maximum of tenant \"a\"), used 25165824"});
  // The other 16 MiB are b's guarantee and what is left.
  const auto c = f.client("c");
  CHECK(f.allocate(c, 8).size() == 8);
  check_status(f.refused(c, 1), kResourceExhausted, {"limit 8388608 of 41943040"});
}

TEST_CASE("what others have cached above their guarantee comes back, once all have unmapped it") {
  Fixture f;
  const auto c = f.client("c");
  f.cache(c, f.allocate(c, 16));
  const auto segments = f.map_all(c);
  const SessionId second = f.driver.open_session("c");
  f.driver.open_pool(second, growing_pool(4, 40));
  f.driver.expect<ExtentsMapped>(MapExtents{0, second, c.pool, 0, 3, 1});
  const auto a = f.client("a");
  f.allocate(a, 16);

  // Extents are equally cheap: the last one goes.
  const Effects asked = f.driver.apply(Allocate{1, a.session, a.pool, 0, 1});
  CHECK(effects_of<Reply>(asked).empty());
  const auto removed = effects_of<ExtentRemoved>(asked);
  REQUIRE(removed.size() == 1);
  CHECK(removed[0].index == 3);
  CHECK(removed[0].segment == segments[3]);
  const auto unmaps = effects_of<UnmapSegment>(asked);
  REQUIRE(unmaps.size() == 2);
  CHECK(unmaps[0].session == c.session);
  CHECK(unmaps[1].session == second);
  CHECK(effects_of<DropSegment>(asked).empty());
  CHECK(f.stats("c").leaving_bytes == 4 * kMiB);
  CHECK(f.stats("c").used_bytes == 16 * kMiB);
  CHECK(f.driver.session_stats(second).unmapping_bytes == 4 * kMiB);

  CHECK(f.driver.apply(SegmentUnmapped{segments[3], c.session}).empty());
  CHECK(f.driver.apply(SegmentUnmapped{segments[3], c.session}).empty());
  const Effects unmapped = f.driver.settle(SegmentUnmapped{segments[3], second});
  CHECK(std::get<DropSegment>(unmapped.at(0)).segment == segments[3]);
  CHECK(effects_of<CreateSegment>(unmapped).size() == 1);
  const auto replies = effects_of<Reply>(unmapped);
  REQUIRE(replies.size() == 1);
  CHECK(replies[0].request == 1);
  CHECK(std::get<BlocksAllocated>(replies[0].body).blocks == Blocks{{16, 1}});
  CHECK(f.stats("c").used_bytes == 12 * kMiB);
  CHECK(f.stats("a").used_bytes == 20 * kMiB);
}

TEST_CASE("memory that nobody has mapped comes back at once") {
  Fixture f;
  const auto c = f.client("c");
  f.cache(c, f.allocate(c, 16));
  const auto a = f.client("a");
  f.allocate(a, 16);
  CHECK(f.allocate(a, 8).size() == 8);
  CHECK(f.stats("c").used_bytes == 8 * kMiB);
  CHECK(f.driver.group_stats(c.pool).cached == 8);
  CHECK(f.driver.pool_stats(c.pool).evicted_blocks_total == 8);
}

TEST_CASE("what is cached within a guarantee is not taken, nor what is in use above it") {
  Fixture f;
  const auto b = f.client("b");
  f.cache(b, f.allocate(b, 8));
  const auto c = f.client("c");
  const Blocks held = f.allocate(c, 16);
  check_status(f.refused(c, 1), kResourceExhausted, {"available 0"});
  const auto a = f.client("a");
  f.allocate(a, 16);
  check_status(f.refused(a, 1), kResourceExhausted, {"available 0"});
  CHECK(f.driver.group_stats(b.pool).cached == 8);
  // One block in use keeps its extent; three extents can go.
  f.cache(c, Blocks(held.begin() + 1, held.end()));
  check_status(f.refused(c, 20), kResourceExhausted, {"requested 20", "available 15"});
  CHECK(f.allocate(a, 8).size() == 8);
  CHECK(f.driver.group_stats(c.pool).capacity == 8);
  CHECK(f.driver.group_stats(c.pool).open == 1);
}

TEST_CASE("a tenant at its maximum takes from its own other pools, not from others") {
  Fixture f;
  const auto c = f.client("c");
  f.cache(c, f.allocate(c, 8));
  const auto first = f.client("a");
  f.cache(first, f.allocate(first, 24));
  PoolSpec spec = growing_pool(4, 40);
  spec.name = "second";
  const SessionId session = f.driver.open_session("a");
  const Fixture::Client second{session, f.driver.open_pool(session, spec).pool};
  CHECK(f.allocate(second, 8).size() == 8);
  CHECK(f.driver.group_stats(first.pool).capacity == 16);
  CHECK(f.driver.group_stats(c.pool).capacity == 8);
  CHECK(f.stats("a").used_bytes == 24 * kMiB);
}

TEST_CASE("an own cached prefix is evicted before anything is taken back") {
  Fixture f;
  const auto c = f.client("c");
  f.cache(c, f.allocate(c, 16));
  const auto a = f.client("a", 16);
  f.cache(a, f.allocate(a, 16));
  CHECK(f.allocate(a, 16).size() == 16);
  CHECK(f.driver.group_stats(c.pool).capacity == 16);
}

TEST_CASE("a new pool waits for memory like an allocation") {
  Fixture f;
  const auto c = f.client("c");
  f.cache(c, f.allocate(c, 16));
  const auto segments = f.map_all(c);
  const auto a = f.client("a");
  f.allocate(a, 16);
  PoolSpec spec = growing_pool(8, 40);
  spec.name = "second";
  const Effects asked = f.driver.apply(OpenPool{1, a.session, spec});
  CHECK(effects_of<UnmapSegment>(asked).size() == 2);
  f.driver.settle(SegmentUnmapped{segments[3], c.session});
  const auto replies = effects_of<Reply>(f.driver.settle(SegmentUnmapped{segments[2], c.session}));
  REQUIRE(replies.size() == 1);
  CHECK(std::get<PoolOpened>(replies[0].body).created);
  spec.name = "third";
  spec.groups[0].num_blocks = 12;
  check_status(f.driver.refused(OpenPool{0, a.session, spec}), kResourceExhausted,
               {"needs 12582912 bytes", "available 0"});
}

TEST_CASE("a quota that all guarantees and what is taken leave room for is admitted") {
  Fixture f;
  const auto c = f.client("c");
  f.allocate(c, 12);
  const SessionId admin = f.driver.open_session("a", Role::kAdmin);
  const auto set = [&](const std::string& tenant, int64_t guaranteed, int64_t maximum) {
    return SetQuota{0, admin, tenant, guaranteed * kMiB, maximum * kMiB};
  };
  // 40 less 12 taken by c and 8 guaranteed to b.
  check_status(f.driver.refused(set("a", 21, 0)), kResourceExhausted,
               {"guarantee of 22020096 bytes", "available 20971520 of 41943040"});
  f.driver.expect<Done>(set("a", 20, 0));
  CHECK(f.stats("a").guaranteed_bytes == 20 * kMiB);
  CHECK(f.stats("a").maximum_bytes == 0);
  check_status(f.refused(c, 1), kResourceExhausted, {"available 0"});
  f.driver.expect<Done>(set("a", 0, 0));
  CHECK(f.allocate(c, 4).size() == 4);
  f.driver.expect<Done>(set("c", 16, 16));
  check_status(f.refused(c, 1), kResourceExhausted, {"available 0"});
  // A maximum below what is taken stops growth and takes nothing away.
  f.driver.expect<Done>(set("c", 0, 4));
  CHECK(f.stats("c").used_bytes == 16 * kMiB);
}

TEST_CASE("quotas that make no sense are refused") {
  Fixture f;
  const SessionId admin = f.driver.open_session("a", Role::kAdmin);
  const auto refused = [&](const std::string& tenant, int64_t guaranteed, int64_t maximum) {
    return f.driver.refused(SetQuota{0, admin, tenant, guaranteed, maximum});
  };
  check_status(refused("z", 1, 0), kNotFound, {"\"z\""});
  check_status(refused("a", -1, 0), kInvalidArgument, {"guaranteed_bytes is -1"});
  check_status(refused("a", 0, -1), kInvalidArgument, {"maximum_bytes -1"});
  check_status(refused("a", 2, 1), kInvalidArgument, {"guaranteed_bytes is 2", "maximum_bytes 1"});
  check_status(refused("a", INT64_MAX, INT64_MAX), kResourceExhausted, {"9223372036854775807"});
  const SessionId writer = f.driver.open_session("a");
  check_status(f.driver.refused(SetQuota{0, writer, "a", 0, 0}), kPermissionDenied, {"admin"});
}

TEST_CASE("a tenant that the operator names no more keeps its pools and has no guarantee") {
  Fixture f;
  const auto a = f.client("a");
  f.driver.apply(Configure{40 * kMiB, 16, {{"c", "another salt", 0, 0}}});
  CHECK(f.stats("a").guaranteed_bytes == 0);
  CHECK(f.allocate(a, 24).size() == 24);
  const auto c = f.client("c");
  CHECK(f.allocate(c, 16).size() == 16);
}

TEST_CASE("numbers that no machine has are taken as the largest that are counted") {
  MachineDriver driver;
  driver.apply(
      Configure{INT64_MAX, 4, {{"a", "s", INT64_MAX, INT64_MAX}, {"b", "t", INT64_MAX, 0}}});
  const SessionId session = driver.open_session();
  check_status(driver.refused(OpenPool{0, session, small_pool(4)}), kResourceExhausted,
               {"available 0"});
  driver.apply(Configure{INT64_MIN, 4, {{"a", "s", INT64_MIN, INT64_MIN}}});
  check_status(driver.refused(OpenPool{0, session, small_pool(4)}), kResourceExhausted,
               {"available 0"});
}

TEST_CASE("eight sessions that each want a fifth of what there can be: five get it") {
  MachineDriver driver(40 * kMiB);
  std::vector<SessionId> sessions;
  PoolId pool{};
  for (int i = 0; i < 8; ++i) {
    sessions.push_back(driver.open_session());
    pool = driver.open_pool(sessions.back(), growing_pool(4, 40)).pool;
  }
  // All ask before any segment is there; then the segments come, one by one.
  std::vector<Effect> all;
  for (const SessionId session : sessions)
    for (Effect& effect : driver.apply(Allocate{1, session, pool, 0, 8})) all.push_back(effect);
  for (size_t i = 0; i < all.size(); ++i)
    if (const auto* create = std::get_if<CreateSegment>(&all[i]))
      for (Effect& effect : driver.apply(SegmentCreated{create->segment, {}}))
        all.push_back(effect);
  int succeeded = 0;
  int refused = 0;
  for (const Reply& reply : effects_of<Reply>(all)) {
    if (const auto* status = std::get_if<Status>(&reply.body)) {
      check_status(*status, kResourceExhausted, {"requested 8", "available 0", "of 40"});
      ++refused;
    } else {
      CHECK(std::get<BlocksAllocated>(reply.body).blocks.size() == 8);
      ++succeeded;
    }
  }
  CHECK(succeeded == 5);
  CHECK(refused == 3);
  CHECK(driver.machine.physical_bytes() == 40 * kMiB);
}

TEST_CASE("exhaustion is an answer, and a waiting request wakes when blocks are freed") {
  Fixture f;
  const auto b = f.client("b", 8);
  check_status(f.refused(b, 9), kResourceExhausted, {"requested 9", "available 4"});
  Blocks blocks = f.allocate(b, 8);
  check_status(f.refused(b, 1), kResourceExhausted, {"requested 1", "available 0"});
  f.driver.release(b.session, b.pool, blocks);

  // a waits for memory of c, and one of its own sessions gives blocks back meanwhile.
  const auto c = f.client("c");
  f.cache(c, f.allocate(c, 16));
  f.map_all(c);
  const auto a = f.client("a");
  blocks = f.allocate(a, 16);
  CHECK(effects_of<Reply>(f.driver.apply(Allocate{1, a.session, a.pool, 0, 2})).empty());
  CHECK(effects_of<Reply>(f.driver.apply(Release{2, a.session, a.pool, 0, {blocks[0]}})).size() ==
        1);
  const auto replies =
      effects_of<Reply>(f.driver.apply(Release{3, a.session, a.pool, 0, {blocks[5]}}));
  REQUIRE(replies.size() == 2);
  CHECK(replies[0].request == 3);
  CHECK(replies[1].request == 1);
  CHECK(std::get<BlocksAllocated>(replies[1].body).blocks == Blocks{{0, 2}, {5, 2}});
}

}  // namespace
}  // namespace larder
