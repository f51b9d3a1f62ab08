#include "kernels/cpu/gather.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/formats.h"
#include "kernels/cpu/view_rows.h"
#include "kernels/kernel_table.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/gather.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#include "kernels/cpu/encode-inl.h"
#include "kernels/cpu/mla-inl.h"
#include "kernels/cpu/nvfp4_direct-inl.h"
#include "kernels/cpu/rotate-inl.h"
#include "kernels/cpu/rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

using cpu::view_row;
using cpu::view_stride;

// K or V: where its rows lie and what is undone before they go out.
struct GatherSide {
  const TensorView* out;
  KvFormat format;
  int64_t dim;
  int64_t data_offset_bytes;   // of the region in a page
  int64_t scale_offset_bytes;  // of the region in a page
  float scale;                 // what is left to multiply with
  const float* key_offset;     // [num_kv_heads, dim], or nullptr
  bool rotated;
};

inline void multiply_row(float* values, int64_t count, float factor) {
  for (int64_t i = 0; i < count; ++i) values[i] *= factor;
}

// Bits are copied where the output has the format of the pool, so a NaN's payload survives.
inline bool keeps_bits(const GatherSide& side) {
  return side.key_offset == nullptr && !side.rotated && view_stride(*side.out) == 1 &&
         ((side.format == KvFormat::kBf16 && side.out->dtype == Dtype::kBf16) ||
          (side.format == KvFormat::kFp16 && side.out->dtype == Dtype::kFp16));
}

inline bool is_direct(const GatherSide& side) {
  return side.key_offset == nullptr && !side.rotated && view_stride(*side.out) == 1 &&
         side.format == KvFormat::kNvfp4 && side.out->dtype != Dtype::kFp32;
}

inline void read_row(const GatherSide& side, int64_t head, const std::byte* data,
                     const std::byte* scales, std::byte* target) {
  if (keeps_bits(side)) {
    std::memcpy(target, data, static_cast<size_t>(2 * side.dim));
    return;
  }
  if (is_direct(side)) {
    if (side.out->dtype == Dtype::kBf16)
      return decode_nvfp4_row_to<Dtype::kBf16>(data, scales, side.dim, side.scale, target);
    return decode_nvfp4_row_to<Dtype::kFp16>(data, scales, side.dim, side.scale, target);
  }
  HWY_ALIGN float values[kMaxHeadDim];
  decode_row(side.format, data, scales, side.dim, values);
  if (side.scale != 1.0f) multiply_row(values, side.dim, side.scale);
  if (side.rotated) rotate_row(values, side.dim);
  if (side.key_offset != nullptr) {
    const float* offset = side.key_offset + head * side.dim;
    for (int64_t i = 0; i < side.dim; ++i) values[i] += offset[i];
  }
  store_floats(side.out->dtype, values, view_stride(*side.out), side.dim, target);
}

// Consecutive tokens of one block, and the row of the first.
struct Run {
  int64_t slot;
  int64_t row;
  int64_t count;
};

// Head by head, so that the pool is read in the order in which it lies in memory.
inline void gather_side(const LayerView& layer, const GatherSide& side, const Run& run) {
  const AttentionGeometry& geometry = layer.geometry;
  const int64_t data_bytes = row_data_bytes(side.format, side.dim);
  const int64_t scale_bytes = row_scale_bytes(side.format, side.dim);
  const std::byte* page = layer.base + run.slot / geometry.block_tokens * layer.block_stride_bytes;
  const int64_t offset = run.slot % geometry.block_tokens;
  for (int64_t head = 0; head < geometry.num_kv_heads; ++head)
    for (int64_t i = 0; i < run.count; ++i) {
      const int64_t source_row = head * geometry.block_tokens + offset + i;
      read_row(side, head, page + side.data_offset_bytes + source_row * data_bytes,
               page + side.scale_offset_bytes + source_row * scale_bytes,
               view_row(*side.out, run.row + i, head));
    }
}

