// Queries of a warp's columns: from memory to fragments, turned as the keys have been.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_plan.cuh"
#include "kernels/cuda/attend_decode_products.cuh"

namespace larder::kernels::cuda {

// What a lane knows of its two columns of a column tile: score * factor is a base-2 logit.
template <typename Shape>
struct ColumnFactors {
  float at[Shape::kColumnTiles][2];
};

// Eight 16-bit values to floats.
template <bool kIsBf16>
__device__ inline void to_floats(const uint4& eight, float* values) {
  const uint32_t words[4] = {eight.x, eight.y, eight.z, eight.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    if constexpr (kIsBf16) {
      values[2 * i] = __uint_as_float(words[i] << 16);
      values[2 * i + 1] = __uint_as_float(words[i] & 0xFFFF0000u);
    } else {
      values[2 * i] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i])));
      values[2 * i + 1] = __half2float(__ushort_as_half(static_cast<uint16_t>(words[i] >> 16)));
    }
  }
}

// Stages of the rotation that pair a lane's own values, kFrom up to kTo apart.
template <int kFrom, int kTo, int kValues>
__device__ inline void rotate_in_lane(float (&values)[kValues]) {
#pragma unroll
  for (int h = kFrom; h < kTo; h *= 2)
#pragma unroll
    for (int i = 0; i < kValues; ++i)
      if ((i & h) == 0) {
        const float a = values[i];
        const float b = values[i + h];
        values[i] = a + b;
        values[i + h] = a - b;
      }
}

// The rotation of a column, whose dims lie in the four lanes of a row: a chunk in one lane, the
// next one in the next.
template <int kChunkDims, int kValues>
__device__ inline void rotate(float factor, float (&values)[kValues]) {
  rotate_in_lane<1, kChunkDims>(values);
#pragma unroll
  for (int lanes = 1; lanes < 4; lanes *= 2)
#pragma unroll
    for (float& value : values) {
      const float other = __shfl_xor_sync(~0u, value, lanes);
      value = (lane_column() & lanes) == 0 ? value + other : other - value;
    }
  rotate_in_lane<kChunkDims, kValues>(values);
#pragma unroll
  for (float& value : values) value *= factor;
}

__device__ inline float row_sum(float value) {
  value += __shfl_xor_sync(~0u, value, 1);
  return value + __shfl_xor_sync(~0u, value, 2);
}

// fp16 fragments are the query times a power of two that brings its largest element to 2^13 ..
// 2^14, so that no element of weight is lost; it goes back into the column's factor.
template <typename Shape>
__device__ inline float to_fragments(const float (&values)[Shape::kDim / 4],
                                     uint32_t (&fragments)[Shape::kDim / 16][2]) {
  using Format = typename Shape::Format;
  float up = 1.0f;
  float down = 1.0f;
  if constexpr (!Format::kIsBf16) {
    uint32_t largest = 0;
    for (const float value : values) largest = max(largest, __float_as_uint(value) & 0x7FFFFFFFu);
    largest = max(largest, __shfl_xor_sync(~0u, largest, 1));
    largest = max(largest, __shfl_xor_sync(~0u, largest, 2));
    const int exponent = max(static_cast<int>(largest >> 23), 20);
    up = __uint_as_float(static_cast<uint32_t>(267 - exponent) << 23);
    down = __uint_as_float(static_cast<uint32_t>(exponent - 13) << 23);
  }
#pragma unroll
  for (int eight = 0; eight < Shape::kDim / 32; ++eight)
#pragma unroll
    for (int i = 0; i < 4; ++i)
      fragments[2 * eight + i / 2][i % 2] =
          pack<Format::kIsBf16>(values[8 * eight + Format::pair_dim(i, 0)] * up,
                                values[8 * eight + Format::pair_dim(i, 1)] * up);
  return down;
}

// The dim that a lane's value number `i` is, where c is its column.
template <typename Format>
__device__ constexpr int query_dim(int i, int c) {
  constexpr int kChunkDims = Format::kKeyChunkDims;
  return (4 * (i / kChunkDims) + c) * kChunkDims + i % kChunkDims;
}

