// Refusals of attend calls: the field, the numbers, and nothing written.
#include <cmath>
#include <cstring>
#include <functional>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::kernels {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

void check_message(const Status& status, std::string_view part, ErrorCode code) {
  CAPTURE(status.to_string());
  CAPTURE(part);
  CHECK(status.code() == code);
  CHECK(status.message().find(part) != std::string::npos);
}

// A good attend: sequences of 33 and 5 tokens with 1 and 2 rows, 4 query heads on 2 KV heads.
struct AttendCall {
  AttendCall() : pool({1, 2, 16, 32, 32, KvFormat::kNvfp4, KvFormat::kNvfp4}, 4, std::byte{0}) {
    params.layer = pool.layer();
    params.q = dense_tensor(q, Dtype::kFp32, 3, 4, 32);
    params.output.out = dense_tensor(out, Dtype::kFp32, 3, 4, 32);
    params.output.lse = lse;
    params.q_lens = q_lens;
    params.seq_lens = seq_lens;
    params.block_table = table;
    params.num_seqs = 2;
    params.block_table_stride = 3;
  }
  test::Pool pool;
  float q[3 * 4 * 32] = {};
  float out[3 * 4 * 32] = {};
  float lse[3 * 4] = {};
  int32_t q_lens[2] = {1, 2};
  int32_t seq_lens[2] = {33, 5};
  int32_t table[6] = {1, 2, 3, 0, -1, kMaxInt32};
  AttendParams params;
};

void refuse_attend(std::string_view part, const std::function<void(AttendCall&)>& change,
                   ErrorCode code = ErrorCode::kInvalidArgument) {
  AttendCall call;
  std::fill_n(call.out, 3 * 4 * 32, 77.0f);
  change(call);
  check_message(run_attend(call.params), part, code);
  for (const float x : call.out) REQUIRE(x == 77.0f);
}

TEST_CASE("a good attend passes") {
  AttendCall call;
  CHECK(run_attend(call.params).ok());
  call.params.output.lse = nullptr;
  CHECK(run_attend(call.params).ok());
  call.params.num_seqs = 0;
  call.params.q.shape[0] = call.params.output.out.shape[0] = 0;
  call.params.q_lens = call.params.seq_lens = call.params.block_table = nullptr;
  CHECK(run_attend(call.params).ok());
}

TEST_CASE("attend refuses lengths that do not fit") {
  refuse_attend("seq_lens[0] is 33: its block_table row has 2 blocks of 16 tokens",
                [](auto& c) { c.params.block_table_stride = 2; });
  refuse_attend("seq_lens[1] is 2147483647", [](auto& c) { c.seq_lens[1] = kMaxInt32; });
  refuse_attend("seq_lens[0] is -1", [](auto& c) { c.seq_lens[0] = -1; });
  refuse_attend("q_lens[1] is -2", [](auto& c) { c.q_lens[1] = -2; });
  refuse_attend("q has 3 rows: q_lens add up to 2", [](auto& c) { c.q_lens[1] = 1; });
  refuse_attend("q has 3 rows: q_lens add up to 2147483648",
                [](auto& c) { c.q_lens[1] = kMaxInt32; });
  refuse_attend("out has 2 rows: expected 3", [](auto& c) { c.params.output.out.shape[0] = 2; });
}

TEST_CASE("attend refuses block ids outside the pool, in the used part of a row only") {
  refuse_attend("block_table[0, 2] is 4: the pool has 4 blocks", [](auto& c) { c.table[2] = 4; });
  refuse_attend("block_table[1, 0] is -1", [](auto& c) { c.table[3] = -1; });
  AttendCall call;
  call.q_lens[0] = 0;
  call.q_lens[1] = 3;
  call.table[0] = -9;  // no row of that sequence, so nobody looks
  CHECK(run_attend(call.params).ok());
}

TEST_CASE("attend refuses shapes that are not the pool's") {
  refuse_attend("q has 3 heads: expected a multiple of num_kv_heads 2",
                [](auto& c) { c.params.q.shape[1] = 3; });
  refuse_attend("q has 0 heads", [](auto& c) { c.params.q.shape[1] = 0; });
  refuse_attend("q has 9223372036854775806 heads",
                [](auto& c) { c.params.q.shape[1] = kMaxInt64 - 1; });
  refuse_attend("q is [3, 4, 64]", [](auto& c) { c.params.q.shape[2] = 64; });
  refuse_attend("out is [3, 2, 32]", [](auto& c) { c.params.output.out.shape[1] = 2; });
  refuse_attend("out: the stride of axis 0 is 0",
                [](auto& c) { c.params.output.out.strides[0] = 0; });
  refuse_attend("q: strides", [](auto& c) { c.params.q.strides[1] = kMaxInt64 / 2; });
  refuse_attend("out: data is null", [](auto& c) { c.params.output.out.data = nullptr; });
}

