// append: the bytes that it writes, and those that it leaves alone, on every vector target.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/kernels/goldens.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/dense_attention.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::append;
using test::consecutive_slots;
using test::normal_values;
using test::Pool;
using test::Side;
using test::to_dtype;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

AttentionGeometry nvfp4_geometry(int32_t heads, int32_t block_tokens, int32_t dim) {
  return {1, heads, block_tokens, dim, dim, KvFormat::kNvfp4, KvFormat::kNvfp4};
}

// Fills every slot and compares each row with the searching encoder.
void check_rows(Pool& pool, Side side, const std::vector<float>& values, int64_t num_slots,
                float global_scale) {
  const int64_t heads = pool.geometry().num_kv_heads;
  const int64_t dim = pool.dim(side);
  for (int64_t slot = 0; slot < num_slots; ++slot)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t group = 0; group < dim / 16; ++group) {
        const auto expected = test::nvfp4_group(
            values.data() + (slot * heads + head) * dim + group * 16, global_scale);
        const std::byte* data =
            pool.bytes().data() + pool.data_offset(side, slot, head) + group * 8;
        const auto scale = static_cast<size_t>(pool.scale_offset(side, slot, head) + group);
        for (int i = 0; i < 8; ++i) {
          CAPTURE(values[static_cast<size_t>((slot * heads + head) * dim + group * 16 + 2 * i)]);
          CAPTURE(
              values[static_cast<size_t>((slot * heads + head) * dim + group * 16 + 2 * i + 1)]);
          REQUIRE(std::to_integer<int>(data[i]) == expected.data[i]);
        }
        REQUIRE(std::to_integer<int>(pool.bytes()[scale]) == expected.scale);
      }
}

TEST_CASE("random rows give the bytes of the searching encoder on every vector target") {
  auto engine = test::random_engine(10);
  CAPTURE(test::seed());
  const AttentionGeometry geometry = {1, 3, 5, 80, 48, KvFormat::kNvfp4, KvFormat::kNvfp4};
  std::vector<float> k = normal_values(engine, 15 * 3 * 80);
  std::vector<float> v = normal_values(engine, 15 * 3 * 48, 300);
  const float specials[] = {kNan,   -kNan, -0.0f,
                            9e-40f, 1e38f, std::numeric_limits<float>::infinity()};
  for (int i = 0; i < 40; ++i) {
    k[engine() % k.size()] = specials[engine() % 6];
    v[engine() % v.size()] = specials[engine() % 6];
  }
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    Pool pool(geometry, 3, std::byte{0xFF}, 7);
    pool.layer().k_scale = 0.37f;
    pool.layer().v_scale = 5.0f;
    REQUIRE(append(pool, k, v, consecutive_slots(0, 15)).ok());
    check_rows(pool, Side::kK, k, 15, 0.37f);
    check_rows(pool, Side::kV, v, 15, 5.0f);
    // The bytes between blocks belong to somebody else.
    for (int64_t i = 0; i < 7; ++i)
      CHECK(pool.bytes()[static_cast<size_t>(pool.layer().page.page_bytes + i)] == std::byte{0xFF});
  });
}

TEST_CASE("values on and beside every rounding midpoint are encoded alike on every target") {
  // With an amax of 6 and a scale of 1 the products are the values themselves.
  std::vector<float> k;
  for (const float middle : {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f})
    for (const float sign : {1.0f, -1.0f})
      for (const float x : {std::nextafter(middle, 0.0f), middle, std::nextafter(middle, 9.0f)}) {
        k.push_back(6.0f);
        k.push_back(sign * x);
        k.insert(k.end(), 14, 0.0f);
      }
  const auto rows = static_cast<int64_t>(k.size() / 16);
  std::vector<float> v = k;
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    Pool pool(nvfp4_geometry(1, 1, 16), rows);
    REQUIRE(append(pool, k, v, consecutive_slots(0, rows)).ok());
    check_rows(pool, Side::kK, k, rows, 1.0f);
  });
}

