// Rows of K, V, Q and output to and from floats, once per vector target of Highway.
//
// Included by each kernel's source inside its foreach_target loop, hence the toggled guard. On the
// scalar target everything is the plain definition (nvfp4.h, e4m3.h, e5m2.h, bf16.h); the other
// targets must give the same bits, which the tests check on every target of the machine. Rows
// inside a page may lie at any byte (an nvfp4 region may have odd size), so they are loaded as
// bytes.

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
#include <limits>

#include <hwy/highway.h>

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/e5m2.h"
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

#if HWY_TARGET != HWY_SCALAR

// Halves as floats.
template <class D>
HWY_INLINE hn::Vec<D> fp16_values(D d, hn::Vec<hn::Rebind<uint16_t, D>> halves) {
#if HWY_TARGET <= HWY_AVX2
  return hn::PromoteTo(d, hn::BitCast(hn::Rebind<hwy::float16_t, D>(), halves));
#else
  const hn::RebindToUnsigned<D> d_u32;
  const hn::RebindToSigned<D> d_i32;
  const auto bits = hn::PromoteTo(d_u32, halves);
  const auto magnitude = hn::BitCast(d_i32, hn::And(bits, hn::Set(d_u32, 0x7FFF)));
  const auto shifted = hn::ShiftLeft<13>(magnitude);
  const auto normal = hn::Add(shifted, hn::Set(d_i32, 112 << 23));
  const auto small = hn::BitCast(d_i32, hn::Mul(hn::ConvertTo(d, magnitude), hn::Set(d, 0x1p-24f)));
  const auto quiet =
      hn::IfThenElseZero(hn::Gt(magnitude, hn::Set(d_i32, 0x7C00)), hn::Set(d_i32, 0x400000));
  const auto special = hn::Or(hn::Or(shifted, hn::Set(d_i32, 0x7F800000)), quiet);
  const auto finite = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d_i32, 0x400)), small, normal);
  const auto value = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d_i32, 0x7BFF)), special, finite);
  const auto sign = hn::ShiftLeft<16>(hn::And(bits, hn::Set(d_u32, 0x8000)));
  return hn::BitCast(d, hn::Or(hn::BitCast(d_u32, value), sign));
#endif
}

// E4M3 bytes as floats: as a half each has 2^-8 of its value. Every NaN is the quiet one.
template <class D>
HWY_INLINE hn::Vec<D> e4m3_values(D d, hn::Vec<hn::Rebind<uint8_t, D>> bytes) {
  const hn::Rebind<uint16_t, D> d_u16;
  const hn::Rebind<int16_t, D> d_i16;
  const auto spread = hn::BitCast(d_i16, hn::ShiftLeft<8>(hn::PromoteTo(d_u16, bytes)));
  const auto half = hn::And(hn::BitCast(d_u16, hn::ShiftRight<1>(spread)), hn::Set(d_u16, 0xBF80));
  const auto value = hn::Mul(fp16_values(d, half), hn::Set(d, 256.0f));
  return hn::IfThenElse(hn::Eq(hn::Abs(value), hn::Set(d, 480.0f)),
                        hn::Set(d, std::numeric_limits<float>::quiet_NaN()), value);
}

// float_to_bf16 and float_to_fp16 of every lane.
template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> bf16_bits(D d, hn::Vec<D> values) {
  const hn::RebindToUnsigned<D> d_u32;
  const auto bits = hn::BitCast(d_u32, values);
  const auto upper = hn::ShiftRight<16>(bits);
  const auto tie = hn::And(upper, hn::Set(d_u32, 1));
  const auto rounded = hn::ShiftRight<16>(hn::Add(hn::Add(bits, hn::Set(d_u32, 0x7FFF)), tie));
  return hn::TruncateTo(hn::Rebind<uint16_t, D>(),
                        hn::IfThenElse(hn::RebindMask(d_u32, hn::IsNaN(values)),
                                       hn::Or(upper, hn::Set(d_u32, 0x40)), rounded));
}

