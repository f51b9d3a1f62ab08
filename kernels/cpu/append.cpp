#include "kernels/cpu/append.h"

#include <cstring>

#include "kernels/cpu/formats.h"
#include "kernels/cpu/rope.h"
#include "kernels/cpu/view_rows.h"
#include "kernels/kernel_table.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/append.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#include "kernels/cpu/encode-inl.h"
#include "kernels/cpu/mla_encode-inl.h"
#include "kernels/cpu/nvfp4_direct-inl.h"
#include "kernels/cpu/rotate-inl.h"
#include "kernels/cpu/rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

using cpu::view_row;
using cpu::view_stride;

// K or V: where its rows come from, what becomes of them and where they go.
struct AppendSide {
  const TensorView* source;
  KvFormat format;
  int64_t dim;
  int64_t data_offset_bytes;   // of the region in a page
  int64_t scale_offset_bytes;  // of the region in a page
  float scale;                 // of the tensor
  const float* key_offset;     // [num_kv_heads, dim], or nullptr
  bool rotated;                // by the transform of keys
  Rope rope;

  bool is_transformed() const { return key_offset != nullptr || rotated; }
  bool is_direct(Encoder encoder) const {
    return rope.dim == 0 && !is_transformed() && format == KvFormat::kNvfp4 &&
           encoder == Encoder::kReference && source->dtype == Dtype::kBf16 &&
           source->strides[2] == 1;
  }
  bool keeps_bits() const {
    return !is_transformed() && ((format == KvFormat::kBf16 && source->dtype == Dtype::kBf16) ||
                                 (format == KvFormat::kFp16 && source->dtype == Dtype::kFp16));
  }
};

// Bits are copied, so a NaN's payload survives.
inline void copy_u16_row(const std::byte* source, int64_t stride, int64_t count,
                         std::byte* target) {
  if (stride == 1) {
    std::memcpy(target, source, static_cast<size_t>(2 * count));
    return;
  }
  for (int64_t i = 0; i < count; ++i)
    std::memcpy(target + 2 * i, source + 2 * i * stride, sizeof(uint16_t));
}

inline void write_row(const AppendParams& params, const AppendSide& side, int64_t head,
                      const std::byte* source, int64_t stride, std::byte* data, std::byte* scales) {
  if (side.keeps_bits()) return copy_u16_row(source, stride, side.dim, data);
  HWY_ALIGN float values[kMaxHeadDim];
  load_floats(side.source->dtype, source, stride, side.dim, values);
  if (side.key_offset != nullptr) {
    const float* offset = side.key_offset + head * side.dim;
    for (int64_t i = 0; i < side.dim; ++i) values[i] -= offset[i];
  }
  if (side.rotated) rotate_row(values, side.dim);
  encode_row(side.format, params.layer.encoder, values, side.dim, side.scale, data, scales);
}

inline std::byte* page_of(const LayerView& layer, int64_t slot) {
  return layer.base + slot / layer.geometry.block_tokens * layer.block_stride_bytes;
}

inline void append_side(const AppendParams& params, const AppendSide& side) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  const int64_t data_bytes = row_data_bytes(side.format, side.dim);
  const int64_t scale_bytes = row_scale_bytes(side.format, side.dim);
  const bool direct = side.is_direct(layer.encoder);
  DirectEncoder encoder(side.scale);
  cpu::Rotation rotation(side.rope);
  HWY_ALIGN std::byte turned[sizeof(float) * kMaxHeadDim];
  for (int64_t row = 0; row < params.num_slots; ++row) {
    const int64_t slot = slot_of(params, row);
    if (slot < 0) continue;
    rotation.begin_row(row);
    std::byte* page = page_of(layer, slot);
    const int64_t offset = slot % geometry.block_tokens;
    for (int64_t head = 0; head < geometry.num_kv_heads; ++head) {
      const int64_t target_row = head * geometry.block_tokens + offset;
      const std::byte* source = view_row(*side.source, row, head);
      std::byte* data = page + side.data_offset_bytes + target_row * data_bytes;
      std::byte* scales = page + side.scale_offset_bytes + target_row * scale_bytes;
      const int64_t stride = view_stride(*side.source);
      if (direct) {
        encoder.add(source, side.dim, data, scales);
      } else if (rotation.is_none()) {
        write_row(params, side, head, source, stride, data, scales);
      } else {
        rotation.rotate(side.source->dtype, source, stride, side.dim, turned);
        write_row(params, side, head, turned, 1, data, scales);
      }
    }
  }
  encoder.finish();
}

inline void append_mla(const AppendParams& params) {
  const LayerView& layer = params.layer;
  const MlaRow format = layer.geometry.mla_row;
  const bool keeps_bits =
      format == MlaRow::kBf16 && params.k.dtype == Dtype::kBf16 && params.v.dtype == Dtype::kBf16;
  cpu::Rotation rotation(params.rope);
  std::byte turned[sizeof(float) * kMlaRopeDim];
  HWY_ALIGN float values[kMlaKeyDim];
  for (int64_t row = 0; row < params.num_slots; ++row) {
    const int64_t slot = slot_of(params, row);
    if (slot < 0) continue;
    std::byte* target =
        page_of(layer, slot) + slot % layer.geometry.block_tokens * mla_row_bytes(format);
    const std::byte* latent = view_row(params.k, row, 0);
    const std::byte* rope = view_row(params.v, row, 0);
    int64_t rope_stride = view_stride(params.v);
    if (!rotation.is_none()) {
      rotation.begin_row(row);
      rotation.rotate(params.v.dtype, rope, rope_stride, kMlaRopeDim, turned);
      rope = turned;
      rope_stride = 1;
    }
    if (keeps_bits) {
      copy_u16_row(latent, view_stride(params.k), kMlaLatentDim, target);
      copy_u16_row(rope, rope_stride, kMlaRopeDim, target + int64_t{2} * kMlaLatentDim);
      continue;
    }
    load_floats(params.k.dtype, latent, view_stride(params.k), kMlaLatentDim, values);
    load_floats(params.v.dtype, rope, rope_stride, kMlaRopeDim, values + kMlaLatentDim);
    encode_mla_row(format, values, layer.k_scale, target);
  }
}

inline void append_layer(const AppendParams& params) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  if (geometry.mla_row != MlaRow::kNone) return append_mla(params);
  append_side(params, {&params.k, geometry.k_format, geometry.k_dim, layer.page.k_data_offset_bytes,
                       layer.page.k_scale_offset_bytes, layer.k_scale,
                       is_centred(layer.key_transform) ? layer.key_offset : nullptr,
                       is_rotated(layer.key_transform), params.rope});
  append_side(params, {&params.v, geometry.v_format, geometry.v_dim, layer.page.v_data_offset_bytes,
                       layer.page.v_scale_offset_bytes, layer.v_scale, nullptr, false, Rope()});
}

void append_on_target(const AppendParams& params) {
  append_layer(params);
  for (int64_t i = 0; i < params.num_further_layers; ++i) append_layer(further_append(params, i));
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace larder::kernels {

HWY_EXPORT(append_on_target);

namespace cpu {

Status supports_append(const AppendParams& params) {
  return supports_formats(params.layer.geometry);
}

void append(const AppendParams& params) { HWY_DYNAMIC_DISPATCH(append_on_target)(params); }

}  // namespace cpu
}  // namespace larder::kernels
#endif
