// append with RoPE: the turned values by an independent definition, and the bytes of a separate
// rotation that is followed by append.
#include "kernels/cpu/rope.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::consecutive_slots;
using test::normal_values;
using test::Pool;
using test::Side;
using test::to_dtype;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr Dtype kDtypes[] = {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32};

double value_of(const std::vector<std::byte>& bytes, int64_t index, Dtype dtype) {
  const auto size = static_cast<size_t>(dtype_bytes(dtype));
  uint32_t bits = 0;
  std::memcpy(&bits, bytes.data() + static_cast<size_t>(index) * size, size);
  if (dtype == Dtype::kFp32) return std::bit_cast<float>(bits);
  const auto half = static_cast<uint16_t>(bits);
  return dtype == Dtype::kBf16 ? test::bf16_value(half) : test::fp16_value(half);
}

void set_value(std::vector<std::byte>& bytes, int64_t index, Dtype dtype, float value) {
  const auto size = static_cast<size_t>(dtype_bytes(dtype));
  uint32_t bits = std::bit_cast<uint32_t>(value);
  if (dtype == Dtype::kBf16) bits = std::isnan(value) ? 0x7FC0 : test::nearest_bf16(value);
  if (dtype == Dtype::kFp16) bits = std::isnan(value) ? 0x7E00 : test::nearest_fp16(value);
  std::memcpy(bytes.data() + static_cast<size_t>(index) * size, &bits, size);
}

// A rotation in place of dense [rows, heads, dim] values, by the words of larder/rope.h. A float
// operation is one in double that is rounded to float: that is the same.
void rotate_apart(std::vector<std::byte>& bytes, Dtype dtype, int64_t rows, int64_t heads,
                  int64_t dim, const Rope& rope) {
  const auto product = [](double a, double b) { return static_cast<float>(a * b); };
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t position = rope.positions != nullptr     ? rope.positions[row]
                             : rope.positions32 != nullptr ? rope.positions32[row]
                                                           : row;
    for (int64_t pair = 0; pair < rope.dim / 2; ++pair) {
      const double angle =
          static_cast<double>(position) *
          std::pow(rope.theta, -2.0 * static_cast<double>(pair) / static_cast<double>(rope.dim));
      double cosine = static_cast<float>(std::cos(angle));
      double sine = static_cast<float>(std::sin(angle));
      if (rope.cos != nullptr) {
        const auto at = [&](const void* table) {
          const auto size = static_cast<size_t>(dtype_bytes(rope.table_dtype));
          const auto* first = static_cast<const std::byte*>(table) +
                              static_cast<size_t>(position * rope.table_stride + pair) * size;
          return value_of({first, first + size}, 0, rope.table_dtype);
        };
        cosine = at(rope.cos);
        sine = at(rope.sin);
      }
      for (int64_t head = 0; head < heads; ++head) {
        const int64_t begin = (row * heads + head) * dim;
        const int64_t first = begin + (rope.interleaved ? 2 * pair : pair);
        const int64_t second = begin + (rope.interleaved ? 2 * pair + 1 : pair + rope.dim / 2);
        const double x = value_of(bytes, first, dtype);
        const double y = value_of(bytes, second, dtype);
        set_value(bytes, first, dtype,
                  static_cast<float>(double{product(x, cosine)} - double{product(y, sine)}));
        set_value(bytes, second, dtype,
                  static_cast<float>(double{product(y, cosine)} + double{product(x, sine)}));
      }
    }
  }
}

