// The codecs of kernels/cpu against values from the definitions, and the golden blocks.
#include <bit>
#include <cmath>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/e5m2.h"
#include "kernels/cpu/nvfp4.h"
#include "tests/kernels/goldens.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using nlohmann::json;
using test::goldens;
using test::hex;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

float parse_golden(const std::string& text) {
  if (text == "inf") return kInfinity;
  if (text == "-inf") return -kInfinity;
  if (text == "nan") return kNan;
  return std::stof(text);
}

struct Encoded {
  std::byte data[8];
  std::byte scale[1];
};

Encoded encode(const std::vector<float>& values, float global_scale) {
  REQUIRE(values.size() == 16);
  Encoded encoded{};
  encode_nvfp4_group_ref(values.data(), global_scale, encoded.data, encoded.scale);
  return encoded;
}

TEST_CASE("every E4M3 byte decodes to its value and encodes back to itself") {
  for (int byte = 0; byte < 256; ++byte) {
    const float value = e4m3_to_float(static_cast<uint8_t>(byte));
    CHECK(std::bit_cast<uint32_t>(kE4m3Values[static_cast<size_t>(byte)]) ==
          std::bit_cast<uint32_t>(value));
    if ((byte & 0x7F) == 0x7F) {
      CHECK(std::isnan(value));
      continue;
    }
    CHECK(value == test::e4m3_value(byte));
    CHECK(std::signbit(value) == (byte >= 0x80));
    CHECK(float_to_e4m3(value) == byte);
  }
}

TEST_CASE("E4M3 rounds midpoints to the even byte and their neighbours to the nearer one") {
  for (int byte = 0; byte < 0x7E; ++byte) {
    const auto middle =
        static_cast<float>((test::e4m3_value(byte) + test::e4m3_value(byte + 1)) / 2);
    CHECK(float_to_e4m3(middle) == byte + byte % 2);
    CHECK(float_to_e4m3(std::nextafter(middle, 0.0f)) == byte);
    CHECK(float_to_e4m3(std::nextafter(middle, 1e9f)) == byte + 1);
    CHECK(float_to_e4m3(-middle) == (0x80 | (byte + byte % 2)));
  }
}

TEST_CASE("E4M3 saturates instead of reaching the NaN byte") {
  for (const float value : {448.0f, 449.0f, 464.0f, 480.0f, 1e4f, 3e38f, kInfinity}) {
    CHECK(float_to_e4m3(value) == 0x7E);
    CHECK(float_to_e4m3(-value) == 0xFE);
  }
  CHECK(float_to_e4m3(kNan) == 0x7F);
  CHECK(float_to_e4m3(-kNan) == 0x7F);
  CHECK(float_to_e4m3(0x1p-10f) == 0);
  CHECK(float_to_e4m3(std::numeric_limits<float>::denorm_min()) == 0);
}

TEST_CASE("every E5M2 byte decodes to its value, and encodes back to itself if it is finite") {
  for (int byte = 0; byte < 256; ++byte) {
    const float value = e5m2_to_float(static_cast<uint8_t>(byte));
    const int magnitude = byte & 0x7F;
    if (magnitude > 0x7C) {
      CHECK(std::isnan(value));
      continue;
    }
    CHECK(value == test::e5m2_value(byte));
    CHECK(std::signbit(value) == (byte >= 0x80));
    CHECK(float_to_e5m2(value) == (magnitude == 0x7C ? byte - 1 : byte));
  }
}

TEST_CASE("E5M2 rounds midpoints to the even byte, saturates, and keeps NaN apart") {
  for (int byte = 0; byte < 0x7B; ++byte) {
    const auto middle =
        static_cast<float>((test::e5m2_value(byte) + test::e5m2_value(byte + 1)) / 2);
    CHECK(float_to_e5m2(middle) == byte + byte % 2);
    CHECK(float_to_e5m2(std::nextafter(middle, 0.0f)) == byte);
    CHECK(float_to_e5m2(std::nextafter(middle, 1e9f)) == byte + 1);
    CHECK(float_to_e5m2(-middle) == (0x80 | (byte + byte % 2)));
  }
  for (const float value : {57344.0f, 61440.0f, 65536.0f, 3e38f, kInfinity}) {
    CHECK(float_to_e5m2(value) == 0x7B);
    CHECK(float_to_e5m2(-value) == 0xFB);
  }
  CHECK(float_to_e5m2(kNan) == 0x7F);
  CHECK(float_to_e5m2(-kNan) == 0x7F);
  CHECK(float_to_e5m2(0x1p-17f) == 0);
}

