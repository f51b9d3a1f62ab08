// Rows of MLA layers (formats.md 5): 512 latent values and 64 RoPE values of one token. Plain
// definitions; mla-inl.h is the vector form, with the same bytes and floats.
//
// Special values: a NaN is left out of every maximum; in nvfp4 latents it is a zero with its sign,
// in e4m3 the byte 0x7F. An infinity saturates: to the scale byte 0x7E, and in fp8_ds_mla it counts
// as the largest float.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/e4m3.h"
#include "kernels/cpu/nvfp4.h"
#include "larder/kv_format.h"

namespace larder::kernels {

inline constexpr int64_t kNvfp4DsRopeOffset = 256;   // bytes from the start of a row
inline constexpr int64_t kNvfp4DsScaleOffset = 320;  // likewise
inline constexpr int64_t kFp8DsScaleOffset = 512;
inline constexpr int64_t kFp8DsRopeOffset = 528;
inline constexpr int64_t kFp8DsTileElements = 128;
inline constexpr int64_t kMlaGroups = kMlaLatentDim / kNvfp4GroupElements;
inline constexpr int64_t kMlaTiles = kMlaLatentDim / kFp8DsTileElements;

// Where nvfp4_ds_mla keeps the scale byte of a latent group.
constexpr int64_t nvfp4_ds_scale_offset(int64_t group) {
  return kNvfp4DsScaleOffset + 8 * (group & 3) + (group >> 2);
}

// Rounded up and at least 2^-9, so that no element passes 6 unless the scale is the largest.
inline Nvfp4Scale nvfp4_ds_scale(float amax) {
  const float wanted = std::max(amax / 6.0f, 0x1p-9f);
  Nvfp4Scale scale;
  scale.byte = float_to_e4m3(wanted);
  if (kE4m3Values[scale.byte] < wanted && scale.byte < 0x7E) ++scale.byte;
  scale.inverse = 1.0f / kE4m3Values[scale.byte];
  return scale;
}

inline float fp8_ds_tile_scale(float amax) {
  return std::max(std::min(amax, std::numeric_limits<float>::max()) / 448.0f,
                  std::numeric_limits<float>::min());
}

// x / scale, to nearest even, saturating.
inline void encode_e4m3_row_ref(const float* values, int64_t count, float scale, std::byte* bytes) {
  for (int64_t i = 0; i < count; ++i)
    bytes[i] = static_cast<std::byte>(float_to_e4m3(values[i] / scale));
}

inline void encode_bf16_row_ref(const float* values, int64_t count, std::byte* bytes) {
  for (int64_t i = 0; i < count; ++i) {
    const uint16_t bits = float_to_bf16(values[i]);
    std::memcpy(bytes + 2 * i, &bits, sizeof(bits));
  }
}

inline void encode_nvfp4_ds_row(const float* latent, const float* rope, std::byte* row) {
  for (int64_t group = 0; group < kMlaGroups; ++group) {
    const float* values = latent + group * kNvfp4GroupElements;
    const Nvfp4Scale scale = nvfp4_ds_scale(nvfp4_amax(values));
    encode_nvfp4_codes_ref(values, scale.inverse, row + group * kNvfp4GroupBytes);
    row[nvfp4_ds_scale_offset(group)] = static_cast<std::byte>(scale.byte);
  }
  encode_e4m3_row_ref(rope, kMlaRopeDim, 1.0f, row + kNvfp4DsRopeOffset);
}

inline void encode_fp8_ds_row(const float* latent, const float* rope, std::byte* row) {
  for (int64_t tile = 0; tile < kMlaTiles; ++tile) {
    const float* values = latent + tile * kFp8DsTileElements;
    float amax = 0.0f;
    for (int64_t i = 0; i < kFp8DsTileElements; i += kNvfp4GroupElements)
      amax = std::max(amax, nvfp4_amax(values + i));
    const float scale = fp8_ds_tile_scale(amax);
    encode_e4m3_row_ref(values, kFp8DsTileElements, scale, row + tile * kFp8DsTileElements);
    std::memcpy(row + kFp8DsScaleOffset + 4 * tile, &scale, sizeof(scale));
  }
  encode_bf16_row_ref(rope, kMlaRopeDim, row + kFp8DsRopeOffset);
}

// `k_scale` counts for fp8_mla alone.
inline void encode_mla_row(MlaRow format, const float* latent /* [512] */,
                           const float* rope /* [64] */, float k_scale, std::byte* row) {
  switch (format) {
    case MlaRow::kNvfp4Ds:
      return encode_nvfp4_ds_row(latent, rope, row);
    case MlaRow::kFp8Ds:
      return encode_fp8_ds_row(latent, rope, row);
    case MlaRow::kFp8:
      encode_e4m3_row_ref(latent, kMlaLatentDim, k_scale, row);
      return encode_e4m3_row_ref(rope, kMlaRopeDim, k_scale, row + kMlaLatentDim);
    case MlaRow::kBf16:
      encode_bf16_row_ref(latent, kMlaLatentDim, row);
      return encode_bf16_row_ref(rope, kMlaRopeDim, row + 2 * kMlaLatentDim);
    case MlaRow::kNone:
      break;
  }
}

inline void decode_e4m3_row_ref(const std::byte* bytes, int64_t count, float scale, float* out) {
  for (int64_t i = 0; i < count; ++i)
    out[i] = kE4m3Values[std::to_integer<uint8_t>(bytes[i])] * scale;
}

inline void decode_bf16_row_ref(const std::byte* bytes, int64_t count, float* out) {
  for (int64_t i = 0; i < count; ++i) {
    uint16_t bits;
    std::memcpy(&bits, bytes + 2 * i, sizeof(bits));
    out[i] = bf16_to_float(bits);
  }
}

// Latent, then rope. Without k_scale: of fp8_mla the values as they are stored.
inline void decode_mla_row(MlaRow format, const std::byte* row, float* out /* [576] */) {
  switch (format) {
    case MlaRow::kNvfp4Ds:
      for (int64_t group = 0; group < kMlaGroups; ++group)
        decode_nvfp4_group_ref(row + group * kNvfp4GroupBytes, row[nvfp4_ds_scale_offset(group)],
                               out + group * kNvfp4GroupElements);
      return decode_e4m3_row_ref(row + kNvfp4DsRopeOffset, kMlaRopeDim, 1.0f, out + kMlaLatentDim);
    case MlaRow::kFp8Ds:
      for (int64_t tile = 0; tile < kMlaTiles; ++tile) {
        float scale;
        std::memcpy(&scale, row + kFp8DsScaleOffset + 4 * tile, sizeof(scale));
        decode_e4m3_row_ref(row + tile * kFp8DsTileElements, kFp8DsTileElements, scale,
                            out + tile * kFp8DsTileElements);
      }
      return decode_bf16_row_ref(row + kFp8DsRopeOffset, kMlaRopeDim, out + kMlaLatentDim);
    case MlaRow::kFp8:
      return decode_e4m3_row_ref(row, kMlaKeyDim, 1.0f, out);
    case MlaRow::kBf16:
      return decode_bf16_row_ref(row, kMlaKeyDim, out);
    case MlaRow::kNone:
      break;
  }
}

}  // namespace larder::kernels
