// Private to kernels/cuda: bytes in host memory with strides, and their dense copy.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include "kernels/checked_int64.h"
#include "larder/tensor.h"

namespace larder::kernels::cuda {

// Runs of contiguous bytes; run (i, j, k) lies at base + the sum of index times stride. The dense
// form is the runs in rising index, the last one fastest, without gaps.
struct HostRows {
  std::byte* base = nullptr;
  std::array<int64_t, 3> counts = {1, 1, 1};
  std::array<int64_t, 3> strides_bytes = {0, 0, 0};
  int64_t run_bytes = 0;

  CheckedInt64 dense_bytes() const {
    return CheckedInt64(counts[0]) * counts[1] * counts[2] * run_bytes;
  }
};

// The same bytes with runs as long as they can be.
inline HostRows with_long_runs(HostRows rows) {
  for (int axis = 2; axis >= 0; --axis) {
    const auto i = static_cast<size_t>(axis);
    if (rows.counts[i] != 1 && rows.strides_bytes[i] != rows.run_bytes) break;
    rows.run_bytes *= rows.counts[i];
    rows.counts[i] = 1;
  }
  return rows;
}

// The tensor has elements.
inline HostRows rows_of(const TensorView& view) {
  HostRows rows;
  rows.base = static_cast<std::byte*>(view.data);
  rows.counts = view.shape;
  rows.run_bytes = dtype_bytes(view.dtype);
  // The stride of an axis of size 1 is never used, and may be any number.
  for (size_t axis = 0; axis < 3; ++axis)
    rows.strides_bytes[axis] = view.shape[axis] == 1 ? 0 : view.strides[axis] * rows.run_bytes;
  return rows;
}

inline HostRows rows_of(std::byte* array, int64_t bytes) { return {array, {1, 1, 1}, {}, bytes}; }

// Copies bytes [begin, end) of the dense form between the rows and `dense`, which is where byte
// `begin` lies.
template <bool kToRows>
void copy_rows(const HostRows& rows, int64_t begin, int64_t end, std::byte* dense) {
  while (begin < end) {
    const int64_t run = begin / rows.run_bytes;
    const int64_t within = begin % rows.run_bytes;
    const int64_t bytes = std::min(rows.run_bytes - within, end - begin);
    std::byte* host = rows.base + within + run % rows.counts[2] * rows.strides_bytes[2] +
                      run / rows.counts[2] % rows.counts[1] * rows.strides_bytes[1] +
                      run / rows.counts[2] / rows.counts[1] * rows.strides_bytes[0];
    if constexpr (kToRows)
      std::memcpy(host, dense, static_cast<size_t>(bytes));
    else
      std::memcpy(dense, host, static_cast<size_t>(bytes));
    begin += bytes;
    dense += bytes;
  }
}

}  // namespace larder::kernels::cuda
