// Rows of floats to stored rows, once per vector target of Highway: every format, every encoder.
// The scalar target is the plain definition (nvfp4.h, nvfp4_search.h, e4m3.h, e5m2.h); the others
// must give the same bytes.

#if defined(LARDER_KERNELS_CPU_ENCODE_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_ENCODE_INL_H_
#undef LARDER_KERNELS_CPU_ENCODE_INL_H_
#else
#define LARDER_KERNELS_CPU_ENCODE_INL_H_
#endif

#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

#include <hwy/highway.h>

#include "kernels/cpu/best_scale-inl.h"
#include "kernels/cpu/nvfp4_search.h"
#include "kernels/cpu/rows-inl.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

#if HWY_TARGET == HWY_SCALAR

inline float group_amax(const float* values) { return nvfp4_amax(values); }

inline void encode_nvfp4_codes(const float* values, float inverse, std::byte* data) {
  encode_nvfp4_codes_ref(values, inverse, data);
}

inline void encode_nvfp4_row(Encoder encoder, const float* values, int64_t dim, float global_scale,
                             std::byte* data, std::byte* scales) {
  for (int64_t group = 0; group < dim / kNvfp4GroupElements; ++group)
    encode_nvfp4_group_ref(encoder, values + group * kNvfp4GroupElements, global_scale,
                           data + group * kNvfp4GroupBytes, scales + group);
}

#else

using GroupLanes = hn::CappedTag<float, kNvfp4GroupElements>;

// The parameters of a rounding to E4M3 or E5M2.
struct E4m3Rounding {
  static constexpr int kDropped = 20;  // bits of a float's mantissa
  static constexpr float kLargest = 448.0f;
  static constexpr float kSmallestNormal = 0x1p-6f;
  static constexpr float kSubnormalMagic = 0x1p14f;  // whose last place is the subnormals' step
  static constexpr int32_t kBias = 120 << 3;
};
struct E5m2Rounding {
  static constexpr int kDropped = 21;
  static constexpr float kLargest = 57344.0f;
  static constexpr float kSmallestNormal = 0x1p-14f;
  static constexpr float kSubnormalMagic = 0x1p7f;
  static constexpr int32_t kBias = 112 << 2;
};

// float_to_e4m3 or float_to_e5m2 of every lane.
template <class Rounding, class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D> > fp8_codes(D d, hn::Vec<D> values) {
  const hn::RebindToSigned<D> d_i32;
  const hn::RebindToUnsigned<D> d_u32;
  const auto set_bits = [&](float x) HWY_ATTR { return hn::Set(d_i32, std::bit_cast<int32_t>(x)); };
  const auto magnitude = hn::And(hn::BitCast(d_i32, values), hn::Set(d_i32, 0x7FFFFFFF));
  const auto capped = hn::Min(magnitude, set_bits(Rounding::kLargest));
  const auto shifted = hn::Add(hn::BitCast(d, capped), hn::Set(d, Rounding::kSubnormalMagic));
  const auto subnormal = hn::Sub(hn::BitCast(d_i32, shifted), set_bits(Rounding::kSubnormalMagic));
  const auto tie = hn::And(hn::ShiftRight<Rounding::kDropped>(capped), hn::Set(d_i32, 1));
  const auto half = hn::Set(d_i32, (1 << (Rounding::kDropped - 1)) - 1);
  const auto rounded = hn::Add(hn::Add(capped, half), tie);
  const auto normal =
      hn::Sub(hn::ShiftRight<Rounding::kDropped>(rounded), hn::Set(d_i32, Rounding::kBias));
  const auto code =
      hn::IfThenElse(hn::Lt(capped, set_bits(Rounding::kSmallestNormal)), subnormal, normal);
  const auto sign = hn::And(hn::ShiftRight<24>(hn::BitCast(d_u32, values)), hn::Set(d_u32, 0x80));
  return hn::IfThenElse(hn::Gt(magnitude, hn::Set(d_i32, 0x7F800000)), hn::Set(d_i32, 0x7F),
                        hn::Or(code, hn::BitCast(d_i32, sign)));
}

