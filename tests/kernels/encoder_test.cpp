// The searching encoders of nvfp4: goldens, the rule of each, and special values.
#include <bit>
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/cpu/nvfp4_search.h"
#include "tests/kernels/goldens.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

struct Encoded {
  std::byte data[8];
  std::byte scale[1];
  bool operator==(const Encoded&) const = default;
};

Encoded encode(Encoder encoder, const std::vector<float>& values, float global_scale) {
  REQUIRE(values.size() == 16);
  Encoded encoded{};
  encode_nvfp4_group_ref(encoder, values.data(), global_scale, encoded.data, encoded.scale);
  return encoded;
}

// The squared error of what a reader gets, in double and in units of the tensor's scale.
double squared_error(const Encoded& encoded, const std::vector<float>& values,
                     double global_scale) {
  double error = 0;
  for (size_t i = 0; i < 16; ++i) {
    if (std::isnan(values[i])) continue;
    const int pair = std::to_integer<int>(encoded.data[i / 2]);
    const double value = test::e2m1_value(i % 2 == 0 ? pair & 15 : pair >> 4) *
                         test::e4m3_value(std::to_integer<int>(encoded.scale[0]));
    error += (value - values[i] / global_scale) * (value - values[i] / global_scale);
  }
  return error;
}

// Codes by search under a scale byte.
Encoded with_scale(int byte, const std::vector<float>& values, float global_scale) {
  Encoded encoded{};
  const auto scale = static_cast<float>(test::e4m3_value(byte));
  const float inverse = byte == 0 ? 0.0f : 1.0f / (scale * global_scale);
  for (size_t i = 0; i < 16; ++i)
    encoded.data[i / 2] |=
        static_cast<std::byte>(test::nearest_e2m1(values[i] * inverse) << (i % 2 * 4));
  encoded.scale[0] = static_cast<std::byte>(byte);
  return encoded;
}

std::vector<float> parse_bf16(const nlohmann::json& texts) {
  std::vector<float> values;
  for (const auto& text : texts)
    values.push_back(
        bf16_to_float(static_cast<uint16_t>(std::stoul(text.get<std::string>(), nullptr, 16))));
  return values;
}

TEST_CASE("four_over_six reproduces the golden blocks byte for byte, and its denominators") {
  const nlohmann::json data = test::goldens();
  int num_fours = 0;
  for (const auto& block : data["blocks"]) {
    CAPTURE(block["name"].get<std::string>());
    const std::vector<float> values = parse_bf16(block["x_bf16"]);
    const float global_scale = block["global_scale"];
    const Encoded encoded = encode(Encoder::kFourOverSix, values, global_scale);
    const auto& golden = block["vllm_4over6"];
    CHECK(test::hex(encoded.data, 8) == golden["data"]);
    CHECK(test::hex(encoded.scale, 1) == golden["sf"]);
    const Nvfp4Scale four = four_over_six_scale(nvfp4_amax(values.data()), 4.0f, global_scale);
    const Nvfp4Scale six = four_over_six_scale(nvfp4_amax(values.data()), 6.0f, global_scale);
    if (four.byte == six.byte) continue;
    const bool is_four = std::to_integer<int>(encoded.scale[0]) == four.byte;
    CHECK(is_four == (golden["denominator"] == 4));
    num_fours += is_four;
  }
  CHECK(num_fours > 0);
}

TEST_CASE("four_over_six reproduces the golden edge blocks") {
  const nlohmann::json data = test::goldens();
  int num_blocks = 0;
  for (const auto& block : data["edge"]) {
    if (!block.contains("vllm_4over6")) continue;  // NaN and infinity, where our rule is our own
    CAPTURE(block["name"].get<std::string>());
    std::vector<float> values;
    for (const auto& text : block["x"]) values.push_back(std::stof(text.get<std::string>()));
    const Encoded encoded = encode(Encoder::kFourOverSix, values, block["global_scale"]);
    CHECK(test::hex(encoded.data, 8) == block["vllm_4over6"]["data"]);
    CHECK(test::hex(encoded.scale, 1) == block["vllm_4over6"]["sf"]);
    ++num_blocks;
  }
  CHECK(num_blocks == 4);
}

std::vector<float> random_group(std::mt19937_64& engine, float amplitude) {
  std::normal_distribution<float> normal(0, amplitude);
  std::vector<float> values(16);
  for (float& x : values) x = normal(engine);
  return values;
}

TEST_CASE("four_over_six takes the scale with the lesser error, and six where they are alike") {
  auto engine = test::random_engine(40);
  CAPTURE(test::seed());
  int num_fours = 0;
  for (int round = 0; round < 3000; ++round) {
    const float global_scale = round % 2 == 0 ? 1.0f : 0.013f;
    const std::vector<float> values = random_group(engine, 3.0f * global_scale);
    const float amax = nvfp4_amax(values.data());
    const int six = test::nearest_e4m3(amax / 6.0 / global_scale);
    const int four = test::nearest_e4m3(amax / 4.0 / global_scale);
    const Encoded chosen = encode(Encoder::kFourOverSix, values, global_scale);
    const int byte = std::to_integer<int>(chosen.scale[0]);
    REQUIRE((std::abs(byte - six) <= 1 || std::abs(byte - four) <= 1));
    const double best =
        std::min(squared_error(with_scale(six, values, global_scale), values, global_scale),
                 squared_error(with_scale(four, values, global_scale), values, global_scale));
    if (byte == six || byte == four) {
      REQUIRE(squared_error(chosen, values, global_scale) <= best * (1 + 1e-4) + 1e-9);
      num_fours += byte == four;
    }
  }
  CHECK(num_fours > 300);
  CHECK(num_fours < 2700);
  const Encoded zero = encode(Encoder::kFourOverSix, std::vector<float>(16, 0.0f), 1.0f);
  CHECK(test::hex(zero.data, 8) == "0000000000000000");
  CHECK(test::hex(zero.scale, 1) == "00");
}

