// Rows of MLA layers, once per vector target of Highway; the plain definition is mla_rows.h.

#if defined(LARDER_KERNELS_CPU_MLA_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_MLA_INL_H_
#undef LARDER_KERNELS_CPU_MLA_INL_H_
#else
#define LARDER_KERNELS_CPU_MLA_INL_H_
#endif

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/cpu/mla_rows.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

inline void decode_nvfp4_ds_row(const std::byte* row, float* out) {
  std::byte scales[kMlaGroups];
  for (int64_t group = 0; group < kMlaGroups; ++group)
    scales[group] = row[nvfp4_ds_scale_offset(group)];
  decode_nvfp4_row(row, scales, kMlaLatentDim, out);
  decode_e4m3_row(row + kNvfp4DsRopeOffset, kMlaRopeDim, out + kMlaLatentDim);
}

inline void decode_fp8_ds_row(const std::byte* row, float* out) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  decode_e4m3_row(row, kMlaLatentDim, out);
  for (int64_t tile = 0; tile < kMlaTiles; ++tile) {
    float scale;
    std::memcpy(&scale, row + kFp8DsScaleOffset + 4 * tile, sizeof(scale));
    float* values = out + tile * kFp8DsTileElements;
    for (int64_t i = 0; i < kFp8DsTileElements; i += lanes)
      hn::StoreU(hn::Mul(hn::LoadU(d, values + i), hn::Set(d, scale)), d, values + i);
  }
  decode_bf16_row(row + kFp8DsRopeOffset, kMlaRopeDim, out + kMlaLatentDim);
}

// Latent, then rope. Without k_scale: of fp8_mla the values as they are stored.
inline void decode_mla_row(MlaRow format, const std::byte* row, float* out /* [576] */) {
  switch (format) {
    case MlaRow::kNvfp4Ds:
      return decode_nvfp4_ds_row(row, out);
    case MlaRow::kFp8Ds:
      return decode_fp8_ds_row(row, out);
    case MlaRow::kFp8:
      return decode_e4m3_row(row, kMlaKeyDim, out);
    case MlaRow::kBf16:
      return decode_bf16_row(row, kMlaKeyDim, out);
    case MlaRow::kNone:
      break;
  }
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
