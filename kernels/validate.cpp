#include "kernels/validate.h"

#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/kernel_table.h"
#include "kernels/refuse.h"

namespace larder::kernels {

bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

Status validate_layer(const LayerView& layer) {
  if (Status s = validate_geometry(layer.geometry, layer.encoder, layer.key_transform); !s.ok())
    return s;
  if (!is_aligned(layer.key_offset, alignof(float)))
    return refuse(kInvalid, "key_offset is not aligned to 4 bytes");
  if (Status s = validate_scale("k_scale", layer.k_scale); !s.ok()) return s;
  if (Status s = validate_scale("v_scale", layer.v_scale); !s.ok()) return s;
  return validate_layer_memory(layer);
}

Status validate_layer_memory(const LayerView& layer) {
  if (layer.page != page_layout(layer.geometry))
    return refuse(kInvalid, "page is not the layout of the geometry: it has ",
                  layer.page.page_bytes, " bytes, the geometry's ",
                  page_layout(layer.geometry).page_bytes);
  if (layer.num_blocks < 0) return refuse(kInvalid, "num_blocks is ", layer.num_blocks);
  if (layer.block_stride_bytes < layer.page.page_bytes)
    return refuse(kInvalid, "block_stride_bytes is ", layer.block_stride_bytes, ": a page has ",
                  layer.page.page_bytes);
  int64_t unused = 0;
  if (__builtin_mul_overflow(layer.num_blocks, layer.block_stride_bytes, &unused) ||
      __builtin_mul_overflow(layer.num_blocks, int64_t{layer.geometry.block_tokens}, &unused))
    return refuse(kInvalid, "num_blocks is ", layer.num_blocks, ": the pool passes 2^63 bytes");
  return {};
}

Status validate_tensor(std::string_view field, const TensorView& view, int64_t num_heads,
                       int64_t dim) {
  if (static_cast<size_t>(view.dtype) >= kDtypeNames.size())
    return refuse(kInvalid, field, ": dtype is ", static_cast<int>(view.dtype),
                  ", which is none of bf16, fp16, fp32");
  const int64_t heads = num_heads > 0 ? num_heads : view.shape[1];
  if (view.shape[0] < 0 || view.shape[1] != heads || view.shape[2] != dim)
    return refuse(kInvalid, field, " is [", view.shape[0], ", ", view.shape[1], ", ", view.shape[2],
                  "]: expected [rows, ", heads, ", ", dim, "]");
  const auto extent = tensor_extent_bytes(view);
  if (!extent)
    return refuse(kInvalid, field, ": strides [", view.strides[0], ", ", view.strides[1], ", ",
                  view.strides[2], "] with ", view.shape[0], " rows pass 2^63 bytes");
  if (extent->begin == extent->end) return {};
  if (view.data == nullptr)
    return refuse(kInvalid, field, ": data is null with ", view.shape[0], " rows");
  if (!is_aligned(view.data, dtype_bytes(view.dtype)))
    return refuse(kInvalid, field, ": data is not aligned to the ", dtype_bytes(view.dtype),
                  " bytes of ", name(view.dtype));
  return {};
}

Status validate_scale(std::string_view field, double value) {
  // A double beyond the floats must not be converted: that is undefined, not infinite.
  const double limit = std::numeric_limits<float>::max();
  if (value > 0 && value <= limit && std::isnormal(static_cast<float>(value))) return {};
  return refuse(kInvalid, field, " is ", value, ": expected a float > 0, from ",
                std::numeric_limits<float>::min(), " to ", limit);
}

}  // namespace larder::kernels
