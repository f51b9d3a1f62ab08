// What a CTA of attention works with: the call by value, the shape of its tiles, its memory.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/layer_scale.h"
#include "kernels/cpu/rotate.h"
#include "kernels/cuda/attend_rows.cuh"
#include "kernels/cuda/attend_state.cuh"

namespace larder::kernels::cuda {

inline constexpr int kTileKeys = 32;  // a lane each
inline constexpr int kWarps = kThreads / 32;
inline constexpr int kMaxPairs = 16;
inline constexpr int kPairsPerWarp = kMaxPairs / kWarps;
inline constexpr int kChunkDims = 128;               // of K, in shared memory at a time
inline constexpr int kChunkStride = kChunkDims + 4;  // float4 of eight lanes meet all banks
// Of the 99 KB that any GPU from 8.0 on has: 3 are left for TileState.
inline constexpr int kMaxDynamicBytes = 96 * 1024;

// How the pairs of a call are dealt out.
struct TileShape {
  int32_t heads = 1;   // of one KV head; the last tile of a group may have fewer
  int32_t tokens = 1;  // consecutive rows of q
  int32_t head_tiles = 1;
  bool is_compensated = false;
  int32_t shared_bytes = 0;
};

// What both kernels take, by value.
struct AttendCore {
  LayerRows layer;
  StridedTensor q;
  OutputView output;
  Parts parts;
  TileShape shape;
  const float* sinks = nullptr;
  const float* alibi_slopes = nullptr;
  const float* key_offset = nullptr;  // nullptr unless keys are centred
  float scale = 1.0f;
  float logit_scale = 1.0f;  // with that of stored keys
  float value_scale = 1.0f;
  float soft_cap = 0.0f;
  int32_t group_size = 1;
  int32_t rotation = 1;  // rotation_dim; 1: keys are not rotated
  float rotation_factor = 1.0f;
  PointOfUse use;
};

// Dynamic shared memory, in floats.
struct TileMemory {
  float* q;        // [pairs, q_stride], zeros past k_dim
  float* sums;     // [pairs, v_dim]
  float* lost;     // [pairs, v_dim]: what rounding added to sums; compensated only
  float* k;        // [kTileKeys, kChunkStride]
  float* weights;  // [pairs, kTileKeys]
};

// Static shared memory.
struct TileState {
  StoredRow k_rows[kTileKeys];
  StoredRow v_rows[kTileKeys];
  uint32_t present;          // of the tile's keys: those that have been located
  uint32_t seen[kMaxPairs];  // a bit per key of the tile
  float shrink[kMaxPairs];   // what a new maximum does to the sums so far
  Normaliser made[kMaxPairs];
};

// The pairs of a CTA: `num_tokens` rows from `first_row` on, `num_heads` heads from `first_head`
// on. Pair p is row p / num_heads, head p % num_heads.
struct Pairs {
  int64_t first_row;
  int32_t num_tokens;
  int32_t kv_head;
  int32_t first_head;
  int32_t num_heads;
  int32_t part;

  __device__ int count() const { return num_tokens * num_heads; }
  __device__ int64_t row(int pair) const { return first_row + pair / num_heads; }
  __device__ int64_t head(int pair) const { return first_head + pair % num_heads; }
};

__host__ __device__ inline int q_stride(int k_dim) { return (k_dim + 3) / 4 * 4; }

__device__ inline TileMemory place(const AttendCore& core, float* memory) {
  const int pairs = core.shape.heads * core.shape.tokens;
  TileMemory space;
  space.k = memory;
  space.weights = space.k + kTileKeys * kChunkStride;
  space.q = space.weights + pairs * kTileKeys;
  space.sums = space.q + pairs * q_stride(core.layer.k_dim);
  space.lost = space.sums + pairs * core.layer.v_dim;
  return space;
}

__device__ inline int warp_index() { return static_cast<int>(threadIdx.x) / 32; }
__device__ inline int lane_index() { return static_cast<int>(threadIdx.x) % 32; }

__device__ inline float warp_max(float value) {
  for (int step = 16; step > 0; step /= 2) value = fmaxf(value, __shfl_xor_sync(~0u, value, step));
  return value;
}
template <typename T>
__device__ inline T warp_sum(T value) {
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(~0u, value, step);
  return value;
}

// Of tiles with as many pairs as fit, of `tokens_wanted` rows at most.
inline TileShape choose_tile(const LayerRows& layer, int64_t group_size, int64_t tokens_wanted,
                             bool is_compensated) {
  const int64_t pair_bytes = 4 * (int64_t{q_stride(layer.k_dim)} +
                                  (is_compensated ? 2 : 1) * int64_t{layer.v_dim} + kTileKeys);
  const int64_t fixed_bytes = 4 * kTileKeys * kChunkStride;
  const int64_t max_pairs =
      std::clamp<int64_t>((kMaxDynamicBytes - fixed_bytes) / pair_bytes, 1, kMaxPairs);
  TileShape shape;
  const int64_t head_tiles = (group_size + max_pairs - 1) / max_pairs;
  const int64_t heads = head_tiles == 0 ? 1 : (group_size + head_tiles - 1) / head_tiles;
  shape.heads = static_cast<int32_t>(heads);
  shape.tokens = static_cast<int32_t>(
      std::clamp<int64_t>(tokens_wanted, 1, std::max<int64_t>(max_pairs / heads, 1)));
  shape.head_tiles = static_cast<int32_t>(head_tiles);
  shape.is_compensated = is_compensated;
  shape.shared_bytes = static_cast<int32_t>(fixed_bytes + shape.heads * shape.tokens * pair_bytes);
  return shape;
}

// A call without its parts and tiles.
inline AttendCore make_core(const LayerView& layer, const TensorView& q,
                            const AttentionOutput& output, float scale, const float* sinks,
                            const Target& target) {
  AttendCore core;
  core.layer = layer_rows(layer);
  core.q = StridedTensor(q);
  core.output = OutputView(output);
  core.sinks = sinks;
  core.scale = scale;
  core.logit_scale = scale * cpu::key_scale(layer);
  core.value_scale = cpu::value_scale(layer);
  core.group_size = static_cast<int32_t>(q.shape[1] / layer.geometry.num_kv_heads);
  if (is_centred(layer.key_transform)) core.key_offset = layer.key_offset;
  if (is_rotated(layer.key_transform)) core.rotation = rotation_dim(layer.geometry.k_dim);
  core.rotation_factor = rotation_factor(core.rotation);
  core.use = point_of_use(target);
  return core;
}

inline JoinCall join_call(const AttendCore& core) {
  return {core.parts, core.output, core.sinks, core.value_scale, core.layer.v_dim};
}

}  // namespace larder::kernels::cuda
