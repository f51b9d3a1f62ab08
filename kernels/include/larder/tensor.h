// TensorView: a strided view of somebody else's tensor of rank 3.
#pragma once

#include <array>
#include <cstdint>
#include <optional>

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

// Bytes [begin, end) relative to a view's data pointer.
struct ByteRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const ByteRange&) const = default;
};

// All bytes that the elements of the view lie in; begin is negative if strides are. [0, 0) for a
// view with no elements. Empty if the shape is negative, the dtype is not one of ours, or the range
// does not fit 64 bits. The kernels do not know how much memory a view has: whoever takes a view
// from another process compares this range with the memory behind it.
std::optional<ByteRange> tensor_extent_bytes(const TensorView& view);

}  // namespace larder
