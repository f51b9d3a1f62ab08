// Refusals of gather calls: the field, the numbers, and nothing written.
#include <cmath>
#include <functional>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::kernels {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();

// A good gather of sequences of 17 and 5 tokens from a pool of 4 blocks of 16 tokens.
struct GatherCall {
  GatherCall() : pool({1, 2, 16, 32, 32, KvFormat::kNvfp4, KvFormat::kNvfp4}, 4, std::byte{0}) {
    params.layer = pool.layer();
    params.k_out = dense_tensor(k, Dtype::kFp32, 22, 2, 32);
    params.v_out = dense_tensor(v, Dtype::kFp32, 22, 2, 32);
    params.block_table = table;
    params.seq_lens = seq_lens;
    params.num_seqs = 2;
    params.block_table_stride = 2;
  }
  void use_slots() {
    params.block_table = nullptr;
    params.seq_lens = nullptr;
    params.num_seqs = 0;
    params.slots = slots;
    params.num_slots = 3;
  }
  test::Pool pool;
  float k[22 * 2 * 32];
  float v[22 * 2 * 32];
  int32_t table[4] = {1, 3, 0, -1};
  int32_t seq_lens[2] = {17, 5};
  int64_t slots[3] = {63, -1, 0};
  GatherParams params;
};

void refuse_gather(std::string_view part, const std::function<void(GatherCall&)>& change) {
  GatherCall call;
  std::fill_n(call.k, std::size(call.k), 77.0f);
  std::fill_n(call.v, std::size(call.v), 77.0f);
  change(call);
  const Status status = run_gather(call.params);
  CAPTURE(status.to_string());
  CAPTURE(part);
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().find(part) != std::string::npos);
  for (const float x : call.k) REQUIRE(x == 77.0f);
  for (const float x : call.v) REQUIRE(x == 77.0f);
}

TEST_CASE("a good gather passes, by table and by slots, also of nothing") {
  GatherCall call;
  CHECK(validate_gather(call.params).ok());
  CHECK(run_gather(call.params).ok());
  call.use_slots();
  CHECK(run_gather(call.params).ok());
  call.params.num_slots = 0;
  call.params.slots = nullptr;
  CHECK(run_gather(call.params).ok());
}

TEST_CASE(
    "gather refuses block ids outside the pool in the used part, and lengths that do not fit") {
  refuse_gather("block_table[0, 1] is 4: the pool has 4 blocks", [](auto& c) { c.table[1] = 4; });
  refuse_gather("block_table[1, 0] is -2", [](auto& c) { c.table[2] = -2; });
  refuse_gather("seq_lens[1] is -1", [](auto& c) { c.seq_lens[1] = -1; });
  refuse_gather("seq_lens[0] is 33: its block_table row has 2 blocks of 16 tokens",
                [](auto& c) { c.seq_lens[0] = 33; });
  refuse_gather("seq_lens[0] is 2147483647", [](auto& c) { c.seq_lens[0] = kMaxInt32; });
  refuse_gather("seq_lens[0] is 17: rows_per_sequence is 16",
                [](auto& c) { c.params.rows_per_sequence = 16; });
  refuse_gather("k_out has 22 rows: the tokens take 23", [](auto& c) { c.seq_lens[1] = 6; });
  refuse_gather("k_out has 22 rows: the tokens take 25",
                [](auto& c) { c.params.rows_per_sequence = 20; });
  refuse_gather("v_out has 21 rows: the tokens take 22",
                [](auto& c) { c.params.v_out.shape[0] = 21; });
}

TEST_CASE("gather refuses first tokens outside of their sequences, and takes them into account") {
  const auto with_first = [](std::string_view part, int32_t a, int32_t b,
                             const std::function<void(GatherCall&)>& change) {
    const int32_t first_tokens[] = {a, b};
    refuse_gather(part, [&](GatherCall& c) {
      c.params.first_tokens = first_tokens;
      change(c);
    });
  };
  const auto nothing = [](GatherCall&) {};
  with_first("first_tokens[0] is -1: expected 0 to seq_lens[0], which is 17", -1, 0, nothing);
  with_first("first_tokens[1] is 6: expected 0 to seq_lens[1], which is 5", 0, 6, nothing);
  with_first("seq_lens[0] is 17 with first_tokens[0] 1: rows_per_sequence is 15", 1, 0,
             [](auto& c) { c.params.rows_per_sequence = 15; });
  with_first("k_out has 22 rows: the tokens take 23", 16, 0, [](auto& c) {
    c.table[3] = 0;
    c.seq_lens[1] = 22;
  });
  with_first("block_table[0, 1] is 4: the pool has 4 blocks", 16, 0,
             [](auto& c) { c.table[1] = 4; });
  with_first("seq_lens[0] is 33: its block_table row has 2 blocks", 32, 0,
             [](auto& c) { c.seq_lens[0] = 33; });
  GatherCall call;
  refuse_gather("first_tokens is not aligned", [&](GatherCall& c) {
    c.params.first_tokens =
        reinterpret_cast<const int32_t*>(reinterpret_cast<const std::byte*>(call.table) + 2);
  });
  const int32_t first_tokens[] = {16, 5};  // blocks before them are not looked up
  call.params.first_tokens = first_tokens;
  call.table[0] = -1;
  call.table[2] = 77;
  call.params.rows_per_sequence = 1;
  call.params.k_out.shape[0] = call.params.v_out.shape[0] = 1;
  CHECK(run_gather(call.params).ok());
}