// e4m3 of value * (1 / k_scale); what is e4m3 already and would not change is copied.
inline void stage_mla_row(MlaRow format, const std::byte* source, float k_scale, int64_t stride,
                          std::byte* target) {
  const float inverse = 1.0f / k_scale;
  HWY_ALIGN float values[kMlaKeyDim];
  std::byte bytes[kMlaKeyDim];
  if (format == MlaRow::kFp8) {
    std::memcpy(bytes, source, sizeof(bytes));
  } else {
    decode_mla_row(format, source, values);
    multiply_row(values, kMlaKeyDim, inverse);
    encode_e4m3_row(values, kMlaKeyDim, 1.0f, bytes);
    if (format == MlaRow::kNvfp4Ds && inverse == 1.0f)
      std::memcpy(bytes + kMlaLatentDim, source + kNvfp4DsRopeOffset, kMlaRopeDim);
  }
  for (int64_t i = 0; i < kMlaKeyDim; ++i) target[i * stride] = bytes[i];
}

inline void gather_mla_row(const LayerView& layer, const TensorView& out, int64_t slot,
                           int64_t row) {
  const MlaRow format = layer.geometry.mla_row;
  const std::byte* source = layer.base +
                            slot / layer.geometry.block_tokens * layer.block_stride_bytes +
                            slot % layer.geometry.block_tokens * mla_row_bytes(format);
  std::byte* target = view_row(out, row, 0);
  if (out.dtype == Dtype::kFp8E4m3)
    return stage_mla_row(format, source, layer.k_scale, view_stride(out), target);
  if (format == MlaRow::kBf16 && out.dtype == Dtype::kBf16 && view_stride(out) == 1) {
    std::memcpy(target, source, size_t{2} * kMlaKeyDim);
    return;
  }
  HWY_ALIGN float values[kMlaKeyDim];
  decode_mla_row(format, source, values);
  const float scale = cpu::tensor_scale(format, layer.k_scale);
  if (scale != 1.0f) multiply_row(values, kMlaKeyDim, scale);
  store_floats(out.dtype, values, view_stride(out), kMlaKeyDim, target);
}

template <class Visit>
HWY_INLINE void for_each_run(const GatherParams& params, const Visit& visit) {
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  for (int64_t i = 0; i < params.num_slots; ++i)
    if (params.slots[i] >= 0) visit(Run{params.slots[i], i, 1});
  int64_t first_row = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int32_t* blocks = params.block_table + sequence * params.block_table_stride;
    const int64_t first = first_token_of(params, sequence);
    const int64_t seq_len = params.seq_lens[sequence];
    int64_t count = 0;
    for (int64_t token = first; token < seq_len; token += count) {
      const int64_t offset = token % block_tokens;
      count = std::min(block_tokens - offset, seq_len - token);
      visit(Run{blocks[token / block_tokens] * block_tokens + offset, first_row + token - first,
                count});
    }
    first_row += params.rows_per_sequence > 0 ? params.rows_per_sequence : seq_len - first;
  }
}

void gather_on_target(const GatherParams& params) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  const bool wants_k = params.k_out.shape[0] > 0;
  const bool wants_v = params.v_out.shape[0] > 0;
  if (geometry.mla_row != MlaRow::kNone) {
    if (!wants_k) return;
    for_each_run(params, [&](const Run& run) HWY_ATTR {
      for (int64_t i = 0; i < run.count; ++i)
        gather_mla_row(layer, params.k_out, run.slot + i, run.row + i);
    });
    return;
  }
  const GatherSide k = {&params.k_out,
                        geometry.k_format,
                        geometry.k_dim,
                        layer.page.k_data_offset_bytes,
                        layer.page.k_scale_offset_bytes,
                        cpu::tensor_scale(geometry.k_format, layer.k_scale),
                        is_centred(layer.key_transform) ? layer.key_offset : nullptr,
                        is_rotated(layer.key_transform)};
  const GatherSide v = {&params.v_out,
                        geometry.v_format,
                        geometry.v_dim,
                        layer.page.v_data_offset_bytes,
                        layer.page.v_scale_offset_bytes,
                        cpu::tensor_scale(geometry.v_format, layer.v_scale),
                        nullptr,
                        false};
  for_each_run(params, [&](const Run& run) HWY_ATTR {
    if (wants_k) gather_side(layer, k, run);
    if (wants_v) gather_side(layer, v, run);
  });
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace larder::kernels {

HWY_EXPORT(gather_on_target);

namespace cpu {

Status supports_gather(const GatherParams& params) {
  return supports_formats(params.layer.geometry);
}

void gather(const GatherParams& params) { HWY_DYNAMIC_DISPATCH(gather_on_target)(params); }

}  // namespace cpu
}  // namespace larder::kernels
#endif
