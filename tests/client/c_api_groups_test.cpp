// The C API of pools that grow and of pools with several groups, against a scripted larderd.
#include <array>
#include <optional>
#include <string>

#include <doctest/doctest.h>

#include "allocator/host_memory.h"
#include "larder/larder.h"
#include "tests/support/scripted_daemon.h"

namespace larder::test {
namespace {

constexpr uint64_t kPool = 5;
constexpr int64_t kBlock = 4096;

// Blocks of 16 tokens, and a state of one block for 32: units of 32 tokens are 2 and 1 blocks.
struct CHybrid {
  ScriptedDaemon daemon;
  std::optional<Peer> peer;
  Segment segment = create_host_segment("segment", 4 * kBlock);
  larder_client* client = nullptr;
  larder_pool* pool = nullptr;

  CHybrid() {
    const std::string socket = daemon.socket();
    larder_client_options options = LARDER_CLIENT_OPTIONS_INIT;
    options.socket_path = socket.c_str();
    options.arena_bytes = 0;
    auto connecting = beside([&] { return larder_connect(&options, &client); });
    peer.emplace(daemon.accept_connect());
    REQUIRE(connecting.get() == LARDER_OK);

    larder_group_options state = LARDER_GROUP_OPTIONS_INIT;
    state.group_name = "state";
    state.opaque_block_bytes = kBlock;
    state.geometry.block_tokens = 32;
    state.num_blocks = 4;
    const larder_group_options* more[] = {&state};
    larder_pool_options wanted = LARDER_POOL_OPTIONS_INIT;
    wanted.name = "p";
    wanted.model = "m";
    wanted.group_name = "rows";
    wanted.geometry = {1, 1, 16, 64, 64, LARDER_KV_FORMAT_BF16, LARDER_KV_FORMAT_BF16, 0};
    wanted.num_blocks = 4;
    wanted.max_blocks = 4;
    wanted.more_groups = more;
    wanted.num_more_groups = 1;
    auto opening = beside([&] { return larder_open_pool(client, &wanted, &pool); });
    const auto [request, asked] = peer->expect<protocol::OpenPool>();
    CHECK(asked.spec.groups.at(0).name == "rows");
    CHECK(asked.spec.groups.at(0).max_blocks == 4);
    CHECK(asked.spec.groups.at(1).name == "state");
    CHECK(asked.spec.groups.at(1).block_tokens == 32);
    const protocol::GroupLayout layout{kBlock, kBlock, kBlock, 4, {4 * kBlock}};
    peer->reply(request.id, protocol::PoolOpened{kPool, true, {layout, layout}});
    for (int g = 0; g < 2; ++g)
      peer->answer<protocol::OpenSegments>(protocol::Segments{{4 * kBlock}}, {segment.fd.get()});
    REQUIRE(opening.get() == LARDER_OK);
  }
  ~CHybrid() {
    auto ending = beside([&] {
      larder_pool_destroy(pool);
      larder_client_destroy(client);
    });
    peer->answer<protocol::ClosePool>(protocol::Done{});
    peer->answer<protocol::Goodbye>(protocol::Done{});
    ending.get();
  }
};

TEST_CASE("C: a pool tells of its groups, and a group is a pool of its own") {
  CHybrid f;
  larder_pool_info info = LARDER_POOL_INFO_INIT;
  REQUIRE(larder_pool_get_info(f.pool, &info) == LARDER_OK);
  CHECK(info.num_blocks == 4);
  CHECK(info.max_blocks == 4);
  CHECK(info.num_groups == 2);
  CHECK(info.unit_tokens == 32);
  larder_pool* state = nullptr;
  REQUIRE(larder_pool_group(f.pool, 1, &state) == LARDER_OK);
  auto resizing = beside([&] {
    larder_resize_result result = {};
    CHECK(larder_pool_resize(state, 2, &result) == LARDER_OK);
    return result;
  });
  CHECK(f.peer->answer<protocol::ResizePool>(protocol::Resized{4, 2, 9, 7}).group == 1);
  const larder_resize_result result = resizing.get();
  CHECK(result.blocks_before == 4);
  CHECK(result.blocks_after == 2);
  CHECK(result.bytes_before == 9);
  CHECK(result.bytes_after == 7);
  auto evicting = beside([&] { return larder_pool_evict(f.pool, 3, nullptr); });
  CHECK(f.peer->answer<protocol::Evict>(protocol::Resized{}).num_blocks == 3);
  CHECK(evicting.get() == LARDER_OK);
  larder_pool_destroy(state);
  CHECK(larder_pool_group(f.pool, 2, &state) == LARDER_INVALID_ARGUMENT);
  CHECK(state == nullptr);
}

TEST_CASE("C: units go out and come back group by group") {
  CHybrid f;
  const std::array<int32_t, 32> tokens = {};
  const std::array<larder_block, 2> rows = {{{0, 1}, {1, 1}}};
  const std::array<larder_block, 1> state = {{{-1, 0}}};
  const larder_block* blocks[] = {rows.data(), state.data()};
  const size_t counts[] = {2, 1};
  std::array<larder_published_block, 2> rows_out = {};
  std::array<larder_published_block, 1> state_out = {};
  larder_published_block* published[] = {rows_out.data(), state_out.data()};
  auto publishing = beside([&] {
    return larder_pool_publish_units(f.pool, tokens.data(), tokens.size(), blocks, counts, 2, "a",
                                     nullptr, 0, published);
  });
  const auto [request, asked] = f.peer->expect<protocol::Publish>();
  CHECK(asked.blocks == std::vector<protocol::Block>{{0, 1}, {1, 1}, {-1, 0}});
  protocol::Published reply{{{{}, {0, 1}}, {{}, {3, 3}}, {{}, {-1, 0}}}};
  reply.blocks[1].key[31] = 8;
  f.peer->reply(request.id, reply);
  CHECK(publishing.get() == LARDER_OK);
  CHECK(rows_out[1].block.id == 3);
  CHECK(rows_out[1].key[31] == 8);
  CHECK(state_out[0].block.id == -1);

  std::array<larder_block, 2> found_rows = {};
  std::array<larder_block, 1> found_state = {};
  larder_block* found[] = {found_rows.data(), found_state.data()};
  size_t found_counts[] = {0, 0};
  int64_t hit_tokens = 0;
  const auto look_up = [&](const size_t* capacities, size_t num_groups) {
    return larder_pool_lookup_units(f.pool, tokens.data(), tokens.size(), 1, nullptr, nullptr, 0,
                                    found, capacities, num_groups, found_counts, &hit_tokens);
  };
  auto looking = beside([&] { return look_up(counts, 2); });
  f.peer->answer<protocol::Lookup>(protocol::Prefix{32, {{0, 1}, {3, 3}, {2, 2}}});
  CHECK(looking.get() == LARDER_OK);
  CHECK(hit_tokens == 32);
  CHECK(found_counts[0] == 2);
  CHECK(found_counts[1] == 1);
  CHECK(found_rows[1].id == 3);
  CHECK(found_state[0].id == 2);

  // Too little room is refused before larderd is asked, with what is needed.
  const size_t small[] = {1, 1};
  CHECK(look_up(small, 2) == LARDER_INVALID_ARGUMENT);
  CHECK(std::string(larder_last_error()).find("blocks[0] has a capacity of 1, 2") == 0);
  CHECK(found_counts[0] == 2);
  CHECK(look_up(counts, 1) == LARDER_INVALID_ARGUMENT);
  CHECK(std::string(larder_last_error()) == "num_groups is 1, the pool has 2");
}

TEST_CASE("C: a client tells how its session fared") {
  CHybrid f;
  uint64_t number = 0;
  int64_t outage_us = -1;
  REQUIRE(larder_client_cache_id(f.client, &number) == LARDER_OK);
  CHECK(number == ScriptedDaemon::kCache);
  REQUIRE(larder_client_resumes(f.client, &number) == LARDER_OK);
  CHECK(number == 0);
  f.peer.reset();
  f.peer.emplace(f.daemon.accept_resume());
  CHECK(eventually([&] { return larder_client_resumes(f.client, &number) == 0 && number == 1; }));
  REQUIRE(larder_client_longest_outage(f.client, &outage_us) == LARDER_OK);
  CHECK(outage_us > 0);
}

TEST_CASE("C: options of groups are checked like those of pools") {
  larder_group_options group = LARDER_GROUP_OPTIONS_INIT;
  const auto refusal = [](const larder_group_options* wanted) {
    const larder_group_options* more[] = {wanted};
    larder_pool_options options = LARDER_POOL_OPTIONS_INIT;
    options.more_groups = more;
    options.num_more_groups = 1;
    larder_pool* pool = nullptr;
    // The client is looked at first, and the first refusal is kept: give one.
    auto* client = reinterpret_cast<larder_client*>(&options);
    CHECK(larder_open_pool(client, &options, &pool) == LARDER_INVALID_ARGUMENT);
    return std::string(larder_last_error());
  };
  CHECK(refusal(nullptr) == "more_groups is NULL");
  group.reserved = 1;
  CHECK(refusal(&group) == "more_groups: reserved is 1, expected 0");
  group.reserved = 0;
  group.layout = 2;
  CHECK(refusal(&group).find("layout is 2") == 0);
  group.layout = 0;
  group.struct_size = 3;
  CHECK(refusal(&group).find("more_groups: struct_size is 3") == 0);
}

}  // namespace
}  // namespace larder::test