// The magnitudes' bits; 0 for a NaN. Positive floats are ordered as their bits are.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D> > magnitude_bits(D d, hn::Vec<D> values) {
  const hn::RebindToSigned<D> d_i32;
  const auto bits = hn::And(hn::BitCast(d_i32, values), hn::Set(d_i32, 0x7FFFFFFF));
  return hn::IfThenZeroElse(hn::Gt(bits, hn::Set(d_i32, std::bit_cast<int32_t>(INFINITY))), bits);
}

inline float group_amax(const float* values) {
  const GroupLanes d;
  const hn::RebindToSigned<GroupLanes> d_i32;
  auto largest = hn::Zero(d_i32);
  for (size_t i = 0; i < kNvfp4GroupElements; i += hn::Lanes(d))
    largest = hn::Max(largest, magnitude_bits(d, hn::LoadU(d, values + i)));
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(d_i32, largest)));
}

// The E2M1 code of a magnitude, in the low bits of the lane; the bits above are not cleared. A code
// is min(2 y, y + 2, y / 2 + 4, 7) rounded to the nearest even integer: the slopes are the steps
// of the format. Each sum is rounded once, at the last place of 2^23, which is 1; doubling and
// halving are exact, so it does not matter whether the target fuses them.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D> > e2m1_codes(D d, hn::Vec<D> magnitudes) {
  const hn::RebindToSigned<D> d_i32;
  constexpr float kMagic = 0x1p23f;
  const auto below_two = hn::MulAdd(magnitudes, hn::Set(d, 2.0f), hn::Set(d, kMagic));
  const auto below_four = hn::Add(magnitudes, hn::Set(d, kMagic + 2));
  const auto from_four = hn::MulAdd(magnitudes, hn::Set(d, 0.5f), hn::Set(d, kMagic + 4));
  const auto largest = hn::Set(d_i32, std::bit_cast<int32_t>(kMagic + 7));
  return hn::Min(hn::Min(hn::BitCast(d_i32, below_two), hn::BitCast(d_i32, below_four)),
                 hn::Min(hn::BitCast(d_i32, from_four), largest));
}

// nvfp4_code of every lane.
template <class D>
HWY_INLINE hn::Vec<hn::RebindToSigned<D> > nvfp4_codes(D d, hn::Vec<D> values, hn::Vec<D> inverse) {
  const hn::RebindToSigned<D> d_i32;
  const hn::RebindToUnsigned<D> d_u32;
  const auto magnitudes = hn::BitCast(d, magnitude_bits(d, hn::Mul(values, inverse)));
  const auto sign = hn::And(hn::ShiftRight<28>(hn::BitCast(d_u32, values)), hn::Set(d_u32, 8));
  return hn::Or(hn::And(e2m1_codes(d, magnitudes), hn::Set(d_i32, 7)), hn::BitCast(d_i32, sign));
}

// The E2M1 value nearest to a magnitude that is not NaN: what lies between two values of one power
// of two is rounded at the last place of a larger one.
template <class D>
HWY_INLINE hn::Vec<D> e2m1_nearest(D d, hn::Vec<D> magnitudes) {
  const hn::RebindToSigned<D> d_i32;
  const auto capped = hn::Min(magnitudes, hn::Set(d, 6.0f));
  const auto power =
      hn::And(hn::BitCast(d_i32, hn::Max(capped, hn::Set(d, 1.0f))), hn::Set(d_i32, 0x7F800000));
  const auto magic = hn::BitCast(d, hn::Add(power, hn::Set(d_i32, 22 << 23)));
  return hn::Sub(hn::Add(capped, magic), magic);
}

