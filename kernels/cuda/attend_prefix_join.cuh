// The splits of a shared prefix as one, so that every sequence of a batch adds one state.
#pragma once

#include <cstdint>

#include "kernels/cuda/early_launch.cuh"

namespace larder::kernels::cuda::prefix {

inline constexpr int kJoinWarps = 4;

// The first split takes the place of all.
struct JoinCall {
  float2* states;  // [num_splits, num_results]: max, sum
  float* sums;     // [num_splits, num_results, dim]
  int64_t num_results;
  int32_t num_splits;
  int32_t dim;  // a multiple of 4
};

// Grid: a warp per result, in strides. Reads num_splits * (dim + 2) floats: bound by memory.
// Results without a prefix hold anything, before and after.
static __global__ __launch_bounds__(32 * kJoinWarps) void join_splits(JoinCall call) {
  constexpr int kAtOnce = 4;
  wait_for_previous_kernel();
  const auto lane = static_cast<int32_t>(threadIdx.x) % 32;
  const int64_t stride = int64_t{gridDim.x} * kJoinWarps;
  for (int64_t result = int64_t{blockIdx.x} * kJoinWarps + threadIdx.x / 32;
       result < call.num_results; result += stride) {
    float max = -INFINITY;
    for (int32_t split = 0; split < call.num_splits; ++split) {
      const float2 state = call.states[split * call.num_results + result];
      if (state.y != 0.0f) max = fmaxf(max, state.x);
    }
    float total = 0.0f;
    for (int32_t dim = 4 * lane; dim < call.dim; dim += 128) {
      float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
      total = 0.0f;
      for (int32_t first = 0; first < call.num_splits; first += kAtOnce) {
        float2 states[kAtOnce];
        float4 parts[kAtOnce];
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          const int64_t at = min(first + i, call.num_splits - 1) * call.num_results + result;
          states[i] = call.states[at];
          parts[i] = *reinterpret_cast<const float4*>(call.sums + at * call.dim + dim);
          if (first + i >= call.num_splits) states[i].y = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < kAtOnce; ++i) {
          if (states[i].y == 0.0f) continue;  // and its sums have not been written
          const float weight = exp2f(states[i].x - max);
          total += weight * states[i].y;
          sums.x += weight * parts[i].x;
          sums.y += weight * parts[i].y;
          sums.z += weight * parts[i].z;
          sums.w += weight * parts[i].w;
        }
      }
      *reinterpret_cast<float4*>(call.sums + result * call.dim + dim) = sums;
    }
    __syncwarp();  // the first split's state has been read
    if (lane == 0) call.states[result] = {max, total};
  }
}

}  // namespace larder::kernels::cuda::prefix
