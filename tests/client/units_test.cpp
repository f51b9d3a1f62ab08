// Pools with several groups: options, views of groups, publish and lookup in units.
#include <optional>

#include <doctest/doctest.h>

#include "allocator/host_memory.h"
#include "protocol/limits.h"
#include "tests/support/scripted_daemon.h"

namespace larder::test {
namespace {

constexpr uint64_t kPool = 5;

GroupOptions attention_group(const std::string& name, int32_t block_tokens) {
  GroupOptions group;
  group.group_name = name;
  group.geometry = {1, 1, block_tokens, 64, 64, KvFormat::kBf16, KvFormat::kBf16};
  group.num_blocks = 8;
  return group;
}

// Full attention over blocks of 16, a window of 40 tokens over blocks of 24, and a state: units of
// 48 tokens are 3, 2 and 1 blocks.
PoolOptions hybrid_pool() {
  PoolOptions options;
  static_cast<GroupOptions&>(options) = attention_group("full", 16);
  options.name = "hybrid";
  options.model = "m";
  options.more_groups.push_back(attention_group("window", 24));
  options.more_groups[0].window_tokens = 40;
  GroupOptions state;
  state.opaque_block_bytes = 4096;
  state.geometry.block_tokens = 48;
  state.num_blocks = 8;
  options.more_groups.push_back(state);
  return options;
}

protocol::GroupLayout layout_of(int64_t block_bytes) {
  return {block_bytes, block_bytes, block_bytes, 8, {8 * block_bytes}};
}

struct Hybrid {
  ScriptedDaemon daemon;
  ScriptedDaemon::Joined joined = daemon.join();
  Client& client = joined.client;
  Peer& peer = joined.peer;
  std::vector<Segment> segments;
  std::optional<Pool> pool;

  Hybrid() {
    auto opening = beside([&] { return client.open_pool(hybrid_pool()); });
    const auto [request, asked] = peer.expect<protocol::OpenPool>();
    spec = asked.spec;
    const std::vector<int64_t> block_bytes = {4096, 6144, 4096};
    protocol::PoolOpened opened{kPool, true, {}};
    for (const int64_t bytes : block_bytes) opened.groups.push_back(layout_of(bytes));
    peer.reply(request.id, opened);
    for (uint32_t g = 0; g < 3; ++g) {
      segments.push_back(create_host_segment("segment", 8 * block_bytes[g]));
      const auto segment = peer.answer<protocol::OpenSegments>(
          protocol::Segments{{8 * block_bytes[g]}}, {segments.back().fd.get()});
      CHECK(segment.group == g);
    }
    auto result = opening.get();
    REQUIRE_MESSAGE(result.ok(), result.status().to_string());
    pool.emplace(std::move(*result));
  }

  void end() {
    auto closing = beside([&] { pool.reset(); });
    peer.answer<protocol::ClosePool>(protocol::Done{});
    closing.get();
    ScriptedDaemon::end(std::move(client), peer);
  }