inline void encode_nvfp4_codes(const float* values, float inverse, std::byte* data) {
  const GroupLanes d;
  const hn::Repartition<uint64_t, GroupLanes> d_u64;
  const hn::Rebind<uint8_t, decltype(d_u64)> d_u8;
  auto* pairs = reinterpret_cast<uint8_t*>(data);
  for (size_t i = 0; i < kNvfp4GroupElements; i += hn::Lanes(d)) {
    // Two codes to a 64-bit lane: the even one stays, the odd one comes down beside it.
    const auto codes =
        hn::BitCast(d_u64, nvfp4_codes(d, hn::LoadU(d, values + i), hn::Set(d, inverse)));
    const auto pair = hn::And(hn::Or(codes, hn::ShiftRight<28>(codes)), hn::Set(d_u64, 0xFF));
    hn::StoreU(hn::TruncateTo(d_u8, pair), d_u8, pairs + i / 2);
  }
}

// What scale bytes stand for.
template <class D>
HWY_INLINE hn::Vec<D> scale_values(D d, hn::Vec<hn::RebindToSigned<D> > bytes) {
  const hn::RebindToSigned<D> d_i32;
  const auto small = hn::Mul(hn::ConvertTo(d, bytes), hn::Set(d, 0x1p-9f));
  const auto large = hn::BitCast(d, hn::ShiftLeft<20>(hn::Add(bytes, hn::Set(d_i32, 120 << 3))));
  const auto is_small = hn::RebindMask(d, hn::Lt(bytes, hn::Set(d_i32, 8)));
  return hn::IfThenElse(is_small, small, large);
}

// What values are multiplied with: 1 / product of the scale and the tensor's, 0 for the scale 0.
template <class D>
HWY_INLINE hn::Vec<D> scale_inverses(D d, hn::Vec<D> scales, hn::Vec<D> products) {
  const auto is_zero = hn::Eq(scales, hn::Zero(d));
  return hn::IfThenZeroElse(is_zero, hn::Div(hn::Set(d, 1.0f), products));
}

// nvfp4_scale of every lane.
template <class D>
HWY_INLINE void nvfp4_scales(D d, hn::Vec<D> amax, float global_scale,
                             hn::Vec<hn::RebindToSigned<D> >& bytes, hn::Vec<D>& inverses) {
  const hn::RebindToSigned<D> d_i32;
  const auto quotient = hn::Div(amax, hn::Set(d, 6.0f * global_scale));
  // The largest scale, for NaN (inf / inf) too.
  bytes = hn::Min(fp8_codes<E4m3Rounding>(d, quotient), hn::Set(d_i32, 0x7E));
  const auto scales = scale_values(d, bytes);
  inverses = scale_inverses(d, scales, hn::Mul(scales, hn::Set(d, global_scale)));
}

// Maxima, then scales, then codes of a stretch of groups: the divisions of a stretch are done side
// by side instead of one after another.
inline void encode_reference_row(const float* values, int64_t dim, float global_scale,
                                 std::byte* data, std::byte* scales) {
  const Floats d;
  const hn::RebindToSigned<Floats> d_i32;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const int64_t num_groups = dim / kNvfp4GroupElements;
  for (int64_t first = 0; first < num_groups; first += lanes) {
    const int64_t count = HWY_MIN(lanes, num_groups - first);
    HWY_ALIGN float amax[hn::MaxLanes(Floats())] = {};
    HWY_ALIGN int32_t bytes[hn::MaxLanes(Floats())];
    HWY_ALIGN float inverses[hn::MaxLanes(Floats())];
    for (int64_t i = 0; i < count; ++i)
      amax[i] = group_amax(values + (first + i) * kNvfp4GroupElements);
    hn::Vec<hn::RebindToSigned<Floats> > byte_lanes;
    hn::Vec<Floats> inverse_lanes;
    nvfp4_scales(d, hn::Load(d, amax), global_scale, byte_lanes, inverse_lanes);
    hn::Store(byte_lanes, d_i32, bytes);
    hn::Store(inverse_lanes, d, inverses);
    for (int64_t i = 0; i < count; ++i) {
      scales[first + i] = static_cast<std::byte>(bytes[i]);
      encode_nvfp4_codes(values + (first + i) * kNvfp4GroupElements, inverses[i],
                         data + (first + i) * kNvfp4GroupBytes);
    }
  }
}

