#include "daemon/pool_identity.h"

#include <map>

#include <doctest/doctest.h>

namespace larder::daemon {
namespace {

protocol::PoolSpec pool_with(protocol::AttentionGroup attention) {
  protocol::GroupSpec group;
  group.name = "attention";
  group.block_tokens = 16;
  group.num_blocks = 4;
  group.kind = std::move(attention);
  return {"p", "m", {group}};
}

protocol::AttentionGroup attention() {
  protocol::AttentionGroup group;
  group.num_layers = 3;
  group.num_kv_heads = 2;
  group.k_dim = 64;
  group.v_dim = 32;
  group.k_format = "nvfp4";
  group.v_format = "bf16";
  return group;
}

TEST_CASE("the identity names everything that sessions must agree on") {
  protocol::AttentionGroup group = attention();
  group.k_scales = {0.5};
  group.v_scales = {1, 2, 0.1};
  const auto spec = to_machine_spec(pool_with(group));
  REQUIRE(spec.ok());
  const std::map<std::string, std::string> identity(spec->identity.begin(), spec->identity.end());
  CHECK(identity.at("num_layers") == "3");
  CHECK(identity.at("num_kv_heads") == "2");
  CHECK(identity.at("k_dim") == "64");
  CHECK(identity.at("v_dim") == "32");
  CHECK(identity.at("k_format") == "nvfp4");
  CHECK(identity.at("v_format") == "bf16");
  CHECK(identity.at("layout") == "BLHNC");
  CHECK(identity.at("k_scales") == "0.5");
  CHECK(identity.at("v_scales") == "1,2,0.1");
  // K: 2 heads * 16 tokens * 36 bytes; V: 2 * 16 * 64; three layers.
  CHECK(spec->groups[0].block_bytes == 3 * (2 * 16 * 36 + 2 * 16 * 64));
}

TEST_CASE("scales that are the same for all layers are the same identity however they are said") {
  protocol::AttentionGroup one = attention();
  one.k_scales = {2};
  protocol::AttentionGroup each = attention();
  each.k_scales = {2, 2, 2};
  CHECK(to_machine_spec(pool_with(one))->identity == to_machine_spec(pool_with(each))->identity);
}

TEST_CASE("what is not served is refused by name") {
  const auto refused = [](auto change, ErrorCode code, const char* word) {
    protocol::PoolSpec pool = pool_with(attention());
    change(pool.groups[0], std::get<protocol::AttentionGroup>(pool.groups[0].kind));
    const auto spec = to_machine_spec(pool);
    REQUIRE(!spec.ok());
    INFO(spec.status().to_string());
    CHECK(spec.status().code() == code);
    CHECK(spec.status().message().find(word) != std::string::npos);
  };
  using G = protocol::GroupSpec;
  using A = protocol::AttentionGroup;
  refused([](G&, A& a) { a.k_format = "int4_per_token_head"; }, ErrorCode::kUnsupported,
          "int4_per_token_head");
  refused([](G&, A& a) { a.v_format = "turboquant_4bit_nc"; }, ErrorCode::kUnsupported,
          "turboquant_4bit_nc");
  refused([](G&, A& a) { a.encoder = "magic"; }, ErrorCode::kUnsupported, "magic");
  refused([](G&, A& a) { a.key_transform = "smeared"; }, ErrorCode::kUnsupported, "smeared");
  refused([](G&, A& a) { a.window_tokens = 0; }, ErrorCode::kInvalidArgument, "window_tokens");
  refused([](G& g, A&) { g.layout = "LBNHC"; }, ErrorCode::kUnsupported, "LBNHC");
  refused([](G& g, A&) { g.max_blocks = 1; }, ErrorCode::kInvalidArgument, "max_blocks is 1");
  refused([](G& g, A&) { g.layer_aliases = {0, 0, 1}; }, ErrorCode::kUnsupported, "layer_aliases");
  refused([](G& g, A&) { g.num_blocks = -4; }, ErrorCode::kInvalidArgument, "-4");
  refused([](G& g, A&) { g.num_blocks = int64_t{1} << 60; }, ErrorCode::kInvalidArgument,
          "num_blocks");
  refused([](G& g, A&) { g.block_tokens = 0; }, ErrorCode::kInvalidArgument, "block_tokens");
}

TEST_CASE("a window, growth and several groups become what the machine knows of them") {
  protocol::AttentionGroup windowed = attention();
  windowed.window_tokens = 128;
  protocol::PoolSpec pool = pool_with(attention());
  pool.groups[0].name = "full";
  protocol::GroupSpec window = pool.groups[0];
  window.name = "window";
  window.kind = windowed;
  window.max_blocks = 2 * window.num_blocks;
  protocol::GroupSpec state = pool.groups[0];
  state.name = "state";
  state.kind = protocol::OpaqueGroup{4096};
  pool.groups.push_back(window);
  pool.groups.push_back(state);
  const auto spec = to_machine_spec(pool);
  REQUIRE_MESSAGE(spec.ok(), spec.status().to_string());
  REQUIRE(spec->groups.size() == 3);
  CHECK(spec->groups[0].kind == GroupKind::kFull);
  CHECK(spec->groups[0].max_blocks == 0);
  CHECK(spec->groups[1].kind == GroupKind::kWindow);
  CHECK(spec->groups[1].window_tokens == 128);
  CHECK(spec->groups[1].max_blocks == window.max_blocks);
  CHECK(spec->groups[2].kind == GroupKind::kState);
  CHECK(spec->groups[2].block_bytes == 4096);
  CHECK(spec->identity.front().first == "full.kind");
  CHECK(spec->identity.back() == std::pair<std::string, std::string>("state.block_bytes", "4096"));
}

TEST_CASE("the only group of an opaque pool is one of blocks like others") {
  protocol::PoolSpec pool = pool_with(attention());
  pool.groups[0].kind = protocol::OpaqueGroup{4096};
  CHECK(to_machine_spec(pool)->groups[0].kind == GroupKind::kFull);
}

}  // namespace
}  // namespace larder::daemon