template <class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D>> fp16_bits(D d, hn::Vec<D> values) {
  const hn::Rebind<uint16_t, D> d_u16;
#if HWY_TARGET <= HWY_AVX2
  return hn::BitCast(d_u16, hn::DemoteTo(hn::Rebind<hwy::float16_t, D>(), values));
#else
  const hn::RebindToUnsigned<D> d_u32;
  const hn::RebindToSigned<D> d_i32;
  const auto bits = hn::BitCast(d_i32, values);
  const auto magnitude = hn::And(bits, hn::Set(d_i32, 0x7FFFFFFF));
  const auto half = hn::Set(d_i32, 0x3F000000);
  const auto shifted = hn::Add(hn::BitCast(d, magnitude), hn::Set(d, 0.5f));
  const auto small = hn::Sub(hn::BitCast(d_i32, shifted), half);
  const auto tie = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d_i32, 1));
  const auto rounded = hn::Add(hn::Add(magnitude, hn::Set(d_i32, 0xFFF)), tie);
  const auto normal = hn::Sub(hn::ShiftRight<13>(rounded), hn::Set(d_i32, 112 << 10));
  const auto payload = hn::And(hn::ShiftRight<13>(magnitude), hn::Set(d_i32, 0x3FF));
  const auto nan = hn::Or(payload, hn::Set(d_i32, 0x7E00));
  auto result = hn::IfThenElse(hn::Lt(magnitude, hn::Set(d_i32, 0x38800000)), small, normal);
  result =
      hn::IfThenElse(hn::Gt(magnitude, hn::Set(d_i32, 0x477FEFFF)), hn::Set(d_i32, 0x7C00), result);
  result = hn::IfThenElse(hn::Gt(magnitude, hn::Set(d_i32, 0x7F800000)), nan, result);
  const auto sign = hn::And(hn::ShiftRight<16>(hn::BitCast(d_u32, values)), hn::Set(d_u32, 0x8000));
  return hn::TruncateTo(d_u16, hn::Or(hn::BitCast(d_u32, result), sign));
#endif
}

// Elements of 1 or 2 bytes to floats, a vector at a time; returns how many: a multiple of the
// lanes.
template <typename Element, class Convert>
HWY_INLINE int64_t widen(const std::byte* source, int64_t count, float* out,
                         const Convert& convert) {
  const Floats d;
  const hn::Rebind<Element, Floats> d_bits;
  const hn::Repartition<uint8_t, decltype(d_bits)> d_u8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* bytes = reinterpret_cast<const uint8_t*>(source);
  const int64_t whole = count / lanes * lanes;
  for (int64_t i = 0; i < whole; i += lanes) {
    const auto bits =
        hn::BitCast(d_bits, hn::LoadU(d_u8, bytes + static_cast<int64_t>(sizeof(Element)) * i));
    hn::StoreU(convert(d, bits), d, out + i);
  }
  return whole;
}

// The reverse.
template <typename Element, class Convert>
HWY_INLINE int64_t narrow(const float* values, int64_t count, std::byte* target,
                          const Convert& convert) {
  const Floats d;
  const hn::Rebind<Element, Floats> d_bits;
  const hn::Repartition<uint8_t, decltype(d_bits)> d_u8;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto* bytes = reinterpret_cast<uint8_t*>(target);
  const int64_t whole = count / lanes * lanes;
  for (int64_t i = 0; i < whole; i += lanes) {
    const auto bits = convert(d, hn::LoadU(d, values + i));
    hn::StoreU(hn::BitCast(d_u8, bits), d_u8, bytes + static_cast<int64_t>(sizeof(Element)) * i);
  }
  return whole;
}

#endif  // not scalar