// A call of `rows` rows on a pool of 4 blocks; K and V, or latent and rope of MLA.
struct Call {
  Call(std::mt19937_64& engine, const AttentionGeometry& shape, int64_t num_rows, Dtype type)
      : geometry(shape), rows(num_rows), dtype(type) {
    const bool is_mla = shape.mla_row != MlaRow::kNone;
    k_dim = is_mla ? 512 : shape.k_dim;
    v_dim = is_mla ? 64 : shape.v_dim;
    k = to_dtype(normal_values(engine, rows * shape.num_kv_heads * k_dim), type);
    v = to_dtype(normal_values(engine, rows * shape.num_kv_heads * v_dim), type);
    slots = consecutive_slots(1, rows);
    for (int64_t row = 0; row < rows; ++row)
      positions.push_back(static_cast<int64_t>(engine() % 1'000'000));
    offsets = normal_values(engine, int64_t{shape.num_kv_heads} * shape.k_dim);
  }
  AppendParams params(Pool& pool) {
    AppendParams params;
    pool.layer().k_scale = 0.37f;
    pool.layer().v_scale = 1.5f;
    pool.layer().encoder = encoder;
    pool.layer().key_transform = transform;
    pool.layer().key_offset = offsets.data();
    params.layer = pool.layer();
    params.k = dense_tensor(k.data(), dtype, rows, geometry.num_kv_heads, k_dim);
    params.v = dense_tensor(v.data(), dtype, rows, geometry.num_kv_heads, v_dim);
    params.slots = slots.data();
    params.num_slots = rows;
    return params;
  }
  // The call with rotation has the bytes of the call after a rotation.
  void check(const Rope& rope) {
    Pool apart(geometry, 4, std::byte{0xFF}, 3);
    Call turned = *this;
    if (geometry.mla_row != MlaRow::kNone)
      rotate_apart(turned.v, dtype, rows, 1, 64, rope);
    else
      rotate_apart(turned.k, dtype, rows, geometry.num_kv_heads, k_dim, rope);
    REQUIRE(run_append(turned.params(apart)).ok());
    test::on_next_target([&](const std::string& target) {
      CAPTURE(target);
      Pool fused(geometry, 4, std::byte{0xFF}, 3);
      AppendParams append = params(fused);
      append.rope = rope;
      const Status status = run_append(append);
      CAPTURE(status.to_string());
      REQUIRE(status.ok());
      CHECK(fused.bytes() == apart.bytes());
    });
  }

  AttentionGeometry geometry;
  int64_t rows, k_dim, v_dim;
  Dtype dtype;
  Encoder encoder = Encoder::kReference;
  KeyTransform transform = KeyTransform::kNone;
  std::vector<std::byte> k, v;
  std::vector<int64_t> slots, positions;
  std::vector<float> offsets;
};

