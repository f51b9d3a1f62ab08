// MLA rows from floats, once per vector target of Highway; the plain definition is mla_rows.h,
// whose bytes every target gives.

#if defined(LARDER_KERNELS_CPU_MLA_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_MLA_ENCODE_INL_H_
#undef LARDER_KERNELS_CPU_MLA_ENCODE_INL_H_
#else
#define LARDER_KERNELS_CPU_MLA_ENCODE_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/encode-inl.h"
#include "kernels/cpu/mla_rows.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

inline void encode_nvfp4_ds_row(const float* values, std::byte* row) {
  for (int64_t group = 0; group < kMlaGroups; ++group) {
    const float* latent = values + group * kNvfp4GroupElements;
    const Nvfp4Scale scale = nvfp4_ds_scale(group_amax(latent));
    encode_nvfp4_codes(latent, scale.inverse, row + group * kNvfp4GroupBytes);
    row[nvfp4_ds_scale_offset(group)] = static_cast<std::byte>(scale.byte);
  }
  encode_e4m3_row(values + kMlaLatentDim, kMlaRopeDim, 1.0f, row + kNvfp4DsRopeOffset);
}

inline void encode_fp8_ds_row(const float* values, std::byte* row) {
  for (int64_t tile = 0; tile < kMlaTiles; ++tile) {
    const float* latent = values + tile * kFp8DsTileElements;
    float amax = 0.0f;
    for (int64_t i = 0; i < kFp8DsTileElements; i += kNvfp4GroupElements)
      amax = std::max(amax, group_amax(latent + i));
    const float scale = fp8_ds_tile_scale(amax);
    encode_e4m3_row(latent, kFp8DsTileElements, scale, row + tile * kFp8DsTileElements);
    std::memcpy(row + kFp8DsScaleOffset + 4 * tile, &scale, sizeof(scale));
  }
  encode_bf16_row(values + kMlaLatentDim, kMlaRopeDim, row + kFp8DsRopeOffset);
}

// `k_scale` counts for fp8_mla alone.
inline void encode_mla_row(MlaRow format, const float* values /* [576]: latent, then rope */,
                           float k_scale, std::byte* row) {
  switch (format) {
    case MlaRow::kNvfp4Ds:
      return encode_nvfp4_ds_row(values, row);
    case MlaRow::kFp8Ds:
      return encode_fp8_ds_row(values, row);
    case MlaRow::kFp8:
      return encode_e4m3_row(values, kMlaKeyDim, k_scale, row);
    case MlaRow::kBf16:
      return encode_bf16_row(values, kMlaKeyDim, row);
    case MlaRow::kNone:
      break;
  }
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