TEST_CASE("attend refuses null arrays and impossible scalars") {
  refuse_attend("q_lens is null", [](auto& c) { c.params.q_lens = nullptr; });
  refuse_attend("seq_lens is null", [](auto& c) { c.params.seq_lens = nullptr; });
  refuse_attend("block_table is null", [](auto& c) { c.params.block_table = nullptr; });
  refuse_attend("num_seqs is -1", [](auto& c) { c.params.num_seqs = -1; });
  refuse_attend("block_table_stride is -3", [](auto& c) { c.params.block_table_stride = -3; });
  refuse_attend("block_table_stride is 9223372036854775807",
                [](auto& c) { c.params.block_table_stride = kMaxInt64; });
  refuse_attend("window_left is -2", [](auto& c) { c.params.window_left = -2; });
  refuse_attend("scale is nan", [](auto& c) { c.params.scale = std::nanf(""); });
  refuse_attend("scale is inf", [](auto& c) { c.params.scale = INFINITY; });
  refuse_attend("v_scale is -1", [](auto& c) { c.params.layer.v_scale = -1; });
}

TEST_CASE("attend refuses shards that cannot be, and judges tables by the shard's tokens") {
  const auto refuse_shard = [](std::string_view part, const ContextShard& shard) {
    refuse_attend(part, [&](auto& c) { c.params.shard = shard; });
  };
  refuse_shard("shard.num_ranks is 0: expected 1 or more", {0, 0, 1});
  refuse_shard("shard.num_ranks is -2147483648", {-kMaxInt32 - 1, 0, 1});
  refuse_shard("shard.rank is 2: expected 0 to 1 with shard.num_ranks 2", {2, 2, 1});
  refuse_shard("shard.rank is -1", {2, -1, 1});
  refuse_shard("shard.rank is 1: expected 0 to 0", {1, 1, 1});
  refuse_shard("shard.interleave is 0: expected 1 or more", {2, 0, 0});
  refuse_shard("shard.interleave is -3", {1, 0, -3});
  refuse_shard("shard.interleave is 1073741824: its product with 2 ranks is 2147483648",
               {2, 0, 1 << 30});
  refuse_shard(
      "shard.interleave is 2147483647: its product with 2147483647 ranks is "
      "4611686014132420609",
      {kMaxInt32, 0, kMaxInt32});
  // 33 tokens are 17 of rank 0 and 16 of rank 1: two blocks and one.
  refuse_attend("seq_lens[0] is 33, of which rank 0 has 17: its block_table row has 1 blocks of 16",
                [](auto& c) {
                  c.params.shard = {2, 0, 1};
                  c.params.block_table_stride = 1;
                });
  refuse_attend("block_table[0, 0] is 4", [](auto& c) {
    c.params.shard = {2, 1, 1};
    c.table[0] = 4;
  });
  AttendCall call;
  call.params.shard = {2, 1, 1};
  call.table[1] = -9;
  CHECK(run_attend(call.params).ok());
  call.params.shard = {40, 39, 1};  // nothing of either sequence
  call.table[0] = call.table[3] = -9;
  CHECK(run_attend(call.params).ok());
  call.params.shard = {1, 0, kMaxInt32};
  check_message(run_attend(call.params), "block_table[0, 0] is -9", ErrorCode::kInvalidArgument);
  for (const ContextShard& shard : {ContextShard{0, 0, 1}, {2, 2, 1}, {2, 0, 0}, {2, 0, 1 << 30}}) {
    call.params.shard = shard;
    CHECK(validate_attend(call.params, Tables::kDevice).code() == ErrorCode::kInvalidArgument);
  }
}

// Two sequences of 40 and 36 tokens whose first two blocks are the same.
void share_blocks(AttendCall& call) {
  call.seq_lens[0] = 40;
  call.seq_lens[1] = 36;
  const int32_t table[] = {1, 2, 3, 1, 2, 0};
  std::copy_n(table, 6, call.table);
  call.params.shared_prefix_tokens = 32;
}

