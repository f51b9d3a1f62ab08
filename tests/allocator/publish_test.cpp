// Publishing, looking up and evicting, through the state machine.
#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;
using enum ErrorCode;

const std::vector<int32_t> kTokens = {1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12};  // three blocks of 4
const std::vector<int32_t> kOthers = {21, 22, 23, 24, 25, 26, 27, 28};

struct Fixture {
  explicit Fixture(int64_t num_blocks) {
    writer = driver.open_session();
    reader = driver.open_session("a", Role::kRead);
    pool = driver.open_pool(writer, small_pool(num_blocks)).pool;
    driver.open_pool(reader, small_pool(num_blocks));
  }
  std::vector<BlockRef> allocate(int64_t n) { return driver.allocate(writer, pool, n); }
  std::vector<BlockRef> publish(std::vector<int32_t> tokens, std::vector<BlockRef> blocks) {
    return driver.publish(writer, pool, std::move(tokens), std::move(blocks));
  }
  MachineDriver driver;
  SessionId writer{}, reader{};
  PoolId pool{};
};

TEST_CASE("published blocks are found by every session of the pool, whole blocks only") {
  Fixture f(8);
  const auto blocks = f.allocate(3);
  const auto reply = f.driver.expect<BlocksPublished>(
      Publish{0, f.writer, f.pool, "", kTokens, {blocks[0], blocks[1]}, {}});
  CHECK(reply.blocks == std::vector<BlockRef>{blocks[0], blocks[1]});
  CHECK(reply.keys.size() == 2);
  const auto words = effects_of<SetOwnerWord>(f.driver.effects);
  REQUIRE(words.size() == 2);
  CHECK(words[0].word == owner_word(OwnerState::kPublished));
  CHECK(f.driver.session_stats(f.writer).open_blocks == 1);
  CHECK(f.driver.session_stats(f.writer).holds == 2);

  const PrefixFound found = f.driver.look_up(f.reader, f.pool, kTokens);
  CHECK(found.hit_tokens == 8);
  CHECK(found.blocks == reply.blocks);
  CHECK(f.driver.look_up(f.reader, f.pool, {1, 2, 3, 4, 5, 6, 7}).hit_tokens == 4);
  CHECK(f.driver.look_up(f.reader, f.pool, {1, 2, 3}).hit_tokens == 0);
  CHECK(f.driver.look_up(f.reader, f.pool, {}).hit_tokens == 0);
  CHECK(f.driver.look_up(f.reader, f.pool, {5, 6, 7, 8}).hit_tokens == 0);
  const PoolStats stats = f.driver.pool_stats(f.pool);
  CHECK(stats.published_blocks_total == 2);
  CHECK(stats.lookup_tokens_total == 12 + 7 + 3 + 0 + 4);
  CHECK(stats.lookup_hit_tokens_total == 12);
}

TEST_CASE("adapter and extra bytes are part of the key") {
  Fixture f(8);
  const auto blocks = f.allocate(1);
  f.driver.expect<BlocksPublished>(
      Publish{0, f.writer, f.pool, "lora", {1, 2, 3, 4}, blocks, {"image"}});
  const auto hits = [&](const std::string& adapter, std::vector<std::string> extra) {
    return f.driver
        .expect<PrefixFound>(
            Lookup{0, f.reader, f.pool, adapter, {1, 2, 3, 4}, std::move(extra), false})
        .hit_tokens;
  };
  CHECK(hits("lora", {"image"}) == 4);
  CHECK(hits("lora", {}) == 0);
  CHECK(hits("", {"image"}) == 0);
  CHECK(hits("lora", {"other"}) == 0);
}

