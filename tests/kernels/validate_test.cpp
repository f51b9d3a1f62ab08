// Refusals of append calls: the field, the numbers, and nothing written.
#include <cmath>
#include <functional>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::kernels {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

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

TEST_CASE("append refuses dtypes of outputs, and centred keys without their offset") {
  refuse_append("k: dtype is fp8_e4m3: expected bf16, fp16 or fp32",
                [](auto& c) { c.params.k.dtype = Dtype::kFp8E4m3; });
  refuse_append("v: dtype is e2m1x2", [](auto& c) { c.params.v.dtype = Dtype::kE2m1x2; });
  refuse_append("key_offset is null with key_transform centred",
                [](auto& c) { c.params.layer.key_transform = KeyTransform::kCentred; });
  refuse_append("key_offset is not aligned", [](auto& c) {
    c.params.layer.key_offset =
        reinterpret_cast<const float*>(reinterpret_cast<const std::byte*>(c.values) + 1);
  });
  AppendCall call;  // checked where the pool is not mapped, and neither are its offsets
  call.params.layer.key_transform = KeyTransform::kCentred;
  CHECK(validate_append(call.params).ok());
}

}  // namespace
}  // namespace larder::kernels
