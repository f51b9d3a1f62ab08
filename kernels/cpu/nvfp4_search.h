// The two encoders of nvfp4 that try several scales for a group and keep the best. Plain
// definitions; the bytes are ordinary nvfp4. The vector code in encode-inl.h gives the same bytes.
//
// Both treat special values as encode_nvfp4_group_ref does: a NaN is stored as a zero with its
// sign, infinities as +-6 under scale byte 0x7E, and no scale byte is negative or NaN.
#pragma once

#include <algorithm>
#include <array>
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

// The squared error of a group under a scale, in units of the tensor's scale: the sum, in the order
// of the elements, of (code value * scale - |x| * (1 / global scale))^2, each operation rounded to
// float. A NaN adds 0.
inline float best_scale_error(const float* values /* [16] */, float global_scale, float decoded,
                              float inverse) {
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
  const Nvfp4Scale middle = nvfp4_scale(nvfp4_amax(values), global_scale);
  Nvfp4Scale best = middle;
  float least = 0.0f;
  for (const int step : kBestScaleSteps) {
    const int byte = middle.byte + step;
    if (byte < 0 || byte > 0x7E) continue;
    const float decoded = kE4m3Values[static_cast<size_t>(byte)];
    const float inverse = decoded > 0.0f ? 1.0f / (decoded * global_scale) : 0.0f;
    const float error = best_scale_error(values, global_scale, decoded, inverse);
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
