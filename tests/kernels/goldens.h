// The golden bytes of tests/data/nvfp4_goldens.json and the generator of their inputs.
#pragma once

#include <cstdint>
#include <fstream>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "kernels/cpu/bf16.h"

namespace larder::test {

inline nlohmann::json goldens() {
  std::ifstream file(LARDER_TEST_DATA "/nvfp4_goldens.json");
  return nlohmann::json::parse(file);
}

inline std::string hex(const std::byte* bytes, size_t count) {
  static const char* const kDigits = "0123456789abcdef";
  std::string text;
  for (size_t i = 0; i < count; ++i) {
    text += kDigits[std::to_integer<int>(bytes[i]) >> 4];
    text += kDigits[std::to_integer<int>(bytes[i]) & 15];
  }
  return text;
}

// The linear congruential generator that made the goldens' inputs: bf16 values.
struct Lcg {
  uint32_t state;
  double next() {
    state = state * 1664525u + 1013904223u;
    return (state >> 8) / 16777216.0;
  }
  float value(double amplitude = 1.0) {
    const double sum = next() + next() + next();
    return kernels::bf16_to_float(
        kernels::float_to_bf16(static_cast<float>((sum - 1.5) * 2.0 * amplitude)));
  }
  std::vector<float> values(int count, double amplitude = 1.0) {
    std::vector<float> out;
    for (int i = 0; i < count; ++i) out.push_back(value(amplitude));
    return out;
  }
};

}  // namespace larder::test
