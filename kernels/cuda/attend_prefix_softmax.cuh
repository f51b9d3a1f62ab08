// The softmax between the two products of a shared prefix: products to weights as halves, and the
// bases that keep these in range.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_products.cuh"
#include "kernels/cuda/attend_prefix_tile.cuh"

namespace larder::kernels::cuda::prefix {

// Weights are held as halves 2^kRaise times their value: the base of a row is its greatest logit at
// first, and raised once one is more than 8 above it. So weights stay below 2^14, and those of
// 2^-30 still count.
inline constexpr float kRaise = 6.0f;
inline constexpr uint32_t kMostWeights = 0x74007400u;  // two halves of 2^14
inline constexpr float kNoBase = -3.402823466e38f;     // of no key: no logit is lower

// Of a warp's 16 pairs. This lane has rows lane / 4 and lane / 4 + 8, the halves below.
template <typename T>
struct WarpSums {
  Sums sums[T::kPanels] = {};
  float weights[2] = {};  // of this lane's keys
  float base[2] = {};
  bool has_base[2] = {};  // false: no key so far, and the base is 0
};

// cap * tanh(logit / cap) as 1 - 2 / (1 + 2^exponent).
__device__ inline float cap_logit(float exponent, float cap) {
  const float power = exp2_fast(exponent);
  return fmaf(-2.0f * cap, reciprocal_fast(1.0f + power), cap);
}

// Products become exponents of weights: logits in base 2, less the row's base.
template <typename T>
__device__ inline void make_exponents(const WideCall& call, const float2 (&factors)[2],
                                      const uint8_t* memory, int stage,
                                      const WarpSums<T>& warp_sums, const Sums& products,
                                      Sums& exponents) {
  const float offsets[2] = {kRaise - warp_sums.base[0], kRaise - warp_sums.base[1]};
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      exponents[n][i] = fmaf(products[n][i], factors[i / 2].x, offsets[i / 2]);
  const int4 present = reinterpret_cast<const int4*>(memory + T::present(call.num_stages))[stage];
  static_assert(kRuns == 4);
  if (call.soft_cap <= 0.0f && (present.x & present.y & present.z & present.w) != 0) return;
  const int runs[kRuns] = {present.x, present.y, present.z, present.w};
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      if (call.soft_cap > 0.0f)
        exponents[n][i] =
            offsets[i / 2] + cap_logit(fmaf(products[n][i], factors[i / 2].x, factors[i / 2].y),
                                       call.soft_cap * kLog2e);
      if (runs[n / 2] == 0) exponents[n][i] = -INFINITY;
    }
}

// Weights of a row's exponents, this lane's, as they are and as halves.
__device__ inline void weigh(const Sums& exponents, Sums& values) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) values[n][i] = exp2_fast(exponents[n][i]);
}
__device__ inline void pack_weights(const Sums& values, Weights& weights) {
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const float* pair = values[2 * step + i / 2] + i % 2 * 2;
      weights[step][i] = pack_halves(pair[0], pair[1]);
    }
}

// Whether one of the warp's rows has a weight that is too great, or no base yet.
template <typename T>
__device__ inline bool needs_base(const Weights& weights, const WarpSums<T>& warp_sums) {
  uint32_t most = weights[0][0];
#pragma unroll
  for (int i = 1; i < kKeys / 4; ++i) most = greater_halves(most, weights[i / 4][i % 4]);
  const bool is_needed = greater_halves(most, kMostWeights) != kMostWeights ||
                         !warp_sums.has_base[0] || !warp_sums.has_base[1];
  return __any_sync(~0u, static_cast<int>(is_needed)) != 0;
}

// Sets the rows' bases to the greatest logits so far, and the tile's exponents by them.
template <typename T>
__device__ inline void raise_bases(Sums& exponents, WarpSums<T>& warp_sums) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    float most = -INFINITY;
#pragma unroll
    for (int n = 0; n < kKeys / 8; ++n)
      most = fmaxf(most, fmaxf(exponents[n][2 * half], exponents[n][2 * half + 1]));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 1));
    most = fmaxf(most, __shfl_xor_sync(~0u, most, 2));
    const bool had_base = warp_sums.has_base[half];
    float up = isinf(most) ? 0.0f : most - kRaise;
    if (had_base) up = fmaxf(up, 0.0f);
    const float shrink = had_base ? exp2_fast(-up) : 1.0f;
    warp_sums.has_base[half] = had_base || most > -INFINITY;
    warp_sums.base[half] += up;
    warp_sums.weights[half] *= shrink;
#pragma unroll
    for (auto& panel : warp_sums.sums)
#pragma unroll
      for (auto& sums : panel)
#pragma unroll
        for (int i = 0; i < 2; ++i) sums[2 * half + i] *= shrink;
#pragma unroll
    for (auto& of_keys : exponents)
#pragma unroll
      for (int i = 0; i < 2; ++i) of_keys[2 * half + i] -= up;
  }
}

template <typename T>
__device__ inline void count_weights(const Sums& values, WarpSums<T>& warp_sums) {
#pragma unroll
  for (int n = 0; n < kKeys / 8; ++n)
#pragma unroll
    for (int half = 0; half < 2; ++half)
      warp_sums.weights[half] += values[n][2 * half] + values[n][2 * half + 1];
}

// Weights of a tile as halves, and counted, by bases that suit them.
template <typename T>
__device__ inline void settle_weights(Sums& exponents, Sums& values, Weights& weights,
                                      WarpSums<T>& warp_sums) {
  pack_weights(values, weights);
  if (needs_base<T>(weights, warp_sums)) {
    raise_bases<T>(exponents, warp_sums);
    weigh(exponents, values);
    pack_weights(values, weights);
  }
  count_weights<T>(values, warp_sums);
}

}  // namespace larder::kernels::cuda::prefix