inline void decode_bf16_row(const std::byte* source, int64_t count, float* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = widen<uint16_t>(source, count, out, [](auto d, auto bits) HWY_ATTR {
    return hn::BitCast(d,
                       hn::ShiftLeft<16>(hn::PromoteTo(hn::RebindToUnsigned<decltype(d)>(), bits)));
  });
#endif
  for (; i < count; ++i) out[i] = bf16_to_float(load_u16(source + 2 * i));
}

inline void decode_fp16_row(const std::byte* source, int64_t count, float* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = widen<uint16_t>(source, count, out,
                      [](auto d, auto bits) HWY_ATTR { return fp16_values(d, bits); });
#endif
  for (; i < count; ++i) out[i] = fp16_to_float(load_u16(source + 2 * i));
}

inline void decode_e4m3_row(const std::byte* source, int64_t count, float* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = widen<uint8_t>(source, count, out,
                     [](auto d, auto bytes) HWY_ATTR { return e4m3_values(d, bytes); });
#endif
  for (; i < count; ++i) out[i] = kE4m3Values[std::to_integer<uint8_t>(source[i])];
}

inline void decode_e5m2_row(const std::byte* source, int64_t count, float* out) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = widen<uint8_t>(source, count, out, [](auto d, auto bytes) HWY_ATTR {
    return fp16_values(d,
                       hn::ShiftLeft<8>(hn::PromoteTo(hn::Rebind<uint16_t, decltype(d)>(), bytes)));
  });
#endif
  for (; i < count; ++i) out[i] = e5m2_to_float(std::to_integer<uint8_t>(source[i]));
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
      if (stride == 1) return decode_fp16_row(source, count, out);
      for (int64_t i = 0; i < count; ++i) out[i] = fp16_to_float(load_u16(source + 2 * i * stride));
      return;
    case Dtype::kFp32:
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(out + i, source + 4 * i * stride, sizeof(float));
      return;
    case Dtype::kFp8E4m3:
    case Dtype::kE2m1x2:
      break;  // outputs only: refused by the validation
  }
}

inline void encode_bf16_row(const float* values, int64_t count, std::byte* target) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = narrow<uint16_t>(values, count, target,
                       [](auto d, auto v) HWY_ATTR { return bf16_bits(d, v); });
#endif
  for (; i < count; ++i) store_u16(float_to_bf16(values[i]), target + 2 * i);
}

inline void encode_fp16_row(const float* values, int64_t count, std::byte* target) {
  int64_t i = 0;
#if HWY_TARGET != HWY_SCALAR
  i = narrow<uint16_t>(values, count, target,
                       [](auto d, auto v) HWY_ATTR { return fp16_bits(d, v); });
#endif
  for (; i < count; ++i) store_u16(float_to_fp16(values[i]), target + 2 * i);
}

// bf16, fp16 or fp32.
inline void store_floats(Dtype dtype, const float* values, int64_t stride, int64_t count,
                         std::byte* target) {
  switch (dtype) {
    case Dtype::kBf16:
      if (stride == 1) return encode_bf16_row(values, count, target);
      for (int64_t i = 0; i < count; ++i)
        store_u16(float_to_bf16(values[i]), target + 2 * i * stride);
      return;
    case Dtype::kFp16:
      if (stride == 1) return encode_fp16_row(values, count, target);
      for (int64_t i = 0; i < count; ++i)
        store_u16(float_to_fp16(values[i]), target + 2 * i * stride);
      return;
    case Dtype::kFp32:
      for (int64_t i = 0; i < count; ++i)
        std::memcpy(target + 4 * i * stride, values + i, sizeof(float));
      return;
    case Dtype::kFp8E4m3:
    case Dtype::kE2m1x2:
      break;
  }
}

#if HWY_TARGET == HWY_SCALAR

