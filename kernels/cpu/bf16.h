// bfloat16 and IEEE half as bits, to and from float. Plain definitions, no vector code.
#pragma once

#include <bit>
#include <cstdint>

namespace larder::kernels {

constexpr float bf16_to_float(uint16_t bits) {
  return std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
}

// Rounds to nearest even; overflows to infinity. A NaN keeps its sign and stays a NaN.
constexpr uint16_t float_to_bf16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if ((bits & 0x7FFFFFFF) > 0x7F800000) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16);
}

// A NaN becomes the quiet NaN with its sign and payload, as the conversion instructions have it.
constexpr float fp16_to_float(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t exponent = (bits >> 10) & 31;
  const uint32_t mantissa = bits & 0x3FF;
  if (exponent == 31 && mantissa != 0)
    return std::bit_cast<float>(sign | 0x7FC00000 | mantissa << 13);
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7F800000);
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 112) << 23 | mantissa << 13);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-24f;  // exact: zero or subnormal
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Rounds to nearest even; overflows to infinity. A NaN becomes the quiet NaN with its sign and the
// upper bits of its payload.
constexpr uint16_t float_to_fp16(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const auto sign = static_cast<uint16_t>((bits >> 16) & 0x8000);
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000)
    return static_cast<uint16_t>(sign | 0x7E00 | ((magnitude >> 13) & 0x3FF));
  if (magnitude >= 0x477FF000) return static_cast<uint16_t>(sign | 0x7C00);  // 65520 and above
  if (magnitude < 0x38800000) {
    // Below 2^-14 the step is 2^-24, which is one unit in the last place of 0.5.
    const float shifted = std::bit_cast<float>(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (std::bit_cast<uint32_t>(shifted) - 0x3F000000));
  }
  const uint32_t rounded = magnitude + 0xFFF + ((magnitude >> 13) & 1);
  return static_cast<uint16_t>(sign | ((rounded >> 13) - (112 << 10)));
}

}  // namespace larder::kernels
