// Number formats on the device: bits to float and back, one value at a time. Rounding, saturation
// and special values as in larder/kv_format.h; written apart from the CPU's, which judges them.
#pragma once

#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace larder::kernels::cuda {

// Integer arithmetic instead of the conversion instructions: a NaN keeps its bits as on the CPU.
__device__ inline float bf16_value(uint16_t bits) { return __uint_as_float(uint32_t{bits} << 16); }

__device__ inline uint16_t bf16_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u) return static_cast<uint16_t>((bits >> 16) | 0x40u);
  return static_cast<uint16_t>((bits + 0x7FFFu + ((bits >> 16) & 1u)) >> 16);
}

__device__ inline float fp16_value(uint16_t bits) {
  const uint32_t sign = (bits & 0x8000u) << 16;
  if ((bits & 0x7C00u) == 0x7C00u)  // infinity, or the quiet NaN with sign and payload
    return __uint_as_float(sign | ((bits & 0x3FFu) != 0 ? 0x7FC00000u : 0x7F800000u) |
                           (bits & 0x3FFu) << 13);
  return __half2float(__ushort_as_half(bits));
}

__device__ inline uint16_t fp16_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t sign = (bits >> 16) & 0x8000u;
  if ((bits & 0x7FFFFFFFu) > 0x7F800000u)
    return static_cast<uint16_t>(sign | 0x7E00u | ((bits >> 13) & 0x3FFu));
  return __half_as_ushort(__float2half_rn(value));
}

// Powers of two that move exponents: exact for every finite code, subnormal ones too.
__device__ inline float e4m3_value(uint8_t byte) {
  const uint32_t magnitude = byte & 0x7Fu;
  if (magnitude == 0x7Fu) return __uint_as_float(0x7FC00000u);
  const float value = __uint_as_float(magnitude << 20) * 0x1p120f;
  return (byte & 0x80u) != 0 ? -value : value;
}

__device__ inline uint8_t e4m3_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x43E00000u) return static_cast<uint8_t>(sign | 0x7Eu);  // 448
  if (magnitude < 0x3C800000u) {  // 2^-6: below, the step is that of floats from 2^14 on
    const float shifted = __fadd_rn(__uint_as_float(magnitude), 0x1p14f);
    return static_cast<uint8_t>(sign | (__float_as_uint(shifted) - 0x46800000u));
  }
  const uint32_t rounded = magnitude + 0x7FFFFu + ((magnitude >> 20) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 20) - (120u << 3)));
}

__device__ inline float e5m2_value(uint8_t byte) {
  return fp16_value(static_cast<uint16_t>(uint32_t{byte} << 8));
}

__device__ inline uint8_t e5m2_bits(float value) {
  const uint32_t bits = __float_as_uint(value);
  const uint32_t sign = (bits >> 24) & 0x80u;
  const uint32_t magnitude = bits & 0x7FFFFFFFu;
  if (magnitude > 0x7F800000u) return 0x7F;
  if (magnitude >= 0x47600000u) return static_cast<uint8_t>(sign | 0x7Bu);  // 57344
  if (magnitude < 0x38800000u) {  // 2^-14: below, the step is that of floats from 2^7 on
    const float shifted = __fadd_rn(__uint_as_float(magnitude), 0x1p7f);
    return static_cast<uint8_t>(sign | (__float_as_uint(shifted) - 0x43000000u));
  }
  const uint32_t rounded = magnitude + 0xFFFFFu + ((magnitude >> 21) & 1u);
  return static_cast<uint8_t>(sign | ((rounded >> 21) - (112u << 2)));
}

// Codes 0 to 7 are 0, 0.5, 1, 1.5, 2, 3, 4, 6: as floats with one bit of mantissa, but that the
// step below 1 is 0.5.
__device__ inline float e2m1_value(uint32_t code) {
  const uint32_t magnitude = code & 7u;
  const float value =
      magnitude < 2 ? 0.5f * static_cast<float>(magnitude)
                    : __uint_as_float(((magnitude >> 1) + 126u) << 23 | (magnitude & 1u) << 22);
  return (code & 8u) != 0 ? -value : value;
}

// Comparisons are false for a NaN: a zero with its sign.
__device__ inline uint32_t e2m1_code(float value) {
  const float magnitude = fabsf(value);
  uint32_t code = 0;
  code += magnitude > 0.25f;
  code += magnitude >= 0.75f;
  code += magnitude > 1.25f;
  code += magnitude >= 1.75f;
  code += magnitude > 2.5f;
  code += magnitude >= 3.5f;
  code += magnitude > 5.0f;
  return code | (__float_as_uint(value) >> 31) << 3;
}

}  // namespace larder::kernels::cuda
