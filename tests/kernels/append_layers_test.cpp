// Slots of 32 bits and further layers of an append, and what a call with them or with RoPE is
// refused for.
#include <cmath>
#include <functional>
#include <limits>
#include <memory>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::normal_values;
using test::Pool;

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

TEST_CASE("slots of 32 bits write what slots of 64 bits write, negative ones nothing") {
  auto engine = test::random_engine(120);
  CAPTURE(test::seed());
  for (const MlaRow row : {MlaRow::kNone, MlaRow::kFp8Ds}) {
    const AttentionGeometry geometry =
        row == MlaRow::kNone
            ? AttentionGeometry{1, 2, 4, 32, 32, KvFormat::kNvfp4, KvFormat::kFp8E4m3}
            : mla_geometry(1, 4, row);
    const bool is_mla = row != MlaRow::kNone;
    std::vector<float> k = normal_values(engine, 6 * (is_mla ? 512 : 64));
    std::vector<float> v = normal_values(engine, 6 * 64);
    const std::vector<int64_t> slots = {7, -1, 0, 0, std::numeric_limits<int32_t>::min(), 11};
    Pool expected(geometry, 3, std::byte{0xA5});
    REQUIRE(test::append(expected, k, v, slots).ok());
    const std::vector<int32_t> slots32(slots.begin(), slots.end());
    Pool pool(geometry, 3, std::byte{0xA5});
    AppendParams params;
    params.layer = pool.layer();
    params.k = dense_tensor(k.data(), Dtype::kFp32, 6, is_mla ? 1 : 2, is_mla ? 512 : 32);
    params.v = dense_tensor(v.data(), Dtype::kFp32, 6, is_mla ? 1 : 2, is_mla ? 64 : 32);
    params.slots32 = slots32.data();
    params.num_slots = 6;
    REQUIRE(run_append(params).ok());
    CHECK(pool.bytes() == expected.bytes());
  }
}

TEST_CASE("further layers get the bytes of calls of their own, with their scales and offsets") {
  auto engine = test::random_engine(121);
  CAPTURE(test::seed());
  const AttentionGeometry geometry = {1, 2, 4, 32, 48, KvFormat::kNvfp4, KvFormat::kFp8E5m2};
  const std::vector<int64_t> slots = {5, -1, 0, 11};
  const std::vector<int64_t> positions = {3, 0, 1'000'000, 77};
  std::vector<std::unique_ptr<Pool>> together, apart;
  std::vector<std::vector<float>> k, v, offsets;
  std::vector<AppendParams> calls;
  for (size_t layer = 0; layer < 4; ++layer) {
    for (auto* pools : {&together, &apart})
      pools->push_back(std::make_unique<Pool>(geometry, 3, std::byte{0xA5}, 5));
    k.push_back(normal_values(engine, 4 * 2 * 32));
    v.push_back(normal_values(engine, 4 * 2 * 48));
    offsets.push_back(normal_values(engine, 2 * 32));
    AppendParams params;
    params.layer = apart.back()->layer();
    params.layer.k_scale = 0.3f + static_cast<float>(layer);
    params.layer.v_scale = 5.0f - static_cast<float>(layer);
    params.layer.key_transform = KeyTransform::kCentredRotated;
    params.layer.key_offset = offsets.back().data();
    params.k = dense_tensor(k.back().data(), Dtype::kFp32, 4, 2, 32);
    params.v = dense_tensor(v.back().data(), Dtype::kFp32, 4, 2, 48);
    params.slots = slots.data();
    params.num_slots = 4;
    params.rope.dim = 16;
    params.rope.positions = positions.data();
    REQUIRE(run_append(params).ok());
    calls.push_back(params);
  }
  AppendParams params = calls[0];
  params.layer.base = together[0]->layer().base;
  std::vector<FurtherLayer> further;
  for (size_t layer = 1; layer < 4; ++layer)
    further.push_back({together[layer]->layer().base, calls[layer].k.data, calls[layer].v.data,
                       calls[layer].layer.key_offset, calls[layer].layer.k_scale,
                       calls[layer].layer.v_scale});
  params.further_layers = further.data();
  params.num_further_layers = 3;
  REQUIRE(run_append(params).ok());
  for (size_t layer = 0; layer < 4; ++layer)
    CHECK(together[layer]->bytes() == apart[layer]->bytes());
}