TEST_CASE("the E2M1 codes have the values of the format and round to nearest even") {
  const double values[8] = {0, 0.5, 1, 1.5, 2, 3, 4, 6};
  for (int code = 0; code < 16; ++code) {
    const float value = e2m1_to_float(static_cast<uint8_t>(code));
    CHECK(std::fabs(value) == values[code & 7]);
    CHECK(std::signbit(value) == (code >= 8));
    CHECK(float_to_e2m1(value) == code);
  }
  for (int code = 0; code < 7; ++code) {
    const auto middle = static_cast<float>((values[code] + values[code + 1]) / 2);
    CHECK(float_to_e2m1(middle) == code + code % 2);
    CHECK(float_to_e2m1(std::nextafter(middle, 0.0f)) == code);
    CHECK(float_to_e2m1(std::nextafter(middle, 9.0f)) == code + 1);
    CHECK(float_to_e2m1(-middle) == (8 | (code + code % 2)));
  }
  CHECK(float_to_e2m1(kInfinity) == 7);
  CHECK(float_to_e2m1(-kInfinity) == 15);
  CHECK(float_to_e2m1(std::copysign(kNan, 1.0f)) == 0);
  CHECK(float_to_e2m1(std::copysign(kNan, -1.0f)) == 8);
}

TEST_CASE("every bf16 and fp16 value survives the way to float and back") {
  for (int i = 0; i < 65536; ++i) {
    const auto bits = static_cast<uint16_t>(i);
    if (std::isnan(bf16_to_float(bits))) {
      CHECK(std::isnan(bf16_to_float(float_to_bf16(bf16_to_float(bits)))));
    } else {
      REQUIRE(bf16_to_float(bits) == test::bf16_value(bits));
      REQUIRE(float_to_bf16(bf16_to_float(bits)) == bits);
    }
    const float half = fp16_to_float(bits);
    const int exponent = (bits >> 10) & 31;
    const int mantissa = bits & 1023;
    if (exponent == 31) {
      REQUIRE((mantissa == 0 ? std::isinf(half) : std::isnan(half)));
    } else {
      const double magnitude =
          exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
      REQUIRE(half == (bits >= 0x8000 ? -magnitude : magnitude));
    }
    if (std::isnan(half))
      REQUIRE(std::isnan(fp16_to_float(float_to_fp16(half))));
    else
      REQUIRE(float_to_fp16(half) == bits);
  }
}

TEST_CASE("bf16 and fp16 round midpoints to even and overflow to infinity") {
  for (int i = 0; i < 0x7BFF; ++i) {
    const auto low = static_cast<uint16_t>(i);
    const auto high = static_cast<uint16_t>(i + 1);
    const auto even = static_cast<uint16_t>(i + i % 2);
    const float half_middle = (fp16_to_float(low) + fp16_to_float(high)) / 2;
    REQUIRE(float_to_fp16(half_middle) == even);
    REQUIRE(float_to_fp16(std::nextafter(half_middle, 0.0f)) == low);
    REQUIRE(float_to_fp16(std::nextafter(half_middle, 1e9f)) == high);
    const float middle = std::bit_cast<float>(static_cast<uint32_t>(i) << 16 | 0x8000);
    REQUIRE(float_to_bf16(middle) == even);
    REQUIRE(float_to_bf16(std::bit_cast<float>(std::bit_cast<uint32_t>(middle) + 1)) == high);
  }
  CHECK(float_to_fp16(65519.0f) == 0x7BFF);
  CHECK(float_to_fp16(65520.0f) == 0x7C00);
  CHECK(float_to_fp16(-1e30f) == 0xFC00);
  CHECK(float_to_bf16(std::numeric_limits<float>::max()) == 0x7F80);
}

TEST_CASE("the golden blocks are reproduced byte for byte, and decode to the golden floats") {
  const json data = goldens();
  REQUIRE(data["blocks"].size() == 12);
  for (const json& block : data["blocks"]) {
    CAPTURE(block["name"].get<std::string>());
    std::vector<float> values;
    for (const json& text : block["x_bf16"])
      values.push_back(
          bf16_to_float(static_cast<uint16_t>(std::stoul(text.get<std::string>(), nullptr, 16))));
    const float global_scale = block["global_scale"];
    const Encoded encoded = encode(values, global_scale);
    CHECK(hex(encoded.data, 8) == block["fi_append"]["data"]);
    CHECK(hex(encoded.scale, 1) == block["fi_append"]["sf"]);
    float decoded[16];
    decode_nvfp4_group_ref(encoded.data, encoded.scale[0], decoded);
    for (size_t i = 0; i < 16; ++i) {
      const std::string text = block["dequant_fi_append_f32"][i];
      CHECK(std::bit_cast<uint32_t>(decoded[i] * global_scale) == std::stoul(text, nullptr, 16));
    }
  }
}

