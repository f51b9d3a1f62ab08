#include "kernels/cpu/append.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/formats.h"
#include "kernels/kernel_table.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/append.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#include "kernels/cpu/rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

// K or V: where its rows come from and where they go.
struct AppendSide {
  const TensorView* source;
  KvFormat format;
  int64_t dim;
  int64_t data_offset_bytes;   // of the region in a page
  int64_t scale_offset_bytes;  // of the region in a page
  float global_scale;
};

inline void write_row(const AppendSide& side, const std::byte* source, std::byte* data,
                      std::byte* scales) {
  const Dtype dtype = side.source->dtype;
  const int64_t stride = side.dim > 1 ? side.source->strides[2] : 1;
  if (side.format == KvFormat::kBf16 && dtype == Dtype::kBf16) {
    // Bits are copied, so a NaN's payload survives.
    if (stride == 1) {
      std::memcpy(data, source, static_cast<size_t>(2 * side.dim));
    } else {
      for (int64_t i = 0; i < side.dim; ++i)
        std::memcpy(data + 2 * i, source + 2 * i * stride, sizeof(uint16_t));
    }
    return;
  }
  HWY_ALIGN float values[kMaxHeadDim];
  load_floats(dtype, source, stride, side.dim, values);
  if (side.format == KvFormat::kNvfp4)
    encode_nvfp4_row(values, side.dim, side.global_scale, data, scales);
  else
    store_floats(Dtype::kBf16, values, 1, side.dim, data);
}

inline void append_side(const AppendParams& params, const AppendSide& side) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  const TensorView& source = *side.source;
  const auto* source_bytes = static_cast<const std::byte*>(source.data);
  const int64_t element_bytes = dtype_bytes(source.dtype);
  const int64_t data_bytes = row_data_bytes(side.format, side.dim);
  const int64_t scale_bytes = row_scale_bytes(side.format, side.dim);
  for (int64_t row = 0; row < params.num_slots; ++row) {
    const int64_t slot = params.slots[row];
    if (slot < 0) continue;
    std::byte* page = layer.base + slot / geometry.block_tokens * layer.block_stride_bytes;
    const int64_t offset = slot % geometry.block_tokens;
    // The stride of an axis of size 1 may be anything; it only meets index 0 here.
    const std::byte* source_row = source_bytes + row * source.strides[0] * element_bytes;
    for (int64_t head = 0; head < geometry.num_kv_heads; ++head) {
      const int64_t target_row = head * geometry.block_tokens + offset;
      write_row(side, source_row + head * source.strides[1] * element_bytes,
                page + side.data_offset_bytes + target_row * data_bytes,
                page + side.scale_offset_bytes + target_row * scale_bytes);
    }
  }
}

void append_on_target(const AppendParams& params) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  append_side(params, {&params.k, geometry.k_format, geometry.k_dim, layer.page.k_data_offset_bytes,
                       layer.page.k_scale_offset_bytes, layer.k_scale});
  append_side(params, {&params.v, geometry.v_format, geometry.v_dim, layer.page.v_data_offset_bytes,
                       layer.page.v_scale_offset_bytes, layer.v_scale});
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace larder::kernels {

HWY_EXPORT(append_on_target);

namespace cpu {

Status supports_append(const AppendParams& params) {
  const LayerView& layer = params.layer;
  if (layer.encoder != Encoder::kReference)
    return refuse(ErrorCode::kUnsupported, "encoder is ", name(layer.encoder),
                  ": the cpu kernels serve reference");
  return supports_formats(layer.geometry);
}

void append(const AppendParams& params) { HWY_DYNAMIC_DISPATCH(append_on_target)(params); }

}  // namespace cpu
}  // namespace larder::kernels
#endif
