// The two encoders of nvfp4 that try several scales for a group and keep the best. Plain
// definitions; the bytes are ordinary nvfp4. The vector code in encode-inl.h gives the same bytes.
//
// Both treat special values as encode_nvfp4_group_ref does: a NaN is stored as a zero with its
// sign, infinities as +-6 under scale byte 0x7E, and no scale byte is negative or NaN.
#pragma once

#include <algorithm>
#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/nvfp4.h"

namespace larder::kernels {

// One of the two scales of four over six: that which maps amax to 6, or to 4. The expressions are
// those of vLLM's nvfp4_4over6 (formats.md 4.1) with IEEE division.
inline Nvfp4Scale four_over_six_scale(float amax, float denominator, float global_scale) {
  const float encode_scale = 1.0f / global_scale;
  Nvfp4Scale scale;
  scale.byte = std::min<uint8_t>(float_to_e4m3(encode_scale * (amax * (1.0f / denominator))), 0x7E);
  const float decoded = kE4m3Values[scale.byte];
  if (decoded > 0.0f) scale.inverse = 1.0f / (decoded * (1.0f / encode_scale));
  return scale;
}

// The squared error in vLLM's order: pairs of elements, with the fused operations that nvcc makes
// of its expressions. NaN where an element is NaN.
inline float four_over_six_error(const float* values /* [16] */, float inverse) {
  const float decode_scale = inverse != 0.0f ? 1.0f / inverse : 0.0f;
  float error = 0.0f;
  for (int i = 0; i < kNvfp4GroupElements; i += 2) {
    const float x =
        std::fma(e2m1_to_float(float_to_e2m1(values[i] * inverse)), decode_scale, -values[i]);
    const float y = std::fma(e2m1_to_float(float_to_e2m1(values[i + 1] * inverse)), decode_scale,
                             -values[i + 1]);
    error += std::fma(x, x, y * y);
  }
  return error;
}

// The scale that maps amax to 4 where its error is less; where both are alike or NaN, to 6.
inline Nvfp4Scale choose_four_over_six(const float* values /* [16] */, float global_scale) {
  const float amax = nvfp4_amax(values);
  const Nvfp4Scale six = four_over_six_scale(amax, 6.0f, global_scale);
  const Nvfp4Scale four = four_over_six_scale(amax, 4.0f, global_scale);
  const bool better =
      four_over_six_error(values, four.inverse) < four_over_six_error(values, six.inverse);
  return better ? four : six;
}

// Distances from the reference's scale byte in the order in which best_scale tries them: of equal
// errors the first stays, that is the smaller distance, then the lower byte.
inline constexpr std::array<int, 13> kBestScaleSteps = {0, -1, 1, -2, 2, -3, 3, 4, 5, 6, 7, 8, 9};

// The errors that best_scale compares are sums in half precision, which GPUs add up two at a time.
// They are the group's own as far as halves go: k, the power of two that brings amax into [1, 2),
// scales the group, and codes are found as bits. With the values y = |x| / (scale * global scale)
// times 2^-14, an E2M1 value of 1 is the smallest normal half, so the E2M1 code is in the bits from
// the ninth on. Halves: to nearest even, subnormal ones kept.
//
// For which groups: those with tensor scales from 2^-64 to 2^64 and the reference's byte from 4 to
// 0x75, so that every byte tried is from 1 to 0x7E; none has an infinity. Then amax / (6 * scale *
// global scale) is from 0.3 (byte 4, 9 above) to 4.5 (byte 4, 3 below), within one in 1,000; `back`
// is from 606 to 20,290, and no half overflows: a miss is below 2, a sum below 32.
inline bool best_scale_uses_halves(uint8_t middle, float global_scale) {
  return middle >= 4 && middle <= 0x75 && global_scale >= 0x1p-64f && global_scale <= 0x1p64f;
}

// k * 2^14, for such a group.
inline float best_scale_power(float amax) {
  const uint32_t exponent = std::bit_cast<uint32_t>(amax) & 0x7F800000;
  return std::bit_cast<float>((254u + 14u) * 0x800000u - exponent);
}

// The nearest half, to even; for magnitudes below 65520.
inline double nearest_half(double value) {
  int exponent = 0;  // value = 2^exponent * [0.5, 1)
  std::frexp(value, &exponent);
  const int step = std::max(exponent - 11, -24);
  return std::ldexp(std::nearbyint(std::ldexp(value, -step)), step);
}

// The squared error of a group under the scale `decoded` (E4M3), in units of 1 / k^2. A NaN adds 0.
// But for 1 / back every argument of nearest_half is exact: products of two halves have 22 bits;
// what is subtracted from one, or added, are multiples of 2^-48 below 2^5. So each line is one
// operation on a GPU.
inline float best_scale_half_error(const float* values /* [16] */, float global_scale,
                                   float decoded, float power /* 2^14 k */) {
  const double back = nearest_half(decoded * global_scale * power);
  const double forward = nearest_half(1.0 / back);
  double sums[2] = {0, 0};  // of even and of odd elements
  for (int i = 0; i < kNvfp4GroupElements; ++i) {
    const float magnitude = std::isnan(values[i]) ? 0.0f : std::fabs(values[i]);
    const double value = nearest_half(magnitude * (power * 0x1p-14f));
    const double y = std::min(nearest_half(value * forward), 0x6p-14);
    const double step = y < 0x2p-14 ? 0x1p-15 : y < 0x4p-14 ? 0x1p-14 : 0x1p-13;
    const double stored = std::floor(y / step + 0.5) * step;  // the nearest E2M1 value, halves up
    const double miss = nearest_half(stored * back - value);
    sums[i % 2] = nearest_half(miss * miss + sums[i % 2]);
  }
  return static_cast<float>(nearest_half(sums[0] + sums[1]));
}

// For other groups: the squared error in units of the tensor's scale: the sum, in the order of the
// elements, of (code value * scale - |x| * (1 / global scale))^2, each operation rounded to float.
// A NaN adds 0.
inline float best_scale_float_error(const float* values /* [16] */, float global_scale,
                                    float decoded, float inverse) {
  const float unit = 1.0f / global_scale;
  float error = 0.0f;
  for (int i = 0; i < kNvfp4GroupElements; ++i) {
    const float magnitude = std::isnan(values[i]) ? 0.0f : std::fabs(values[i]);
    const float difference =
        kE2m1Magnitudes[float_to_e2m1(magnitude * inverse) & 7] * decoded - magnitude * unit;
    error += difference * difference;
  }
  return error;
}

// Of the scale bytes from 3 below to 9 above the reference's, within [0, 0x7E], the one with the
// least error.
inline Nvfp4Scale choose_best_scale(const float* values /* [16] */, float global_scale) {
  const float amax = nvfp4_amax(values);
  const Nvfp4Scale middle = nvfp4_scale(amax, global_scale);
  const bool halves = best_scale_uses_halves(middle.byte, global_scale);
  Nvfp4Scale best = middle;
  float least = 0.0f;
  for (const int step : kBestScaleSteps) {
    const int byte = middle.byte + step;
    if (byte < 0 || byte > 0x7E) continue;
    const float decoded = kE4m3Values[static_cast<size_t>(byte)];
    const float inverse = decoded > 0.0f ? 1.0f / (decoded * global_scale) : 0.0f;
    const float error =
        halves ? best_scale_half_error(values, global_scale, decoded, best_scale_power(amax))
               : best_scale_float_error(values, global_scale, decoded, inverse);
    if (step != 0 && !(error < least)) continue;
    least = error;
    best = {static_cast<uint8_t>(byte), inverse};
  }
  return best;
}

inline void encode_nvfp4_group_ref(Encoder encoder, const float* values /* [16] */,
                                   float global_scale, std::byte* data /* [8] */,
                                   std::byte* scale_byte) {
  if (encoder == Encoder::kReference)
    return encode_nvfp4_group_ref(values, global_scale, data, scale_byte);
  const Nvfp4Scale scale = encoder == Encoder::kFourOverSix
                               ? choose_four_over_six(values, global_scale)
                               : choose_best_scale(values, global_scale);
  encode_nvfp4_codes_ref(values, scale.inverse, data);
  *scale_byte = static_cast<std::byte>(scale.byte);
}

}  // namespace larder::kernels