// four_over_six_error. Where the target does not fuse, the plain definition's std::fma does.
inline float four_over_six_error_lanes(const float* values, float inverse) {
#if HWY_NATIVE_FMA
  if (inverse == 0.0f) return four_over_six_error(values, inverse);
  const GroupLanes d;
  HWY_ALIGN float differences[kNvfp4GroupElements];
  const auto decode_scale = hn::Set(d, 1.0f / inverse);
  for (size_t i = 0; i < kNvfp4GroupElements; i += hn::Lanes(d)) {
    const auto v = hn::LoadU(d, values + i);
    const auto product = hn::BitCast(d, magnitude_bits(d, hn::Mul(v, hn::Set(d, inverse))));
    hn::Store(hn::MulSub(e2m1_nearest(d, product), decode_scale, hn::Abs(v)), d, differences + i);
  }
  float error = 0.0f;
  for (size_t i = 0; i < kNvfp4GroupElements; i += 2)
    error += std::fma(differences[i], differences[i], differences[i + 1] * differences[i + 1]);
  return error;
#else
  return four_over_six_error(values, inverse);
#endif
}

inline Nvfp4Scale four_over_six_lanes(const float* values, float global_scale) {
  const float amax = group_amax(values);
  const Nvfp4Scale six = four_over_six_scale(amax, 6.0f, global_scale);
  const Nvfp4Scale four = four_over_six_scale(amax, 4.0f, global_scale);
  const bool better = four_over_six_error_lanes(values, four.inverse) <
                      four_over_six_error_lanes(values, six.inverse);
  return better ? four : six;
}

// kBestScaleSteps, filled up with steps that no byte can take.
alignas(64) inline constexpr int32_t kBestScaleLanes[16] = {0, -1, 1, -2, 2, -3,  3,   4,
                                                            5, 6,  7, 8,  9, 999, 999, 999};

// best_scale_float_error of every lane.
template <class D>
HWY_INLINE hn::Vec<D> best_scale_float_errors(D d, const float* magnitudes /* [16] */,
                                              float global_scale, hn::Vec<D> scales,
                                              hn::Vec<D> inverses) {
  const float unit = 1.0f / global_scale;
  auto error = hn::Zero(d);
  for (size_t i = 0; i < kNvfp4GroupElements; ++i) {
    const auto product =
        hn::BitCast(d, magnitude_bits(d, hn::Mul(hn::Set(d, magnitudes[i]), inverses)));
    const auto difference =
        hn::MulSub(e2m1_nearest(d, product), scales, hn::Set(d, magnitudes[i] * unit));
    error = hn::Add(error, hn::Mul(difference, difference));
  }
  return error;
}

// choose_best_scale, one lane per scale that is tried.
inline Nvfp4Scale best_scale_lanes(const float* values, float global_scale) {
  const GroupLanes d;
  const hn::RebindToSigned<GroupLanes> d_i32;
  const float amax = group_amax(values);
  const Nvfp4Scale middle = nvfp4_scale(amax, global_scale);
  const bool uses_halves = best_scale_uses_halves(middle.byte, global_scale);
  const float power = best_scale_power(amax);
  HWY_ALIGN float magnitudes[kNvfp4GroupElements];  // the halves, where those are used
  for (size_t i = 0; i < kNvfp4GroupElements; i += hn::Lanes(d)) {
    const auto exact = hn::BitCast(d, magnitude_bits(d, hn::LoadU(d, values + i)));
    const auto halves = nearest_halves(d, hn::Mul(exact, hn::Set(d, power * 0x1p-14f)));
    hn::Store(uses_halves ? halves : exact, d, magnitudes + i);
  }
  Nvfp4Scale best = middle;
  float least = std::numeric_limits<float>::infinity();
  for (size_t lane = 0; lane < kNvfp4GroupElements; lane += hn::Lanes(d)) {
    const auto bytes =
        hn::Add(hn::Set(d_i32, middle.byte), hn::Load(d_i32, kBestScaleLanes + lane));
    const auto in_range =
        hn::AndNot(hn::Lt(bytes, hn::Zero(d_i32)), hn::Lt(bytes, hn::Set(d_i32, 0x7F)));
    const auto scales = scale_values(d, hn::IfThenElseZero(in_range, bytes));
    const auto products = hn::Mul(scales, hn::Set(d, global_scale));
    const auto inverses = scale_inverses(d, scales, products);
    const auto errors =
        uses_halves ? best_scale_half_errors(d, magnitudes, products, power)
                    : best_scale_float_errors(d, magnitudes, global_scale, scales, inverses);
    const auto counted = hn::IfThenElse(hn::RebindMask(d, in_range), errors, hn::Set(d, INFINITY));
    const auto minimum = hn::MinOfLanes(d, counted);
    if (!(hn::GetLane(minimum) < least)) continue;
    least = hn::GetLane(minimum);
    const size_t first = hn::FindKnownFirstTrue(d, hn::Eq(counted, minimum));
    HWY_ALIGN float all_inverses[kNvfp4GroupElements];
    hn::Store(inverses, d, all_inverses);
    best = {static_cast<uint8_t>(middle.byte + kBestScaleLanes[lane + first]), all_inverses[first]};
  }
  return best;
}

