// The two products of a tile: queries with keys, weights with values. By warpgroups where there is
// wgmma, which go on while the group's threads do other things, else by warps, at once. Both leave
// each lane the same sums.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_tile.cuh"
#include "kernels/cuda/attend_prefix_wgmma.cuh"

namespace larder::kernels::cuda::prefix {

// Of 16 keys each, as the first factor of the second product.
using Weights = uint32_t[kKeys / 16][4];

namespace by_warps {

// products = queries * keys.
template <typename T>
__device__ inline void multiply(uint32_t queries, uint32_t keys, Place place, Sums& products) {
  const int lane = place.lane;
  // Of queries: rows 0-7, 8-15, then both again for the upper 8 dims; of keys: lower and upper
  // dims of rows 0-7, then of rows 8-15.
  const int query_row = place.warp * 16 + lane % 16;
  const int key_row = lane % 8 + lane / 16 * 8;
#pragma unroll
  for (auto& of_keys : products)
#pragma unroll
    for (float& product : of_keys) product = 0.0f;
#pragma unroll
  for (int step = 0; step < T::kDim / 16; ++step) {
    uint32_t a[4];
    load_matrices(queries + chunk_offset(query_row, 2 * step + lane / 16, kGroupPairs), a);
#pragma unroll
    for (int n = 0; n < kKeys / 16; ++n) {
      uint32_t b[4];
      load_matrices(keys + chunk_offset(n * 16 + key_row, 2 * step + lane / 8 % 2, kKeys), b);
      multiply_add(products[2 * n], a, b[0], b[1]);
      multiply_add(products[2 * n + 1], a, b[2], b[3]);
    }
  }
}

// sums += weights * values.
template <typename T>
__device__ inline void add(const Weights& weights, uint32_t values, Place place,
                           Sums (&sums)[T::kPanels]) {
  // Rows 0-7 and 8-15 of the lower 8 dims, then of the upper ones.
  const int row = place.lane % 16;
#pragma unroll
  for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
    for (int n = 0; n < T::kDim / 16; ++n) {
      uint32_t b[4];
      load_matrices_transposed(
          values + chunk_offset(step * 16 + row, 2 * n + place.lane / 16, kKeys), b);
      multiply_add(sums[n / 4][2 * (n % 4)], weights[step], b[0], b[1]);
      multiply_add(sums[n / 4][2 * (n % 4) + 1], weights[step], b[2], b[3]);
    }
}

}  // namespace by_warps

// Begins products = queries * keys, panels in shared memory.
template <typename T>
__device__ inline void begin_products_of_keys(uint32_t queries, uint32_t keys, Place place,
                                              Sums& products) {
  if constexpr (!kHasGroupProducts) {
    by_warps::multiply<T>(queries, keys, place, products);
  } else {
    static_assert(kGroupPairs == kKeys);  // panels of queries and of keys are alike
    const uint32_t a = describe(queries);
    const uint32_t b = describe(keys);
    open_products();
#pragma unroll
    for (int step = 0; step < T::kDim / 16; ++step) {
      const uint32_t at = described(step / 4 * kKeys * 128 + step % 4 * 32);
      multiply_group(products, a + at, b + at, step > 0);
    }
    close_products();
  }
}

// Begins sums = weights * values, added to what they are where `adds`; by warps they are always.
template <typename T>
__device__ inline void begin_sums_of_values(const Weights& weights, uint32_t values, bool adds,
                                            Place place, Sums (&sums)[T::kPanels]) {
  if constexpr (!kHasGroupProducts) {
    by_warps::add<T>(weights, values, place, sums);
  } else {
    const uint32_t b = describe(values);
    open_products();
#pragma unroll
    for (int step = 0; step < kKeys / 16; ++step)
#pragma unroll
      for (int panel = 0; panel < T::kPanels; ++panel)
        multiply_group(sums[panel], weights[step], b + described((panel * kKeys + step * 16) * 128),
                       adds || step > 0);
    close_products();
  }
}

}  // namespace larder::kernels::cuda::prefix
