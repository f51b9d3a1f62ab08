// Pools of several groups: units, windows, states, and what of them a prefix needs.
#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;
using Blocks = std::vector<BlockRef>;

constexpr BlockRef kAbsent = {-1, 0};

GroupSpec group(const char* name, int64_t num_blocks, int32_t block_tokens,
                GroupKind kind = GroupKind::kFull, int32_t window_tokens = 0) {
  GroupSpec spec{name, 4096, num_blocks, block_tokens};
  spec.kind = kind;
  spec.window_tokens = window_tokens;
  return spec;
}

// Tokens 0, 1, 2 ...
std::vector<int32_t> tokens(int32_t count) {
  std::vector<int32_t> list;
  for (int32_t i = 0; i < count; ++i) list.push_back(i);
  return list;
}

struct Fixture {
  explicit Fixture(std::vector<GroupSpec> groups) {
    spec = {"pool", "model@1", {}, std::move(groups)};
    writer = driver.open_session();
    reader = driver.open_session("a", Role::kRead);
    pool = driver.open_pool(writer, spec).pool;
    driver.open_pool(reader, spec);
  }
  Blocks allocate(uint32_t from_group, int64_t count) {
    return driver.expect<BlocksAllocated>(Allocate{0, writer, pool, from_group, count}).blocks;
  }
  Publish publication(int32_t num_tokens, Blocks blocks, int64_t first = 0) {
    return {0, writer, pool, "", tokens(num_tokens), std::move(blocks), {}, first};
  }
  Blocks publish(int32_t num_tokens, Blocks blocks) {
    return driver.expect<BlocksPublished>(publication(num_tokens, std::move(blocks))).blocks;
  }
  PrefixFound find(int32_t num_tokens, bool hold = false) {
    return driver.look_up(reader, pool, tokens(num_tokens), hold);
  }
  void release(SessionId session, uint32_t in_group, Blocks blocks) {
    driver.expect<Done>(Release{0, session, pool, in_group, std::move(blocks)});
  }
  GroupStats stats(uint32_t of_group) { return driver.pool_stats(pool).groups.at(of_group); }
  MachineDriver driver;
  PoolSpec spec;
  SessionId writer{}, reader{};
  PoolId pool{};
};

TEST_CASE("a unit has as many tokens as whole blocks of every group need") {
  // lcm(4, 6) = 12 tokens: three blocks of group 0, then two of group 1.
  Fixture f({group("a", 8, 4), group("b", 8, 6)});
  const Blocks a = f.allocate(0, 6);
  const Blocks b = f.allocate(1, 4);
  const Blocks unit = {a[0], a[1], a[2], b[0], b[1]};
  const auto published = f.driver.expect<BlocksPublished>(f.publication(12, unit));
  CHECK(published.keys.size() == 1);
  CHECK(published.blocks == unit);
  CHECK(f.stats(0).published == 3);
  CHECK(f.stats(1).published == 2);
  CHECK(f.find(11).blocks.empty());
  CHECK(f.find(23).hit_tokens == 12);
  CHECK(f.find(23).blocks == unit);

  // The second unit goes on from the first; a lookup may ask for it alone.
  f.driver.expect<BlocksPublished>(f.publication(24, {a[3], a[4], a[5], b[2], b[3]}, 1));
  CHECK(f.find(24).hit_tokens == 24);
  const auto rest =
      f.driver.expect<PrefixFound>(Lookup{0, f.reader, f.pool, "", tokens(24), {}, false, 1});
  CHECK(rest.blocks == Blocks{a[3], a[4], a[5], b[2], b[3]});
  // max_blocks counts blocks of all groups: 9 hold one whole unit of 5.
  const auto limited =
      f.driver.expect<PrefixFound>(Lookup{0, f.reader, f.pool, "", tokens(24), {}, false, 0, 9});
  CHECK(limited.hit_tokens == 12);
}

TEST_CASE("a prefix is held in every group and counted in each") {
  Fixture f({group("a", 4, 4), group("b", 4, 2)});
  const Blocks a = f.allocate(0, 1);
  const Blocks b = f.allocate(1, 2);
  f.publish(4, {a[0], b[0], b[1]});
  f.find(4, true);
  CHECK(f.driver.session_stats(f.reader).holds == 3);
  f.release(f.writer, 0, a);
  f.release(f.writer, 1, b);
  CHECK(f.stats(0).cached == 0);
  f.release(f.reader, 0, a);
  CHECK(f.stats(0).cached == 1);
  CHECK(f.stats(0).evictable == 0);  // block 0 and 1 of group 1 are held by the reader
  CHECK(f.stats(1).published == 2);
  f.release(f.reader, 1, {b[1], b[0]});
  CHECK(f.stats(0).evictable == 1);
  CHECK(f.stats(1).evictable == 2);
}

