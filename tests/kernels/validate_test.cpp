// Refusals of append and attend calls: the field, the numbers, and nothing written.
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

void check_message(const Status& status, std::string_view part) {
  CAPTURE(status.to_string());
  CAPTURE(part);
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().find(part) != std::string::npos);
}

// A good append of 4 rows into a pool of 2 blocks of 16 tokens, 2 heads, 32 dims.
struct AppendCall {
  AppendCall() : pool({1, 2, 16, 32, 32, KvFormat::kNvfp4, KvFormat::kNvfp4}, 2, std::byte{0xA5}) {
    params.layer = pool.layer();
    params.k = dense_tensor(values, Dtype::kFp32, 4, 2, 32);
    params.v = params.k;
    params.slots = slots;
    params.num_slots = 4;
  }
  test::Pool pool;
  float values[4 * 2 * 32] = {};
  int64_t slots[4] = {0, 1, -1, 31};
  AppendParams params;
};

void refuse_append(std::string_view part, const std::function<void(AppendCall&)>& change) {
  AppendCall call;
  change(call);
  const std::vector<std::byte> before = call.pool.bytes();
  check_message(run_append(call.params), part);
  CHECK(call.pool.bytes() == before);
}

TEST_CASE("a good append passes") {
  AppendCall call;
  CHECK(validate_append(call.params).ok());
  CHECK(run_append(call.params).ok());
  call.params.num_slots = 0;
  call.params.slots = nullptr;
  call.params.k = call.params.v = dense_tensor(nullptr, Dtype::kFp32, 0, 2, 32);
  CHECK(run_append(call.params).ok());
}

TEST_CASE("append refuses shapes that are not the pool's, naming expected and got") {
  refuse_append("k is [4, 2, 40]: expected [rows, 2, 32]",
                [](auto& c) { c.params.k.shape[2] = 40; });
  refuse_append("v is [4, 1, 32]: expected [rows, 2, 32]",
                [](auto& c) { c.params.v.shape[1] = 1; });
  refuse_append("k is [-4, 2, 32]", [](auto& c) { c.params.k.shape[0] = -4; });
  refuse_append("v has 3 rows: k has 4", [](auto& c) { c.params.v.shape[0] = 3; });
  refuse_append("k: dtype is 7", [](auto& c) { c.params.k.dtype = static_cast<Dtype>(7); });
}

TEST_CASE("append refuses slots that the pool has not, and writes nothing") {
  refuse_append("slots[1] is 32: the pool has 32 slots", [](auto& c) { c.slots[1] = 32; });
  refuse_append("slots[3] is 9223372036854775807", [](auto& c) { c.slots[3] = kMaxInt64; });
  refuse_append("num_slots is 5: k has 4 rows", [](auto& c) { c.params.num_slots = 5; });
  refuse_append("num_slots is -1", [](auto& c) { c.params.num_slots = -1; });
  refuse_append("num_slots is 9223372036854775807",
                [](auto& c) { c.params.num_slots = kMaxInt64; });
  refuse_append("slots is null", [](auto& c) { c.params.slots = nullptr; });
}

TEST_CASE("append refuses hostile strides, null data and misaligned data") {
  refuse_append("k: strides [9223372036854775807",
                [](auto& c) { c.params.k.strides[0] = kMaxInt64; });
  refuse_append("v: strides", [](auto& c) { c.params.v.strides[2] = -kMaxInt64; });
  refuse_append("k: data is null", [](auto& c) { c.params.k.data = nullptr; });
  refuse_append("v: data is not aligned",
                [](auto& c) { c.params.v.data = reinterpret_cast<std::byte*>(c.values) + 2; });
}

TEST_CASE("append refuses a layer that cannot be") {
  refuse_append("k_dim is 100", [](auto& c) { c.params.layer.geometry.k_dim = 100; });
  refuse_append("page is not the layout of the geometry: it has 1152 bytes, the geometry's 1728",
                [](auto& c) { c.params.layer.geometry.num_kv_heads = 3; });
  refuse_append("block_stride_bytes is 10: a page has 1152",
                [](auto& c) { c.params.layer.block_stride_bytes = 10; });
  refuse_append("num_blocks is -1", [](auto& c) { c.params.layer.num_blocks = -1; });
  refuse_append("num_blocks is 9223372036854775807",
                [](auto& c) { c.params.layer.num_blocks = kMaxInt64; });
  refuse_append("k_scale is 0", [](auto& c) { c.params.layer.k_scale = 0; });
  refuse_append("v_scale is nan", [](auto& c) { c.params.layer.v_scale = std::nanf(""); });
}

TEST_CASE("append into a format that no kernel serves is UNSUPPORTED") {
  AppendCall call;
  call.params.layer.geometry.k_format = KvFormat::kFp8E5m2;
  const Status status = run_append(call.params);
  CHECK(status.code() == ErrorCode::kUnsupported);
  CHECK(status.message().find("k_format is fp8_e5m2") != std::string::npos);
}

// A good attend: sequences of 33 and 5 tokens with 1 and 2 rows, 4 query heads on 2 KV heads.
struct AttendCall {
  AttendCall() : pool({1, 2, 16, 32, 32, KvFormat::kNvfp4, KvFormat::kNvfp4}, 4, std::byte{0}) {
    params.layer = pool.layer();
    params.q = dense_tensor(q, Dtype::kFp32, 3, 4, 32);
    params.out = dense_tensor(out, Dtype::kFp32, 3, 4, 32);
    params.lse = lse;
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

void refuse_attend(std::string_view part, const std::function<void(AttendCall&)>& change) {
  AttendCall call;
  std::fill_n(call.out, 3 * 4 * 32, 77.0f);
  change(call);
  check_message(run_attend(call.params), part);
  for (const float x : call.out) REQUIRE(x == 77.0f);
}

TEST_CASE("a good attend passes") {
  AttendCall call;
  CHECK(run_attend(call.params).ok());
  call.params.lse = nullptr;
  CHECK(run_attend(call.params).ok());
  call.params.num_seqs = 0;
  call.params.q.shape[0] = call.params.out.shape[0] = 0;
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
  refuse_attend("out has 2 rows: q has 3", [](auto& c) { c.params.out.shape[0] = 2; });
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
  refuse_attend("out is [3, 2, 32]", [](auto& c) { c.params.out.shape[1] = 2; });
  refuse_attend("out: the stride of axis 0 is 0", [](auto& c) { c.params.out.strides[0] = 0; });
  refuse_attend("q: strides", [](auto& c) { c.params.q.strides[1] = kMaxInt64 / 2; });
  refuse_attend("out: data is null", [](auto& c) { c.params.out.data = nullptr; });
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

}  // namespace
}  // namespace larder::kernels
