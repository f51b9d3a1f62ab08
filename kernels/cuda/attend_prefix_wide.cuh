// Attention of many query pairs over the keys of a shared prefix: softmax over tiles of keys
// between two products of matrices, in the manner of FlashAttention 2.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_tile.cuh"
#include "kernels/cuda/early_launch.cuh"

namespace larder::kernels::cuda::prefix {

// Weights are held as halves 2^kRaise times their value, and the base of a row is raised once a
// logit is more than kSlack above it: they stay below 2^14, and those of 2^-30 still count.
inline constexpr float kRaise = 6.0f;
inline constexpr float kSlack = 8.0f;
inline constexpr float kNoBase = -1e30f;

// Of a warp: kStripes of 16 pairs, stripe n from pair 64 n + 16 warp on. This lane has rows
// lane / 4 and lane / 4 + 8 of each.
template <typename T, int kStripes>
struct WarpSums {
  float sums[kStripes][T::kDim / 8][4] = {};
  float weights[kStripes][2] = {};  // of this lane's keys
  float base[kStripes][2];
};

__device__ inline int stripe_row(Place place, int stripe, int half) {
  return (stripe * kWarps + place.warp) * 16 + half * 8 + place.lane / 4;
}

template <typename T, int kStripes>
using Logits = float[kStripes][T::kKeys / 8][4];

// products = queries * keys.
template <typename T, int kStripes>
__device__ inline void multiply_keys(uint32_t queries, uint32_t keys, Place place,
                                     Logits<T, kStripes>& products) {
  const int lane = place.lane;
  const int warp = place.warp;
  // Of queries: rows 0-7, 8-15, then both again for the upper 8 dims; of keys: lower and upper
  // dims of rows 0-7, then of rows 8-15.
  const int query_row = warp * 16 + lane % 16;
  const int key_row = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
    for (int n = 0; n < T::kKeys / 8; ++n)
#pragma unroll
      for (int i = 0; i < 4; ++i) products[stripe][n][i] = 0.0f;
#pragma unroll
  for (int step = 0; step < T::kDim / 16; ++step) {
    uint32_t a[kStripes][4];
#pragma unroll
    for (int stripe = 0; stripe < kStripes; ++stripe)
      load_matrices(queries + stripe * 16 * kWarps * T::kHalfRowBytes +
                        chunk_offset(query_row, 2 * step + lane / 16, T::kHalfRowBytes),
                    a[stripe]);
#pragma unroll
    for (int n = 0; n < T::kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices(keys + n * 16 * T::kHalfRowBytes +
                        chunk_offset(key_row, 2 * step + lane / 8 % 2, T::kHalfRowBytes),
                    b);
#pragma unroll
      for (int stripe = 0; stripe < kStripes; ++stripe) {
        multiply_add(products[stripe][2 * n], a[stripe], b[0], b[1]);
        multiply_add(products[stripe][2 * n + 1], a[stripe], b[2], b[3]);
      }
    }
  }
}

// sums += weights * values.
template <typename T, int kStripes>
__device__ inline void add_values(uint32_t values, const uint32_t (&weights)[kStripes][4], int step,
                                  int lane, WarpSums<T, kStripes>& warp_sums) {
  // Rows 0-7 and 8-15 of the lower 8 dims, then of the upper ones.
  const int row = lane % 16;
#pragma unroll
  for (int n = 0; n < T::kDim / 16; ++n) {
    uint32_t b[4];
    load_matrices_transposed(values + step * 16 * T::kHalfRowBytes +
                                 chunk_offset(row, 2 * n + lane / 16, T::kHalfRowBytes),
                             b);
#pragma unroll
    for (int stripe = 0; stripe < kStripes; ++stripe) {
      multiply_add(warp_sums.sums[stripe][2 * n], weights[stripe], b[0], b[1]);
      multiply_add(warp_sums.sums[stripe][2 * n + 1], weights[stripe], b[2], b[3]);
    }
  }
}

// cap * tanh(logit / cap) in base 2 of the product, as 1 - 2 / (1 + e^(2 x)).
__device__ inline float cap_logit(float product, float2 factors, float cap) {
  const float power = exp2_fast(fmaf(product, factors.x, factors.y));
  return fmaf(-2.0f * cap, reciprocal_fast(1.0f + power), cap);
}

// Products to logits where a factor alone does not do: with a soft cap, or runs of keys that are
// not there.
template <typename T, int kStripes>
__device__ inline void finish_logits(const WideCall& call, const uint8_t* memory,
                                     const int* present, Place place, Logits<T, kStripes>& logits) {
  const auto* factors = reinterpret_cast<const float2*>(memory + T::kFactors);
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      const float2 factor = factors[stripe_row(place, stripe, half)];
#pragma unroll
      for (int n = 0; n < T::kKeys / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          float& logit = logits[stripe][n][2 * half + i];
          logit = call.soft_cap > 0.0f ? cap_logit(logit, factor, call.soft_cap * kLog2e)
                                       : logit * factor.x;
          if (present[n / 2] == 0) logit = -INFINITY;
        }
    }
}