TEST_CASE("a key that exists already answers with its block; the caller's own stays open") {
  Fixture f(8);
  const auto first = f.allocate(2);
  f.publish(kTokens, first);
  const SessionId second = f.driver.open_session();
  f.driver.open_pool(second, small_pool(8));
  const auto own = f.driver.allocate(second, f.pool, 3);
  const auto serving = f.driver.publish(second, f.pool, kTokens, own);
  CHECK(serving == std::vector<BlockRef>{first[0], first[1], own[2]});
  CHECK(f.driver.session_stats(second).open_blocks == 2);
  CHECK(f.driver.session_stats(second).holds == 3);
  f.driver.release(second, f.pool, {own[0], own[1]});
  f.driver.release(f.writer, f.pool, first);
  CHECK(f.driver.group_stats(f.pool).published == 3);  // the second session still holds them
  f.driver.release(second, f.pool, serving);
  CHECK(f.driver.group_stats(f.pool).cached == 3);
}

TEST_CASE("publishing a published block again under the same key changes nothing") {
  Fixture f(8);
  const auto blocks = f.allocate(3);
  f.publish({1, 2, 3, 4}, {blocks[0]});
  CHECK(f.publish(kTokens, blocks) == blocks);
  CHECK(f.publish(kTokens, blocks) == blocks);
  CHECK(f.driver.session_stats(f.writer).holds == 3);
  CHECK(f.publish(kTokens, {}).empty());
}

TEST_CASE("a publish that is wrong anywhere publishes nothing") {
  Fixture f(8);
  const auto b = f.allocate(3);
  const auto publish = [&](std::vector<int32_t> tokens, std::vector<BlockRef> blocks,
                           std::vector<std::string> extra = {}) {
    return f.driver.refused(
        Publish{0, f.writer, f.pool, "", std::move(tokens), std::move(blocks), std::move(extra)});
  };
  check_status(publish({1, 2, 3, 4, 5, 6, 7}, {b[0], b[1]}), kInvalidArgument,
               {"2 blocks", "7 tokens", "1 blocks of 4"});
  check_status(publish({1, 2, 3, -4}, {b[0]}), kInvalidArgument, {"tokens[3] is -4"});
  check_status(publish(kTokens, {b[0], b[1]}, {"x"}), kInvalidArgument,
               {"extra has 1", "3 blocks"});
  check_status(publish(kTokens, {b[0], b[1]}, {"x", "x", "x", "x"}), kInvalidArgument,
               {"extra has 4", "3 blocks"});
  check_status(publish(kTokens, {b[0], b[0]}), kInvalidArgument, {"block 0 is named twice"});
  check_status(publish(kTokens, {b[0], {7, 1}}), kNotFound, {"block 7"});
  check_status(publish(kTokens, {b[0], {1, 9}}), kStaleGeneration, {"block 1", "9"});
  check_status(publish(kTokens, {b[0], {8, 1}}), kNotFound, {"block 8"});
  f.publish({1, 2, 3, 4}, {b[0]});
  check_status(publish(kOthers, {b[0], b[1]}), kInvalidArgument, {"block 0", "another prefix"});
}

TEST_CASE("a lookup is refused for negative tokens and a wrong number of extras") {
  Fixture f(8);
  check_status(f.driver.refused(Lookup{0, f.reader, f.pool, "", {-1}, {}, false}), kInvalidArgument,
               {"tokens[0] is -1"});
  check_status(f.driver.refused(Lookup{0, f.reader, f.pool, "", {1, 2, 3, 4}, {"", ""}, false}),
               kInvalidArgument, {"extra has 2", "1 blocks"});
}

