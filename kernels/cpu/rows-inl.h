// Rows of K, V, Q and output to and from floats, once per vector target of Highway.
//
// Included by each kernel's source inside its foreach_target loop, hence the toggled guard. On the
// scalar target everything is the plain definition (nvfp4.h, bf16.h); the other targets must give
// the same bytes, which the tests check on every target of the machine. Rows inside a page may lie
// at any byte (an nvfp4 region may have odd size), so they are loaded as bytes.

#if defined(LARDER_KERNELS_CPU_ROWS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_ROWS_INL_H_
#undef LARDER_KERNELS_CPU_ROWS_INL_H_
#else
#define LARDER_KERNELS_CPU_ROWS_INL_H_
#endif

#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/nvfp4.h"
#include "larder/kv_format.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using Floats = hn::ScalableTag<float>;

inline uint16_t load_u16(const std::byte* source) {
  uint16_t bits;
  std::memcpy(&bits, source, sizeof(bits));
  return bits;
}

inline void store_u16(uint16_t bits, std::byte* target) {
  std::memcpy(target, &bits, sizeof(bits));
}

inline void decode_bf16_row(const std::byte* source, int64_t count, float* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  const Floats d;
  const hn::RebindToUnsigned<Floats> d_u32;
  const hn::Rebind<uint16_t, Floats> d_u16;
  const hn::Repartition<uint8_t, decltype(d_u16)> d_u8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* bytes = reinterpret_cast<const uint8_t*>(source);
  for (; i + lanes <= count; i += lanes) {
    const auto bits = hn::BitCast(d_u16, hn::LoadU(d_u8, bytes + 2 * i));
    hn::StoreU(hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d_u32, bits))), d, out + i);
  }
#endif
  for (; i < count; ++i) out[i] = bf16_to_float(load_u16(source + 2 * i));
}

// `stride` in elements of the dtype.
inline void load_floats(Dtype dtype, const std::byte* source, int64_t stride, int64_t count,
                        float* out) {
  switch (dtype) {
    case Dtype::kBf16:
      if (stride == 1) return decode_bf16_row(source, count, out);
      for (int64_t i = 0; i < count; ++i) out[i] = bf16_to_float(load_u16(source + 2 * i * stride));
      return;
    case Dtype::kFp16:
      for (int64_t i = 0; i < count; ++i) out[i] = fp16_to_float(load_u16(source + 2 * i * stride));
      return;
    case Dtype::kFp32:
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(out + i, source + 4 * i * stride, sizeof(float));
      return;
  }
}

inline void store_floats(Dtype dtype, const float* values, int64_t stride, int64_t count,
                         std::byte* target) {
  switch (dtype) {
    case Dtype::kBf16:
      for (int64_t i = 0; i < count; ++i)
        store_u16(float_to_bf16(values[i]), target + 2 * i * stride);
      return;
    case Dtype::kFp16:
      for (int64_t i = 0; i < count; ++i)
        store_u16(float_to_fp16(values[i]), target + 2 * i * stride);
      return;
    case Dtype::kFp32:
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(target + 4 * i * stride, values + i, sizeof(float));
      return;
  }
}

#if HWY_TARGET == HWY_SCALAR

inline void decode_nvfp4_row(const std::byte* data, const std::byte* scales, int64_t dim,
                             float* out) {
  for (int64_t group = 0; group < dim / kNvfp4GroupElements; ++group)
    decode_nvfp4_group_ref(data + group * kNvfp4GroupBytes, scales[group],
                           out + group * kNvfp4GroupElements);
}

inline void encode_nvfp4_row(const float* values, int64_t dim, float global_scale, std::byte* data,
                             std::byte* scales) {
  for (int64_t group = 0; group < dim / kNvfp4GroupElements; ++group)
    encode_nvfp4_group_ref(values + group * kNvfp4GroupElements, global_scale,
                           data + group * kNvfp4GroupBytes, scales + group);
}

#else

