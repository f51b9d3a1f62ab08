// Rotation of a row's pairs by its position on the device: cosine and sine of (position, pair), and
// the rotated pair. What larder/rope.h says; the CPU's floats, but that a cosine or a sine may
// differ in its last place where the float64 value lies within an ulp or two of a midpoint of two
// floats (some 1 in 10^8).
#pragma once

#include <cmath>
#include <cstdint>

#include "kernels/cuda/codes.cuh"
#include "kernels/cuda/stored.cuh"
#include "kernels/params.h"

namespace larder::kernels::cuda {

// Rope by value, as a kernel takes it: about 1 KiB.
struct RopeCall {
  int dim;  // 0: no rotation
  bool interleaved;
  Dtype table_dtype;
  const int64_t* positions;  // or the next, or neither: row i has position i
  const int32_t* positions32;
  const void* cos;  // nullptr: frequencies count
  const void* sin;
  int64_t table_stride;  // in elements
  int64_t table_rows;
  double frequencies[kMaxRopeDim / 2];  // radians per position, of each pair
};

// On the host.
inline RopeCall rope_call(const Rope& rope) {
  RopeCall call = {};
  call.dim = rope.dim;
  call.interleaved = rope.interleaved;
  call.table_dtype = rope.table_dtype;
  call.positions = rope.positions;
  call.positions32 = rope.positions32;
  call.cos = rope.cos;
  call.sin = rope.sin;
  call.table_stride = rope.table_stride;
  call.table_rows = rope.table_rows;
  if (rope.cos == nullptr)
    for (int pair = 0; pair < rope.dim / 2; ++pair)
      call.frequencies[pair] = std::pow(rope.theta, -2.0 * pair / rope.dim);
  return call;
}

// The position of a row that is written, read once; -1, and a fault, where it is negative or past
// the tables: the row is to be left out. One thread per row.
__device__ inline int64_t position_of(const RopeCall& rope, const PointOfUse& use, int64_t row) {
  int64_t position = row;
  if (rope.positions != nullptr) position = load_once(rope.positions + row);
  if (rope.positions32 != nullptr) position = load_once(rope.positions32 + row);
  if (position >= 0 && (rope.cos == nullptr || position < rope.table_rows)) return position;
  use.report(position);
  return -1;
}

struct CosineSine {
  float cosine;
  float sine;
};

// Of pair 0 .. dim / 2 - 1 of a position that position_of gave.
__device__ inline CosineSine cosine_sine(const RopeCall& rope, int64_t position, int pair) {
  if (rope.cos != nullptr) {
    const int64_t index = position * rope.table_stride + pair;
    return {load_value(rope.table_dtype, rope.cos, index),
            load_value(rope.table_dtype, rope.sin, index)};
  }
  const double angle = __dmul_rn(static_cast<double>(position), rope.frequencies[pair]);
  double sine, cosine;
  sincos(angle, &sine, &cosine);
  return {__double2float_rn(cosine), __double2float_rn(sine)};
}

// Elements of pair i of a row, and the pair of element i.
__device__ inline int first_of_pair(const RopeCall& rope, int pair) {
  return rope.interleaved ? 2 * pair : pair;
}
__device__ inline int second_of_pair(const RopeCall& rope, int pair) {
  return rope.interleaved ? 2 * pair + 1 : pair + rope.dim / 2;
}
__device__ inline int pair_of(const RopeCall& rope, int i) {
  if (rope.interleaved) return i >> 1;
  return i < rope.dim / 2 ? i : i - rope.dim / 2;
}

// A NaN is the positive quiet one.
__device__ inline float rotated_first(float x, float y, CosineSine turn) {
  const float value = __fsub_rn(__fmul_rn(x, turn.cosine), __fmul_rn(y, turn.sine));
  return isnan(value) ? __uint_as_float(0x7FC00000u) : value;
}
__device__ inline float rotated_second(float x, float y, CosineSine turn) {
  const float value = __fadd_rn(__fmul_rn(y, turn.cosine), __fmul_rn(x, turn.sine));
  return isnan(value) ? __uint_as_float(0x7FC00000u) : value;
}

// As a tensor of the dtype (bf16, fp16 or fp32) would hold the value.
__device__ inline float rounded_to(Dtype dtype, float value) {
  if (dtype == Dtype::kBf16) return bf16_value(bf16_bits(value));
  if (dtype == Dtype::kFp16) return fp16_value(fp16_bits(value));
  return value;
}

}  // namespace larder::kernels::cuda
