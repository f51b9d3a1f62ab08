// Calls of the C API that need no daemon: every function with NULL, pages of an engine's own, and
// results of several attentions.
#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "larder/larder.h"

namespace larder {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct NullCall {
  const char* function;
  larder_code code;
  std::string sentence;
};

TEST_CASE("NULL where something is required is refused by every function") {
  std::vector<NullCall> calls;
  const auto called = [&](const char* function, larder_code code) {
    calls.push_back({function, code, larder_last_error()});
  };
#define CALL(function, ...) called(#function, function(__VA_ARGS__))
  CALL(larder_dtype_from_name, "bf16", nullptr);
  CALL(larder_kv_format_from_name, nullptr, nullptr);
  CALL(larder_encoder_from_name, nullptr, nullptr);
  CALL(larder_key_transform_from_name, nullptr, nullptr);
  CALL(larder_mla_row_from_name, nullptr, nullptr);
  CALL(larder_layout_from_name, nullptr, nullptr);
  CALL(larder_mla_geometry, 1, 16, LARDER_MLA_ROW_FP8, nullptr);
  CALL(larder_geometry_page_layout, nullptr, nullptr);
  CALL(larder_dense_pages, nullptr, nullptr, 0, 0, 0, nullptr);
  CALL(larder_connect, nullptr, nullptr);
  CALL(larder_client_session_id, nullptr, nullptr);
  CALL(larder_client_boot_id, nullptr, nullptr);
  CALL(larder_client_cache_id, nullptr, nullptr);
  CALL(larder_client_resumes, nullptr, nullptr);
  CALL(larder_client_longest_outage, nullptr, nullptr);
  larder_pool* pool = nullptr;
  CALL(larder_open_pool, nullptr, nullptr, &pool);
  CALL(larder_open_pool, nullptr, nullptr, nullptr);
  CALL(larder_pool_get_info, nullptr, nullptr);
  CALL(larder_pool_group, nullptr, 0, &pool);
  CALL(larder_pool_group, nullptr, 0, nullptr);
  CALL(larder_pool_resize, nullptr, 1, nullptr);
  CALL(larder_pool_evict, nullptr, 1, nullptr);
  CALL(larder_pool_data, nullptr, nullptr);
  CALL(larder_pool_stats, nullptr, nullptr, 0, nullptr);
  CALL(larder_pool_allocate, nullptr, 1, nullptr);
  CALL(larder_pool_release, nullptr, nullptr, 1);
  CALL(larder_pool_publish, nullptr, nullptr, 1, nullptr, 1, nullptr, nullptr, 1, nullptr);
  CALL(larder_pool_lookup, nullptr, nullptr, 1, 1, nullptr, nullptr, 0, nullptr, 0, nullptr,
       nullptr);
  CALL(larder_pool_publish_units, nullptr, nullptr, 0, nullptr, nullptr, 1, nullptr, nullptr, 0,
       nullptr);
  CALL(larder_pool_lookup_units, nullptr, nullptr, 0, 1, nullptr, nullptr, 0, nullptr, nullptr, 1,
       nullptr, nullptr);
  CALL(larder_pool_copy, nullptr, nullptr, nullptr, 1);
  CALL(larder_pool_append, nullptr, 0, nullptr, nullptr, nullptr, 1);
  CALL(larder_pool_attend, nullptr, 0, nullptr, nullptr);
  CALL(larder_pool_sparse_attend, nullptr, 0, nullptr, nullptr);
  CALL(larder_pool_gather, nullptr, 0, nullptr);
  CALL(larder_pool_read, nullptr, 0, nullptr, nullptr, nullptr, 1);
  CALL(larder_pool_read_pages, nullptr, 0, nullptr, 1, nullptr, 1);
  CALL(larder_pool_write_pages, nullptr, 0, nullptr, 1, nullptr, 1);
  CALL(larder_pool_read_blocks, nullptr, nullptr, 1, nullptr, 1);
  CALL(larder_pool_write_blocks, nullptr, nullptr, 1, nullptr, 1);
  CALL(larder_pool_export_pages, nullptr, 0, nullptr, 1, nullptr);
  CALL(larder_pool_import_pages, nullptr, 0, nullptr, 1, nullptr);
  CALL(larder_pool_scrub, nullptr, nullptr, 0);
  CALL(larder_pool_checksum, nullptr, nullptr, 0, nullptr);
  larder_sequence* sequence = nullptr;
  CALL(larder_sequence_begin, nullptr, &sequence);
  CALL(larder_sequence_begin, nullptr, nullptr);
  CALL(larder_sequence_num_tokens, nullptr, nullptr);
  CALL(larder_sequence_blocks, nullptr, nullptr, 0, nullptr);
  CALL(larder_sequence_block_ids, nullptr, nullptr, 0, nullptr);
  CALL(larder_sequence_last_slots, nullptr, nullptr, 0, nullptr);
  CALL(larder_sequence_adopt_prefix, nullptr, nullptr, 0, nullptr, nullptr);
  CALL(larder_sequence_extend, nullptr, 1);
  CALL(larder_sequence_append, nullptr, 0, nullptr, nullptr);
  CALL(larder_sequence_attend, nullptr, 0, nullptr, nullptr, nullptr, nullptr);
  CALL(larder_sequence_publish, nullptr, nullptr, 0, nullptr);
  CALL(larder_sequence_fork, nullptr, &sequence);
  CALL(larder_sequence_truncate, nullptr, 0);
  CALL(larder_sequence_end, nullptr);
  CALL(larder_merge_states, nullptr, 1, nullptr, nullptr, nullptr);
  CALL(larder_combine_rank, nullptr, nullptr, 1, 0, nullptr, nullptr);
  int64_t number = 0;
  const larder_context_shard shard = {2, 1, 16};
  CALL(larder_local_tokens, nullptr, 0, &number);
  CALL(larder_local_tokens, &shard, 0, nullptr);
  CALL(larder_global_token, nullptr, 0, &number);
  CALL(larder_global_token, &shard, 0, nullptr);
#undef CALL
  for (const NullCall& call : calls) {
    INFO(call.function, ": ", call.sentence);
    CHECK(call.code == LARDER_INVALID_ARGUMENT);
    CHECK(call.sentence.find(" is NULL") != std::string::npos);
  }
}

TEST_CASE("dense pages are described by base and strides") {
  larder_pool_options options = LARDER_POOL_OPTIONS_INIT;
  larder_geometry geometry = options.geometry;
  geometry.num_layers = 1;
  geometry.num_kv_heads = 2;
  geometry.block_tokens = 16;
  geometry.k_dim = geometry.v_dim = 64;
  geometry.k_format = geometry.v_format = LARDER_KV_FORMAT_BF16;
  std::vector<unsigned char> memory(2 * 8192);
  larder_paged_kv paged = LARDER_PAGED_KV_INIT;
  REQUIRE(larder_dense_pages(memory.data(), &geometry, 2, LARDER_PAGE_ORDER_NHD,
                             LARDER_V_SCALE_ORDER_LINEAR, &paged) == LARDER_OK);
  // A bf16 row is 128 bytes; K of a page is 2 heads * 16 tokens of them, V lies behind it.
  CHECK(paged.struct_size == sizeof paged);
  CHECK(paged.k_data.base == memory.data());
  CHECK(paged.v_data.base == memory.data() + 4096);
  CHECK(paged.k_data.page_stride_bytes == 8192);
  CHECK(paged.k_data.head_stride_bytes == 128);
  CHECK(paged.k_data.token_stride_bytes == 256);
  CHECK(paged.num_pages == 2);
  CHECK(paged.geometry.num_kv_heads == 2);
  CHECK(paged.v_scale_order == LARDER_V_SCALE_ORDER_LINEAR);

  SUBCASE("an output struct is written as far as its caller has it") {
    larder_paged_kv shorter = LARDER_PAGED_KV_INIT;
    shorter.struct_size = sizeof(size_t) + sizeof(larder_paged_rows);
    shorter.num_pages = 77;
    CHECK(larder_dense_pages(memory.data(), &geometry, 2, LARDER_PAGE_ORDER_HND,
                             LARDER_V_SCALE_ORDER_LINEAR, &shorter) == LARDER_OK);
    CHECK(shorter.struct_size == sizeof(size_t) + sizeof(larder_paged_rows));
    CHECK(shorter.k_data.head_stride_bytes == 2048);
    CHECK(shorter.k_data.token_stride_bytes == 128);
    CHECK(shorter.v_data.base == nullptr);
    CHECK(shorter.num_pages == 77);
  }
  SUBCASE("what is wrong is named, and nothing written") {
    const auto refusal = [&](void* base, int64_t num_pages, larder_page_order order,
                             size_t struct_size = sizeof(larder_paged_kv)) {
      larder_paged_kv out = LARDER_PAGED_KV_INIT;
      out.struct_size = struct_size;
      out.num_pages = 77;
      CHECK(larder_dense_pages(base, &geometry, num_pages, order, 0, &out) ==
            LARDER_INVALID_ARGUMENT);
      CHECK(out.num_pages == 77);
      return std::string(larder_last_error());
    };
    CHECK(refusal(nullptr, 1, 0) == "base is NULL");
    CHECK(refusal(memory.data(), -1, 0) == "num_pages is -1, expected 0 or more");
    CHECK(refusal(memory.data(), 1, 2) == "order is 2, expected 0 to 1 (NHD, HND)");
    CHECK(refusal(memory.data(), 1, 0, 0).find("struct_size is 0") != std::string::npos);
    geometry.v_dim = -1;
    CHECK(refusal(memory.data(), 1, 0).find("v_dim is -1") != std::string::npos);
  }
}

TEST_CASE("states are merged by the weight of their keys") {
  // The second state has three times the keys of the first: exp(lse) is 1 and 3.
  std::vector<float> outs[2] = {{1.0f, 10.0f}, {5.0f, 2.0f}};
  const float lses[2] = {0.0f, std::log(3.0f)};
  larder_attention_state states[2];
  for (int i = 0; i < 2; ++i)
    states[i] = {larder_dense_tensor(outs[i].data(), LARDER_DTYPE_FP32, 1, 1, 2), &lses[i]};
  std::vector<float> merged(2, kNan);
  float lse = kNan;
  const larder_tensor out = larder_dense_tensor(merged.data(), LARDER_DTYPE_FP32, 1, 1, 2);
  REQUIRE(larder_merge_states(states, 2, &out, &lse, nullptr) == LARDER_OK);
  CHECK(merged[0] == doctest::Approx(4.0));
  CHECK(merged[1] == doctest::Approx(4.0));
  CHECK(lse == doctest::Approx(std::log(4.0)));
  larder_merge_options options = LARDER_MERGE_OPTIONS_INIT;
  options.lse_form = LARDER_LSE_BASE2;
  REQUIRE(larder_merge_states(states, 2, &out, &lse, &options) == LARDER_OK);
  CHECK(lse == doctest::Approx(2.0));
  const float sink = std::log(4.0f);
  options.sinks = &sink;
  options.num_sinks = 1;
  REQUIRE(larder_merge_states(states, 2, &out, &lse, &options) == LARDER_OK);
  CHECK(merged[0] == doctest::Approx(2.0));
  CHECK(lse == doctest::Approx(2.0));

  merged.assign(2, 7.0f);
  options.state_form = 16;
  CHECK(larder_merge_states(states, 2, &out, &lse, &options) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_last_error() == std::string("state_form is 16, expected bits of 7"));
  states[1].lse = nullptr;
  CHECK(larder_merge_states(states, 2, &out, &lse, nullptr) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_last_error() == std::string("states[1].lse is NULL"));
  states[1].lse = &lses[1];
  states[1].out.shape[2] = 1;
  CHECK(larder_merge_states(states, 2, &out, &lse, nullptr) == LARDER_INVALID_ARGUMENT);
  CHECK(merged == std::vector<float>(2, 7.0f));
}

TEST_CASE("a rank's share is its part of the whole") {
  std::vector<float> part = {8.0f, 4.0f};
  const float lses[2] = {0.0f, std::log(3.0f)};
  float total = kNan;
  const larder_tensor out = larder_dense_tensor(part.data(), LARDER_DTYPE_FP32, 1, 1, 2);
  REQUIRE(larder_combine_rank(&out, lses, 2, 0, &total, nullptr) == LARDER_OK);
  CHECK(part[0] == doctest::Approx(2.0));
  CHECK(part[1] == doctest::Approx(1.0));
  CHECK(total == doctest::Approx(std::log(4.0)));
  const std::vector<float> before = part;
  CHECK(larder_combine_rank(&out, lses, 2, 2, &total, nullptr) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_combine_rank(&out, lses, -1, 0, &total, nullptr) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_combine_rank(&out, nullptr, 2, 0, &total, nullptr) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_last_error() == std::string("lses with 2 entries is NULL"));
  CHECK(part == before);
}

TEST_CASE("a rank's tokens and their places; figures that cannot be are refused") {
  // Rank 1 of 2, 16 at a time: tokens 16 to 31, 48 to 63 and so on.
  const larder_context_shard shard = {2, 1, 16};
  const larder_context_shard whole = {0, 0, 0};
  int64_t number = -7;
  for (const auto& [tokens, expected] :
       {std::pair{0, 0}, {16, 0}, {17, 1}, {32, 16}, {40, 16}, {50, 18}, {64, 32}}) {
    REQUIRE(larder_local_tokens(&shard, tokens, &number) == LARDER_OK);
    CHECK(number == expected);
    REQUIRE(larder_local_tokens(&whole, tokens, &number) == LARDER_OK);
    CHECK(number == tokens);
  }
  for (const auto& [local, expected] : {std::pair{0, 16}, {15, 31}, {16, 48}, {33, 81}}) {
    REQUIRE(larder_global_token(&shard, local, &number) == LARDER_OK);
    CHECK(number == expected);
    REQUIRE(larder_global_token(&whole, local, &number) == LARDER_OK);
    CHECK(number == local);
  }
  const larder_context_shard wide = {2147483647, 2147483646, 1};
  REQUIRE(larder_global_token(&wide, 2147483647, &number) == LARDER_OK);
  CHECK(number == int64_t{2147483647} * 2147483647 + 2147483646);
  number = -7;
  const larder_context_shard wrong = {2, 1, 1 << 30};
  CHECK(larder_local_tokens(&wrong, 1, &number) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_last_error() == std::string("shard.interleave is 1073741824: its product with 2 "
                                           "ranks is 2147483648, expected less than 2^31"));
  CHECK(larder_local_tokens(&shard, -1, &number) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_last_error() == std::string("tokens is -1, expected 0 to 2147483647"));
  CHECK(larder_global_token(&shard, int64_t{1} << 31, &number) == LARDER_INVALID_ARGUMENT);
  CHECK(larder_last_error() == std::string("local is 2147483648, expected 0 to 2147483647"));
  CHECK(number == -7);
}

}  // namespace
}  // namespace larder