// Raises the bases to the greatest logits, where one of the warp's is far above its base.
template <typename T, int kStripes>
__device__ inline void raise_bases(const Logits<T, kStripes>& logits,
                                   const float (&factors)[kStripes][2],
                                   WarpSums<T, kStripes>& warp_sums) {
  float greatest[kStripes][2];
  bool is_far = false;
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float& most = greatest[stripe][half];
      most = logits[stripe][0][2 * half];
#pragma unroll
      for (int n = 0; n < T::kKeys / 8; ++n)
        most = fmaxf(most, fmaxf(logits[stripe][n][2 * half], logits[stripe][n][2 * half + 1]));
      most *= factors[stripe][half];
      is_far |= most > warp_sums.base[stripe][half] + kSlack;
    }
  if (__any_sync(~0u, static_cast<int>(is_far)) == 0) return;
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float base = fmaxf(greatest[stripe][half], warp_sums.base[stripe][half]);
      base = fmaxf(base, __shfl_xor_sync(~0u, base, 1));
      base = fmaxf(base, __shfl_xor_sync(~0u, base, 2));
      const float shrink = exp2_fast(warp_sums.base[stripe][half] - base);
      warp_sums.base[stripe][half] = base;
      warp_sums.weights[stripe][half] *= shrink;
#pragma unroll
      for (int n = 0; n < T::kDim / 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) warp_sums.sums[stripe][n][2 * half + i] *= shrink;
    }
}

// One tile of keys and values, which lie as halves in shared memory, for the warp's stripes.
template <typename T, int kStripes>
__device__ inline void attend_tile(const WideCall& call, const uint8_t* memory, int stage,
                                   Place place, WarpSums<T, kStripes>& warp_sums) {
  const uint32_t keys =
      shared_address(memory + T::kHalves) + (T::kIsDirect ? stage * T::kHalvesBytes : 0);
  const auto* present = reinterpret_cast<const int*>(memory + T::kPresent) + stage * 4;
  const auto* pair_factors = reinterpret_cast<const float2*>(memory + T::kFactors);
  Logits<T, kStripes> logits;
  multiply_keys<T, kStripes>(shared_address(memory + T::kQueries), keys, place, logits);
  float factors[kStripes][2];
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      factors[stripe][half] = pair_factors[stripe_row(place, stripe, half)].x;
  int num_present = 0;
#pragma unroll
  for (int run = 0; run < T::kRuns; ++run) num_present += present[run];
  if (call.soft_cap > 0.0f || num_present < T::kRuns) {
    finish_logits<T, kStripes>(call, memory, present, place, logits);
#pragma unroll
    for (int stripe = 0; stripe < kStripes; ++stripe)
      factors[stripe][0] = factors[stripe][1] = 1.0f;
  }
  raise_bases<T, kStripes>(logits, factors, warp_sums);
#pragma unroll
  for (int step = 0; step < T::kKeys / 16; ++step) {
    uint32_t weights[kStripes][4];
#pragma unroll
    for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const int half = i % 2;
        const float factor = factors[stripe][half];
        const float base = kRaise - warp_sums.base[stripe][half];
        const float* pair = logits[stripe][2 * step + i / 2] + 2 * half;
        const float low = exp2_fast(fmaf(pair[0], factor, base));
        const float high = exp2_fast(fmaf(pair[1], factor, base));
        warp_sums.weights[stripe][half] += low + high;
        weights[stripe][i] = pack_halves(low, high);
      }
    add_values<T, kStripes>(keys + T::kHalvesBytes / 2, weights, step, place.lane, warp_sums);
  }
}

