// append on any GPU: rows of K and V, or of MLA, into the slots of one layer after another. The
// bytes are those of kernels/cpu/append.cpp (cosines: see rope.cuh). Compiled with -fmad=false.
#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/rope.cuh"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/units.cuh"

namespace larder::kernels::cuda {
namespace {

constexpr int kMaxWarps = 4;

// Rows of a tensor, strides in elements.
struct Source {
  const uint8_t* data;
  Dtype dtype;
  int64_t row_stride;
  int64_t head_stride;
  int64_t stride;
};

// K or V: where its rows come from, what becomes of them and where they go.
struct Side {
  Source source;
  KvFormat format;
  int dim;
  int64_t data_offset_bytes;   // of the region in a page
  int64_t scale_offset_bytes;  // of the region in a page
  int64_t data_bytes;          // of a row
  int64_t scale_bytes;         // of a row
  float scale;                 // of the tensor
  const float* key_offset;     // [num_kv_heads, dim], or nullptr
  bool rotated;                // by the transform of keys
  bool turns;                  // by RoPE
  bool keeps_bits;             // a NaN's payload survives
};

struct Call {
  uint8_t* base;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int block_tokens;
  int num_kv_heads;
  Encoder encoder;
  MlaRow mla_row;  // then sides are latent and rope, and the format is this
  Side sides[2];
  const int64_t* slots;  // or the next
  const int32_t* slots32;
  int64_t num_slots;
  RopeCall rope;
};

// What a CTA shares. The values of each warp's row begin at a multiple of kRowFloats.
struct Shared {
  float values[kMaxWarps][kRowFloats];
  CosineSine turns[kMaxRopeDim / 2];  // of the row, by pair
  uint8_t* page;                      // of the row's slot; nullptr: the row is skipped
  int token;                          // within the block
  int64_t position;                   // where there is RoPE
};

__device__ const uint8_t* source_row(const Source& source, int64_t row, int head) {
  const int64_t index = row * source.row_stride + head * source.head_stride;
  return source.data + index * (source.dtype == Dtype::kFp32 ? 4 : 2);
}

// Value i of a row, turned, as a tensor of the source's dtype would hold it.
__device__ float turned_value(const RopeCall& rope, const Shared& shared, const Side& side,
                              const uint8_t* row, int i) {
  const int pair = pair_of(rope, i);
  const int first = first_of_pair(rope, pair);
  const Source& source = side.source;
  const float x = load_value(source.dtype, row, first * source.stride);
  const float y = load_value(source.dtype, row, second_of_pair(rope, pair) * source.stride);
  const CosineSine turn = shared.turns[pair];
  return rounded_to(source.dtype,
                    i == first ? rotated_first(x, y, turn) : rotated_second(x, y, turn));
}

__device__ float input_value(const RopeCall& rope, const Shared& shared, const Side& side,
                             const uint8_t* row, int i) {
  if (side.turns && i < rope.dim) return turned_value(rope, shared, side, row, i);
  return load_value(side.source.dtype, row, i * side.source.stride);
}

__device__ void copy_u16_row(const RopeCall& rope, const Shared& shared, const Side& side,
                             const uint8_t* row, uint8_t* target, int lane) {
  const auto* source = reinterpret_cast<const uint16_t*>(row);
  for (int i = lane; i < side.dim; i += kWarp) {
    uint16_t bits = source[i * side.source.stride];
    if (side.turns && i < rope.dim) {
      const float value = turned_value(rope, shared, side, row, i);
      bits = side.source.dtype == Dtype::kBf16 ? bf16_bits(value) : fp16_bits(value);
    }
    store_u16(bits, target + 2 * i);
  }
}

__device__ void append_row(const Call& call, const Side& side, const Shared& shared, int64_t row,
                           int head, float* values, int lane) {
  const uint8_t* source = source_row(side.source, row, head);
  const int64_t target_row = int64_t{head} * call.block_tokens + shared.token;
  uint8_t* data = shared.page + side.data_offset_bytes + target_row * side.data_bytes;
  uint8_t* scales = shared.page + side.scale_offset_bytes + target_row * side.scale_bytes;
  if (side.keeps_bits) return copy_u16_row(call.rope, shared, side, source, data, lane);
  for (int i = lane; i < side.dim; i += kWarp) {
    float value = input_value(call.rope, shared, side, source, i);
    if (side.key_offset != nullptr)
      value = difference(value, side.key_offset[int64_t{head} * side.dim + i]);
    values[place(i)] = value;
  }
  __syncwarp();
  if (side.rotated) rotate(values, side.dim, lane);
  encode_row(side.format, call.encoder, values, side.dim, side.scale, data, scales, lane);
  __syncwarp();  // before the values of the next row
}

__device__ void append_mla_row(const Call& call, const Shared& shared, int64_t row, float* values,
                               int lane) {
  const Side& latent = call.sides[0];
  const Side& rope = call.sides[1];
  const uint8_t* latent_row = source_row(latent.source, row, 0);
  const uint8_t* rope_row = source_row(rope.source, row, 0);
  uint8_t* target = shared.page + shared.token * latent.data_bytes;
  if (latent.keeps_bits && rope.keeps_bits) {
    copy_u16_row(call.rope, shared, latent, latent_row, target, lane);
    return copy_u16_row(call.rope, shared, rope, rope_row, target + 2 * kMlaLatentDim, lane);
  }
  for (int i = lane; i < kMlaLatentDim; i += kWarp)
    values[place(i)] = load_value(latent.source.dtype, latent_row, i * latent.source.stride);
  for (int i = lane; i < kMlaRopeDim; i += kWarp)
    values[place(kMlaLatentDim + i)] = input_value(call.rope, shared, rope, rope_row, i);
  __syncwarp();
  encode_mla_row(call.mla_row, values, latent.scale, target, lane);
  __syncwarp();
}

// A slot that names no block, or one without the right to write, or a position that cannot be, is
// reported once.
__device__ void find_slot(const Call& call, const PointOfUse& use, int64_t row, Shared& shared) {
  shared.page = nullptr;
  const int64_t slot = call.slots32 != nullptr ? int64_t{load_once(call.slots32 + row)}
                                               : load_once(call.slots + row);
  if (slot < 0) return;
  const int64_t block = slot / call.block_tokens;
  if (!use.may_use(block, call.num_blocks, true, slot)) return;
  if (call.rope.dim > 0) {
    shared.position = position_of(call.rope, use, row);
    if (shared.position < 0) return;
  }
  shared.page = call.base + block * call.block_stride_bytes;
  shared.token = static_cast<int>(slot % call.block_tokens);
}

// Grid: a CTA per row, up to 2^20, which then take every 2^20th. Block: 1 to 4 warps, each of which
// has one head's K or V (or the whole MLA row) at a time in shared memory: transform there, then a
// lane per group or element encodes. Moves 2 * heads * dim * element bytes per token in, and what
// the format stores out; bound by the encoder's arithmetic (best_scale: 13 tries per group), else
// by the latency of a row. With RoPE the CTA first computes the row's cosines and sines.
__global__ void __launch_bounds__(kMaxWarps* kWarp)
    append_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ Shared shared;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int num_warps = static_cast<int>(blockDim.x) / kWarp;
  float* values = shared.values[warp];
  for (int64_t row = blockIdx.x; row < call.num_slots; row += gridDim.x) {
    if (threadIdx.x == 0) find_slot(call, use, row, shared);
    __syncthreads();
    if (shared.page != nullptr) {
      if (call.rope.dim > 0) {
        for (int pair = static_cast<int>(threadIdx.x); pair < call.rope.dim / 2;
             pair += static_cast<int>(blockDim.x))
          shared.turns[pair] = cosine_sine(call.rope, shared.position, pair);
        __syncthreads();
      }
      if (call.mla_row != MlaRow::kNone)
        append_mla_row(call, shared, row, values, lane);
      else
        for (int item = warp; item < 2 * call.num_kv_heads; item += num_warps)
          append_row(call, call.sides[item & 1], shared, row, item >> 1, values, lane);
    }
    __syncthreads();
  }
}

Source source_of(const TensorView& view) {
  return {static_cast<const uint8_t*>(view.data), view.dtype, view.strides[0], view.strides[1],
          view.strides[2]};
}

Side side_of(const TensorView& view, KvFormat format, int64_t data_offset_bytes,
             int64_t scale_offset_bytes, float scale) {
  const int64_t dim = view.shape[2];
  const bool keeps_bits = (format == KvFormat::kBf16 && view.dtype == Dtype::kBf16) ||
                          (format == KvFormat::kFp16 && view.dtype == Dtype::kFp16);
  return {source_of(view),
          format,
          static_cast<int>(dim),
          data_offset_bytes,
          scale_offset_bytes,
          row_data_bytes(format, dim),
          row_scale_bytes(format, dim),
          scale,
          nullptr,
          false,
          false,
          keeps_bits};
}

Call call_of(const AppendParams& params, const RopeCall& rope) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  Call call = {reinterpret_cast<uint8_t*>(layer.base),
               layer.block_stride_bytes,
               layer.num_blocks,
               geometry.block_tokens,
               geometry.num_kv_heads,
               layer.encoder,
               geometry.mla_row,
               {},
               params.slots,
               params.slots32,
               params.num_slots,
               rope};
  const bool is_mla = geometry.mla_row != MlaRow::kNone;
  call.sides[0] = side_of(params.k, geometry.k_format, page.k_data_offset_bytes,
                          page.k_scale_offset_bytes, layer.k_scale);
  call.sides[1] = side_of(params.v, geometry.v_format, page.v_data_offset_bytes,
                          page.v_scale_offset_bytes, layer.v_scale);
  call.sides[is_mla ? 1 : 0].turns = params.rope.dim > 0;
  if (is_mla) {
    call.sides[0].data_bytes = mla_row_bytes(geometry.mla_row);
    for (Side& side : call.sides)
      side.keeps_bits = geometry.mla_row == MlaRow::kBf16 && side.source.dtype == Dtype::kBf16;
    return call;
  }
  if (is_centred(layer.key_transform)) call.sides[0].key_offset = layer.key_offset;
  call.sides[0].rotated = is_rotated(layer.key_transform);
  if (layer.key_transform != KeyTransform::kNone) call.sides[0].keeps_bits = false;
  return call;
}

}  // namespace

// Whatever passes validate_append.
Status supports_append(const AppendParams&) { return {}; }

// Faults are those that the first layer's launch finds.
Status append(const AppendParams& params, const Target& target) {
  if (params.num_slots == 0) return {};
  PointOfUse use = point_of_use(target);
  const RopeCall rope = rope_call(params.rope);
  for (int64_t i = -1; i < params.num_further_layers; ++i) {
    const Call call = call_of(i < 0 ? params : further_append(params, i), rope);
    const int items = call.mla_row != MlaRow::kNone ? 1 : 2 * call.num_kv_heads;
    append_kernel<<<grid_of(params.num_slots), kWarp * std::min(items, kMaxWarps), 0,
                    stream_of(target)>>>(call, use);
    if (Status s = launched("append"); !s.ok()) return s;
    use.faults = nullptr;
  }
  return {};
}

}  // namespace larder::kernels::cuda