// Twice the E2M1 values, so that they are integers. Code 8 gives +0 where the plain definition has
// -0; no sum can tell.
alignas(16) inline constexpr int8_t kTwiceE2m1[16] = {0, 1,  2,  3,  4,  6,  8,  12,
                                                      0, -1, -2, -3, -4, -6, -8, -12};

inline void decode_nvfp4_row(const std::byte* data, const std::byte* scales, int64_t dim,
                             float* out) {
  const hn::CappedTag<float, kNvfp4GroupElements> d;
  const hn::RebindToSigned<decltype(d)> d_i32;
  const hn::Rebind<int8_t, decltype(d)> d_i8;
  const hn::FixedTag<uint8_t, 16> d_codes;
  const hn::FixedTag<uint8_t, 8> d_pairs;
  const auto* pairs = reinterpret_cast<const uint8_t*>(data);
  const auto table = hn::Load(d_codes, reinterpret_cast<const uint8_t*>(kTwiceE2m1));
  const auto low_mask = hn::Set(d_codes, 15);
  alignas(16) int8_t twice[kNvfp4GroupElements];
  for (int64_t group = 0; group < dim / kNvfp4GroupElements; ++group) {
    const auto packed = hn::ZeroExtendVector(d_codes, hn::LoadU(d_pairs, pairs + 8 * group));
    const auto low = hn::And(packed, low_mask);
    const auto high = hn::And(hn::ShiftRight<4>(packed), low_mask);
    hn::Store(hn::TableLookupBytes(table, hn::InterleaveLower(d_codes, low, high)), d_codes,
              reinterpret_cast<uint8_t*>(twice));
    const auto scale = hn::Set(d, 0.5f * kE4m3Values[std::to_integer<uint8_t>(scales[group])]);
    for (size_t i = 0; i < kNvfp4GroupElements; i += hn::Lanes(d)) {
      const auto integers = hn::PromoteTo(d_i32, hn::LoadU(d_i8, twice + i));
      hn::StoreU(hn::Mul(hn::ConvertTo(d, integers), scale), d,
                 out + group * kNvfp4GroupElements + i);
    }
  }
}

// The magnitudes' bits; 0 for a NaN. Positive floats are ordered as their bits are.
template <class D, class V = hn::Vec<D> >
HWY_INLINE hn::Vec<hn::RebindToSigned<D> > magnitude_bits(D, V values) {
  const hn::RebindToSigned<D> d_i32;
  const auto bits = hn::And(hn::BitCast(d_i32, values), hn::Set(d_i32, 0x7FFFFFFF));
  return hn::IfThenZeroElse(hn::Gt(bits, hn::Set(d_i32, 0x7F800000)), bits);
}

// nvfp4_code of every lane. From 1 on a code is exponent and first mantissa bit, so rounding is an
// addition to the bits; below 1 the step is 0.5, one unit in the last place of 2^22.
template <class D, class V = hn::Vec<D> >
HWY_INLINE hn::Vec<hn::RebindToSigned<D> > nvfp4_codes(D d, V values, V inverse) {
  const hn::RebindToSigned<D> d_i32;
  const hn::RebindToUnsigned<D> d_u32;
  const auto six = hn::Set(d_i32, std::bit_cast<int32_t>(6.0f));
  const auto bits = hn::Min(magnitude_bits(d, hn::Mul(values, inverse)), six);
  const auto shifted = hn::Add(hn::BitCast(d, bits), hn::Set(d, 0x1p22f));
  const auto below_one =
      hn::Sub(hn::BitCast(d_i32, shifted), hn::Set(d_i32, std::bit_cast<int32_t>(0x1p22f)));
  const auto tie = hn::And(hn::ShiftRight<22>(bits), hn::Set(d_i32, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d_i32, 0x1FFFFF)), tie);
  const auto from_one = hn::Sub(hn::ShiftRight<22>(rounded), hn::Set(d_i32, 2 * 127 - 2));
  const auto one = hn::Set(d_i32, std::bit_cast<int32_t>(1.0f));
  const auto magnitude = hn::IfThenElse(hn::Lt(bits, one), below_one, from_one);
  const auto sign = hn::And(hn::ShiftRight<28>(hn::BitCast(d_u32, values)), hn::Set(d_u32, 8));
  return hn::Or(magnitude, hn::BitCast(d_i32, sign));
}

