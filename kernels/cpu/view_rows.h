// Where the rows of a [tokens, heads, dim] tensor lie.
#pragma once

#include <cstddef>
#include <cstdint>

#include "larder/tensor.h"

namespace larder::kernels::cpu {

// The stride of an axis of size 1 may be anything; it only meets index 0 here.
inline std::byte* view_row(const TensorView& view, int64_t token, int64_t head) {
  return static_cast<std::byte*>(view.data) +
         (token * view.strides[0] + head * view.strides[1]) * dtype_bytes(view.dtype);
}

// Between the elements of a row.
inline int64_t view_stride(const TensorView& view) {
  return view.shape[2] > 1 ? view.strides[2] : 1;
}

}  // namespace larder::kernels::cpu