// Where a pair's state of a split lies, in states.
__device__ inline int64_t state_index(const WideCall& call, const WideItem& item, int pair) {
  const auto at = static_cast<uint32_t>(item.first_pair + pair);
  const auto size = static_cast<uint32_t>(call.group_size);
  const int64_t row = item.first_row + at / size;
  const int64_t head = int64_t{item.kv_head} * call.group_size + at % size;
  return (item.split * call.q.shape[0] + row) * call.q.shape[1] + head;
}

template <typename T, int kStripes>
__device__ inline void store_sums(const WideCall& call, const WideItem& item,
                                  const WarpSums<T, kStripes>& warp_sums) {
  const Place place = current_place();
  const int column = place.lane % 4;
  constexpr float kToWeight = 1.0f / (1 << static_cast<int>(kRaise));
  constexpr float kToValue = kToWeight * (1 << lowered_by(T::kFormat));
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
#pragma unroll
    for (int half = 0; half < 2; ++half) {
      float weight = warp_sums.weights[stripe][half];
      weight += __shfl_xor_sync(~0u, weight, 1);
      weight += __shfl_xor_sync(~0u, weight, 2);
      const int pair = stripe_row(place, stripe, half);
      if (pair >= item.num_pairs) continue;
      const int64_t index = state_index(call, item, pair);
      if (column == 0) call.states[index] = {warp_sums.base[stripe][half], weight * kToWeight};
      if (weight == 0.0f) continue;
      float* to = call.sums + index * T::kDim;
#pragma unroll
      for (int n = 0; n < T::kDim / 16; ++n) {
        const float* low = warp_sums.sums[stripe][2 * n] + 2 * half;
        const float* high = warp_sums.sums[stripe][2 * n + 1] + 2 * half;
        if constexpr (T::kHasParity) {
          *reinterpret_cast<float4*>(to + n * 16 + column * 4) = {
              low[0] * kToValue, high[0] * kToValue, low[1] * kToValue, high[1] * kToValue};
        } else {
          *reinterpret_cast<float2*>(to + n * 16 + column * 2) = {low[0] * kToValue,
                                                                  low[1] * kToValue};
          *reinterpret_cast<float2*>(to + n * 16 + 8 + column * 2) = {high[0] * kToValue,
                                                                      high[1] * kToValue};
        }
      }
    }
}

// An item's keys for its pairs, at most 64 * kStripes of them.
template <typename T, int kStripes>
__device__ inline void attend_item(const WideCall& call, const WideItem& item, uint8_t* memory) {
  const int run_token = static_cast<int>(threadIdx.x) / 32 % T::kRuns * kRunTokens;
  int32_t block = block_of(call, item, item.begin + run_token);
  copy_tile<T>(call, item, item.begin, block, 0, current_place(), memory);
  commit_copies();
  block = block_of(call, item, item.begin + T::kKeys + run_token);
  load_queries<T>(call, item, memory);
  WarpSums<T, kStripes> warp_sums;
#pragma unroll
  for (int stripe = 0; stripe < kStripes; ++stripe)
    warp_sums.base[stripe][0] = warp_sums.base[stripe][1] = kNoBase;
  int stage = 0;
  for (int32_t tile = item.begin; tile < item.end; tile += T::kKeys) {
    const Place place = current_place();
    wait_for_copies();
    __syncthreads();  // the copies of all warps are there, and the last tile has been read
    if (tile + T::kKeys < item.end) {
      copy_tile<T>(call, item, tile + T::kKeys, block, stage ^ 1, place, memory);
      commit_copies();
      block = block_of(call, item, tile + 2 * T::kKeys + run_token);
    }
    if constexpr (!T::kIsDirect) {
      decode_tile<T>(stage, place, memory);
      __syncthreads();
    }
    if (place.warp * 16 < item.num_pairs)
      attend_tile<T, kStripes>(call, memory, stage, place, warp_sums);
    stage ^= 1;
  }
  store_sums<T, kStripes>(call, item, warp_sums);
}