TEST_CASE("a window group needs the blocks of its last tokens only") {
  // Units of 4 tokens; the window of 6 tokens is in the last two blocks of 4.
  Fixture f({group("full", 8, 4), group("window", 8, 4, GroupKind::kWindow, 6)});
  const Blocks full = f.allocate(0, 4);
  const Blocks window = f.allocate(1, 3);
  f.publish(16, {full[0], kAbsent, full[1], window[0], full[2], window[1], full[3], window[2]});
  // The first unit alone lacks its window; the second one lacks the first one's block.
  CHECK(f.find(4).hit_tokens == 0);
  CHECK(f.find(8).hit_tokens == 0);
  CHECK(f.find(12).hit_tokens == 12);
  const PrefixFound found = f.find(16, true);
  CHECK(found.hit_tokens == 16);
  CHECK(found.blocks ==
        Blocks{full[0], kAbsent, full[1], kAbsent, full[2], window[1], full[3], window[2]});
  CHECK(f.driver.session_stats(f.reader).holds == 6);
}

TEST_CASE("a window ends within a unit where its group has several blocks in one") {
  // Units of 8 tokens: one full block and four of 2 tokens; a window of 5 tokens is in three.
  Fixture f({group("full", 4, 8), group("window", 8, 2, GroupKind::kWindow, 5)});
  const Blocks full = f.allocate(0, 2);
  const Blocks window = f.allocate(1, 5);
  f.publish(16, {full[0], kAbsent, window[0], window[1], window[2], full[1], kAbsent, kAbsent,
                 window[3], window[4]});
  CHECK(f.find(8).blocks == Blocks{full[0], kAbsent, window[0], window[1], window[2]});
  CHECK(f.find(16).hit_tokens == 8);  // the second unit lacks one of its last three
}

TEST_CASE("the longest usable run is found where the window of a longer one is missing") {
  Fixture f({group("full", 8, 4), group("window", 8, 4, GroupKind::kWindow, 4)});
  const Blocks full = f.allocate(0, 4);
  const Blocks window = f.allocate(1, 1);
  f.publish(16, {full[0], kAbsent, full[1], window[0], full[2], kAbsent, full[3], kAbsent});
  const PrefixFound found = f.find(16);
  CHECK(found.hit_tokens == 8);
  CHECK(found.blocks == Blocks{full[0], kAbsent, full[1], window[0]});
  CHECK(f.driver.pool_stats(f.pool).lookup_hit_tokens_total == 8);
}

TEST_CASE("a state group needs the state at the end, which can be filled in later") {
  // A state needs one block per unit, whatever its block_tokens.
  Fixture f({group("full", 8, 2), group("state", 8, 4, GroupKind::kState)});
  const Blocks full = f.allocate(0, 6);
  const Blocks state = f.allocate(1, 2);
  const Blocks first = {full[0],  full[1], kAbsent, full[2], full[3],
                        state[0], full[4], full[5], kAbsent};
  CHECK(f.publish(12, first) == first);
  CHECK(f.find(12).hit_tokens == 8);
  CHECK(f.find(12).blocks == Blocks{full[0], full[1], kAbsent, full[2], full[3], state[0]});
  // The last unit's state, under the same key.
  const Blocks second = {full[0], full[1], kAbsent, full[2], full[3],
                         kAbsent, full[4], full[5], state[1]};
  CHECK(f.publish(12, second) == second);
  CHECK(f.find(12).hit_tokens == 12);
  CHECK(f.find(12, true).blocks == second);
  CHECK(f.driver.session_stats(f.reader).holds == 7);
  CHECK(f.driver.pool_stats(f.pool).published_blocks_total == 8);
}

TEST_CASE("a key that exists answers with the blocks of every group, and holds them") {
  Fixture f({group("full", 8, 4), group("window", 8, 4, GroupKind::kWindow, 4)});
  const Blocks there = {f.allocate(0, 1)[0], f.allocate(1, 1)[0]};
  f.publish(4, there);
  const SessionId second = f.driver.open_session();
  f.driver.open_pool(second, f.spec);
  const auto allocate = [&](uint32_t from) {
    return f.driver.expect<BlocksAllocated>(Allocate{0, second, f.pool, from, 1}).blocks[0];
  };
  const Blocks own = {allocate(0), allocate(1)};
  const auto publish = [&](Blocks blocks) {
    return f.driver
        .expect<BlocksPublished>(Publish{0, second, f.pool, "", tokens(4), std::move(blocks), {}})
        .blocks;
  };
  CHECK(publish(own) == there);
  CHECK(f.driver.session_stats(second).open_blocks == 2);
  CHECK(f.driver.session_stats(second).holds == 2);
  // Where it names none, it gets none.
  CHECK(publish({own[0], kAbsent}) == Blocks{there[0], kAbsent});
  CHECK(f.driver.session_stats(second).holds == 3);
}

