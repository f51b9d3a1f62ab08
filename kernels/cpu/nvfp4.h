// NVFP4 groups: 16 values as 8 bytes of E2M1 pairs and one E4M3 scale. Plain definition.
//
// The expressions are those of FlashInfer's append kernel with IEEE division, and they define the
// bytes: the vector code in rows-inl.h must give the same.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/e2m1.h"
#include "kernels/cpu/e4m3.h"
#include "larder/kv_format.h"

namespace larder::kernels {

inline constexpr int kNvfp4GroupBytes = kNvfp4GroupElements / 2;
static_assert(kNvfp4GroupElements == 16 && kNvfp4GroupBytes == 8);

struct Nvfp4Scale {
  uint8_t byte = 0;      // E4M3, never negative, never NaN
  float inverse = 0.0f;  // what elements are multiplied with before they are rounded to E2M1
};

// `amax` is the largest magnitude of the group, NaNs left out. The test is on the encoded scale:
// where it is zero the whole group is, however large 1 / amax would be.
inline Nvfp4Scale nvfp4_scale(float amax, float global_scale) {
  Nvfp4Scale scale;
  // The NaN byte would come from inf / inf: an infinite element with a tensor scale near the
  // largest float. It saturates as every other infinity does.
  scale.byte = std::min<uint8_t>(float_to_e4m3(amax / (6.0f * global_scale)), 0x7E);
  const float decoded = kE4m3Values[scale.byte];
  if (decoded > 0.0f) scale.inverse = 1.0f / (decoded * global_scale);
  return scale;
}

// The sign comes from the element, not from the product: the same, except that a global scale near
// the smallest normal float makes the inverse infinite, and 0 * inf has no sign of its own.
inline uint8_t nvfp4_code(float value, float inverse) {
  return static_cast<uint8_t>((float_to_e2m1(value * inverse) & 7) | (std::signbit(value) ? 8 : 0));
}

// The largest magnitude, NaNs left out.
inline float nvfp4_amax(const float* values /* [16] */) {
  float amax = 0.0f;
  for (int i = 0; i < kNvfp4GroupElements; ++i)
    if (std::fabs(values[i]) > amax) amax = std::fabs(values[i]);
  return amax;
}

inline void encode_nvfp4_codes_ref(const float* values /* [16] */, float inverse,
                                   std::byte* data /* [8] */) {
  for (size_t i = 0; i < kNvfp4GroupBytes; ++i)
    data[i] = static_cast<std::byte>(nvfp4_code(values[2 * i], inverse) |
                                     nvfp4_code(values[2 * i + 1], inverse) << 4);
}

inline void encode_nvfp4_group_ref(const float* values /* [16] */, float global_scale,
                                   std::byte* data /* [8] */, std::byte* scale_byte) {
  const Nvfp4Scale scale = nvfp4_scale(nvfp4_amax(values), global_scale);
  encode_nvfp4_codes_ref(values, scale.inverse, data);
  *scale_byte = static_cast<std::byte>(scale.byte);
}

// e2m1 * scale, exact in float; the tensor's scale comes last, where readers of whole tensors need
// it: x = decoded * global_scale. Attention folds it into the logit scale and into the output.
inline void decode_nvfp4_group_ref(const std::byte* data /* [8] */, std::byte scale_byte,
                                   float* values /* [16] */) {
  const float scale = kE4m3Values[std::to_integer<uint8_t>(scale_byte)];
  for (size_t i = 0; i < kNvfp4GroupBytes; ++i) {
    const auto pair = std::to_integer<uint8_t>(data[i]);
    values[2 * i] = e2m1_to_float(pair & 15) * scale;
    values[2 * i + 1] = e2m1_to_float(pair >> 4) * scale;
  }
}

}  // namespace larder::kernels
