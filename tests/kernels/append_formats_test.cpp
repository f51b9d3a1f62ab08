// append into every format by every encoder and key transform: random calls against an oracle that
// writes its own page, on every vector target.
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/cpu/nvfp4_search.h"
#include "kernels/cpu/rotate.h"
#include "kernels/kernel_table.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Pool;
using test::Side;

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInfinity = std::numeric_limits<float>::infinity();

void put_u16(uint16_t bits, std::byte* target) { std::memcpy(target, &bits, sizeof(bits)); }

uint16_t expected_bf16(float x) {
  const auto upper = static_cast<uint16_t>(std::bit_cast<uint32_t>(x) >> 16);
  return std::isnan(x) ? static_cast<uint16_t>(upper | 0x40) : test::nearest_bf16(x);
}

uint16_t expected_fp16(float x) {
  const uint32_t bits = std::bit_cast<uint32_t>(x);
  if (!std::isnan(x)) return test::nearest_fp16(x);
  return static_cast<uint16_t>((bits >> 16 & 0x8000) | 0x7E00 | (bits >> 13 & 0x3FF));
}

void expect_nvfp4(Encoder encoder, const float* values, int64_t dim, float scale, std::byte* data,
                  std::byte* scales) {
  for (int64_t group = 0; group < dim / 16; ++group) {
    if (encoder != Encoder::kReference) {  // judged in encoder_test.cpp
      encode_nvfp4_group_ref(encoder, values + group * 16, scale, data + group * 8, scales + group);
      continue;
    }
    const test::Nvfp4Group expected = test::nvfp4_group(values + group * 16, scale);
    std::memcpy(data + group * 8, expected.data, 8);
    scales[group] = static_cast<std::byte>(expected.scale);
  }
}

void expect_row(KvFormat format, Encoder encoder, const float* values, int64_t dim, float scale,
                std::byte* data, std::byte* scales) {
  if (format == KvFormat::kNvfp4) return expect_nvfp4(encoder, values, dim, scale, data, scales);
  for (int64_t i = 0; i < dim; ++i) {
    const float x = values[i];
    switch (format) {
      case KvFormat::kBf16:
        put_u16(expected_bf16(x), data + 2 * i);
        break;
      case KvFormat::kFp16:
        put_u16(expected_fp16(x), data + 2 * i);
        break;
      case KvFormat::kFp8E4m3:
        data[i] = static_cast<std::byte>(std::isnan(x) ? 0x7F : test::nearest_e4m3(x / scale));
        break;
      default:
        data[i] = static_cast<std::byte>(std::isnan(x) ? 0x7F : test::nearest_e5m2(x / scale));
        break;
    }
  }
}

// One random call: where the elements are, and what they are as floats.
struct RandomSource {
  RandomSource(std::mt19937_64& engine, int64_t rows, int64_t heads, int64_t dim, float amplitude) {
    dtype = static_cast<Dtype>(engine() % 3);
    switch (engine() % 4) {
      case 0:
        strides = {heads * dim, dim, 1};
        break;
      case 1:
        strides = {2 * heads * dim + 3, dim, 1};
        break;
      case 2:
        strides = {dim, rows * dim, 1};
        break;
      default:
        strides = {1, rows, rows * heads};
        break;
    }
    shape = {rows, heads, dim};
    std::normal_distribution<float> normal(0, amplitude);
    const float specials[] = {kNan, -kNan, kInfinity, -kInfinity, -0.0f, 1e-40f, 1e38f};
    std::vector<float> values(static_cast<size_t>(3 * (rows * heads * dim + rows)));
    for (float& x : values) x = engine() % 50 == 0 ? specials[engine() % 7] : normal(engine);
    bytes = test::to_dtype(values, dtype);
  }

  float at(int64_t row, int64_t head, int64_t i) const {
    const int64_t index = row * strides[0] + head * strides[1] + i * strides[2];
    const auto* element = bytes.data() + index * dtype_bytes(dtype);
    float value = 0;
    uint16_t bits = 0;
    if (dtype == Dtype::kFp32) {
      std::memcpy(&value, element, 4);
      return value;
    }
    std::memcpy(&bits, element, 2);
    return dtype == Dtype::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
  }
  uint16_t bits_at(int64_t row, int64_t head, int64_t i) const {
    uint16_t bits = 0;
    const int64_t index = row * strides[0] + head * strides[1] + i * strides[2];
    std::memcpy(&bits, bytes.data() + 2 * index, 2);
    return bits;
  }
  TensorView view() { return {bytes.data(), dtype, shape, strides}; }

