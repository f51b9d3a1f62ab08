// The rotation of rotate.h, once per vector target of Highway.

#if defined(LARDER_KERNELS_CPU_ROTATE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_ROTATE_INL_H_
#undef LARDER_KERNELS_CPU_ROTATE_INL_H_
#else
#define LARDER_KERNELS_CPU_ROTATE_INL_H_
#endif

#include <cstdint>
#include <limits>

#include <hwy/highway.h>

#include "kernels/cpu/rotate.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

#if HWY_TARGET == HWY_SCALAR

inline void rotate_row(float* values, int64_t dim) { rotate_row_ref(values, dim); }

#else

// The stages 1 and 2, whose pairs lie within four lanes.
HWY_INLINE void rotate_within_blocks(float* values, int64_t dim) {
  const hn::CappedTag<float, 16> d;
  const hn::Repartition<double, decltype(d)> d_pair;
  for (int64_t i = 0; i < dim; i += static_cast<int64_t>(hn::Lanes(d))) {
    auto v = hn::LoadU(d, values + i);
    auto other = hn::Shuffle2301(v);
    v = hn::OddEven(hn::Sub(other, v), hn::Add(v, other));
    other = hn::Shuffle1032(v);
    const auto sum = hn::BitCast(d_pair, hn::Add(v, other));
    const auto difference = hn::BitCast(d_pair, hn::Sub(other, v));
    hn::StoreU(hn::BitCast(d, hn::OddEven(difference, sum)), d, values + i);
  }
}

// The stage h, which is at least the lanes of d.
template <class D>
HWY_INLINE void rotate_stage(D d, float* values, int64_t dim, int64_t h) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t first = 0; first < dim; first += 2 * h)
    for (int64_t i = first; i < first + h; i += lanes) {
      const auto a = hn::LoadU(d, values + i);
      const auto b = hn::LoadU(d, values + i + h);
      hn::StoreU(hn::Add(a, b), d, values + i);
      hn::StoreU(hn::Sub(a, b), d, values + i + h);
    }
}

// `dim` is a multiple of 16.
inline void rotate_row(float* values, int64_t dim) {
  const hn::CappedTag<float, 16> d;
  const int32_t n = rotation_dim(static_cast<int32_t>(dim));
  rotate_within_blocks(values, dim);
  rotate_stage(hn::CappedTag<float, 4>(), values, dim, 4);
  rotate_stage(hn::CappedTag<float, 8>(), values, dim, 8);
  for (int64_t h = 16; h < n; h *= 2) rotate_stage(d, values, dim, h);
  const auto factor = hn::Set(d, rotation_factor(n));
  const auto nan = hn::Set(d, std::numeric_limits<float>::quiet_NaN());
  for (int64_t i = 0; i < dim; i += static_cast<int64_t>(hn::Lanes(d))) {
    const auto scaled = hn::Mul(hn::LoadU(d, values + i), factor);
    hn::StoreU(hn::IfThenElse(hn::IsNaN(scaled), nan, scaled), d, values + i);
  }
}

#endif

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