TEST_CASE("attend refuses a shared prefix that is none") {
  const auto refuse_prefix = [](std::string_view part, auto change) {
    refuse_attend(part, [&](auto& c) {
      share_blocks(c);
      change(c);
    });
  };
  refuse_prefix("shared_prefix_tokens is -2: expected -1 (find it), 0 (none) or a multiple of",
                [](auto& c) { c.params.shared_prefix_tokens = -2; });
  refuse_prefix("shared_prefix_tokens is 20: expected",
                [](auto& c) { c.params.shared_prefix_tokens = 20; });
  refuse_prefix("shared_prefix_tokens is 64: a block_table row has 3 blocks of 16 tokens",
                [](auto& c) { c.params.shared_prefix_tokens = 64; });
  refuse_prefix("shared_prefix_tokens is 48: sequence 0 has 39 tokens before its rows",
                [](auto& c) { c.params.shared_prefix_tokens = 48; });
  refuse_prefix("shared_prefix_tokens is 32: sequence 1 has 31 tokens before its rows",
                [](auto& c) { c.seq_lens[1] = 33; });
  refuse_prefix("shared_prefix_tokens is 32: block_table[1, 1] is 0, that of sequence 0 is 2",
                [](auto& c) { c.table[4] = 0; });
  // Also where no row sees them, or where the prefix is not used.
  refuse_prefix("block_table[1, 0] is -9, that of sequence 0 is 1", [](auto& c) {
    c.table[3] = -9;
    c.params.window_left = 1;
    c.params.deterministic = true;
  });
  for (const int32_t tokens : {-2, 20, 64}) {
    AttendCall call;
    share_blocks(call);
    call.params.shared_prefix_tokens = tokens;
    CHECK(validate_attend(call.params, Tables::kDevice).code() == ErrorCode::kInvalidArgument);
  }
}

TEST_CASE("a shared prefix changes no result, with whatever option") {
  AttendCall call;
  share_blocks(call);
  call.params.layer = call.pool.layer();
  const auto run = [&](int32_t tokens) {
    std::fill_n(call.out, 3 * 4 * 32, std::nanf(""));
    call.params.shared_prefix_tokens = tokens;
    const Status status = run_attend(call.params);
    REQUIRE_MESSAGE(status.ok(), status.to_string());
    return std::vector<float>(call.out, call.out + 3 * 4 * 32);
  };
  static const float slopes[4] = {1, 0.5f, 0.25f, 0};
  const auto check = [&] {
    const std::vector<float> expected = run(0);
    for (const int32_t tokens : {16, 32, int32_t{kFindSharedPrefix}})
      CHECK(run(tokens) == expected);
  };
  check();
  call.params.window_left = 3;
  check();
  call.params.alibi_slopes = slopes;
  check();
  call.params.deterministic = true;
  check();
  call.params.shard = {2, 1, 16};  // of 32 tokens 16, which are a block
  check();
  call.table[4] = 3;  // behind the shard's part of the prefix
  check();
}

// A pointer of any type that lies one byte beside the given one.
template <typename T>
T* beside(T* pointer) {
  T* result = pointer;
  const uintptr_t address = reinterpret_cast<uintptr_t>(pointer) + 1;
  std::memcpy(&result, &address, sizeof result);
  return result;
}

TEST_CASE("attend refuses options that exclude each other, or cannot be") {
  static const float floats[4] = {};
  refuse_attend("soft_cap is -1", [](auto& c) { c.params.soft_cap = -1; });
  refuse_attend("soft_cap is nan", [](auto& c) { c.params.soft_cap = std::nanf(""); });
  refuse_attend("soft_cap is inf", [](auto& c) { c.params.soft_cap = INFINITY; });
  refuse_attend(
      "soft_cap is 30 with alibi_slopes",
      [](auto& c) {
        c.params.soft_cap = 30;
        c.params.alibi_slopes = floats;
      },
      ErrorCode::kUnsupported);
  refuse_attend("sinks are given with partial", [](auto& c) {
    c.params.sinks = floats;
    c.params.partial = true;
  });
  refuse_attend("num_splits is -1: expected 0 to 4096", [](auto& c) { c.params.num_splits = -1; });
  refuse_attend("num_splits is 4097", [](auto& c) { c.params.num_splits = 4097; });
  refuse_attend("num_splits is 2147483647", [](auto& c) { c.params.num_splits = kMaxInt32; });
  refuse_attend("its product with k_scale", [](auto& c) {
    c.params.scale = 1e30f;
    c.params.layer.k_scale = 1e30f;
  });
}

