// Results of attention on the device: strided tensors, the output dtypes, sinks and the forms of
// LSE. The meaning is that of kernels/params.h and larder/lse_form.h; written apart from the CPU's,
// which judges it.
#pragma once

#include <cstdint>

#include "kernels/cuda/stored.cuh"
#include "kernels/params.h"

namespace larder::kernels::cuda {

// A TensorView as kernels take it: std::array has no functions for the device.
struct StridedTensor {
  void* data = nullptr;
  Dtype dtype = Dtype::kFp32;
  int64_t shape[3] = {};
  int64_t strides[3] = {};

  StridedTensor() = default;
  explicit StridedTensor(const TensorView& view) : data(view.data), dtype(view.dtype) {
    for (size_t axis = 0; axis < 3; ++axis) {
      shape[axis] = view.shape[axis];
      strides[axis] = view.strides[axis];
    }
  }
  // Of the first element of (row, head). The stride of an axis of size 1 only meets index 0.
  __device__ int64_t row_index(int64_t row, int64_t head) const {
    return row * strides[0] + head * strides[1];
  }
};

// AttentionOutput as kernels take it.
struct OutputView {
  StridedTensor out;
  float* lse = nullptr;
  LseForm lse_form;
  float out_scale = 1.0f;
  float out_sf_scale = 1.0f;
  uint8_t* out_sf = nullptr;
  int64_t out_sf_first_row = 0;

  OutputView() = default;
  explicit OutputView(const AttentionOutput& output)
      : out(output.out),
        lse(output.lse),
        lse_form(output.lse_form),
        out_scale(output.out_scale),
        out_sf_scale(output.out_sf_scale),
        out_sf(output.out_sf),
        out_sf_first_row(output.out_sf_first_row) {}
};

__device__ inline double no_keys() { return -INFINITY; }

// exp(lse) / (exp(lse) + exp(sink)) of a row that sees keys: 1 with a sink of -inf, 0 with +inf.
__device__ inline double sink_factor(double lse, double sink) {
  return 1.0 / (1.0 + exp(sink - lse));
}

// What a row keeps of its output next to its sink: 1 without one.
__device__ inline double kept_of(double lse, const float* sinks, int64_t head) {
  return sinks == nullptr || lse == no_keys() ? 1.0 : sink_factor(lse, sinks[head]);
}

__device__ inline double log_add(double a, double b) {
  if (isnan(a) || isnan(b)) return NAN;
  const double larger = a > b ? a : b;
  if (isinf(larger)) return larger;
  return larger + log1p(exp((a > b ? b : a) - larger));
}

// Natural log of a value in some form, and back. In float64 a float survives the way there and
// back.
__device__ inline double lse_from_form(float value, LseForm form) {
  constexpr double kLn2 = 0.693147180559945309417;
  return form.base2 ? value * kLn2 : value;
}
__device__ inline float lse_to_form(double lse, LseForm form, const float* sinks, int64_t head) {
  constexpr double kLog2E = 1.44269504088896340736;
  if (form.includes_sink && sinks != nullptr) lse = log_add(lse, sinks[head]);
  return static_cast<float>(form.base2 ? lse * kLog2E : lse);
}

__device__ inline int64_t lse_index(LseForm form, int64_t row, int64_t head, int64_t num_rows,
                                    int64_t num_heads) {
  return form.heads_first ? head * num_rows + row : row * num_heads + head;
}

// `sinks`: [num_q_heads] or nullptr.
__device__ inline void store_lse(const OutputView& output, int64_t row, int64_t head, double lse,
                                 const float* sinks) {
  if (output.lse == nullptr) return;
  output.lse[lse_index(output.lse_form, row, head, output.out.shape[0], output.out.shape[1])] =
      lse_to_form(lse, output.lse_form, sinks, head);
}

// Byte offset of (row, column) in 128x4 tiles of scales (formats.md 7.12).
__device__ inline int64_t scale_tile_offset(int64_t row, int64_t column, int64_t num_columns) {
  const int64_t tile = (row / 128) * ((num_columns + 3) / 4) + column / 4;
  return tile * 512 + row % 32 * 16 + row / 32 % 4 * 4 + column % 4;
}

// 16 values as 8 bytes of E2M1 pairs, `stride` apart; returns the scale byte. A NaN is left out of
// the maximum and becomes a zero; signs come from the values, also where the product has none.
__device__ inline uint8_t encode_output_group(const float* values, float out_sf_scale,
                                              uint8_t* target, int64_t stride) {
  float amax = 0.0f;
  for (int i = 0; i < kNvfp4GroupElements; ++i)
    if (fabsf(values[i]) > amax) amax = fabsf(values[i]);
  const uint8_t wanted = e4m3_bits(out_sf_scale * amax / 6.0f);
  const uint8_t scale = wanted > 0x7E ? 0x7E : wanted;
  const float decoded = e4m3_value(scale);
  const float inverse = decoded > 0.0f ? out_sf_scale / decoded : 0.0f;
  const auto code = [&](float value) {
    return (e2m1_code(value * inverse) & 7u) | (__float_as_uint(value) >> 31) << 3;
  };
  for (int i = 0; i < kNvfp4GroupElements; i += 2)
    target[i / 2 * stride] = static_cast<uint8_t>(code(values[i]) | code(values[i + 1]) << 4);
  return scale;
}

// The `dim` values of (row, head), by `num_threads` threads of which this is number `thread`.
__device__ inline void store_output(const OutputView& output, int64_t row, int64_t head,
                                    const float* values, int dim, int thread, int num_threads) {
  const StridedTensor& out = output.out;
  const int64_t first = out.row_index(row, head);
  auto* bytes = static_cast<uint8_t*>(out.data);
  if (out.dtype == Dtype::kE2m1x2) {
    const int num_groups = dim / kNvfp4GroupElements;
    constexpr int kGroupBytes = kNvfp4GroupElements / 2;
    for (int group = thread; group < num_groups; group += num_threads) {
      const uint8_t scale = encode_output_group(
          values + group * kNvfp4GroupElements, output.out_sf_scale,
          bytes + first + int64_t{group} * kGroupBytes * out.strides[2], out.strides[2]);
      output.out_sf[scale_tile_offset(output.out_sf_first_row + row, head * num_groups + group,
                                      out.shape[1] * num_groups)] = scale;
    }
  } else if (out.dtype == Dtype::kFp8E4m3) {
    for (int i = thread; i < dim; i += num_threads)
      bytes[first + i * out.strides[2]] = e4m3_bits(values[i] / output.out_scale);
  } else {
    for (int i = thread; i < dim; i += num_threads)
      store_value(out.dtype, out.data, first + i * out.strides[2], values[i]);
  }
}

}  // namespace larder::kernels::cuda