// A lane's share of the queries as they are stored: of column g of each column tile.
template <typename Shape>
struct QueryRows {
  uint4 eights[Shape::kColumnTiles][Shape::kDim / 32];
  int32_t row[Shape::kColumnTiles];  // of the sequence
  bool is_there[Shape::kColumnTiles];
};

// A column's elements, and whether it is there; `pair` is its number in the sequence.
__device__ inline const uint16_t* find_query(const DecodeCall& call, const Walk& walk, int32_t pair,
                                             int32_t& row, bool& is_there) {
  row = row_of(call, pair);
  const int32_t head = walk.head * call.group + pair - row * call.group;
  is_there = row < walk.plan.rows && walk.first_row + row < call.num_rows;
  return static_cast<const uint16_t*>(call.q) + int64_t{walk.first_row + row} * call.q_row_stride +
         head * call.q_head_stride;
}

template <typename Shape>
__device__ inline void fetch_queries(const DecodeCall& call, const Walk& walk,
                                     QueryRows<Shape>& rows) {
  using Format = typename Shape::Format;
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile) {
    const int32_t pair = walk.column_tile * Shape::kColumns + 8 * tile + lane_row();
    const uint16_t* from = find_query(call, walk, pair, rows.row[tile], rows.is_there[tile]);
#pragma unroll
    for (int eight = 0; eight < Shape::kDim / 32; ++eight) {
      rows.eights[tile][eight] = {0, 0, 0, 0};
      if (rows.is_there[tile])
        rows.eights[tile][eight] = __ldg(
            reinterpret_cast<const uint4*>(from + query_dim<Format>(8 * eight, lane_column())));
    }
  }
}

// Of a segment that is served soon; a lane brings a line of 128 bytes near.
template <typename Shape>
__device__ inline void prefetch_queries(const DecodeCall& call, const Walk& walk) {
  constexpr int kLines = Shape::kDim / 64;  // of a column
  const int lane = static_cast<int>(threadIdx.x % 32);
  int32_t row = 0;
  bool is_there = false;
  const uint16_t* from =
      find_query(call, walk, walk.column_tile * Shape::kColumns + lane / kLines, row, is_there);
  if (is_there && lane < Shape::kColumns * kLines) prefetch_line(from + lane % kLines * 64);
}

// To fragments, by the whole warp; notes what the columns see, too.
template <typename Shape>
__device__ inline void place_queries(const DecodeCall& call, const Walk& walk,
                                     const QueryRows<Shape>& rows, Queries<Shape>& queries,
                                     ColumnFactors<Shape>& factors, ColumnNote* columns) {
  using Format = typename Shape::Format;
  constexpr int kEights = Shape::kDim / 32;
  const int g = lane_row();
  const int c = lane_column();
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile) {
    ColumnNote note = {0, 0, rows.row[tile], 0.0f};
    if (rows.is_there[tile]) {
      note.begin = visible_begin(call, walk.plan, note.row);
      note.end = visible_end(call, walk.plan, note.row);
    }
    float values[Shape::kDim / 4];
#pragma unroll
    for (int eight = 0; eight < kEights; ++eight) {
      if (call.is_q_bf16)
        to_floats<true>(rows.eights[tile][eight], values + 8 * eight);
      else
        to_floats<false>(rows.eights[tile][eight], values + 8 * eight);
    }
    if (call.key_offset != nullptr) {
      float product = 0.0f;
      const float* offsets = call.key_offset + walk.head * Shape::kDim;
#pragma unroll
      for (int i = 0; i < Shape::kDim / 4; ++i)
        product += values[i] * __ldg(offsets + query_dim<Format>(i, c));
      note.shift = call.scale * kLog2E * row_sum(product);
    }
    if (c == 0) columns[8 * tile + g] = note;
    if (call.is_rotated) rotate<Format::kKeyChunkDims>(call.rotation_factor, values);
    const float down =
        to_fragments<Shape>(values, queries.fragments[tile]) * (call.logit_factor * Format::kUndo);
    factors.at[tile][0] = __shfl_sync(~0u, down, 8 * c);
    factors.at[tile][1] = __shfl_sync(~0u, down, 8 * c + 4);
  }
  __syncwarp();
}

}  // namespace larder::kernels::cuda
