// Private to kernels: 64-bit sums and products that remember whether one of them overflowed.
#pragma once

#include <cstdint>

namespace larder {

struct CheckedInt64 {
  int64_t value = 0;
  bool fits = true;  // false: some step passed 64 bits, and value means nothing

  CheckedInt64() = default;
  CheckedInt64(int64_t initial) : value(initial) {}

  friend CheckedInt64 operator+(CheckedInt64 a, CheckedInt64 b) {
    CheckedInt64 sum;
    sum.fits = !__builtin_add_overflow(a.value, b.value, &sum.value) && a.fits && b.fits;
    return sum;
  }
  friend CheckedInt64 operator*(CheckedInt64 a, CheckedInt64 b) {
    CheckedInt64 product;
    product.fits = !__builtin_mul_overflow(a.value, b.value, &product.value) && a.fits && b.fits;
    return product;
  }
};

}  // namespace larder