TEST_CASE("a unit is evicted with its blocks of all groups, and only when none is in use") {
  Fixture f({group("full", 2, 4), group("window", 3, 4, GroupKind::kWindow, 4)});
  const Blocks full = f.allocate(0, 2);
  const Blocks window = f.allocate(1, 2);
  f.publish(8, {full[0], window[0], full[1], window[1]});
  f.release(f.writer, 0, full);
  CHECK(f.stats(0).cached == 2);
  CHECK(f.stats(0).evictable == 0);
  check_status(f.driver.refused(Allocate{0, f.writer, f.pool, 0, 1}), kResourceExhausted,
               {"requested 1", "available 0", "of 2"});
  f.release(f.writer, 1, {window[1]});
  CHECK(f.stats(0).evictable == 1);
  CHECK(f.allocate(0, 1) == Blocks{{1, 2}});  // the last unit went
  CHECK(f.stats(1).free == 2);                // and its window block with it
  CHECK(f.stats(1).published == 1);
  CHECK(f.driver.pool_stats(f.pool).evicted_blocks_total == 2);
  f.release(f.writer, 1, {window[0]});
  CHECK(f.allocate(1, 3).size() == 3);
  CHECK(f.stats(0).free == 1);
  CHECK(f.find(4).hit_tokens == 0);
}

TEST_CASE("units that are named wrongly are refused as a whole") {
  Fixture f({group("full", 8, 4), group("window", 8, 2, GroupKind::kWindow, 4)});
  const Blocks full = f.allocate(0, 2);
  const Blocks window = f.allocate(1, 4);
  const auto refused = [&](int32_t num_tokens, Blocks blocks, int64_t first = 0) {
    return f.driver.refused(f.publication(num_tokens, std::move(blocks), first));
  };
  check_status(refused(4, {kAbsent, window[0], window[1]}), kNotFound, {"block -1"});
  check_status(refused(4, {full[0], window[0]}), kInvalidArgument,
               {"2 blocks are named", "unit of 4 tokens has 3"});
  check_status(refused(4, {full[0], window[0], window[1], full[1], window[2], window[3]}),
               kInvalidArgument, {"4 tokens"});
  check_status(refused(4, {full[0], window[0], window[0]}), kInvalidArgument,
               {"block 0 is named twice"});
  check_status(refused(8, {full[0], window[0], window[1], full[0], window[2], window[3]}),
               kInvalidArgument, {"block 0 is named twice"});
  // The same number in two groups is two blocks.
  CHECK(full[0].id == window[0].id);
  // A block of the wrong slot of its own unit.
  f.publish(4, {full[0], window[0], window[1]});
  check_status(refused(4, {full[0], window[1], kAbsent}), kInvalidArgument,
               {"block 1 is published already"});
}

TEST_CASE("a unit without a block of any group is refused") {
  Fixture f(
      {group("window", 8, 2, GroupKind::kWindow, 4), group("state", 8, 4, GroupKind::kState)});
  const Blocks state = f.allocate(1, 1);
  check_status(
      f.driver.refused(f.publication(8, {kAbsent, kAbsent, state[0], kAbsent, kAbsent, kAbsent})),
      kInvalidArgument, {"unit 1 names no block"});
  CHECK(f.publish(4, {kAbsent, kAbsent, state[0]}) == Blocks{kAbsent, kAbsent, state[0]});
  CHECK(f.find(4).hit_tokens == 0);
}

TEST_CASE("nothing is found from a later block on where the end decides what is needed") {
  Fixture f({group("full", 8, 4), group("window", 8, 4, GroupKind::kWindow, 4)});
  const Blocks full = f.allocate(0, 2);
  const Blocks window = f.allocate(1, 2);
  f.publish(8, {full[0], window[0], full[1], window[1]});
  CHECK(f.find(8).hit_tokens == 8);
  const auto later =
      f.driver.expect<PrefixFound>(Lookup{0, f.reader, f.pool, "", tokens(8), {}, false, 1});
  CHECK(later.hit_tokens == 0);
  CHECK(later.blocks.empty());
}

TEST_CASE("groups that make no unit are refused, naming the field") {
  MachineDriver driver;
  const SessionId session = driver.open_session();
  const auto refused = [&](std::vector<GroupSpec> groups) {
    return driver.refused(OpenPool{0, session, {"pool", "model@1", {}, std::move(groups)}});
  };
  check_status(refused({group("a", 8, 4, GroupKind::kWindow)}), kInvalidArgument,
               {"window_tokens is 0", "window"});
  check_status(refused({group("a", 8, 4, GroupKind::kFull, 4)}), kInvalidArgument,
               {"window_tokens is 4", "full"});
  check_status(refused({group("a", 8, 65536), group("b", 8, 65535)}), kInvalidArgument,
               {"block_tokens is 65535", "2^31"});
  check_status(refused({group("a", 8, 1), group("b", 8, 2048)}), kInvalidArgument,
               {"unit of 2048 tokens has 2049 blocks", "1024"});
}

TEST_CASE("each group has its own null block") {
  Fixture f([] {
    std::vector<GroupSpec> groups = {group("a", 4, 4), group("b", 4, 4)};
    groups[1].reserve_block_zero = true;
    return groups;
  }());
  CHECK(f.allocate(0, 1) == Blocks{{0, 1}});
  CHECK(f.allocate(1, 3) == Blocks{{1, 1}, {2, 1}, {3, 1}});
  check_status(f.driver.refused(f.publication(4, {{0, 1}, {0, 1}})), kNotFound, {"null block"});
}

}  // namespace
}  // namespace larder