TEST_CASE("a long prefix is published and looked up in portions") {
  Fixture f(8);
  const auto b = f.allocate(3);
  const auto publish_from = [&](int64_t first_block, std::vector<BlockRef> blocks) {
    return Publish{0,       f.writer,          f.pool,          "",
                   kTokens, std::move(blocks), {"x", "y", "z"}, first_block};
  };
  check_status(f.driver.refused(publish_from(1, {b[1]})), kNotFound, {"first_block is 1"});
  f.driver.expect<BlocksPublished>(publish_from(0, {b[0]}));
  const auto rest = f.driver.expect<BlocksPublished>(publish_from(1, {b[1], b[2]}));
  CHECK(rest.blocks == std::vector<BlockRef>{b[1], b[2]});
  f.driver.expect<BlocksPublished>(publish_from(3, {}));
  check_status(f.driver.refused(publish_from(2, {b[1], b[2]})), kInvalidArgument,
               {"2 blocks", "block 2", "3 blocks of 4"});
  check_status(f.driver.refused(publish_from(4, {})), kInvalidArgument, {"first_block is 4"});
  check_status(f.driver.refused(publish_from(-1, {})), kInvalidArgument, {"first_block is -1"});
  check_status(f.driver.refused(publish_from(INT64_MAX, {b[0]})), kInvalidArgument,
               {"9223372036854775807"});

  const auto look_up = [&](int64_t first_block, int64_t max_blocks) {
    return Lookup{0,     f.reader,    f.pool,    "", kTokens, {"x", "y", "z"},
                  false, first_block, max_blocks};
  };
  const auto found = [&](int64_t first_block, int64_t max_blocks) {
    return f.driver.expect<PrefixFound>(look_up(first_block, max_blocks)).blocks;
  };
  CHECK(found(0, 2) == std::vector<BlockRef>{b[0], b[1]});
  CHECK(found(2, 2) == std::vector<BlockRef>{b[2]});
  CHECK(found(3, 2).empty());
  CHECK(found(0, 0).empty());
  CHECK(f.driver.pool_stats(f.pool).lookup_tokens_total == 24);
  CHECK(f.driver.pool_stats(f.pool).lookup_hit_tokens_total == 12);
  check_status(f.driver.refused(look_up(4, 1)), kInvalidArgument, {"first_block is 4"});
  check_status(f.driver.refused(look_up(0, -1)), kInvalidArgument, {"max_blocks is -1"});
}

TEST_CASE("holds of a lookup keep blocks until they are released") {
  Fixture f(3);
  f.driver.release(f.writer, f.pool, f.publish(kTokens, f.allocate(3)));
  const auto held = f.driver.look_up(f.reader, f.pool, kTokens, true).blocks;
  f.driver.look_up(f.reader, f.pool, {1, 2, 3, 4}, true);
  CHECK(f.driver.session_stats(f.reader).holds == 4);
  CHECK(f.driver.group_stats(f.pool).published == 3);
  check_status(f.driver.refused(Allocate{0, f.writer, f.pool, 0, 1}), kResourceExhausted,
               {"available 0"});
  check_status(f.driver.refused(Release{0, f.reader, f.pool, 0, {held[1], held[1]}}), kNotFound,
               {"block 1"});
  f.driver.release(f.reader, f.pool, {held[0], held[1], held[2], held[0]});
  CHECK(f.driver.group_stats(f.pool).cached == 3);
  check_status(f.driver.refused(Release{0, f.reader, f.pool, 0, {held[0]}}), kNotFound,
               {"not held"});
  CHECK(f.allocate(3).size() == 3);
}

TEST_CASE("lookups without a hold pin nothing, however many") {
  Fixture f(3);
  f.driver.release(f.writer, f.pool, f.publish(kTokens, f.allocate(3)));
  for (int i = 0; i < 1000; ++i) f.driver.look_up(f.reader, f.pool, kTokens);
  CHECK(f.driver.group_stats(f.pool).published == 0);
  CHECK(f.driver.group_stats(f.pool).cached == 3);
  CHECK(f.allocate(3).size() == 3);
  CHECK(f.driver.pool_stats(f.pool).evicted_blocks_total == 3);
}

TEST_CASE("eviction takes the last block of a chain, every time") {
  for (int repetition = 0; repetition < 200; ++repetition) {
    Fixture f(3);
    const auto blocks = f.allocate(3);
    f.publish(kTokens, blocks);
    // In any order of release, and at any time.
    for (int i = 0; i < 3; ++i) {
      f.driver.now_us += repetition % 2;
      f.driver.release(f.writer, f.pool, {blocks[(i * (1 + repetition % 2) + repetition) % 3]});
    }
    CHECK(f.allocate(1) == std::vector<BlockRef>{{2, 2}});
    CHECK(f.driver.look_up(f.reader, f.pool, kTokens).hit_tokens == 8);
  }
}

