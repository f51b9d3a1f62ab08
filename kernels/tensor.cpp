#include "larder/tensor.h"

namespace larder {

std::optional<ByteRange> tensor_extent_bytes(const TensorView& view) {
  if (static_cast<size_t>(view.dtype) >= kDtypeNames.size()) return std::nullopt;
  for (const int64_t size : view.shape)
    if (size < 0) return std::nullopt;
  for (const int64_t size : view.shape)
    if (size == 0) return ByteRange{};

  ByteRange range = {0, dtype_bytes(view.dtype)};
  for (size_t axis = 0; axis < 3; ++axis) {
    if (view.shape[axis] == 1) continue;
    int64_t span = 0;
    if (__builtin_mul_overflow(view.shape[axis] - 1, view.strides[axis], &span) ||
        __builtin_mul_overflow(span, dtype_bytes(view.dtype), &span))
      return std::nullopt;
    int64_t& edge = span < 0 ? range.begin : range.end;
    if (__builtin_add_overflow(edge, span, &edge)) return std::nullopt;
  }
  return range;
}

}  // namespace larder