inline void decode_nvfp4_row(const std::byte* data, const std::byte* scales, int64_t dim,
                             float* out) {
  for (int64_t group = 0; group < dim / kNvfp4GroupElements; ++group)
    decode_nvfp4_group_ref(data + group * kNvfp4GroupBytes, scales[group],
                           out + group * kNvfp4GroupElements);
}

#else

// A group is 8 bytes, each of two codes; a lane of 32 bits takes one byte and gives two values of
// 16 bits, the even element in the lower half.
using PairLanes = hn::CappedTag<uint32_t, kNvfp4GroupBytes>;

// The upper halves of the E2M1 magnitudes as floats.
alignas(16) inline constexpr uint16_t kE2m1Bf16[8] = {0x0000, 0x3F00, 0x3F80, 0x3FC0,
                                                      0x4000, 0x4040, 0x4080, 0x40C0};

// Looks the magnitudes up in a table of 8, which every 128-bit block of `table` holds; the sign of
// a code is added to the sign of the table's value.
template <class D>
HWY_INLINE hn::Vec<D> lookup_pairs(D d, const uint8_t* pairs, hn::Vec<D> table) {
  const hn::Rebind<uint8_t, D> d_pairs;
  const hn::Repartition<uint8_t, D> d_u8;
  const auto lanes = hn::PromoteTo(d, hn::LoadU(d_pairs, pairs));
  const auto codes =
      hn::And(hn::Or(hn::ShiftLeft<1>(lanes), hn::ShiftLeft<13>(lanes)), hn::Set(d, 0x000E000E));
  const auto index = hn::Or(hn::Or(codes, hn::ShiftLeft<8>(codes)), hn::Set(d, 0x01000100));
  const auto magnitudes =
      hn::BitCast(d, hn::TableLookupBytes(hn::BitCast(d_u8, table), hn::BitCast(d_u8, index)));
  const auto signs =
      hn::And(hn::Or(hn::ShiftLeft<12>(lanes), hn::ShiftLeft<24>(lanes)), hn::Set(d, 0x80008000));
  return hn::Xor(magnitudes, signs);
}

inline void decode_nvfp4_row(const std::byte* data, const std::byte* scales, int64_t dim,
                             float* out) {
  const PairLanes d_u32;
  const hn::Rebind<float, PairLanes> d;
  const hn::Repartition<uint16_t, PairLanes> d_u16;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto* pairs = reinterpret_cast<const uint8_t*>(data);
  const auto table = hn::BitCast(d_u32, hn::LoadDup128(d_u16, kE2m1Bf16));
  const auto upper = hn::Set(d_u32, 0xFFFF0000);
  for (int64_t group = 0; group < dim / kNvfp4GroupElements; ++group) {
    const auto scale = hn::Set(d, kE4m3Values[std::to_integer<uint8_t>(scales[group])]);
    for (int64_t i = group * kNvfp4GroupBytes; i < (group + 1) * kNvfp4GroupBytes; i += lanes) {
      const auto values = lookup_pairs(d_u32, pairs + i, table);
      const auto even = hn::BitCast(d, hn::ShiftLeft<16>(values));
      const auto odd = hn::BitCast(d, hn::And(values, upper));
      hn::StoreInterleaved2(hn::Mul(even, scale), hn::Mul(odd, scale), d, out + 2 * i);
    }
  }
}

#endif

// A K or V row as floats, without the tensor's scale (see tensor_scale in formats.h).
inline void decode_row(KvFormat format, const std::byte* data, const std::byte* scales, int64_t dim,
                       float* out) {
  switch (format) {
    case KvFormat::kBf16:
      return decode_bf16_row(data, dim, out);
    case KvFormat::kFp16:
      return decode_fp16_row(data, dim, out);
    case KvFormat::kFp8E4m3:
      return decode_e4m3_row(data, dim, out);
    case KvFormat::kFp8E5m2:
      return decode_e5m2_row(data, dim, out);
    case KvFormat::kNvfp4:
      return decode_nvfp4_row(data, scales, dim, out);
  }
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