TEST_CASE("gather refuses slots that the pool or the output has not") {
  refuse_gather("slots[2] is 64: the pool has 64 slots", [](auto& c) {
    c.use_slots();
    c.slots[2] = 64;
  });
  refuse_gather("slots is null with num_slots 3", [](auto& c) {
    c.use_slots();
    c.params.slots = nullptr;
  });
  refuse_gather("k_out has 2 rows: the tokens take 3", [](auto& c) {
    c.use_slots();
    c.params.k_out.shape[0] = 2;
  });
  refuse_gather("num_slots is -1", [](auto& c) { c.params.num_slots = -1; });
  refuse_gather("num_slots is 3 with num_seqs 2", [](auto& c) {
    c.params.slots = c.slots;
    c.params.num_slots = 3;
  });
}

TEST_CASE("gather refuses outputs that are not the pool's, overlap or have a dtype of others") {
  refuse_gather("k_out is [22, 2, 16]: expected [rows, 2, 32]",
                [](auto& c) { c.params.k_out.shape[2] = 16; });
  refuse_gather("v_out is [22, 1, 32]: expected [rows, 2, 32]",
                [](auto& c) { c.params.v_out.shape[1] = 1; });
  refuse_gather("k_out is [-1, 2, 32]", [](auto& c) { c.params.k_out.shape[0] = -1; });
  refuse_gather("k_out: dtype is fp8_e4m3: expected bf16, fp16 or fp32",
                [](auto& c) { c.params.k_out.dtype = Dtype::kFp8E4m3; });
  refuse_gather("v_out: dtype is e2m1x2", [](auto& c) { c.params.v_out.dtype = Dtype::kE2m1x2; });
  refuse_gather("v_out: dtype is 9", [](auto& c) { c.params.v_out.dtype = static_cast<Dtype>(9); });
  refuse_gather("k_out: the stride of axis 1 is 0 with size 2",
                [](auto& c) { c.params.k_out.strides[1] = 0; });
  refuse_gather("v_out: strides", [](auto& c) { c.params.v_out.strides[0] = kMaxInt64 / 4; });
  refuse_gather("k_out: data is null", [](auto& c) { c.params.k_out.data = nullptr; });
  refuse_gather("v_out: data is not aligned",
                [](auto& c) { c.params.v_out.data = reinterpret_cast<std::byte*>(c.v) + 1; });
}

TEST_CASE("gather refuses null arrays, impossible scalars and layers that cannot be") {
  refuse_gather("seq_lens is null", [](auto& c) { c.params.seq_lens = nullptr; });
  refuse_gather("block_table is null", [](auto& c) { c.params.block_table = nullptr; });
  refuse_gather("num_seqs is -1", [](auto& c) { c.params.num_seqs = -1; });
  refuse_gather("num_seqs is 9223372036854775807", [](auto& c) { c.params.num_seqs = kMaxInt64; });
  refuse_gather("block_table_stride is -3", [](auto& c) { c.params.block_table_stride = -3; });
  refuse_gather("block_table_stride is 9223372036854775807",
                [](auto& c) { c.params.block_table_stride = kMaxInt64; });
  refuse_gather("rows_per_sequence is -1", [](auto& c) { c.params.rows_per_sequence = -1; });
  refuse_gather("rows_per_sequence is 9223372036854775807",
                [](auto& c) { c.params.rows_per_sequence = kMaxInt64; });
  refuse_gather("k_scale is nan", [](auto& c) { c.params.layer.k_scale = std::nanf(""); });
  refuse_gather("key_offset is null with key_transform centred_rotated",
                [](auto& c) { c.params.layer.key_transform = KeyTransform::kCentredRotated; });
  refuse_gather("base is null", [](auto& c) { c.params.layer.base = nullptr; });
}

}  // namespace
}  // namespace larder::kernels
