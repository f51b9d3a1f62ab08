// Rotation of a row's pairs by its position (larder/rope.h). The plain definition; the folder is
// built without fused operations.
#pragma once

#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include "kernels/cpu/bf16.h"
#include "larder/rope.h"

namespace larder::kernels::cpu {

// One of bf16, fp16 or fp32.
inline float load_element(Dtype dtype, const std::byte* source) {
  if (dtype == Dtype::kFp32) {
    float value;
    std::memcpy(&value, source, sizeof(value));
    return value;
  }
  uint16_t bits;
  std::memcpy(&bits, source, sizeof(bits));
  return dtype == Dtype::kBf16 ? bf16_to_float(bits) : fp16_to_float(bits);
}

inline void store_element(Dtype dtype, float value, std::byte* target) {
  if (dtype == Dtype::kFp32) {
    std::memcpy(target, &value, sizeof(value));
    return;
  }
  const uint16_t bits = dtype == Dtype::kBf16 ? float_to_bf16(value) : float_to_fp16(value);
  std::memcpy(target, &bits, sizeof(bits));
}

// A call's rotation: frequencies once, then cosines and sines row after row.
class Rotation {
 public:
  explicit Rotation(const Rope& rope) : rope_(rope) {
    if (rope.cos != nullptr) return;
    for (int32_t pair = 0; pair < rope.dim / 2; ++pair)
      frequencies_[static_cast<size_t>(pair)] = std::pow(rope.theta, -2.0 * pair / rope.dim);
  }

  bool is_none() const { return rope_.dim == 0; }

  void begin_row(int64_t row) {
    const int64_t position = rope_.positions != nullptr     ? rope_.positions[row]
                             : rope_.positions32 != nullptr ? rope_.positions32[row]
                                                            : row;
    for (int32_t pair = 0; pair < rope_.dim / 2; ++pair) {
      const auto i = static_cast<size_t>(pair);
      if (rope_.cos != nullptr) {
        cosines_[i] = table_value(rope_.cos, position, pair);
        sines_[i] = table_value(rope_.sin, position, pair);
      } else {
        const double angle = static_cast<double>(position) * frequencies_[i];
        cosines_[i] = static_cast<float>(std::cos(angle));
        sines_[i] = static_cast<float>(std::sin(angle));
      }
    }
  }

  // A head's `count` values, `stride` elements apart, to dense ones of the same dtype.
  void rotate(Dtype dtype, const std::byte* source, int64_t stride, int64_t count,
              std::byte* target) const {
    const int64_t bytes = dtype_bytes(dtype);
    for (int64_t i = rope_.dim; i < count; ++i)
      std::memcpy(target + i * bytes, source + i * stride * bytes, static_cast<size_t>(bytes));
    const int64_t half = rope_.dim / 2;
    for (int64_t pair = 0; pair < half; ++pair) {
      const int64_t first = rope_.interleaved ? 2 * pair : pair;
      const int64_t second = rope_.interleaved ? 2 * pair + 1 : pair + half;
      const float x = load_element(dtype, source + first * stride * bytes);
      const float y = load_element(dtype, source + second * stride * bytes);
      const float cosine = cosines_[static_cast<size_t>(pair)];
      const float sine = sines_[static_cast<size_t>(pair)];
      store_element(dtype, quiet(x * cosine - y * sine), target + first * bytes);
      store_element(dtype, quiet(y * cosine + x * sine), target + second * bytes);
    }
  }

 private:
  // Which of two NaNs an operation keeps differs between compilers.
  static float quiet(float value) {
    return std::isnan(value) ? std::numeric_limits<float>::quiet_NaN() : value;
  }
  float table_value(const void* table, int64_t position, int64_t pair) const {
    return load_element(rope_.table_dtype, static_cast<const std::byte*>(table) +
                                               (position * rope_.table_stride + pair) *
                                                   dtype_bytes(rope_.table_dtype));
  }

  static constexpr size_t kMaxPairs = kMaxRopeDim / 2;
  Rope rope_;
  std::array<double, kMaxPairs> frequencies_ = {};  // radians per position
  std::array<float, kMaxPairs> cosines_ = {};       // of the row
  std::array<float, kMaxPairs> sines_ = {};
};

}  // namespace larder::kernels::cpu
