// The rotation of keys: an orthonormal Walsh-Hadamard transform, which is its own inverse. Plain
// definition; rotate-inl.h is the vector form, with the same bits.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "larder/kv_format.h"

namespace larder::kernels {

// 1 / sqrt(n) of a power of two, correctly rounded.
constexpr float rotation_factor(int32_t n) {
  float factor = 1.0f;
  for (; n >= 4; n /= 4) factor *= 0.5f;
  return n == 2 ? factor * 0.707106781186547524f : factor;
}

// In place, on consecutive stretches of rotation_dim(dim) elements: stages h = 1, 2, 4, ..., each
// of which replaces a pair (a, b) that lies h apart by (a + b, a - b), then the factor. Every NaN
// of the result is the positive quiet one, as which of two NaNs a sum keeps is nobody's promise.
inline void rotate_row_ref(float* values, int64_t dim) {
  const int32_t n = rotation_dim(static_cast<int32_t>(dim));
  for (int64_t h = 1; h < n; h *= 2)
    for (int64_t i = 0; i < dim; ++i) {
      if ((i & h) != 0) continue;
      const float a = values[i];
      const float b = values[i + h];
      values[i] = a + b;
      values[i + h] = a - b;
    }
  for (int64_t i = 0; i < dim; ++i) {
    values[i] *= rotation_factor(n);
    if (std::isnan(values[i])) values[i] = std::numeric_limits<float>::quiet_NaN();
  }
}

}  // namespace larder::kernels