// Errors are compared in halves where the reference's byte is from 4 to 0x75 (best_scale_test.cpp),
// else in floats.
TEST_CASE("best_scale finds the least error of all scales that it may try") {
  auto engine = test::random_engine(41);
  CAPTURE(test::seed());
  std::uniform_real_distribution<float> exponent(-11, 9);
  int num_better = 0;
  int num_floats = 0;
  for (int round = 0; round < 3000; ++round) {
    const float global_scale = round % 3 == 0 ? 1.0f : std::exp2(exponent(engine));
    const std::vector<float> values =
        random_group(engine, global_scale * std::exp2(exponent(engine)));
    const Encoded reference = encode(Encoder::kReference, values, global_scale);
    const Encoded chosen = encode(Encoder::kBestScale, values, global_scale);
    const int middle = std::to_integer<int>(reference.scale[0]);
    double best = std::numeric_limits<double>::infinity();
    for (int byte = std::max(middle - 3, 0); byte <= std::min(middle + 9, 0x7E); ++byte)
      best = std::min(best,
                      squared_error(with_scale(byte, values, global_scale), values, global_scale));
    const int byte = std::to_integer<int>(chosen.scale[0]);
    REQUIRE(byte >= middle - 3);
    REQUIRE(byte <= std::min(middle + 9, 0x7E));
    REQUIRE(chosen == with_scale(byte, values, global_scale));
    const double error = squared_error(chosen, values, global_scale);
    const double reference_error = squared_error(reference, values, global_scale);
    const double tolerance = middle >= 4 && middle <= 0x75 ? 0.02 : 1e-5;
    REQUIRE(error <= best * (1 + tolerance));
    REQUIRE(error <= reference_error * (1 + tolerance));
    num_better += error < 0.99 * reference_error;
    num_floats += tolerance < 0.02;
  }
  CHECK(num_better > 1000);
  CHECK(num_floats > 300);
}

TEST_CASE("of equal errors best_scale keeps the scale nearest to the reference's, then the lower") {
  // Of the scales from 0x20 to 0x2C, around the reference's 0x23, only 0x28 = 0.25 makes ones
  // exact.
  const Encoded ones = encode(Encoder::kBestScale, std::vector<float>(16, 1.0f), 1.0f);
  CHECK(test::hex(ones.scale, 1) == "28");
  CHECK(test::hex(ones.data, 8) == "6666666666666666");
  // Where nothing is to be gained the reference's byte stays.
  const std::vector<float> exact = {6,  4,  3,  2,  1.5f,  1,  0.5f,  0,
                                    -6, -4, -3, -2, -1.5f, -1, -0.5f, 0};
  CHECK(encode(Encoder::kBestScale, exact, 1.0f) == encode(Encoder::kReference, exact, 1.0f));
  const std::vector<float> zeros(16, 0.0f);
  CHECK(encode(Encoder::kBestScale, zeros, 1.0f) == encode(Encoder::kReference, zeros, 1.0f));
}

TEST_CASE("every encoder stores NaN as a signed zero, and never a negative or NaN scale") {
  auto engine = test::random_engine(42);
  CAPTURE(test::seed());
  const float specials[] = {kNan, -kNan, kInfinity, -kInfinity, 3e38f, -1e-45f, 0.0f, 1.0f};
  const float scales[] = {1.0f, std::numeric_limits<float>::min(), 1e-30f, 3.4e38f, 0.37f};
  for (const Encoder encoder : {Encoder::kReference, Encoder::kFourOverSix, Encoder::kBestScale})
    for (int round = 0; round < 2000; ++round) {
      std::vector<float> values = random_group(engine, 1.0f);
      for (int i = 0; i < 4; ++i) values[engine() % 16] = specials[engine() % 8];
      const Encoded encoded = encode(encoder, values, scales[engine() % 5]);
      REQUIRE(std::to_integer<int>(encoded.scale[0]) <= 0x7E);
      for (size_t i = 0; i < 16; ++i) {
        const int pair = std::to_integer<int>(encoded.data[i / 2]);
        const int code = i % 2 == 0 ? pair & 15 : pair >> 4;
        if (std::isnan(values[i])) REQUIRE(code == (std::signbit(values[i]) ? 8 : 0));
      }
    }
  std::vector<float> values(16, 1.0f);
  values[0] = -kInfinity;
  for (const Encoder encoder : {Encoder::kReference, Encoder::kFourOverSix, Encoder::kBestScale}) {
    const Encoded encoded = encode(encoder, values, 1.0f);
    CHECK(test::hex(encoded.scale, 1) == "7e");
    CHECK(test::hex(encoded.data, 8) == "0f00000000000000");
  }
}

TEST_CASE("best_scale does not let a NaN choose: the other elements are as if it were a zero") {
  auto engine = test::random_engine(43);
  CAPTURE(test::seed());
  for (int round = 0; round < 500; ++round) {
    std::vector<float> values = random_group(engine, 2.0f);
    const size_t at = engine() % 16;
    values[at] = 0.0f;
    const Encoded clean = encode(Encoder::kBestScale, values, 0.7f);
    values[at] = kNan;
    REQUIRE(encode(Encoder::kBestScale, values, 0.7f) == clean);
  }
}

}  // namespace
}  // namespace larder::kernels
