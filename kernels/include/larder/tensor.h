// TensorView: a strided view of somebody else's tensor of rank 3.
#pragma once

#include <array>
#include <cstdint>

#include "larder/kv_format.h"

namespace larder {

// [tokens, heads, dim]. Any strides, in elements; the stride of an axis of size 1 is never used.
// The memory belongs to the caller and must outlive the call that takes the view.
struct TensorView {
  void* data = nullptr;
  Dtype dtype = Dtype::kFp32;
  std::array<int64_t, 3> shape = {0, 0, 0};
  std::array<int64_t, 3> strides = {0, 0, 0};
};

// A dense row-major view.
inline TensorView dense_tensor(void* data, Dtype dtype, int64_t tokens, int64_t heads,
                               int64_t dim) {
  return {data, dtype, {tokens, heads, dim}, {heads * dim, dim, 1}};
}

}  // namespace larder
