// The queries of a shared prefix: rotated, scaled to halves, and the factors of their logits.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_tile.cuh"
#include "kernels/cuda/early_launch.cuh"

namespace larder::kernels::cuda::prefix {

// 16 elements of a pair in a lane's registers, the others in lanes beside it.
template <typename T>
__device__ inline void rotate_pair(float (&values)[16], float factor) {
#pragma unroll
  for (int h = 1; h < 16; h *= 2)
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      if ((i & h) != 0) continue;
      const float a = values[i];
      const float b = values[i + h];
      values[i] = a + b;
      values[i + h] = a - b;
    }
  for (int h = 1; h < T::kDim / 16; h *= 2)
#pragma unroll
    for (int i = 0; i < 16; ++i) {
      const float other = __shfl_xor_sync(~0u, values[i], h);
      values[i] =
          (threadIdx.x & static_cast<unsigned>(h)) == 0 ? values[i] + other : other - values[i];
    }
#pragma unroll
  for (int i = 0; i < 16; ++i) values[i] *= factor;
}

// What makes a logit of a product: x * product, or with a soft cap what cap_logit takes.
__device__ inline float2 logit_factors(const WideCall& call, float unscaled, float shift) {
  if (call.soft_cap <= 0.0f) return {unscaled * kLog2e, shift * kLog2e};
  const float to_exponent = 2.0f * kLog2e / call.soft_cap;
  return {unscaled * to_exponent, shift * to_exponent};
}

// Scaled by a power of two that brings the pair's greatest magnitude to [2^13, 2^14), which loses
// nothing of bf16 and fp16, and by the sign of the logits' scale.
template <typename T>
__device__ inline void store_pair(const WideCall& call, float (&values)[16], float shift, int pair,
                                  int part, uint8_t* queries, float2* factors) {
  float greatest = 0.0f;
#pragma unroll
  for (int i = 0; i < 16; ++i) greatest = fmaxf(greatest, fabsf(values[i]));
  for (int h = 1; h < T::kDim / 16; h *= 2)
    greatest = fmaxf(greatest, __shfl_xor_sync(~0u, greatest, h));
  const uint32_t exponent = max(__float_as_uint(greatest) >> 23, 20u);
  const float sign = call.logit_scale < 0.0f ? -1.0f : 1.0f;
  const float up = sign * __uint_as_float((127u + 13u + 127u - exponent) << 23);
  const float down = __uint_as_float((exponent - 13u) << 23);
#pragma unroll
  for (float& value : values) value *= up;
  uint32_t words[8];
#pragma unroll
  for (int i = 0; i < 8; ++i)
    words[i] = T::kHasParity ? pack_halves(values[i % 4 * 4 + i / 4], values[i % 4 * 4 + i / 4 + 2])
                             : pack_halves(values[2 * i], values[2 * i + 1]);
  *reinterpret_cast<uint4*>(queries + chunk_offset(pair, 2 * part, kGroupPairs)) = {
      words[0], words[1], words[2], words[3]};
  *reinterpret_cast<uint4*>(queries + chunk_offset(pair, 2 * part + 1, kGroupPairs)) = {
      words[4], words[5], words[6], words[7]};
  constexpr float kLowered = 1 << lowered_by(T::kFormat);
  if (part == 0)
    factors[pair] = logit_factors(call, fabsf(call.logit_scale) * kLowered * down, shift);
}

// Sixteen elements of a pair of the group as they are given, zeros if it is not there.
__device__ inline const uint8_t* given_query(const WideCall& call, const WideItem& item, int pair,
                                             int part) {
  const auto at = static_cast<uint32_t>(item.first_pair + pair);
  const auto size = static_cast<uint32_t>(call.group_size);
  const int64_t row = item.first_row + at / size;
  const int64_t head = int64_t{kv_head_of_cta()} * call.group_size + at % size;
  return static_cast<const uint8_t*>(call.q.data) + 2 * (call.q.row_index(row, head) + part * 16);
}
__device__ inline void unpack_query(const uint4& low, const uint4& high, bool is_bf16,
                                    float (&values)[16]) {
  const uint32_t pairs[8] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
#pragma unroll
  for (int i = 0; i < 16; ++i) {
    const auto bits = static_cast<uint16_t>(pairs[i / 2] >> 16 * (i % 2));
    values[i] = is_bf16 ? bf16_value(bits) : __half2float(__ushort_as_half(bits));
  }
}

// Queries of a group's pairs as halves, zeros for those that are not there, and their factors. By
// the threads of the group, each of which copies all that it takes to where the halves will be, so
// that memory is waited for once. In loops that are not unrolled: code that runs once is slow to
// fetch.
template <typename T>
__device__ inline void load_queries(const WideCall& call, const WideItem& item, int pair_group,
                                    uint8_t* memory) {
  constexpr int kLanes = T::kDim / 16;  // a pair
  constexpr int kStep = kGroupThreads / kLanes;
  uint8_t* queries = memory + T::kQueries + pair_group * T::kHalfTileBytes;
  auto* factors =
      reinterpret_cast<float2*>(memory + T::factors(call.num_stages)) + pair_group * kGroupPairs;
  const int first_pair = pair_group * kGroupPairs;
  const auto thread = static_cast<unsigned>(threadIdx.x) % kGroupThreads;
  const auto part = static_cast<int>(thread % kLanes);
  const auto first = static_cast<int>(thread / kLanes);
  constexpr int kTurns = kGroupPairs / kStep;
  const uint8_t* from[kTurns];
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int pair = first_pair + first + turn * kStep;
    from[turn] = given_query(call, item, pair < item.num_pairs ? pair : 0, part);
  }
  wait_for_previous_kernel();
#pragma unroll
  for (int turn = 0; turn < kTurns; ++turn) {
    const int pair = first + turn * kStep;
    const bool is_there = first_pair + pair < item.num_pairs;
    copy_16(shared_address(queries + chunk_offset(pair, 2 * part, kGroupPairs)), from[turn],
            is_there);
    copy_16(shared_address(queries + chunk_offset(pair, 2 * part + 1, kGroupPairs)),
            from[turn] + 16, is_there);
  }
  commit_copies();
  wait_for_copies<0>();
#pragma unroll 1
  for (int pair = first; pair < kGroupPairs; pair += kStep) {
    const auto* given = reinterpret_cast<const uint4*>(queries);
    float values[16];
    unpack_query(given[chunk_offset(pair, 2 * part, kGroupPairs) / 16],
                 given[chunk_offset(pair, 2 * part + 1, kGroupPairs) / 16],
                 call.q.dtype == Dtype::kBf16, values);
    float shift = 0.0f;
    if (call.key_offset != nullptr) {
      const float* offset = call.key_offset + int64_t{kv_head_of_cta()} * T::kDim + part * 16;
      double product = 0.0;
#pragma unroll
      for (int i = 0; i < 16; ++i) product += double{values[i]} * offset[i];
      for (int h = 1; h < kLanes; h *= 2) product += __shfl_xor_sync(~0u, product, h);
      shift = static_cast<float>(call.scale * product);
    }
    if (call.is_rotated) rotate_pair<T>(values, call.rotation_factor);
    store_pair<T>(call, values, shift, pair, part, queries, factors);
  }
}

}  // namespace larder::kernels::cuda::prefix