  Dtype dtype;
  std::array<int64_t, 3> shape;
  std::array<int64_t, 3> strides;
  std::vector<std::byte> bytes;
};

void expect_side(Pool& pool, Side side, const RandomSource& source,
                 const std::vector<int64_t>& slots) {
  const LayerView& layer = pool.layer();
  const KvFormat format = side == Side::kK ? layer.geometry.k_format : layer.geometry.v_format;
  const int64_t dim = pool.dim(side);
  const auto transform = side == Side::kK ? layer.key_transform : KeyTransform::kNone;
  const bool keeps_bits = transform == KeyTransform::kNone &&
                          ((format == KvFormat::kBf16 && source.dtype == Dtype::kBf16) ||
                           (format == KvFormat::kFp16 && source.dtype == Dtype::kFp16));
  for (size_t row = 0; row < slots.size(); ++row)
    for (int64_t head = 0; head < layer.geometry.num_kv_heads; ++head) {
      if (slots[row] < 0) continue;
      std::byte* data = pool.bytes().data() + pool.data_offset(side, slots[row], head);
      std::byte* scales = pool.bytes().data() + pool.scale_offset(side, slots[row], head);
      std::vector<float> values;
      for (int64_t i = 0; i < dim; ++i) {
        values.push_back(source.at(static_cast<int64_t>(row), head, i));
        if (is_centred(transform)) values.back() -= layer.key_offset[head * dim + i];
        if (keeps_bits) put_u16(source.bits_at(static_cast<int64_t>(row), head, i), data + 2 * i);
      }
      if (keeps_bits) continue;
      if (is_rotated(transform)) rotate_row_ref(values.data(), dim);
      expect_row(format, layer.encoder, values.data(), dim,
                 side == Side::kK ? layer.k_scale : layer.v_scale, data, scales);
    }
}

int32_t random_dim(std::mt19937_64& engine, KvFormat format, bool multiple_of_16) {
  if (format == KvFormat::kNvfp4 || multiple_of_16)
    return static_cast<int32_t>(16 * (1 + engine() % 13));
  return static_cast<int32_t>(1 + engine() % 100);
}

AttentionGeometry random_geometry(std::mt19937_64& engine, KeyTransform transform) {
  AttentionGeometry geometry;
  geometry.num_layers = 1;
  geometry.num_kv_heads = static_cast<int32_t>(1 + engine() % 4);
  geometry.block_tokens = static_cast<int32_t>(1 + engine() % 20);
  geometry.k_format = static_cast<KvFormat>(engine() % kKvFormatNames.size());
  geometry.v_format = static_cast<KvFormat>(engine() % kKvFormatNames.size());
  geometry.k_dim = random_dim(engine, geometry.k_format, is_rotated(transform));
  geometry.v_dim = random_dim(engine, geometry.v_format, false);
  return geometry;
}

