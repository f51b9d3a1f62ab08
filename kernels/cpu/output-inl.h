// How attention's result is stored, once per vector target of Highway.

#if defined(LARDER_KERNELS_CPU_OUTPUT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_OUTPUT_INL_H_
#undef LARDER_KERNELS_CPU_OUTPUT_INL_H_
#else
#define LARDER_KERNELS_CPU_OUTPUT_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

#include "kernels/cpu/e4m3.h"
#include "kernels/cpu/lse.h"
#include "kernels/cpu/nvfp4.h"
#include "kernels/cpu/rows-inl.h"
#include "kernels/cpu/view_rows.h"
#include "kernels/params.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

using cpu::view_row;
using cpu::view_stride;

// Byte offset of (row, column) in 128x4 tiles of scales (formats.md 7.12).
inline int64_t scale_tile_offset(int64_t row, int64_t column, int64_t num_columns) {
  const int64_t tile = (row / 128) * ((num_columns + 3) / 4) + column / 4;
  return tile * 512 + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
}

// A group of NVFP4 output. The tensor's scale is one for encoding: x = e2m1 * scale byte /
// out_sf_scale. NaN, infinities and zeros as in the pool's nvfp4: a NaN is dropped from the maximum
// and becomes a zero, infinities saturate, the scale byte is never NaN, and a group whose scale
// encodes to 0 is zeros (with their signs).
inline uint8_t encode_output_group(const float* values, float out_sf_scale, std::byte* target,
                                   int64_t stride) {
  float amax = 0.0f;
  for (int i = 0; i < kNvfp4GroupElements; ++i)
    if (std::fabs(values[i]) > amax) amax = std::fabs(values[i]);  // false for a NaN
  const uint8_t scale = std::min<uint8_t>(float_to_e4m3(out_sf_scale * amax / 6.0f), 0x7E);
  const float decoded = kE4m3Values[scale];
  const float inverse = decoded > 0.0f ? out_sf_scale / decoded : 0.0f;
  for (int i = 0; i < kNvfp4GroupElements; i += 2)
    target[i / 2 * stride] = static_cast<std::byte>(nvfp4_code(values[i], inverse) |
                                                    nvfp4_code(values[i + 1], inverse) << 4);
  return scale;
}

inline void store_nvfp4_output(const AttentionOutput& output, int64_t row, int64_t head,
                               const float* values) {
  const int64_t stride = view_stride(output.out);
  const int64_t num_groups = output.out.shape[2] / kNvfp4GroupBytes;
  std::byte* target = view_row(output.out, row, head);
  for (int64_t group = 0; group < num_groups; ++group) {
    const uint8_t scale =
        encode_output_group(values + group * kNvfp4GroupElements, output.out_sf_scale,
                            target + group * kNvfp4GroupBytes * stride, stride);
    output.out_sf[scale_tile_offset(output.out_sf_first_row + row, head * num_groups + group,
                                    output.out.shape[1] * num_groups)] = scale;
  }
}

// The `dim` values of (row, head).
inline void store_output(const AttentionOutput& output, int64_t row, int64_t head,
                         const float* values, int64_t dim) {
  const int64_t stride = view_stride(output.out);
  std::byte* target = view_row(output.out, row, head);
  if (output.out.dtype == Dtype::kE2m1x2)
    store_nvfp4_output(output, row, head, values);
  else if (output.out.dtype == Dtype::kFp8E4m3)
    for (int64_t i = 0; i < dim; ++i)
      target[i * stride] = static_cast<std::byte>(float_to_e4m3(values[i] / output.out_scale));
  else
    store_floats(output.out.dtype, values, stride, dim, target);
}

// `sinks`: [num_q_heads] or nullptr.
inline void store_lse(const AttentionOutput& output, int64_t row, int64_t head, double lse,
                      const float* sinks) {
  if (output.lse == nullptr) return;
  const auto& [num_rows, num_heads, dim] = output.out.shape;
  output.lse[cpu::lse_index(output.lse_form, row, head, num_rows, num_heads)] =
      cpu::lse_to_form(lse, output.lse_form, sinks == nullptr ? nullptr : sinks + head);
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