TEST_CASE("the golden page is reproduced byte for byte") {
  const std::string expected = test::goldens()["page"]["linear"];
  REQUIRE(expected.size() == 2 * 576);
  // The golden's values come in the order [head][token][dim], first K and then V.
  test::Lcg lcg{7};
  std::vector<float> sides[2];
  for (auto& side : sides) side = lcg.values(2 * 4 * 64);
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    Pool pool(nvfp4_geometry(2, 4, 64), 1);
    const auto slots = consecutive_slots(0, 4);
    AppendParams params;
    params.layer = pool.layer();
    params.k = {sides[0].data(), Dtype::kFp32, {4, 2, 64}, {64, 4 * 64, 1}};
    params.v = {sides[1].data(), Dtype::kFp32, {4, 2, 64}, {64, 4 * 64, 1}};
    params.slots = slots.data();
    params.num_slots = 4;
    REQUIRE(run_append(params).ok());
    for (size_t i = 0; i < 576; ++i)
      REQUIRE(std::to_integer<unsigned long>(pool.bytes()[i]) ==
              std::stoul(expected.substr(2 * i, 2), nullptr, 16));
  });
}

TEST_CASE("read-back is within 0.15 of the input for every layout, K and V on their own") {
  auto engine = test::random_engine(11);
  CAPTURE(test::seed());
  for (const int32_t heads : {1, 2, 3, 4, 8})
    for (const int32_t block_tokens : {4, 8, 16, 64})
      for (const bool head_major : {false, true}) {
        CAPTURE(heads);
        CAPTURE(block_tokens);
        const int64_t rows = 67;
        Pool pool(nvfp4_geometry(heads, block_tokens, 64), 64 / block_tokens + 16);
        std::vector<float> k = normal_values(engine, rows * heads * 64);
        std::vector<float> v = normal_values(engine, rows * heads * 64);
        const auto slots = consecutive_slots(2, rows);
        AppendParams params;
        params.layer = pool.layer();
        params.k = dense_tensor(k.data(), Dtype::kFp32, rows, heads, 64);
        params.v = dense_tensor(v.data(), Dtype::kFp32, rows, heads, 64);
        if (head_major) params.k.strides = params.v.strides = {64, rows * 64, 1};
        params.slots = slots.data();
        params.num_slots = rows;
        REQUIRE(run_append(params).ok());
        for (const Side side : {Side::kK, Side::kV}) {
          const std::vector<float>& in = side == Side::kK ? k : v;
          std::vector<double> read, expected;
          for (int64_t row = 0; row < rows; ++row)
            for (int64_t head = 0; head < heads; ++head) {
              const auto values = pool.read(side, row + 2, head);
              read.insert(read.end(), values.begin(), values.end());
              const int64_t at = head_major ? head * rows + row : row * heads + head;
              expected.insert(expected.end(), in.begin() + at * 64, in.begin() + at * 64 + 64);
            }
          const double error = test::relative_l2(read, expected);
          CHECK(error < 0.15);
          CHECK(error > 0.05);
        }
      }
}

TEST_CASE("negative slots are skipped and write nothing") {
  auto engine = test::random_engine(12);
  Pool pool(nvfp4_geometry(2, 4, 32), 3, std::byte{0xA5});
  const std::vector<std::byte> before = pool.bytes();
  std::vector<float> k(8 * 2 * 32, kNan);
  std::vector<float> v = k;
  const int64_t lowest = std::numeric_limits<int64_t>::min();
  const int64_t lowest32 = std::numeric_limits<int32_t>::min();
  REQUIRE(append(pool, k, v, {-1, -1, lowest32, lowest, -1, -4, -12, -1}).ok());
  CHECK(pool.bytes() == before);

  k = normal_values(engine, 8 * 2 * 32);
  REQUIRE(append(pool, k, v, {-1, 3, -1, 11, 0, -1, -1, 6}).ok());
  for (int64_t slot = 0; slot < 12; ++slot) {
    const bool written = slot == 3 || slot == 11 || slot == 0 || slot == 6;
    for (int64_t head = 0; head < 2; ++head) {
      const auto at = static_cast<size_t>(pool.data_offset(Side::kK, slot, head));
      CHECK(std::equal(before.begin() + static_cast<int64_t>(at),
                       before.begin() + static_cast<int64_t>(at) + 16,
                       pool.bytes().begin() + static_cast<int64_t>(at)) == !written);
    }
  }
}

