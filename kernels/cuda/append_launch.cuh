// The host's half of tuned appends: what their calls have in common.
#pragma once

#include <algorithm>
#include <bit>

#include "kernels/cuda/append_call.cuh"
#include "kernels/cuda/launch.h"
#include "kernels/refuse.h"

namespace larder::kernels::cuda {

inline Status not_tuned(std::string_view what) {
  return refuse(ErrorCode::kUnsupported, "tuned append: ", what);
}

// Of a tensor of 16-bit values. That of an axis with one entry may be anything, and is nothing
// here: addresses past the last row are made, though not read.
inline int64_t stride_bytes(const TensorView& view, int axis) {
  return view.shape[axis] > 1 ? 2 * view.strides[axis] : 0;
}

// Whether all of a tensor's rows can be read in 16-byte units: dtype bf16 or fp16, the last
// dimension contiguous, the other strides multiples of 8.
inline bool has_vector_rows(const TensorView& view) {
  const bool is_16_bit = view.dtype == Dtype::kBf16 || view.dtype == Dtype::kFp16;
  return is_16_bit && view.strides[2] == 1 && stride_bytes(view, 0) % 16 == 0 &&
         stride_bytes(view, 1) % 16 == 0;
}

inline TensorScale tensor_scale(float scale) {
  return {{scale, 1.0f / scale}, {6.0f * scale, 1.0f / (6.0f * scale)}};
}

// Layer 0 is that of the params, the others are the further ones.
inline RowsLayer layer_of(const AppendParams& params, int64_t i) {
  const LayerView& layer = params.layer;
  FurtherLayer one = {layer.base,       params.k.data, params.v.data,
                      layer.key_offset, layer.k_scale, layer.v_scale};
  if (i > 0) one = params.further_layers[i - 1];
  return {reinterpret_cast<uint8_t*>(one.base),
          {static_cast<const uint8_t*>(one.k), static_cast<const uint8_t*>(one.v)},
          is_centred(layer.key_transform) ? one.key_offset : nullptr,
          {tensor_scale(one.k_scale), tensor_scale(one.v_scale)}};
}

// Memory that a tuned append can read and write in its units.
inline Status check_tuned_memory(const AppendParams& params) {
  const LayerView& layer = params.layer;
  if (!std::has_single_bit(static_cast<unsigned>(layer.geometry.block_tokens)))
    return not_tuned("block_tokens is a power of two");
  if (!has_vector_rows(params.k) || !has_vector_rows(params.v))
    return not_tuned("rows of k and v are bf16 or fp16 in units of 16 bytes");
  if (layer.num_blocks > 1 && layer.block_stride_bytes % 16 != 0)
    return not_tuned("blocks begin at multiples of 16 bytes");
  const auto is_aligned = [](const void* address) {
    return reinterpret_cast<uintptr_t>(address) % 16 == 0;
  };
  const auto is_usual = [](float scale) { return scale >= 0x1p-64f && scale <= 0x1p64f; };
  for (int64_t i = 0; i <= params.num_further_layers; ++i) {
    const RowsLayer one = layer_of(params, i);
    if (!is_aligned(one.base) || !is_aligned(one.sources[0]) || !is_aligned(one.sources[1]) ||
        !is_aligned(one.key_offset))
      return not_tuned("base, k, v and key_offset are multiples of 16 bytes");
    if (!is_usual(one.scales[0].one.value) || !is_usual(one.scales[1].one.value))
      return not_tuned("scales lie between 2^-64 and 2^64");
  }
  return {};
}

// All but the layers, and how the work is shared.
inline RowsCall call_of(const AppendParams& params) {
  const LayerView& layer = params.layer;
  RowsCall call = {};
  call.block_stride_bytes = layer.block_stride_bytes;
  call.num_blocks = layer.num_blocks;
  call.slots = params.slots;
  call.slots32 = params.slots32;
  call.num_slots = params.num_slots;
  call.row_stride_bytes[0] = stride_bytes(params.k, 0);
  call.row_stride_bytes[1] = stride_bytes(params.v, 0);
  call.block_shift = std::countr_zero(static_cast<unsigned>(layer.geometry.block_tokens));
  call.rope = rope_call(params.rope);
  return call;
}

// Calls run(call, number of layers, point of use) for as many layers at a time as a launch takes.
// `reports`: the first launch tells about bad slots.
template <class Run>
Status launch_layers(const AppendParams& params, const Target& target, RowsCall call, bool reports,
                     const Run& run) {
  PointOfUse use = point_of_use(target);
  const int64_t num_layers = params.num_further_layers + 1;
  for (int64_t first = 0; first < num_layers; first += kMaxLaunchLayers) {
    const auto count = std::min<int64_t>(kMaxLaunchLayers, num_layers - first);
    for (int64_t i = 0; i < count; ++i) call.layers[i] = layer_of(params, first + i);
    if (first > 0 || !reports) use.faults = nullptr;
    run(call, static_cast<unsigned>(count), use);
    if (Status status = launched("append"); !status.ok()) return status;
  }
  return {};
}

}  // namespace larder::kernels::cuda