TEST_CASE("attend refuses arrays that are not aligned") {
  static const float floats[5] = {};
  static const int64_t offsets[3] = {};
  static const uint8_t mask[64] = {};
  refuse_attend("sinks is not aligned to 4", [](auto& c) { c.params.sinks = beside(floats); });
  refuse_attend("alibi_slopes is not aligned to 4",
                [](auto& c) { c.params.alibi_slopes = beside(floats); });
  refuse_attend("lse is not aligned to 4", [](auto& c) { c.params.output.lse = beside(c.lse); });
  refuse_attend("q_lens is not aligned to 4", [](auto& c) { c.params.q_lens = beside(c.q_lens); });
  refuse_attend("seq_lens is not aligned to 4",
                [](auto& c) { c.params.seq_lens = beside(c.seq_lens); });
  refuse_attend("block_table is not aligned to 4",
                [](auto& c) { c.params.block_table = beside(c.table); });
  refuse_attend("mask_offsets is not aligned to 8", [](auto& c) {
    c.params.mask = mask;
    c.params.mask_offsets = beside(offsets);
    c.params.mask_bytes = 64;
  });
}

TEST_CASE("attend refuses a mask that does not hold every sequence's bits") {
  // 1 x 33 bits are 5 bytes, 2 x 5 bits are 2.
  static const uint8_t mask[7] = {};
  static int64_t offsets[2];
  const auto with_mask = [](int64_t first, int64_t second, int64_t bytes) {
    offsets[0] = first;
    offsets[1] = second;
    return [=](AttendCall& c) {
      c.params.mask = mask;
      c.params.mask_offsets = offsets;
      c.params.mask_bytes = bytes;
    };
  };
  AttendCall good;
  with_mask(0, 5, 7)(good);
  CHECK(run_attend(good.params).ok());
  refuse_attend(
      "mask_offsets[1] is 5: the mask has 6 bytes, of which the sequence's 10 bits take 2",
      with_mask(0, 5, 6));
  refuse_attend("mask_offsets[0] is 3: the mask has 7 bytes", with_mask(3, 5, 7));
  refuse_attend("mask_offsets[0] is -1", with_mask(-1, 5, 7));
  refuse_attend("mask_offsets[1] is 9223372036854775807", with_mask(0, kMaxInt64, 7));
  refuse_attend("mask_bytes is -1", with_mask(0, 5, -1));
  refuse_attend("mask_offsets is null", [](auto& c) {
    c.params.mask = mask;
    c.params.mask_bytes = 7;
  });
}

TEST_CASE("attend refuses queries of output dtypes, and outputs without what their dtype needs") {
  refuse_attend("q: dtype is fp8_e4m3, which is for outputs only",
                [](auto& c) { c.params.q.dtype = Dtype::kFp8E4m3; });
  refuse_attend("q: dtype is e2m1x2", [](auto& c) { c.params.q.dtype = Dtype::kE2m1x2; });
  refuse_attend("out_scale is 0", [](auto& c) {
    c.params.output.out.dtype = Dtype::kFp8E4m3;
    c.params.output.out_scale = 0;
  });
  static uint8_t scales[128 * 8];
  const auto nvfp4 = [](AttendCall& c) {
    c.params.output.out.dtype = Dtype::kE2m1x2;
    c.params.output.out.shape[2] = 16;
    c.params.output.out_sf = scales;
  };
  AttendCall good;
  nvfp4(good);
  CHECK(run_attend(good.params).ok());
  refuse_attend("out_sf is null with 3 rows", [=](auto& c) {
    nvfp4(c);
    c.params.output.out_sf = nullptr;
  });
  refuse_attend("out_sf_scale is inf", [=](auto& c) {
    nvfp4(c);
    c.params.output.out_sf_scale = INFINITY;
  });
  refuse_attend("out_sf_first_row is -1", [=](auto& c) {
    nvfp4(c);
    c.params.output.out_sf_first_row = -1;
  });
  refuse_attend("out_sf_first_row is 9223372036854775807 with 3 rows", [=](auto& c) {
    nvfp4(c);
    c.params.output.out_sf_first_row = kMaxInt64;
  });
  refuse_attend("out is [3, 4, 32]: expected [rows, 4, 16]", [=](auto& c) {
    nvfp4(c);
    c.params.output.out.shape[2] = 32;
  });
}

TEST_CASE("attend refuses nvfp4 output of a dim that has no whole groups") {
  test::Pool pool({1, 1, 4, 24, 24, KvFormat::kBf16, KvFormat::kBf16}, 1);
  std::vector<float> q(24);
  std::vector<uint8_t> out(12), scales(512);
  AttendParams params;
  params.layer = pool.layer();
  params.q = dense_tensor(q.data(), Dtype::kFp32, 1, 1, 24);
  params.output.out = dense_tensor(out.data(), Dtype::kE2m1x2, 1, 1, 12);
  params.output.out_sf = scales.data();
  check_message(run_attend(params), "out: dtype is e2m1x2 with a dim of 24",
                ErrorCode::kInvalidArgument);
}

}  // namespace
}  // namespace larder::kernels