TEST_CASE("a NaN or an infinity changes no byte outside its own group") {
  auto engine = test::random_engine(13);
  CAPTURE(test::seed());
  for (const float bad : {kNan, std::numeric_limits<float>::infinity()}) {
    Pool clean(nvfp4_geometry(2, 4, 64), 1);
    Pool dirty(nvfp4_geometry(2, 4, 64), 1);
    std::vector<float> k = normal_values(engine, 4 * 2 * 64);
    std::vector<float> v = normal_values(engine, 4 * 2 * 64);
    REQUIRE(append(clean, k, v, consecutive_slots(0, 4)).ok());
    k[(2 * 2 + 1) * 64 + 3 * 16 + 5] = bad;  // token 2, head 1, group 3
    REQUIRE(append(dirty, k, v, consecutive_slots(0, 4)).ok());
    const int64_t data = clean.data_offset(Side::kK, 2, 1) + 3 * 8;
    const int64_t scale = clean.scale_offset(Side::kK, 2, 1) + 3;
    for (int64_t i = 0; i < 576; ++i) {
      if ((i >= data && i < data + 8) || i == scale) continue;
      REQUIRE(clean.bytes()[static_cast<size_t>(i)] == dirty.bytes()[static_cast<size_t>(i)]);
    }
    for (const double x : dirty.read(Side::kK, 2, 1)) CHECK(std::isfinite(x));
  }
}

TEST_CASE("appending 7 and then 9 tokens gives the bytes of appending 16") {
  auto engine = test::random_engine(14);
  const AttentionGeometry geometry = {1, 2, 4, 64, 32, KvFormat::kNvfp4, KvFormat::kBf16};
  std::vector<float> k = normal_values(engine, 16 * 2 * 64);
  std::vector<float> v = normal_values(engine, 16 * 2 * 32);
  Pool whole(geometry, 4);
  REQUIRE(append(whole, k, v, consecutive_slots(0, 16)).ok());
  Pool chunked(geometry, 4);
  std::vector<float> k_head(k.begin(), k.begin() + 7 * 128), k_tail(k.begin() + 7 * 128, k.end());
  std::vector<float> v_head(v.begin(), v.begin() + 7 * 64), v_tail(v.begin() + 7 * 64, v.end());
  REQUIRE(append(chunked, k_head, v_head, consecutive_slots(0, 7)).ok());
  REQUIRE(append(chunked, k_tail, v_tail, consecutive_slots(7, 9)).ok());
  CHECK(whole.bytes() == chunked.bytes());
}

TEST_CASE("dtype and strides of the input do not matter, only its values") {
  auto engine = test::random_engine(15);
  CAPTURE(test::seed());
  const int64_t rows = 5, heads = 3, dim = 48;
  // Multiples of 1/16 below 8 are exact in all three dtypes.
  std::vector<float> dense(static_cast<size_t>(rows * heads * dim));
  for (float& x : dense) x = static_cast<float>(static_cast<int>(engine() % 255) - 127) / 16.0f;
  const AttentionGeometry geometry = {1, 3, 4, 48, 48, KvFormat::kNvfp4, KvFormat::kBf16};
  Pool expected(geometry, 2);
  REQUIRE(append(expected, dense, dense, consecutive_slots(1, rows)).ok());
  const auto slots = consecutive_slots(1, rows);

  const std::array<int64_t, 3> layouts[] = {
      {heads * dim, dim, 1},           // dense
      {2 * heads * dim, dim, 1},       // half of an interleaved tensor
      {dim, rows * dim, 1},            // heads outermost
      {2 * heads * dim, 2 * dim, 1},   // every second head
      {1, rows, rows * heads},         // dim outermost
      {-heads * dim, dim, 1},          // backwards
      {2 * heads * dim, 2 * dim, 2}};  // every second element
  for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32})
    for (const auto& strides : layouts) {
      CAPTURE(name(dtype));
      CAPTURE(strides[0]);
      std::vector<float> spread(static_cast<size_t>(4 * rows * heads * dim), 99.0f);
      const int64_t origin = strides[0] < 0 ? (rows - 1) * -strides[0] : 0;
      for (int64_t r = 0; r < rows; ++r)
        for (int64_t h = 0; h < heads; ++h)
          for (int64_t d = 0; d < dim; ++d)
            spread[static_cast<size_t>(origin + r * strides[0] + h * strides[1] + d * strides[2])] =
                dense[static_cast<size_t>((r * heads + h) * dim + d)];
      std::vector<std::byte> bytes = to_dtype(spread, dtype);
      void* data = bytes.data() + origin * dtype_bytes(dtype);
      test::on_every_target([&](const std::string& target) {
        CAPTURE(target);
        Pool pool(geometry, 2);
        AppendParams params;
        params.layer = pool.layer();
        params.k = params.v = {data, dtype, {rows, heads, dim}, strides};
        params.slots = slots.data();
        params.num_slots = rows;
        REQUIRE(run_append(params).ok());
        CHECK(pool.bytes() == expected.bytes());
      });
    }
}