  protocol::PoolSpec spec;
};

TEST_CASE(
    "the groups of a pool go to larderd in order, with names of their kind where none is given") {
  Hybrid f;
  REQUIRE(f.spec.groups.size() == 3);
  CHECK(f.spec.name == "hybrid");
  CHECK(f.spec.groups[0].name == "full");
  CHECK(f.spec.groups[0].block_tokens == 16);
  CHECK(std::get<protocol::AttentionGroup>(f.spec.groups[0].kind).window_tokens == -1);
  CHECK(f.spec.groups[1].name == "window");
  CHECK(std::get<protocol::AttentionGroup>(f.spec.groups[1].kind).window_tokens == 40);
  CHECK(f.spec.groups[2].name == "opaque");
  CHECK(std::get<protocol::OpaqueGroup>(f.spec.groups[2].kind).block_bytes == 4096);
  CHECK(f.pool->num_groups() == 3);
  CHECK(f.pool->unit_tokens() == 48);
  f.end();
}

TEST_CASE("a view of a group acts on that group, and keeps the pool open") {
  Hybrid f;
  std::optional<Pool> window(f.pool->group(1).value());
  CHECK(window->geometry().block_tokens == 24);
  CHECK(window->num_groups() == 3);
  CHECK(window->data().value() != f.pool->data().value());
  auto allocating = beside([&] { return window->allocate(2); });
  const auto allocate = f.peer.answer<protocol::Allocate>(protocol::Blocks{{{3, 1}, {4, 1}}});
  CHECK(allocate.group == 1);
  CHECK(allocating.get().value().at(1) == BlockHandle{4, 1});
  auto releasing = beside([&] {
    const std::vector<BlockHandle> blocks = {{3, 1}};
    return window->release(blocks);
  });
  CHECK(f.peer.answer<protocol::Release>(protocol::Done{}).group == 1);
  CHECK(releasing.get().ok());
  auto resizing = beside([&] { return window->resize(6); });
  CHECK(f.peer.answer<protocol::ResizePool>(protocol::Resized{}).group == 1);
  CHECK(resizing.get().ok());

  // Rows of 64 bf16 keys and values: what group 1 is written, group 0 does not show.
  std::vector<float> rows(64, 2.0f);
  const TensorView tensor = dense_tensor(rows.data(), Dtype::kFp32, 1, 1, 64);
  const std::vector<int64_t> slots = {0};
  CHECK(window->append(0, tensor, tensor, slots).ok());
  CHECK(window->data().value()[1] == std::byte{0x40});  // bf16 2.0 is 0x4000
  CHECK(f.pool->data().value()[1] == std::byte{0});

  f.pool.reset();  // the view still holds the pool: larderd is told nothing
  CHECK(window->group(2).value().num_blocks() == 8);
  check_status(window->group(3).status(), ErrorCode::kInvalidArgument,
               "group is 3, the pool has 3");
  check_status(window->group(-1).status(), ErrorCode::kInvalidArgument, "group is -1");
  f.pool = std::move(window);
  f.end();
}

TEST_CASE("publish_units names the blocks group after group, and returns them so") {
  Hybrid f;
  const std::vector<int32_t> tokens(2 * 48 + 5, 3);
  const std::vector<std::vector<BlockHandle>> blocks = {
      {{0, 1}, {1, 1}, {2, 1}, {3, 1}, {4, 1}, {5, 1}},
      {{}, {}, {6, 2}, {7, 2}},
      {{}, {1, 3}},
  };
  auto publishing = beside([&] { return f.pool->publish_units(tokens, blocks, "adapter"); });
  const auto [request, asked] = f.peer.expect<protocol::Publish>();
  CHECK(asked.pool == kPool);
  CHECK(asked.adapter == "adapter");
  CHECK(asked.first_block == 0);
  CHECK(std::get<std::vector<int32_t>>(asked.tokens) == tokens);
  const std::vector<protocol::Block> expected = {{0, 1},  {1, 1},  {2, 1}, {3, 1}, {4, 1},  {5, 1},
                                                 {-1, 0}, {-1, 0}, {6, 2}, {7, 2}, {-1, 0}, {1, 3}};
  CHECK(asked.blocks == expected);
  protocol::Published reply;
  for (size_t i = 0; i < expected.size(); ++i) {
    protocol::PublishedBlock block{{}, expected[i]};
    block.key[0] = static_cast<uint8_t>(i);
    reply.blocks.push_back(block);
  }
  reply.blocks[4].block = {7, 7};  // an older one
  f.peer.reply(request.id, reply);
  const auto published = publishing.get();
  REQUIRE(published.ok());
  REQUIRE(published->size() == 3);
  CHECK((*published)[0].size() == 6);
  CHECK((*published)[0][4].block == BlockHandle{7, 7});
  CHECK((*published)[1].size() == 4);
  CHECK((*published)[1][3].key[0] == 9);
  CHECK((*published)[1][0].block == BlockHandle{});
  CHECK((*published)[2].size() == 2);
  CHECK((*published)[2][1].block == BlockHandle{1, 3});
  f.end();
}

TEST_CASE("lookup_units gives each group its blocks, and hits whole units") {
  Hybrid f;
  const std::vector<int32_t> tokens(100, 3);
  auto looking = beside([&] { return f.pool->lookup_units(tokens); });
  const auto [request, asked] = f.peer.expect<protocol::Lookup>();
  CHECK(asked.hold);
  CHECK(asked.first_block == 0);
  f.peer.reply(request.id, protocol::Prefix{96,
                                            {{0, 1},
                                             {1, 1},
                                             {2, 1},
                                             {3, 1},
                                             {4, 1},
                                             {5, 1},
                                             {-1, 0},
                                             {-1, 0},
                                             {6, 1},
                                             {7, 1},
                                             {-1, 0},
                                             {2, 1}}});
  const auto prefix = looking.get();
  REQUIRE(prefix.ok());
  CHECK(prefix->hit_tokens == 96);
  CHECK(prefix->blocks.at(0).size() == 6);
  CHECK(prefix->blocks.at(1) == std::vector<BlockHandle>{{}, {}, {6, 1}, {7, 1}});
  CHECK(prefix->blocks.at(2) == std::vector<BlockHandle>{{}, {2, 1}});

  auto missing = beside([&] { return f.pool->lookup_units(tokens, false); });
  f.peer.answer<protocol::Lookup>(protocol::Prefix{});
  CHECK(missing.get().value().hit_tokens == 0);

  auto wrong = beside([&] { return f.pool->lookup_units(tokens, false); });
  f.peer.answer<protocol::Lookup>(protocol::Prefix{48, {{0, 1}, {1, 1}}});
  check_status(wrong.get().status(), ErrorCode::kInternal, "2 blocks, expected 0");
  f.end();
}

TEST_CASE(
    "long lists of units go in messages of whole units, and all is given back when one fails") {
  Hybrid f;
  // 341 units of 6 blocks fit a publish, and 1365 a lookup.
  constexpr size_t kUnits = 342;
  std::vector<std::vector<BlockHandle>> blocks(3);
  for (size_t i = 0; i < kUnits; ++i) {
    for (int32_t b = 0; b < 3; ++b) blocks[0].push_back({b, static_cast<uint32_t>(i)});
    for (int32_t b = 0; b < 2; ++b) blocks[1].push_back({b, static_cast<uint32_t>(i)});
    blocks[2].push_back({});
  }
  const std::vector<int32_t> tokens(16, 3);
  auto publishing = beside([&] { return f.pool->publish_units(tokens, blocks); });
  auto [request, first] = f.peer.expect<protocol::Publish>();
  CHECK(first.blocks.size() == 341 * 6);
  CHECK(first.first_block == 0);
  protocol::Published reply;
  for (const protocol::Block& block : first.blocks) reply.blocks.push_back({{}, block});
  reply.blocks[0].block = {5, 5};
  reply.blocks[341 * 3 + 1].block = {6, 6};
  f.peer.reply(request.id, reply);
  const auto second = f.peer.answer<protocol::Publish>(Status(ErrorCode::kNotFound, "gone"));
  CHECK(second.first_block == 341);
  CHECK(second.blocks ==
        std::vector<protocol::Block>{{0, 341}, {1, 341}, {2, 341}, {0, 341}, {1, 341}, {-1, 0}});
  const auto of_first = f.peer.answer<protocol::Release>(protocol::Done{});
  CHECK(of_first.group == 0);
  CHECK(of_first.blocks == std::vector<protocol::Block>{{5, 5}});
  const auto of_second = f.peer.answer<protocol::Release>(protocol::Done{});
  CHECK(of_second.group == 1);
  CHECK(of_second.blocks == std::vector<protocol::Block>{{6, 6}});
  check_status(publishing.get().status(), ErrorCode::kNotFound, "gone");

  auto looking = beside([&] { return f.pool->lookup_units(tokens); });
  protocol::Prefix prefix;
  prefix.blocks.assign(1365 * 6, {1, 1});
  f.peer.answer<protocol::Lookup>(prefix);
  CHECK(f.peer.answer<protocol::Lookup>(protocol::Prefix{}).first_block == 1365);
  CHECK(looking.get().value().hit_tokens == 1365 * 48);
  f.end();
}

TEST_CASE("blocks of no whole number of units are refused with the numbers") {
  Hybrid f;
  const std::vector<int32_t> tokens(48, 3);
  std::vector<std::vector<BlockHandle>> blocks = {{{}, {}, {}}, {{}, {}}, {{}}};
  blocks.pop_back();
  check_status(f.pool->publish_units(tokens, blocks).status(), ErrorCode::kInvalidArgument,
               "blocks has 2 groups, the pool has 3");
  blocks = {{{}, {}, {}, {}}, {{}, {}}, {{}}};
  check_status(f.pool->publish_units(tokens, blocks).status(), ErrorCode::kInvalidArgument,
               "blocks[0] has 4 entries, expected 3: 1 units of 3");
  blocks = {{{}, {}, {}}, {{}, {}}, {{}, {}}};
  check_status(f.pool->publish_units(tokens, blocks).status(), ErrorCode::kInvalidArgument,
               "blocks[2] has 2 entries, expected 1");
  f.end();
}

TEST_CASE("what is for pools with one group is refused by name in one with several") {
  Hybrid f;
  const std::vector<int32_t> tokens(48, 3);
  const std::vector<BlockHandle> blocks(3);
  check_status(f.pool->publish(tokens, blocks).status(), ErrorCode::kUnsupported, "publish_units");
  check_status(f.pool->lookup(tokens).status(), ErrorCode::kUnsupported, "lookup_units");
  {
    Sequence sequence = f.pool->begin_sequence();
    check_status(sequence.extend(5), ErrorCode::kUnsupported, "3 groups");
    check_status(sequence.adopt_prefix(tokens).status(), ErrorCode::kUnsupported, "3 groups");
  }
  f.end();
}

TEST_CASE("options of groups that cannot be are refused before larderd is asked") {
  ScriptedDaemon daemon;
  auto [client, peer] = daemon.join();
  const auto refused = [asking = &client](auto change, ErrorCode code, const std::string& part) {
    PoolOptions options = hybrid_pool();
    change(options);
    check_status(asking->open_pool(options).status(), code, part);
  };
  refused([](PoolOptions& o) { o.more_groups[0].group_name = "full"; }, ErrorCode::kInvalidArgument,
          "more_groups[0].group_name is \"full\"");
  refused([](PoolOptions& o) { o.more_groups[1].v_scales = {2.0}; }, ErrorCode::kInvalidArgument,
          "more_groups[1]: ");
  refused([](PoolOptions& o) { o.more_groups[1].window_tokens = 4; }, ErrorCode::kInvalidArgument,
          "window_tokens");
  refused([](PoolOptions& o) { o.window_tokens = 0; }, ErrorCode::kInvalidArgument,
          "window_tokens is 0");
  refused([](PoolOptions& o) { o.more_groups[0].max_blocks = 7; }, ErrorCode::kInvalidArgument,
          "group \"window\": max_blocks is 7");
  refused([](PoolOptions& o) { o.segment_bytes = -1; }, ErrorCode::kInvalidArgument,
          "segment_bytes is -1");
  refused(
      [](PoolOptions& o) {
        o.layout = KvLayout::kLbhnc;
        o.max_blocks = 9;
      },
      ErrorCode::kUnsupported, "LBHNC have a fixed size");
  // 1009 * 1013 * 1019 is more than any token list has.
  refused(
      [](PoolOptions& o) {
        o.geometry.block_tokens = 1009;
        o.more_groups[0].geometry.block_tokens = 1013;
        o.more_groups[1].geometry.block_tokens = 1019;
      },
      ErrorCode::kInvalidArgument, "block_tokens");
  ScriptedDaemon::end(std::move(client), peer);
}

}  // namespace
}  // namespace larder::test