// nvfp4_scale of every lane, as bytes and inverses.
template <class D, class V = hn::Vec<D>, class I = hn::Vec<hn::RebindToSigned<D> > >
HWY_INLINE void nvfp4_scales(D d, V amax, float global_scale, I& bytes, V& inverses) {
  const hn::RebindToSigned<D> d_i32;
  const auto quotient = hn::BitCast(d_i32, hn::Div(amax, hn::Set(d, 6.0f * global_scale)));
  // The largest scale, for NaN (inf / inf) too.
  const auto bits = hn::Min(hn::And(quotient, hn::Set(d_i32, 0x7FFFFFFF)),
                            hn::Set(d_i32, std::bit_cast<int32_t>(448.0f)));
  const auto shifted = hn::Add(hn::BitCast(d, bits), hn::Set(d, 0x1p14f));
  const auto subnormal =
      hn::Sub(hn::BitCast(d_i32, shifted), hn::Set(d_i32, std::bit_cast<int32_t>(0x1p14f)));
  const auto tie = hn::And(hn::ShiftRight<20>(bits), hn::Set(d_i32, 1));
  const auto rounded = hn::Add(hn::Add(bits, hn::Set(d_i32, 0x7FFFF)), tie);
  const auto bias = hn::Set(d_i32, 120 << 3);
  const auto normal = hn::Sub(hn::ShiftRight<20>(rounded), bias);
  const auto smallest_normal = hn::Set(d_i32, std::bit_cast<int32_t>(0x1p-6f));
  bytes = hn::IfThenElse(hn::Lt(bits, smallest_normal), subnormal, normal);

  const auto small = hn::Mul(hn::ConvertTo(d, bytes), hn::Set(d, 0x1p-9f));
  const auto large = hn::BitCast(d, hn::ShiftLeft<20>(hn::Add(bytes, bias)));
  const auto is_small = hn::RebindMask(d, hn::Lt(bytes, hn::Set(d_i32, 8)));
  const auto product = hn::Mul(hn::IfThenElse(is_small, small, large), hn::Set(d, global_scale));
  const auto is_zero = hn::RebindMask(d, hn::Eq(bytes, hn::Zero(d_i32)));
  inverses = hn::IfThenZeroElse(is_zero, hn::Div(hn::Set(d, 1.0f), product));
}

inline float group_amax(const float* values) {
  const hn::CappedTag<float, kNvfp4GroupElements> d;
  const hn::RebindToSigned<decltype(d)> d_i32;
  auto largest = hn::Zero(d_i32);
  for (size_t i = 0; i < kNvfp4GroupElements; i += hn::Lanes(d))
    largest = hn::Max(largest, magnitude_bits(d, hn::LoadU(d, values + i)));
  return std::bit_cast<float>(hn::GetLane(hn::MaxOfLanes(d_i32, largest)));
}

inline void encode_nvfp4_group(const float* values, float inverse, std::byte* data) {
  const hn::CappedTag<float, kNvfp4GroupElements> d;
  const hn::Repartition<uint64_t, decltype(d)> d_u64;
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

// Maxima, then scales, then codes of a stretch of groups: the divisions of a stretch are done side
// by side instead of one after another.
inline void encode_nvfp4_row(const float* values, int64_t dim, float global_scale, std::byte* data,
                             std::byte* scales) {
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
      encode_nvfp4_group(values + (first + i) * kNvfp4GroupElements, inverses[i],
                         data + (first + i) * kNvfp4GroupBytes);
    }
  }
}

#endif

// A K or V row as floats, without the tensor's scale.
inline void decode_row(KvFormat format, const std::byte* data, const std::byte* scales, int64_t dim,
                       float* out) {
  if (format == KvFormat::kNvfp4)
    decode_nvfp4_row(data, scales, dim, out);
  else
    decode_bf16_row(data, dim, out);
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