// A good append of 4 rows into two layers of 2 blocks of 16 tokens, 2 heads, 32 dims, with RoPE.
struct LayersCall {
  LayersCall()
      : pool({1, 2, 16, 32, 32, KvFormat::kNvfp4, KvFormat::kNvfp4}, 2, std::byte{0xA5}),
        second({1, 2, 16, 32, 32, KvFormat::kNvfp4, KvFormat::kNvfp4}, 2, std::byte{0xA5}) {
    params.layer = pool.layer();
    params.k = params.v = dense_tensor(values, Dtype::kFp32, 4, 2, 32);
    params.slots = slots;
    params.num_slots = 4;
    params.rope.dim = 32;
    params.rope.positions = positions;
    further.base = second.layer().base;
    further.k = further.v = values;
    params.further_layers = &further;
    params.num_further_layers = 1;
  }
  void use_tables() {
    params.rope.cos = table;
    params.rope.sin = table + 16;
    params.rope.table_stride = 32;
    params.rope.table_rows = 8;
  }
  Pool pool, second;
  float values[4 * 2 * 32] = {};
  float table[8 * 32] = {};
  int64_t slots[4] = {0, 1, -1, 31};
  int32_t slots32[4] = {0, 1, -1, 31};
  int64_t positions[4] = {0, 7, -5, 1};  // that of a skipped row is not looked at
  int32_t positions32[4] = {0, 7, -5, 1};
  FurtherLayer further;
  AppendParams params;
};

void refuse(std::string_view part, const std::function<void(LayersCall&)>& change) {
  LayersCall call;
  change(call);
  const std::vector<std::byte> before = call.pool.bytes();
  const Status status = run_append(call.params);
  CAPTURE(status.to_string());
  CAPTURE(part);
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().find(part) != std::string::npos);
  CHECK(call.pool.bytes() == before);
  CHECK(call.second.bytes() == before);
}

TEST_CASE("a good append into two layers passes, with theta or tables, in either width") {
  LayersCall call;
  CHECK(run_append(call.params).ok());
  call.use_tables();
  CHECK(run_append(call.params).ok());
  call.params.slots = nullptr;
  call.params.slots32 = call.slots32;
  call.params.rope.positions = nullptr;
  CHECK(run_append(call.params).ok());
  call.params.rope.positions32 = call.positions32;
  CHECK(run_append(call.params).ok());
  call.params.rope.dim = 0;  // and nothing of it is looked at
  call.params.rope.positions = call.positions;
  call.params.rope.theta = -1;
  CHECK(run_append(call.params).ok());
}

TEST_CASE("append refuses slots of both widths, of none, and past the pool") {
  refuse("slots32 is given with slots", [](auto& c) { c.params.slots32 = c.slots32; });
  refuse("slots is null with num_slots 4", [](auto& c) { c.params.slots = nullptr; });
  refuse("slots32[3] is 32: the pool has 32 slots", [](auto& c) {
    c.params.slots = nullptr;
    c.params.slots32 = c.slots32;
    c.slots32[3] = 32;
  });
  refuse("slots32 is not aligned", [](auto& c) {
    c.params.slots = nullptr;
    c.params.slots32 =
        reinterpret_cast<const int32_t*>(reinterpret_cast<const std::byte*>(c.slots32) + 2);
  });
}

TEST_CASE("append refuses a rotation that cannot be") {
  refuse("rope.dim is 33: expected an even number from 0 to 32",
         [](auto& c) { c.params.rope.dim = 33; });
  refuse("rope.dim is 34", [](auto& c) { c.params.rope.dim = 34; });
  refuse("rope.dim is -2", [](auto& c) { c.params.rope.dim = -2; });
  refuse("rope.theta is 1: expected a finite number > 1", [](auto& c) { c.params.rope.theta = 1; });
  refuse("rope.theta is nan", [](auto& c) { c.params.rope.theta = std::nan(""); });
  refuse("rope.theta is inf",
         [](auto& c) { c.params.rope.theta = std::numeric_limits<double>::infinity(); });
  refuse("rope.positions is null with num_slots 4",
         [](auto& c) { c.params.rope.positions = nullptr; });
  refuse("rope.positions32 is given with rope.positions",
         [](auto& c) { c.params.rope.positions32 = c.positions32; });
  refuse("rope.positions[3] is -1: expected 0 or more", [](auto& c) { c.positions[3] = -1; });
  refuse("rope.positions32[0] is -9", [](auto& c) {
    c.params.rope.positions = nullptr;
    c.params.rope.positions32 = c.positions32;
    c.positions32[0] = -9;
  });
}