TEST_CASE("the stride of an axis of size 1 may be anything") {
  auto engine = test::random_engine(16);
  std::vector<float> k = normal_values(engine, 16);
  Pool expected(nvfp4_geometry(1, 1, 16), 1);
  REQUIRE(append(expected, k, k, {0}).ok());
  for (const int64_t stride : {int64_t{7}, int64_t{0}, int64_t{1} << 40, int64_t{-1}}) {
    Pool pool(nvfp4_geometry(1, 1, 16), 1);
    const int64_t slot = 0;
    AppendParams params;
    params.layer = pool.layer();
    params.k = params.v = {k.data(), Dtype::kFp32, {1, 1, 16}, {stride, stride, 1}};
    params.slots = &slot;
    params.num_slots = 1;
    REQUIRE(run_append(params).ok());
    CHECK(pool.bytes() == expected.bytes());
  }
}

TEST_CASE("bf16 pools keep bf16 bits as they are and round fp32 to nearest even") {
  const AttentionGeometry geometry = {1, 1, 2, 5, 3, KvFormat::kBf16, KvFormat::kBf16};
  Pool pool(geometry, 1);
  pool.layer().k_scale = 0.5f;  // 16-bit formats store the value itself
  std::vector<uint16_t> k = {0x3F80, 0x7FC1, 0x7F81, 0x8000, 0x0001};
  std::vector<float> v = {1.00390625f, 1.01171875f, -3.0f};
  const int64_t slot = 1;
  AppendParams params;
  params.layer = pool.layer();
  params.k = dense_tensor(k.data(), Dtype::kBf16, 1, 1, 5);
  params.v = dense_tensor(v.data(), Dtype::kFp32, 1, 1, 3);
  params.slots = &slot;
  params.num_slots = 1;
  REQUIRE(run_append(params).ok());
  CHECK(std::memcmp(pool.bytes().data() + 10, k.data(), 10) == 0);
  const uint16_t expected[3] = {0x3F80, 0x3F82, 0xC040};
  CHECK(std::memcmp(pool.bytes().data() + 20 + 6, expected, 6) == 0);
}

TEST_CASE("of two rows with one slot the later stays, and rows past num_slots are ignored") {
  std::vector<float> k(3 * 16, 1.0f);
  std::fill(k.begin() + 16, k.begin() + 32, 2.0f);
  std::fill(k.begin() + 32, k.end(), 4.0f);
  Pool pool(nvfp4_geometry(1, 1, 16), 1);
  const int64_t slots[] = {0, 0};
  AppendParams params;
  params.layer = pool.layer();
  params.k = params.v = dense_tensor(k.data(), Dtype::kFp32, 3, 1, 16);
  params.slots = slots;
  params.num_slots = 2;
  REQUIRE(run_append(params).ok());
  CHECK(pool.read(Side::kK, 0, 0)[0] == doctest::Approx(2.0).epsilon(0.04));
}

}  // namespace
}  // namespace larder::kernels