// The group that a tile of pairs is of, by a search of all lanes at once.
__device__ inline PrefixGroup find_group(const WideCall& call, int64_t tile) {
  const int32_t num_groups = call.header->num_groups;
  int32_t before = 0;
  for (int32_t first = 0; first < num_groups; first += 32) {
    const int32_t i = first + static_cast<int32_t>(threadIdx.x) % 32;
    const bool begins = i < num_groups && call.groups[i].first_tile <= tile;
    before += __popc(__ballot_sync(~0u, static_cast<int>(begins)));
  }
  return call.groups[before - 1];
}

template <typename T>
__device__ inline WideItem item_of(const WideCall& call, uint32_t index) {
  WideItem item;
  const auto heads = static_cast<uint32_t>(call.layer.num_kv_heads);
  const auto splits = static_cast<uint32_t>(call.num_splits);
  item.kv_head = static_cast<int32_t>(index % heads);
  index /= heads;
  item.split = static_cast<int32_t>(index % splits);
  const uint32_t tile = index / splits;
  const PrefixGroup group = find_group(call, tile);
  item.blocks = call.block_table + group.leader * call.block_table_stride;
  item.first_row = group.first_row;
  item.first_pair = (tile - group.first_tile) * T::kPairs;
  item.num_pairs = static_cast<int32_t>(
      min(group.num_rows * call.group_size - item.first_pair, int64_t{T::kPairs}));
  item.tokens = group.tokens;
  const int32_t tiles = (group.tokens - 1) / kSplitTokens + 1;
  const int64_t length =
      int64_t{max((tiles + call.num_splits - 1) / call.num_splits, kMinSplitTiles)} * kSplitTokens;
  item.begin = static_cast<int32_t>(min(item.split * length, int64_t{item.tokens}));
  item.end = static_cast<int32_t>(min(item.split * length + length, int64_t{item.tokens}));
  return item;
}

// Grid: items in strides, of a tile of query pairs, a split of the keys and a KV head. CTA: four
// warps of 16 or 32 pairs each. Keys and values are copied as they are stored while the tile before
// is worked at, decoded once for all pairs, and multiplied by tensor cores. Per token and KV head
// the stored bytes are read once a tile of 128 pairs (64 of 256 dims): bound by the products.
// Of 128 dims, a tile of 64 keys and 128 pairs is 4.2 MFLOP and some 1300 instructions a thread
// (nvfp4): with two CTAs a multiprocessor, fewer issue slots than mma.sync takes clocks.
template <typename T>
__global__ __launch_bounds__(kWideThreads,
                             2) void attend_wide(const __grid_constant__ WideCall call) {
  extern __shared__ uint4 shared_memory[];
  __shared__ WideItem item;
  auto* memory = reinterpret_cast<uint8_t*>(shared_memory);
  wait_for_previous_kernel();
  if (!begin_with_plan(call.taken)) return;
  // Far fewer than 2^31: kMaxPartBytes bounds what they write.
  const auto num_items = static_cast<uint32_t>(call.header->num_tiles) *
                         static_cast<uint32_t>(call.num_splits * call.layer.num_kv_heads);
  for (uint32_t index = blockIdx.x; index < num_items; index += gridDim.x) {
    if (threadIdx.x < 32) {
      const WideItem next = item_of<T>(call, index);
      if (threadIdx.x == 0) item = next;
    }
    __syncthreads();
    if (item.begin >= item.end) {
      const auto pair = static_cast<int>(threadIdx.x);
      if (pair < item.num_pairs) call.states[state_index(call, item, pair)] = {kNoBase, 0.0f};
    } else if (T::kMaxStripes > 1 && item.num_pairs > 16 * kWarps) {
      attend_item<T, T::kMaxStripes>(call, item, memory);
    } else {
      attend_item<T, 1>(call, item, memory);
    }
    __syncthreads();  // before the next item takes the shared memory
  }
}

}  // namespace larder::kernels::cuda::prefix
