// float8_e4m3fn: 1-4-3 bits, bias 7, smallest value 2^-9, largest 448 (0x7E), NaN 0x7F and 0xFF,
// no infinity. Plain definition, no vector code.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <limits>

namespace larder::kernels {

constexpr float e4m3_to_float(uint8_t byte) {
  const uint32_t sign = static_cast<uint32_t>(byte & 0x80) << 24;
  const uint32_t exponent = (byte >> 3) & 15;
  const uint32_t mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<float>::quiet_NaN();
  if (exponent != 0) return std::bit_cast<float>(sign | (exponent + 120) << 23 | mantissa << 20);
  const float magnitude = static_cast<float>(mantissa) * 0x1p-9f;
  return std::bit_cast<float>(sign | std::bit_cast<uint32_t>(magnitude));
}

// Rounds to nearest even and saturates to +-448, infinities too; NaN of either sign is 0x7F.
constexpr uint8_t float_to_e4m3(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  const uint32_t sign = (bits >> 24) & 0x80;
  const uint32_t magnitude = bits & 0x7FFFFFFF;
  if (magnitude > 0x7F800000) return 0x7F;
  if (magnitude >= std::bit_cast<uint32_t>(448.0f)) return static_cast<uint8_t>(sign | 0x7E);
  if (magnitude < std::bit_cast<uint32_t>(0x1p-6f)) {
    // Below 2^-6 the step is 2^-9, which is one unit in the last place of 2^14.
    const float shifted = std::bit_cast<float>(magnitude) + 0x1p14f;
    return static_cast<uint8_t>(
        sign | (std::bit_cast<uint32_t>(shifted) - std::bit_cast<uint32_t>(0x1p14f)));
  }
  const uint32_t rounded = magnitude + 0x7FFFF + ((magnitude >> 20) & 1);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120 << 3)));
}

// Every byte's value, for readers that decode one scale at a time.
inline constexpr std::array<float, 256> kE4m3Values = [] {
  std::array<float, 256> values{};
  for (size_t byte = 0; byte < values.size(); ++byte)
    values[byte] = e4m3_to_float(static_cast<uint8_t>(byte));
  return values;
}();

}  // namespace larder::kernels