TEST_CASE("a block with a held descendant is not counted as available") {
  Fixture f(3);
  const auto blocks = f.publish(kTokens, f.allocate(3));
  f.driver.release(f.writer, f.pool, {blocks[0], blocks[1]});
  CHECK(f.driver.group_stats(f.pool).cached == 2);
  check_status(f.driver.refused(Allocate{0, f.writer, f.pool, 0, 1}), kResourceExhausted,
               {"available 0"});
}

TEST_CASE("the prefix that was used longest ago goes first") {
  Fixture f(5);
  const auto long_one = f.publish(kTokens, f.allocate(3));
  const auto short_one = f.publish(kOthers, f.allocate(2));
  f.driver.release(f.writer, f.pool, long_one);
  f.driver.now_us = 1;
  f.driver.release(f.writer, f.pool, short_one);
  f.driver.now_us = 2;
  f.driver.release(f.reader, f.pool, f.driver.look_up(f.reader, f.pool, kTokens, true).blocks);
  f.allocate(2);
  CHECK(f.driver.look_up(f.reader, f.pool, kOthers).hit_tokens == 0);
  CHECK(f.driver.look_up(f.reader, f.pool, kTokens).hit_tokens == 12);
}

TEST_CASE("a lookup without a hold is no use: what it finds becomes no younger") {
  Fixture f(5);
  f.driver.release(f.writer, f.pool, f.publish(kTokens, f.allocate(3)));
  f.driver.now_us = 1;
  f.driver.release(f.writer, f.pool, f.publish(kOthers, f.allocate(2)));
  f.driver.now_us = 2;
  CHECK(f.driver.look_up(f.reader, f.pool, kTokens).hit_tokens == 12);
  CHECK(f.driver.machine.record().empty());
  f.allocate(2);
  CHECK(f.driver.look_up(f.reader, f.pool, kTokens).hit_tokens == 4);
  CHECK(f.driver.look_up(f.reader, f.pool, kOthers).hit_tokens == 8);
}

TEST_CASE("a block that was evicted and used again answers to its new key only") {
  Fixture f(1);
  const auto old_block = f.publish({1, 2, 3, 4}, f.allocate(1));
  f.driver.release(f.writer, f.pool, old_block);
  const auto block = f.allocate(1);
  const auto words = effects_of<SetOwnerWord>(f.driver.effects);
  REQUIRE(words.size() == 2);
  CHECK(words[0].word == owner_word(OwnerState::kNone));
  CHECK(words[1].word == owner_word(OwnerState::kOpen, f.writer));
  CHECK(block[0].generation == old_block[0].generation + 1);
  f.publish({5, 6, 7, 8}, block);
  CHECK(f.driver.look_up(f.reader, f.pool, {1, 2, 3, 4}).hit_tokens == 0);
  CHECK(f.driver.look_up(f.reader, f.pool, {5, 6, 7, 8}).blocks == block);
}

TEST_CASE("cached blocks are not live: 24 finished requests leave none, and all can be allocated") {
  Fixture f(100);
  for (int32_t request = 0; request < 24; ++request) {
    const std::vector<int32_t> tokens = {request, 1, 2, 3, 4, 5, 6, 7, 8};
    auto blocks = f.allocate(3);
    f.publish(tokens, {blocks[0], blocks[1]});
    f.driver.release(f.writer, f.pool, blocks);
  }
  const GroupStats stats = f.driver.group_stats(f.pool);
  CHECK(stats.open + stats.published == 0);
  CHECK(stats.cached == 48);
  CHECK(stats.free == 52);
  CHECK(f.allocate(100).size() == 100);
}

}  // namespace
}  // namespace larder