TEST_CASE("the dims of a rotation end at 256, and at 64 in MLA rows") {
  Pool wide({1, 1, 2, 512, 16, KvFormat::kBf16, KvFormat::kBf16}, 1);
  Pool mla(mla_geometry(1, 2, MlaRow::kBf16), 1);
  std::vector<float> values(1024);
  const int64_t slot = 0;
  for (auto* pool : {&wide, &mla}) {
    AppendParams params;
    params.layer = pool->layer();
    params.k = dense_tensor(values.data(), Dtype::kFp32, 1, 1, 512);
    params.v = dense_tensor(values.data(), Dtype::kFp32, 1, 1, pool == &mla ? 64 : 16);
    params.slots = &slot;
    params.num_slots = 1;
    params.rope.positions = &slot;
    params.rope.dim = pool == &mla ? 64 : 256;
    CHECK(run_append(params).ok());
    params.rope.dim += 2;
    const Status status = run_append(params);
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(status.message().find(pool == &mla ? "rope.dim is 66" : "rope.dim is 258") !=
          std::string::npos);
  }
}

TEST_CASE("append refuses tables that cannot be, and positions past them") {
  const auto with_tables = [](std::string_view part,
                              const std::function<void(LayersCall&)>& change) {
    refuse(part, [&](LayersCall& c) {
      c.use_tables();
      change(c);
    });
  };
  with_tables("rope.sin is null with rope.cos", [](auto& c) { c.params.rope.sin = nullptr; });
  with_tables("rope.cos is null with rope.sin", [](auto& c) { c.params.rope.cos = nullptr; });
  with_tables("rope.table_stride is 15: a row has 16 values",
              [](auto& c) { c.params.rope.table_stride = 15; });
  with_tables("rope.table_stride is 9223372036854775807",
              [](auto& c) { c.params.rope.table_stride = kMaxInt64; });
  with_tables("rope.table_rows is 0", [](auto& c) { c.params.rope.table_rows = 0; });
  with_tables("rope.positions[1] is 7: the tables have 7 rows",
              [](auto& c) { c.params.rope.table_rows = 7; });
  with_tables("rope.positions[3] is -1", [](auto& c) { c.positions[3] = -1; });
  with_tables("rope.table_rows is 3: without positions there is a row for each of the 4 slots",
              [](auto& c) {
                c.params.rope.positions = nullptr;
                c.params.rope.table_rows = 3;
              });
  with_tables("dtype is fp8_e4m3: expected bf16, fp16 or fp32",
              [](auto& c) { c.params.rope.table_dtype = Dtype::kFp8E4m3; });
  with_tables("rope.table_dtype is 9",
              [](auto& c) { c.params.rope.table_dtype = static_cast<Dtype>(9); });
  with_tables("rope.sin is not aligned to the 4 bytes of fp32",
              [](auto& c) { c.params.rope.sin = reinterpret_cast<const std::byte*>(c.table) + 2; });
}

TEST_CASE("append refuses further layers that cannot be, and writes none of them") {
  refuse("further_layers is null with num_further_layers 1",
         [](auto& c) { c.params.further_layers = nullptr; });
  refuse("num_further_layers is -1", [](auto& c) { c.params.num_further_layers = -1; });
  refuse("num_further_layers is 4096", [](auto& c) { c.params.num_further_layers = 4096; });
  refuse("further_layers[0].k is null with 4 rows", [](auto& c) { c.further.k = nullptr; });
  refuse("further_layers[0].v is not aligned to the 4 bytes of fp32",
         [](auto& c) { c.further.v = reinterpret_cast<std::byte*>(c.values) + 1; });
  refuse("further_layers[0].base is null with 2 blocks", [](auto& c) { c.further.base = nullptr; });
  refuse("further_layers[0].k_scale is 0", [](auto& c) { c.further.k_scale = 0; });
  refuse("further_layers[0].v_scale is nan", [](auto& c) { c.further.v_scale = std::nanf(""); });
  refuse("further_layers[0].key_offset is null with key_transform centred", [](auto& c) {
    c.params.layer.key_transform = KeyTransform::kCentred;
    c.params.layer.key_offset = c.values;
  });
  refuse("two layers begin 0 bytes apart: expected the 1152 bytes of a page",
         [](auto& c) { c.further.base = c.params.layer.base; });
  refuse("two layers begin 1151 bytes apart",
         [](auto& c) { c.further.base = c.params.layer.base + 1151; });
}

}  // namespace
}  // namespace larder::kernels
