// The errors of best_scale in half precision, a lane per scale that is tried: the numbers of
// best_scale_half_error in nvfp4_search.h, in float and double.

#if defined(LARDER_KERNELS_CPU_BEST_SCALE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_BEST_SCALE_INL_H_
#undef LARDER_KERNELS_CPU_BEST_SCALE_INL_H_
#else
#define LARDER_KERNELS_CPU_BEST_SCALE_INL_H_
#endif

#include <cstddef>

#include <hwy/highway.h>

#include "kernels/cpu/nvfp4_search.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

#if HWY_TARGET != HWY_SCALAR

// The nearest halves, to even, of magnitudes below 2^15: what lies between two powers of two is
// rounded at the last place of a larger one.
template <class D>
HWY_INLINE hn::Vec<D> nearest_halves(D d, hn::Vec<D> magnitudes) {
  using Bits = hn::TFromD<hn::RebindToSigned<D> >;
  constexpr int kMantissaBits = sizeof(Bits) == 8 ? 52 : 23;
  constexpr Bits kExponent = (sizeof(Bits) == 8 ? Bits{0x7FF} : Bits{0xFF}) << kMantissaBits;
  const hn::RebindToSigned<D> d_bits;
  const auto power = hn::And(hn::BitCast(d_bits, hn::Max(magnitudes, hn::Set(d, 0x1p-14f))),
                             hn::Set(d_bits, kExponent));
  const auto magic =
      hn::BitCast(d, hn::Add(power, hn::Set(d_bits, Bits{kMantissaBits - 10} << kMantissaBits)));
  return hn::Sub(hn::Add(magnitudes, magic), magic);
}

// Sums in half precision of every lane, as doubles: squares of halves, and their sums with halves,
// are exact there.
template <class D>
struct HalfSums {
  hn::Vec<hn::Repartition<double, D> > low, high;  // of the lower and the upper lanes
};

template <class D>
HWY_INLINE HalfSums<D> add_squares(D /*d*/, hn::Vec<D> misses, const HalfSums<D>& sums) {
  const hn::Repartition<double, D> d_f64;
  const hn::Half<D> d_half;
  const auto low = hn::PromoteTo(d_f64, hn::LowerHalf(d_half, misses));
  const auto high = hn::PromoteTo(d_f64, hn::UpperHalf(d_half, misses));
  return {nearest_halves(d_f64, hn::MulAdd(low, low, sums.low)),
          nearest_halves(d_f64, hn::MulAdd(high, high, sums.high))};
}

template <class D>
HWY_INLINE hn::Vec<D> add_sums(D d, const HalfSums<D>& a, const HalfSums<D>& b) {
  const hn::Repartition<double, D> d_f64;
  const hn::Half<D> d_half;
  const auto low = nearest_halves(d_f64, hn::Add(a.low, b.low));
  const auto high = nearest_halves(d_f64, hn::Add(a.high, b.high));
  return hn::Combine(d, hn::DemoteTo(d_half, high), hn::DemoteTo(d_half, low));
}

// The misses of one value: its E2M1 value under each scale, less the value itself.
template <class D>
HWY_INLINE hn::Vec<D> half_misses(D d, float half, hn::Vec<D> forward, hn::Vec<D> back) {
  const hn::Rebind<uint16_t, D> d_u16;
  const auto value = hn::Set(d, half);
  const auto y = hn::Min(fp16_bits(d, hn::Mul(value, forward)), hn::Set(d_u16, 0x0E00));
  const auto stored = hn::And(hn::Add(y, hn::Set(d_u16, 0x0100)), hn::Set(d_u16, 0xFE00));
  // Exact in float: where `stored` is not 0, both are multiples of 2^-17.
  const auto miss = hn::MulSub(fp16_values(d, stored), back, value);
  return fp16_values(d, fp16_bits(d, miss));
}

// best_scale_half_error of every lane. `halves` are the group's magnitudes in units of 1 / k;
// `products` are scale * global scale. Lanes whose product is 0 come out as anything.
template <class D>
HWY_INLINE hn::Vec<D> best_scale_half_errors(D d, const float* halves /* [16] */,
                                             hn::Vec<D> products, float power) {
  const auto back = nearest_halves(d, hn::Mul(products, hn::Set(d, power)));
  const auto forward = nearest_halves(d, hn::Div(hn::Set(d, 1.0f), back));
  const auto zero = hn::Zero(hn::Repartition<double, D>());
  HalfSums<D> even = {zero, zero}, odd = {zero, zero};
  for (size_t i = 0; i < kNvfp4GroupElements; i += 2) {
    even = add_squares(d, half_misses(d, halves[i], forward, back), even);
    odd = add_squares(d, half_misses(d, halves[i + 1], forward, back), odd);
  }
  return add_sums(d, even, odd);
}

#endif

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
