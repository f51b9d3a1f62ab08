// float8_e5m2: 1-5-2 bits, bias 15, smallest value 2^-16, largest finite 57344 (0x7B), infinities
// 0x7C and 0xFC, NaNs above them: the upper byte of an IEEE half. Plain definition, no vector code.
#pragma once

#include <bit>
#include <cstdint>

#include "kernels/cpu/bf16.h"

namespace larder::kernels {

constexpr float e5m2_to_float(uint8_t byte) {
  return fp16_to_float(static_cast<uint16_t>(byte << 8));
}

// Rounds to nearest even and saturates to +-57344, infinities too; NaN of either sign is 0x7F.
constexpr uint8_t float_to_e5m2(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7F;
  if (magnitude >= std::bit_cast<uint32_t>(57344.0f)) return static_cast<uint8_t>(sign | 0x7B);
  if (magnitude < std::bit_cast<uint32_t>(0x1p-14f)) {
    // Below 2^-14 the step is 2^-16, which is one unit in the last place of 2^7.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p7f;
    return static_cast<uint8_t>(
        sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p7f)));
  }
  const uint32_t rounded = magnitude + 0xFFFFF + ((magnitude >> 21) & 1);
  return static_cast<uint8_t>(sign | ((rounded >> 21) - (112 << 2)));
}

}  // namespace larder::kernels
