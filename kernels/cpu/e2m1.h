// E2M1: 4 bits, sign - two exponent bits - one mantissa bit; no infinity, no NaN.
// Plain definition, no vector code.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>

namespace larder::kernels {

// Values of codes 0 to 7; codes 8 to 15 are their negatives (8 is -0).
inline constexpr std::array<float, 8> kE2m1Magnitudes = {0.0f, 0.5f, 1.0f, 1.5f,
                                                         2.0f, 3.0f, 4.0f, 6.0f};

inline float e2m1_to_float(uint8_t code) {
  const float magnitude = kE2m1Magnitudes[code & 7];
  return (code & 8) != 0 ? -magnitude : magnitude;
}

// Rounds to nearest, ties to the even code, and saturates to +-6. The sign is kept, that of zeros
// too. NaN encodes to a zero with the NaN's sign: every comparison below is false for it.
inline uint8_t float_to_e2m1(float value) {
  const float magnitude = std::fabs(value);
  int code = 0;
  code += magnitude > 0.25f;
  code += magnitude >= 0.75f;
  code += magnitude > 1.25f;
  code += magnitude >= 1.75f;
  code += magnitude > 2.5f;
  code += magnitude >= 3.5f;
  code += magnitude > 5.0f;
  return static_cast<uint8_t>(code | (std::signbit(value) ? 8 : 0));
}

}  // namespace larder::kernels