inline void encode_nvfp4_row(Encoder encoder, const float* values, int64_t dim, float global_scale,
                             std::byte* data, std::byte* scales) {
  if (encoder == Encoder::kReference)
    return encode_reference_row(values, dim, global_scale, data, scales);
  for (int64_t group = 0; group < dim / kNvfp4GroupElements; ++group) {
    const float* elements = values + group * kNvfp4GroupElements;
    const Nvfp4Scale scale = encoder == Encoder::kFourOverSix
                                 ? four_over_six_lanes(elements, global_scale)
                                 : best_scale_lanes(elements, global_scale);
    scales[group] = static_cast<std::byte>(scale.byte);
    encode_nvfp4_codes(elements, scale.inverse, data + group * kNvfp4GroupBytes);
  }
}

#endif

// x / scale.
inline void encode_e4m3_row(const float* values, int64_t count, float scale, std::byte* bytes) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = narrow<uint8_t>(values, count, bytes, [scale](auto d, auto v) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(d)> d_u32;
    const auto codes = fp8_codes<E4m3Rounding>(d, hn::Div(v, hn::Set(d, scale)));
    return hn::TruncateTo(hn::Rebind<uint8_t, decltype(d)>(), hn::BitCast(d_u32, codes));
  });
#endif
  for (; i < count; ++i) bytes[i] = static_cast<std::byte>(float_to_e4m3(values[i] / scale));
}

inline void encode_e5m2_row(const float* values, int64_t count, float scale, std::byte* bytes) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = narrow<uint8_t>(values, count, bytes, [scale](auto d, auto v) HWY_ATTR {
    const hn::RebindToUnsigned<decltype(d)> d_u32;
    const auto codes = fp8_codes<E5m2Rounding>(d, hn::Div(v, hn::Set(d, scale)));
    return hn::TruncateTo(hn::Rebind<uint8_t, decltype(d)>(), hn::BitCast(d_u32, codes));
  });
#endif
  for (; i < count; ++i) bytes[i] = static_cast<std::byte>(float_to_e5m2(values[i] / scale));
}

// A K or V row from floats. `encoder` and `scales` count for nvfp4 only; `scale` is the tensor's.
inline void encode_row(KvFormat format, Encoder encoder, const float* values, int64_t dim,
                       float scale, std::byte* data, std::byte* scales) {
  switch (format) {
    case KvFormat::kBf16:
      return encode_bf16_row(values, dim, data);
    case KvFormat::kFp16:
      return encode_fp16_row(values, dim, data);
    case KvFormat::kFp8E4m3:
      return encode_e4m3_row(values, dim, scale, data);
    case KvFormat::kFp8E5m2:
      return encode_e5m2_row(values, dim, scale, data);
    case KvFormat::kNvfp4:
      return encode_nvfp4_row(encoder, values, dim, scale, data, scales);
  }
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