TEST_CASE("the golden edge blocks are reproduced: underflow, saturation, signed zero, inf, NaN") {
  const json data = goldens();
  REQUIRE(data["edge"].size() == 6);
  for (const json& block : data["edge"]) {
    CAPTURE(block["name"].get<std::string>());
    std::vector<float> values;
    for (const json& text : block["x"]) values.push_back(parse_golden(text));
    const Encoded encoded = encode(values, block["global_scale"]);
    CHECK(hex(encoded.data, 8) == block["fi_append"]["data"]);
    CHECK(hex(encoded.scale, 1) == block["fi_append"]["sf"]);
  }
}

TEST_CASE("a group of one value reads back as the format allows") {
  struct {
    float value, global_scale;
    int scale;
    float decoded;
  } const cases[] = {
      {0x1p-20f, 1, 0x00, 0},
      {1e-38f, 1, 0x00, 0},
      {9e-40f, 1, 0x00, 0},
      {0.0058f, 1, 0x00, 0},
      {0.0061f, 1, 0x01, 0.005859375f},
      {3000, 1, 0x7E, 2688},
      {1, 1, 0x23, 1.03125f},
      {-1, 1, 0x23, -1.03125f},
      {0, 1, 0x00, 0},
      {3000, 3000.0f / 2688, 0x7E, 3000},
  };
  for (const auto& c : cases) {
    CAPTURE(c.value);
    const Encoded encoded = encode(std::vector<float>(16, c.value), c.global_scale);
    CHECK(std::to_integer<int>(encoded.scale[0]) == c.scale);
    float decoded[16];
    decode_nvfp4_group_ref(encoded.data, encoded.scale[0], decoded);
    for (const float x : decoded) CHECK(x * c.global_scale == doctest::Approx(c.decoded));
  }
}

TEST_CASE("the values 0 to 15 read back as in the reference") {
  std::vector<float> values;
  for (int i = 0; i < 16; ++i) values.push_back(static_cast<float>(i));
  const Encoded encoded = encode(values, 1.0f);
  CHECK(std::to_integer<int>(encoded.scale[0]) == 0x42);
  const float expected[16] = {0,    1.25f, 2.5f, 2.5f, 3.75f, 5,  5,  7.5f,
                              7.5f, 10,    10,   10,   10,    15, 15, 15};
  float decoded[16];
  decode_nvfp4_group_ref(encoded.data, encoded.scale[0], decoded);
  for (int i = 0; i < 16; ++i) CHECK(decoded[i] == expected[i]);
}

TEST_CASE("extreme tensor scales give finite values, never NaN") {
  for (const float global_scale : {std::numeric_limits<float>::min(), 1e-30f, 1e30f, 3.4e38f})
    for (const float value : {0.0f, 1e-38f, 1.0f, 3e38f, kInfinity, -kInfinity}) {
      std::vector<float> values(16, value);
      values[3] = 0.0f;
      const Encoded encoded = encode(values, global_scale);
      CHECK(std::to_integer<int>(encoded.scale[0]) < 0x7F);
      float decoded[16];
      decode_nvfp4_group_ref(encoded.data, encoded.scale[0], decoded);
      for (const float x : decoded) CHECK(std::isfinite(x));
      CHECK(decoded[3] == 0);
    }
}

TEST_CASE("random groups match an encoder that searches for the nearest code") {
  auto engine = test::random_engine(1);
  CAPTURE(test::seed());
  std::normal_distribution<float> normal;
  std::uniform_real_distribution<float> exponent(-12, 12);
  for (int round = 0; round < 2000; ++round) {
    const float global_scale = std::exp2(exponent(engine));
    const float amplitude = std::exp2(exponent(engine)) * global_scale;
    std::vector<float> values(16);
    for (float& x : values) x = amplitude * normal(engine);
    if (round % 5 == 0) values[engine() % 16] = kNan;
    if (round % 7 == 0) values[engine() % 16] = -kInfinity;
    const Encoded encoded = encode(values, global_scale);
    const test::Nvfp4Group expected = test::nvfp4_group(values.data(), global_scale);
    CHECK(hex(encoded.data, 8) == hex(reinterpret_cast<const std::byte*>(expected.data), 8));
    CHECK(std::to_integer<int>(encoded.scale[0]) == expected.scale);
  }
}

}  // namespace
}  // namespace larder::kernels