TEST_CASE("a turned pair is the plane rotation by position * theta^(-2i / dim), also far out") {
  auto engine = test::random_engine(110);
  CAPTURE(test::seed());
  for (const double theta : {10000.0, 1.5, 5e6})
    for (const bool interleaved : {false, true})
      for (const int32_t dim : {2, 6, 64, 256}) {
        std::vector<int64_t> positions = {0, 1, 2, 131'071, 1'000'000};
        Rope rope;
        rope.dim = dim;
        rope.interleaved = interleaved;
        rope.theta = theta;
        rope.positions = positions.data();
        cpu::Rotation rotation(rope);
        const int64_t count = dim + 3;
        const std::vector<float> in = normal_values(engine, count);
        for (size_t row = 0; row < positions.size(); ++row) {
          std::vector<float> out(in.size(), kNan);
          rotation.begin_row(static_cast<int64_t>(row));
          rotation.rotate(Dtype::kFp32, reinterpret_cast<const std::byte*>(in.data()), 1, count,
                          reinterpret_cast<std::byte*>(out.data()));
          for (int32_t i = 0; i < dim / 2; ++i) {
            const auto first = static_cast<size_t>(interleaved ? 2 * i : i);
            const auto second = static_cast<size_t>(interleaved ? 2 * i + 1 : i + dim / 2);
            const long double angle = static_cast<long double>(positions[row]) *
                                      std::pow(static_cast<long double>(theta), -2.0L * i / dim);
            const long double x = in[first], y = in[second];
            const long double c = std::cos(angle), s = std::sin(angle);
            // Three roundings to float, and what float64 loses of an angle of a million.
            const double bound = 3e-7 * static_cast<double>(std::abs(x) + std::abs(y));
            CAPTURE(positions[row]);
            CAPTURE(i);
            CHECK(std::abs(static_cast<double>(x * c - y * s) - out[first]) <= bound);
            CHECK(std::abs(static_cast<double>(y * c + x * s) - out[second]) <= bound);
          }
          for (auto i = static_cast<size_t>(dim); i < in.size(); ++i) CHECK(out[i] == in[i]);
        }
      }
}

TEST_CASE("hand-computed turns: tables give cosine and sine, each operation is rounded") {
  // (3, 4) by (0.5, 0.25): 3 * 0.5 - 4 * 0.25 and 4 * 0.5 + 3 * 0.25; the third value stays.
  const float cosines[] = {9, 0.5f}, sines[] = {9, 0.25f};
  const int32_t position = 1;
  const std::vector<float> k = {3, 4, 7};
  Pool pool({1, 1, 2, 3, 3, KvFormat::kFp16, KvFormat::kBf16}, 1);
  const int32_t slot = 1;
  AppendParams params;
  params.layer = pool.layer();
  params.k = params.v = dense_tensor(const_cast<float*>(k.data()), Dtype::kFp32, 1, 1, 3);
  params.slots32 = &slot;
  params.num_slots = 1;
  params.rope.dim = 2;
  params.rope.cos = cosines;
  params.rope.sin = sines;
  params.rope.table_stride = 1;
  params.rope.table_rows = 2;
  params.rope.positions32 = &position;
  REQUIRE(run_append(params).ok());
  CHECK(pool.read(Side::kK, 1, 0) == std::vector<double>{0.5, 2.75, 7});
  CHECK(pool.read(Side::kV, 1, 0) == std::vector<double>{3, 4, 7});
  // Without positions row i has row i of the tables: 3 * 9 - 4 * 9 and 4 * 9 + 3 * 9.
  params.rope.positions32 = nullptr;
  REQUIRE(run_append(params).ok());
  CHECK(pool.read(Side::kK, 1, 0) == std::vector<double>{-9, 63, 7});
}

TEST_CASE("append with RoPE writes the bytes of a rotation and append, for every format") {
  auto engine = test::random_engine(111);
  CAPTURE(test::seed());
  for (size_t format = 0; format < kKvFormatNames.size(); ++format)
    for (const Dtype dtype : kDtypes)
      for (const KeyTransform transform : {KeyTransform::kNone, KeyTransform::kCentred,
                                           KeyTransform::kRotated, KeyTransform::kCentredRotated})
        for (const bool interleaved : {false, true})
          for (const int32_t dim : {80, 48, 2}) {
            CAPTURE(kKvFormatNames[format]);
            CAPTURE(name(dtype));
            CAPTURE(name(transform));
            CAPTURE(interleaved);
            CAPTURE(dim);
            const AttentionGeometry geometry = {
                1, 3, 5, 80, 48, static_cast<KvFormat>(format), KvFormat::kNvfp4};
            Call call(engine, geometry, 9, dtype);
            call.transform = transform;
            Rope rope;
            rope.dim = dim;
            rope.interleaved = interleaved;
            rope.positions = call.positions.data();
            call.check(rope);
          }
}

TEST_CASE("append with RoPE writes the bytes of a rotation and append, for every encoder and MLA") {
  auto engine = test::random_engine(112);
  CAPTURE(test::seed());
  for (const Dtype dtype : kDtypes)
    for (const bool interleaved : {false, true}) {
      CAPTURE(name(dtype));
      CAPTURE(interleaved);
      Rope rope;
      rope.dim = 64;
      rope.interleaved = interleaved;
      rope.theta = 500000;
      for (const Encoder encoder :
           {Encoder::kReference, Encoder::kFourOverSix, Encoder::kBestScale}) {
        CAPTURE(name(encoder));
        Call call(engine, {1, 2, 4, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4}, 9, dtype);
        call.encoder = encoder;
        rope.positions = call.positions.data();
        call.check(rope);
      }
      for (const MlaRow row : {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16}) {
        CAPTURE(name(row));
        Call call(engine, mla_geometry(1, 4, row), 9, dtype);
        rope.dim = row == MlaRow::kFp8 ? 32 : 64;
        rope.positions = call.positions.data();
        call.check(rope);
      }
    }
}

TEST_CASE("tables may lie as cosine | sine in one row, in every dtype, with positions of 32 bits") {
  auto engine = test::random_engine(113);
  CAPTURE(test::seed());
  const int64_t table_rows = 100;
  for (const Dtype table_dtype : kDtypes)
    for (const bool interleaved : {false, true}) {
      const int32_t dim = 48;
      std::vector<float> values;
      for (int64_t p = 0; p < table_rows; ++p)
        for (int32_t i = 0; i < dim; ++i) {
          const double angle = static_cast<double>(p) * std::pow(1e4, -2.0 * (i % 24) / dim);
          values.push_back(static_cast<float>(i < 24 ? std::cos(angle) : std::sin(angle)));
        }
      const std::vector<std::byte> cache = to_dtype(values, table_dtype);
      Call call(engine, {1, 3, 5, 80, 48, KvFormat::kBf16, KvFormat::kNvfp4}, 9, Dtype::kBf16);
      std::vector<int32_t> positions = {99, 0, 1, 50, 50, 2, 3, 98, 17};
      Rope rope;
      rope.dim = dim;
      rope.interleaved = interleaved;
      rope.cos = cache.data();
      rope.sin = cache.data() + 24 * dtype_bytes(table_dtype);
      rope.table_dtype = table_dtype;
      rope.table_stride = dim;
      rope.table_rows = table_rows;
      rope.positions32 = positions.data();
      CAPTURE(name(table_dtype));
      call.check(rope);
      rope.positions32 = nullptr;  // row i of the tables
      call.check(rope);
    }
}

TEST_CASE("strides of keys do not matter to a rotation, and the caller's keys stay") {
  auto engine = test::random_engine(114);
  CAPTURE(test::seed());
  const int64_t rows = 5, heads = 2, dim = 32;
  const AttentionGeometry geometry = {1, 2, 4, 32, 32, KvFormat::kNvfp4, KvFormat::kBf16};
  Call call(engine, geometry, rows, Dtype::kBf16);
  Rope rope;
  rope.dim = 16;
  rope.positions = call.positions.data();
  Pool expected(geometry, 4);
  AppendParams params = call.params(expected);
  params.rope = rope;
  REQUIRE(run_append(params).ok());
  std::vector<uint16_t> spread(static_cast<size_t>(2 * rows * heads * dim), 0xFFFF);
  for (int64_t i = 0; i < rows * heads * dim; ++i)
    std::memcpy(&spread[static_cast<size_t>(2 * i)], call.k.data() + 2 * i, 2);
  const std::vector<uint16_t> before = spread;
  Pool pool(geometry, 4);
  params = call.params(pool);
  params.rope = rope;
  params.k.data = spread.data();
  params.k.strides = {2 * heads * dim, 2 * dim, 2};
  REQUIRE(run_append(params).ok());
  CHECK(pool.bytes() == expected.bytes());
  CHECK(spread == before);
}

TEST_CASE("a NaN turns its pair into the positive quiet NaN and no other, skipped rows stay") {
  Pool pool({1, 1, 2, 4, 4, KvFormat::kBf16, KvFormat::kBf16}, 1, std::byte{0xA5});
  const uint16_t k[2][4] = {{0xFFC1, 0x3F80, 0x4000, 0xFFC5}, {0x3F80, 0x3F80, 0x3F80, 0x3F80}};
  const int64_t slots[] = {0, -1};
  const int64_t positions[] = {0, -77};  // of a skipped row: not looked at
  AppendParams params;
  params.layer = pool.layer();
  params.k = params.v = dense_tensor(const_cast<uint16_t*>(&k[0][0]), Dtype::kBf16, 2, 1, 4);
  params.slots = slots;
  params.num_slots = 2;
  params.rope.dim = 2;
  params.rope.positions = positions;
  REQUIRE(run_append(params).ok());
  uint16_t bits[4];
  std::memcpy(bits, pool.bytes().data(), 8);
  CHECK(bits[0] == 0x7FC0);
  CHECK(bits[1] == 0x7FC0);
  CHECK(bits[2] == 0x4000);
  CHECK(bits[3] == 0xFFC5);  // past dim: its payload survives
  CHECK(std::to_integer<int>(pool.bytes()[8]) == 0xA5);
}

}  // namespace
}  // namespace larder::kernels