TEST_CASE("random calls write the oracle's bytes and no other, on every target") {
  auto engine = test::random_engine(20);
  CAPTURE(test::seed());
  for (int round = 0; round < 400; ++round) {
    const auto transform = static_cast<KeyTransform>(engine() % kKeyTransformNames.size());
    const AttentionGeometry geometry = random_geometry(engine, transform);
    const auto extra = static_cast<int64_t>(engine() % 9);
    Pool expected(geometry, 3, std::byte{0xA5}, extra);
    std::uniform_real_distribution<float> exponent(-6, 6);
    LayerView& layer = expected.layer();
    layer.k_scale = engine() % 3 == 0 ? 1.0f : std::exp2(exponent(engine));
    layer.v_scale = engine() % 20 == 0 ? std::numeric_limits<float>::min() : 0.3f;
    layer.encoder = static_cast<Encoder>(engine() % kEncoderNames.size());
    layer.key_transform = transform;
    const std::vector<float> offset =
        test::normal_values(engine, int64_t{geometry.num_kv_heads} * geometry.k_dim);
    layer.key_offset = offset.data();
    const auto rows = static_cast<int64_t>(1 + engine() % 6);
    std::vector<int64_t> slots;
    for (int64_t i = 0; i < rows; ++i)
      slots.push_back(static_cast<int64_t>(engine() % (3 * geometry.block_tokens + 1)) - 1);
    RandomSource k(engine, rows, geometry.num_kv_heads, geometry.k_dim,
                   std::exp2(exponent(engine)));
    RandomSource v(engine, rows, geometry.num_kv_heads, geometry.v_dim, 1.0f);
    expect_side(expected, Side::kK, k, slots);
    expect_side(expected, Side::kV, v, slots);
    test::on_every_target([&](const std::string& target) {
      CAPTURE(round);
      CAPTURE(target);
      CAPTURE(name(geometry.k_format));
      CAPTURE(name(geometry.v_format));
      CAPTURE(name(layer.encoder));
      CAPTURE(name(transform));
      Pool pool(geometry, 3, std::byte{0xA5}, extra);
      AppendParams params;
      params.layer = expected.layer();
      params.layer.base = pool.bytes().data();
      params.k = k.view();
      params.v = v.view();
      params.slots = slots.data();
      params.num_slots = rows;
      REQUIRE(run_append(params).ok());
      for (size_t i = 0; i < pool.bytes().size(); ++i) {
        CAPTURE(i);
        REQUIRE(std::to_integer<int>(pool.bytes()[i]) == std::to_integer<int>(expected.bytes()[i]));
      }
    });
  }
}

TEST_CASE("fp8 saturates to 448 and to 57344 times the scale, and a NaN stays one") {
  const float values[] = {1e4f, -1e4f, 1e9f, kInfinity, -kInfinity, kNan, -kNan, 0.0f, -0.0f};
  struct {
    KvFormat format;
    int expected[9];
  } const cases[] = {
      {KvFormat::kFp8E4m3, {0x7E, 0xFE, 0x7E, 0x7E, 0xFE, 0x7F, 0x7F, 0x00, 0x80}},
      {KvFormat::kFp8E5m2, {0x75, 0xF5, 0x7B, 0x7B, 0xFB, 0x7F, 0x7F, 0x00, 0x80}},
  };
  for (const auto& c : cases)
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      Pool pool({1, 1, 1, 9, 9, c.format, c.format}, 1);
      pool.layer().k_scale = 0.5f;
      std::vector<float> k(values, values + 9);
      std::vector<float> v = k;
      REQUIRE(test::append(pool, k, v, {0}).ok());
      for (size_t i = 0; i < 9; ++i) CHECK(std::to_integer<int>(pool.bytes()[i]) == c.expected[i]);
      if (c.format == KvFormat::kFp8E4m3) CHECK(pool.read(Side::kK, 0, 0)[0] == 448 * 0.5);
    });
}

TEST_CASE("k_scale and v_scale reach their own side, and rows read back whatever they are") {
  auto engine = test::random_engine(21);
  CAPTURE(test::seed());
  for (const KvFormat format : {KvFormat::kFp8E4m3, KvFormat::kFp8E5m2, KvFormat::kNvfp4}) {
    Pool one({1, 2, 16, 64, 64, format, format}, 1);
    Pool two({1, 2, 16, 64, 64, format, format}, 1);
    two.layer().k_scale = 0.3f;
    two.layer().v_scale = 2.1f;
    std::vector<float> k = test::normal_values(engine, 16 * 2 * 64);
    std::vector<float> v = test::normal_values(engine, 16 * 2 * 64);
    for (Pool* pool : {&one, &two})
      REQUIRE(test::append(*pool, k, v, test::consecutive_slots(0, 16)).ok());
    CHECK(one.bytes() != two.bytes());
    for (int64_t slot = 0; slot < 16; ++slot)
      for (int64_t head = 0; head < 2; ++head)
        for (const Side side : {Side::kK, Side::kV}) {
          const float* in = (side == Side::kK ? k : v).data() + (slot * 2 + head) * 64;
          double error = 0, norm = 0;
          const auto read = two.read(side, slot, head);
          for (size_t i = 0; i < 64; ++i) {
            error += (read[i] - in[i]) * (read[i] - in[i]);
            norm += in[i] * in[i];
          }
          CHECK(std::sqrt(error / norm) < (format == KvFormat::kNvfp4 ? 0.2 : 0.08));
        }
  }
}

}  // namespace
}  // namespace larder::kernels
