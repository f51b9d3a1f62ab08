// The two products of tuned attention, of one tile and a warp's columns, and the queries as they
// are multiplied.
//
// Scores come transposed, S^T = K Q^T, so that keys and values are decoded straight into operands:
// a lane holds columns 2c and 2c + 1 (of each column tile) of its two tokens. Sums likewise, O^T +=
// V^T P^T: four dims at a time of columns 2c and 2c + 1.
#pragma once

#include <cstdint>
#include <utility>

#include "kernels/cuda/attend_decode_rows.cuh"

namespace larder::kernels::cuda {

// A lane's share of the queries of a column each: fragments in the order of its keys' dims.
template <typename Shape>
struct Queries {
  uint32_t fragments[Shape::kColumnTiles][Shape::kDim / 16][2];
};
template <typename Shape>
struct Scores {
  float at[Shape::kColumnTiles][4];  // token first, column 2c and 2c + 1; then token second
};
template <typename Shape>
struct Sums {
  float at[Shape::kColumnTiles][Shape::kSumTiles][4];
};
// Weights of a tile, transposed: pairs of tokens of the lane's column g. Of bf16 values, what
// cutting them to bf16 left as well, since 8 bits of a weight are too few.
template <typename Shape>
struct Weights {
  static constexpr int kTerms = Shape::Format::kIsBf16 ? 2 : 1;
  uint32_t at[Shape::kColumnTiles][kTerms][2];
};

template <typename Shape, int kEight>
__device__ inline void multiply_eight(const typename Shape::Format::Keys& keys, int first_fragment,
                                      const Queries<Shape>& queries, Scores<Shape>& scores) {
  uint32_t first[4];
  uint32_t second[4];
  Shape::Format::template eight_keys<kEight>(keys, 0, first);
  Shape::Format::template eight_keys<kEight>(keys, 1, second);
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const uint32_t(&b)[2] = queries.fragments[tile][first_fragment + i];
      multiply_add<Shape::Format::kIsBf16>(scores.at[tile], first[2 * i], second[2 * i],
                                           first[2 * i + 1], second[2 * i + 1], b[0], b[1]);
    }
}

// A tile in shared memory.
struct TilePlace {
  const uint8_t* data;
  const uint8_t* scales;
};

// Scores of kTiles neighbouring tiles, side by side: products of one tile wait for each other.
template <typename Shape, int kTiles>
__device__ inline void key_products(const TilePlace& place,
                                    const typename Shape::Format::Lane& lane,
                                    const Queries<Shape>& queries, Scores<Shape>* scores) {
  using Format = typename Shape::Format;
  constexpr int kEights = Format::kKeyChunkDims / 8;
#pragma unroll
  for (int i = 0; i < kTiles; ++i)
#pragma unroll
    for (auto& four : scores[i].at)
#pragma unroll
      for (float& score : four) score = 0.0f;
#pragma unroll
  for (int chunk = 0; chunk < Format::kKeyChunks; ++chunk) {
    typename Format::Keys keys[kTiles];
#pragma unroll
    for (int i = 0; i < kTiles; ++i)
      Format::load_keys(place.data + i * Format::kTileBytes,
                        place.scales + i * Format::kTileScaleBytes, lane, chunk, keys[i]);
    [&]<int... kEight>(std::integer_sequence<int, kEight...>) {
      const auto multiply = [&]<int kOne>(std::integral_constant<int, kOne>) {
#pragma unroll
        for (int i = 0; i < kTiles; ++i)
          multiply_eight<Shape, kOne>(keys[i], 2 * (chunk * kEights + kOne), queries, scores[i]);
      };
      (multiply(std::integral_constant<int, kEight>{}), ...);
    }
    (std::make_integer_sequence<int, kEights>{});
  }
}

template <typename Shape, int kFour>
__device__ inline void add_four(const typename Shape::Format::Values& values, int first_tile,
                                const Weights<Shape>& weights, Sums<Shape>& sums) {
  uint32_t first[4];
  uint32_t second[4];
  Shape::Format::template four_values<kFour>(values, first, second);
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int term = 0; term < Weights<Shape>::kTerms; ++term) {
      const uint32_t(&b)[2] = weights.at[tile][term];
#pragma unroll
      for (int i = 0; i < 2; ++i)
        multiply_add<Shape::Format::kIsBf16>(sums.at[tile][first_tile + i], first[2 * i],
                                             first[2 * i + 1], second[2 * i], second[2 * i + 1],
                                             b[0], b[1]);
    }
}

template <typename Shape>
__device__ inline void add_chunk(const typename Shape::Format::Values& values, int chunk,
                                 const Weights<Shape>& weights, Sums<Shape>& sums) {
  constexpr int kFours = Shape::Format::kValueChunkDims / 4;
  [&]<int... kFour>(std::integer_sequence<int, kFour...>) {
    (add_four<Shape, kFour>(values, 2 * (chunk * kFours + kFour), weights, sums), ...);
  }
  (std::make_integer_sequence<int, kFours>{});
}

// The values of a tile that are finite, of the lane's tokens in `kept`, a bit each; whether there
// were others.
template <typename Shape>
__device__ inline bool finite_products(const TilePlace& place,
                                       const typename Shape::Format::Lane& lane, uint32_t kept,
                                       const Weights<Shape>& weights, Sums<Shape>& sums) {
  using Format = typename Shape::Format;
  bool has_special = false;
#pragma unroll
  for (int chunk = 0; chunk < Format::kValueChunks; ++chunk) {
    typename Format::Values values;
    Format::load_values(place.data, place.scales, lane, chunk, values);
    has_special |= Format::keep_finite(values, kept);
    add_chunk<Shape>(values, chunk, weights, sums);
  }
  return has_special;
}

// What cutting a weight to bf16 left of it. Above 0 where the weight is, so that it does not make
// NaN of an infinite value.
__device__ inline float remainder(float weight, uint32_t cut) {
  return fmaxf(weight - __uint_as_float(cut), weight * 0x1p-100f);
}

// The four weights of a lane's column pair and tokens.
template <typename Shape>
__device__ inline void place_weights(int tile, const float (&values)[4], Weights<Shape>& weights) {
  constexpr bool kIsBf16 = Shape::Format::kIsBf16;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const float first = values[2 * i];
    const float second = values[2 * i + 1];
    if constexpr (kIsBf16) {
      const uint32_t high = permute(__float_as_uint(first), __float_as_uint(second), 0x7632);
      weights.at[tile][0][i] = transpose8(high);
      weights.at[tile][1][i] = transpose8(
          pack<true>(remainder(first, high << 16), remainder(second, high & 0xFFFF0000u)));
    } else {
      weights.at[tile][0][i] = transpose8(pack<false>(first, second));
    }
  }
}

// First dim of four of a lane's sums.
template <typename Format>
__device__ constexpr int sum_dim(int four, int g) {
  constexpr int kFours = Format::kValueChunkDims / 4;
  return (8 * (four / kFours) + g) * Format::kValueChunkDims + 4 * (four % kFours);
}

// Those four, of column 2c + second.
template <typename Shape>
__device__ inline float4 four_sums(const Sums<Shape>& sums, int tile, int four, int second) {
  const float(&a)[4] = sums.at[tile][2 * four];
  const float(&b)[4] = sums.at[tile][2 * four + 1];
  return second == 0 ? float4{a[0], b[0], a[2], b[2]} : float4{a[1], b[1], a[3], b[3]};
}

}  // namespace larder::kernels::cuda
