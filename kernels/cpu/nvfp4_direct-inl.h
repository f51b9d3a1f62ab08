// nvfp4 rows from bf16 rows, and to bf16 or fp16 rows, without a row of floats in between: the same
// bits as encode_nvfp4_row and decode_nvfp4_row with the conversions around them, which is what the
// scalar target does.

#if defined(LARDER_KERNELS_CPU_NVFP4_DIRECT_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_NVFP4_DIRECT_INL_H_
#undef LARDER_KERNELS_CPU_NVFP4_DIRECT_INL_H_
#else
#define LARDER_KERNELS_CPU_NVFP4_DIRECT_INL_H_
#endif

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>

#include <hwy/highway.h>

#include "kernels/cpu/encode-inl.h"
#include "kernels/cpu/rows-inl.h"
#include "kernels/kernel_table.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

// The row times the tensor's scale, rounded to bf16 or fp16, by way of floats.
inline void decode_nvfp4_row_through_floats(Dtype dtype, const std::byte* data,
                                            const std::byte* scales, int64_t dim,
                                            float global_scale, std::byte* target) {
  HWY_ALIGN float values[kMaxHeadDim];
  decode_nvfp4_row(data, scales, dim, values);
  for (int64_t i = 0; i < dim; ++i) values[i] *= global_scale;
  store_floats(dtype, values, 1, dim, target);
}

#if HWY_TARGET == HWY_SCALAR

class DirectEncoder {
 public:
  explicit DirectEncoder(float global_scale) : global_scale_(global_scale) {}
  void add(const std::byte* source, int64_t dim, std::byte* data, std::byte* scales) const {
    float values[kMaxHeadDim];
    decode_bf16_row(source, dim, values);
    encode_nvfp4_row(Encoder::kReference, values, dim, global_scale_, data, scales);
  }
  void finish() const {}

 private:
  float global_scale_;
};

template <Dtype kDtype>
inline void decode_nvfp4_row_to(const std::byte* data, const std::byte* scales, int64_t dim,
                                float global_scale, std::byte* target) {
  decode_nvfp4_row_through_floats(kDtype, data, scales, dim, global_scale, target);
}

#else

inline constexpr int64_t kDirectGroups = 8;  // whose maxima and scales are found together
inline constexpr int64_t kBf16GroupBytes = int64_t{2} * kNvfp4GroupElements;

// Tensor scales for which no product of a finite or infinite element and an inverse is NaN.
inline bool encodes_directly(float global_scale) {
  return global_scale >= 0x1p-100f && global_scale <= 0x1p100f;
}

using MaxLanes16 = hn::Repartition<int16_t, PairLanes>;
using MaxVector = hn::Vec<MaxLanes16>;

// bf16 magnitudes are ordered as their bits are, NaNs above all.
HWY_INLINE MaxVector direct_maxima(const uint8_t* group) {
  const MaxLanes16 d;
  const hn::Repartition<uint8_t, PairLanes> d_u8;
  const auto mask = hn::Set(d, 0x7FFF);
  auto largest = hn::And(hn::BitCast(d, hn::LoadU(d_u8, group)), mask);
#if HWY_MAX_BYTES == 16
  largest =
      hn::Max(largest, hn::And(hn::BitCast(d, hn::LoadU(d_u8, group + kBf16GroupBytes / 2)), mask));
#endif
  return largest;
}

// Lanes of T alternate between a and b, each with the maxima of its 128-bit block's halves.
template <typename T>
HWY_INLINE MaxVector merge_maxima(MaxVector a, MaxVector b) {
  const MaxLanes16 d;
  const hn::Repartition<T, PairLanes> d_t;
  const auto lower = hn::InterleaveLower(d_t, hn::BitCast(d_t, a), hn::BitCast(d_t, b));
  const auto upper = hn::InterleaveUpper(d_t, hn::BitCast(d_t, a), hn::BitCast(d_t, b));
  return hn::Max(hn::BitCast(d, lower), hn::BitCast(d, upper));
}

// The largest magnitude of each of 8 groups, in order. Groups from `count` on repeat the last.
HWY_INLINE hn::Vec<hn::FixedTag<int16_t, 8> > eight_maxima(const uint8_t* groups, int64_t count) {
  MaxVector m[kDirectGroups];
  for (int64_t i = 0; i < kDirectGroups; ++i)
    m[i] = direct_maxima(groups + std::min(i, count - 1) * kBf16GroupBytes);
  const auto first = merge_maxima<uint32_t>(merge_maxima<uint16_t>(m[0], m[1]),
                                            merge_maxima<uint16_t>(m[2], m[3]));
  const auto second = merge_maxima<uint32_t>(merge_maxima<uint16_t>(m[4], m[5]),
                                             merge_maxima<uint16_t>(m[6], m[7]));
  const auto all = merge_maxima<uint64_t>(first, second);
#if HWY_MAX_BYTES == 16
  return all;
#else
  const hn::FixedTag<int16_t, 8> d;
  return hn::Max(hn::LowerHalf(d, all), hn::UpperHalf(d, all));
#endif
}

// Elements of as many bytes as D has; `factor` holds the inverse of each lane's group.
template <class D>
HWY_INLINE void encode_direct_codes(D d_u32, const uint8_t* source,
                                    hn::Vec<hn::Rebind<float, D> > factor, uint8_t* pairs) {
  const hn::Rebind<float, D> d;
  const hn::Repartition<uint8_t, D> d_u8;
  const hn::Rebind<uint8_t, D> d_pairs;
  const auto elements = hn::BitCast(d_u32, hn::LoadU(d_u8, source));
  const auto magnitudes = hn::And(elements, hn::Set(d_u32, 0x7FFF7FFF));
  const auto even = hn::BitCast(d, hn::ShiftLeft<16>(magnitudes));
  const auto odd = hn::BitCast(d, hn::And(magnitudes, hn::Set(d_u32, 0x7FFF0000)));
  const auto low = hn::BitCast(d_u32, e2m1_codes(d, hn::Mul(even, factor)));
  const auto high = hn::BitCast(d_u32, e2m1_codes(d, hn::Mul(odd, factor)));
  const auto codes = hn::Or(low, hn::ShiftLeft<4>(high));
  const auto low_sign = hn::And(hn::ShiftRight<12>(elements), hn::Set(d_u32, 0x08));
  const auto high_sign = hn::And(hn::ShiftRight<24>(elements), hn::Set(d_u32, 0x80));
  hn::StoreU(hn::TruncateTo(d_pairs, hn::Or(codes, hn::Or(low_sign, high_sign))), d_pairs, pairs);
}

HWY_INLINE void encode_direct_codes(const uint8_t* source, int64_t count, const float* inverses,
                                    uint8_t* pairs) {
  const PairLanes d_u32;
  const hn::Rebind<float, PairLanes> d;
  int64_t group = 0;
#if HWY_MAX_BYTES >= 64
  const hn::FixedTag<uint32_t, 16> d_two;
  for (; group + 2 <= count; group += 2)
    encode_direct_codes(d_two, source + group * kBf16GroupBytes,
                        hn::Combine(hn::FixedTag<float, 16>(), hn::Set(d, inverses[group + 1]),
                                    hn::Set(d, inverses[group])),
                        pairs + group * kNvfp4GroupBytes);
#endif
  for (; group < count; ++group)
    for (int64_t i = 0; i < kNvfp4GroupBytes; i += static_cast<int64_t>(hn::Lanes(d)))
      encode_direct_codes(d_u32, source + group * kBf16GroupBytes + 4 * i,
                          hn::Set(d, inverses[group]), pairs + group * kNvfp4GroupBytes + i);
}

// The reference encoder on bf16 rows. Rows are taken up in chunks of 8 groups, of which a batch is
// encoded at once: first the maxima of all, then the scales, then the codes. One chunk's scales are
// a long chain of operations that wait for each other; those of a batch overlap.
class DirectEncoder {
 public:
  explicit DirectEncoder(float global_scale) : global_scale_(global_scale) {}

  // The row is written by the time of finish(), rows in the order of the calls.
  void add(const std::byte* source, int64_t dim, std::byte* data, std::byte* scales) {
    for (int64_t left = dim / kNvfp4GroupElements; left > 0; left -= kDirectGroups) {
      const int64_t count = std::min(kDirectGroups, left);
      chunks_[num_chunks_] = {reinterpret_cast<const uint8_t*>(source), data, scales, count};
      source += count * kBf16GroupBytes;
      data += count * kNvfp4GroupBytes;
      scales += count;
      if (++num_chunks_ == kBatch) finish();
    }
  }

  void finish() {
    HWY_ALIGN uint16_t largest[kBatch * kDirectGroups];
    HWY_ALIGN float inverses[kBatch * kDirectGroups];
    HWY_ALIGN uint8_t bytes[kBatch * kDirectGroups];
    const bool in_range = encodes_directly(global_scale_);
    bool direct[kBatch];
    for (int64_t i = 0; i < num_chunks_; ++i)
      direct[i] = find_maxima(chunks_[i], largest + i * kDirectGroups) && in_range;
    find_scales(largest, inverses, bytes);
    for (int64_t i = 0; i < num_chunks_; ++i) {
      const Chunk& chunk = chunks_[i];
      if (!direct[i]) {
        encode_through_floats(chunk);
        continue;
      }
      std::memcpy(chunk.scales, bytes + i * kDirectGroups, static_cast<size_t>(chunk.count));
      encode_direct_codes(chunk.source, chunk.count, inverses + i * kDirectGroups,
                          reinterpret_cast<uint8_t*>(chunk.data));
    }
    num_chunks_ = 0;
  }

 private:
  static constexpr int64_t kBatch = 16;
  struct Chunk {
    const uint8_t* source;
    std::byte* data;
    std::byte* scales;
    int64_t count;  // of groups
  };

  // False if there is a NaN.
  static bool find_maxima(const Chunk& chunk, uint16_t* largest /* [8] */) {
    const hn::FixedTag<int16_t, 8> d;
    const hn::FixedTag<uint16_t, 8> d_u16;
    // The full number is a constant in its own copy of the code.
    const auto maxima = chunk.count == kDirectGroups ? eight_maxima(chunk.source, kDirectGroups)
                                                     : eight_maxima(chunk.source, chunk.count);
    hn::Store(hn::BitCast(d_u16, maxima), d_u16, largest);
    return hn::AllFalse(d, hn::Gt(maxima, hn::Set(d, 0x7F80)));
  }

  void find_scales(const uint16_t* largest, float* inverses, uint8_t* bytes) const {
    const hn::CappedTag<float, kDirectGroups> d;
    const hn::Rebind<uint16_t, decltype(d)> d_u16;
    const hn::RebindToUnsigned<decltype(d)> d_u32;
    const hn::Rebind<uint8_t, decltype(d)> d_u8;
    for (int64_t i = 0; i < num_chunks_ * kDirectGroups; i += static_cast<int64_t>(hn::Lanes(d))) {
      const auto amax =
          hn::BitCast(d, hn::ShiftLeft<16>(hn::PromoteTo(d_u32, hn::LoadU(d_u16, largest + i))));
      hn::Vec<hn::RebindToSigned<decltype(d)> > byte_lanes;
      hn::Vec<decltype(d)> inverse_lanes;
      nvfp4_scales(d, amax, global_scale_, byte_lanes, inverse_lanes);
      hn::StoreU(hn::TruncateTo(d_u8, hn::BitCast(d_u32, byte_lanes)), d_u8, bytes + i);
      hn::Store(inverse_lanes, d, inverses + i);
    }
  }

  void encode_through_floats(const Chunk& chunk) const {
    HWY_ALIGN float values[kDirectGroups * kNvfp4GroupElements];
    const int64_t dim = chunk.count * kNvfp4GroupElements;
    decode_bf16_row(reinterpret_cast<const std::byte*>(chunk.source), dim, values);
    encode_reference_row(values, dim, global_scale_, chunk.data, chunk.scales);
  }

  float global_scale_;
  int64_t num_chunks_ = 0;
  Chunk chunks_[kBatch];
};

template <Dtype kDtype, class D>
HWY_INLINE hn::Vec<hn::Rebind<uint16_t, D> > to_bits(D d, hn::Vec<D> values) {
  if constexpr (kDtype == Dtype::kBf16)
    return bf16_bits(d, values);
  else
    return fp16_bits(d, values);
}

// The 8 magnitudes of a group as 16-bit floats, in every 128-bit block.
template <Dtype kDtype>
HWY_INLINE hn::Vec<PairLanes> scaled_magnitudes(float scale, float global_scale) {
  const hn::CappedTag<float, 8> d;
  const hn::Repartition<uint16_t, PairLanes> d_u16;
  const auto factor = hn::Set(d, scale);
  const auto bits = [&](size_t first) HWY_ATTR {
    const auto exact = hn::Mul(hn::LoadU(d, kE2m1Magnitudes.data() + first), factor);
    return to_bits<kDtype>(d, hn::Mul(exact, hn::Set(d, global_scale)));
  };
  const auto low = bits(0);
#if HWY_MAX_BYTES == 16
  return hn::BitCast(PairLanes(), hn::Combine(d_u16, bits(4), low));
#else
  return hn::BitCast(PairLanes(), hn::Combine(d_u16, low, low));
#endif
}

#if HWY_MAX_BYTES >= 64
// Of two groups: each has half of the vector.
template <Dtype kDtype>
HWY_INLINE hn::Vec<hn::FixedTag<uint32_t, 16> > scaled_magnitudes(float scale, float next_scale,
                                                                  float global_scale) {
  const hn::FixedTag<float, 16> d;
  const hn::FixedTag<float, 8> d_half;
  const hn::FixedTag<uint16_t, 16> d_u16;
  const auto magnitudes = hn::LoadU(d_half, kE2m1Magnitudes.data());
  const auto exact = hn::Combine(d, hn::Mul(magnitudes, hn::Set(d_half, next_scale)),
                                 hn::Mul(magnitudes, hn::Set(d_half, scale)));
  const auto bits = to_bits<kDtype>(d, hn::Mul(exact, hn::Set(d, global_scale)));
  return hn::BitCast(
      hn::FixedTag<uint32_t, 16>(),
      hn::Combine(hn::FixedTag<uint16_t, 32>(), hn::ConcatUpperUpper(d_u16, bits, bits),
                  hn::ConcatLowerLower(d_u16, bits, bits)));
}
#endif

// The row times the tensor's scale, rounded to kDtype: bf16 or fp16. Signs are put on rounded
// magnitudes, which is not what multiplication does to the NaN of a scale byte 0x7F.
template <Dtype kDtype>
inline void decode_nvfp4_row_to(const std::byte* data, const std::byte* scales, int64_t dim,
                                float global_scale, std::byte* target) {
  const PairLanes d;
  const auto* pairs = reinterpret_cast<const uint8_t*>(data);
  auto* out = reinterpret_cast<uint8_t*>(target);
  const int64_t num_groups = dim / kNvfp4GroupElements;
  const auto scale_of = [&](int64_t i) { return kE4m3Values[std::to_integer<uint8_t>(scales[i])]; };
  const auto store = [out](auto d_lanes, auto bits, int64_t at) HWY_ATTR {
    const hn::Repartition<uint8_t, decltype(d_lanes)> d_u8;
    hn::StoreU(hn::BitCast(d_u8, bits), d_u8, out + 4 * at);
  };
  for (int64_t i = 0; i < num_groups; ++i)
    if (std::isnan(scale_of(i)))
      return decode_nvfp4_row_through_floats(kDtype, data, scales, dim, global_scale, target);
  int64_t group = 0;
#if HWY_MAX_BYTES >= 64
  const hn::FixedTag<uint32_t, 16> d_two;
  for (; group + 2 <= num_groups; group += 2) {
    const auto table =
        scaled_magnitudes<kDtype>(scale_of(group), scale_of(group + 1), global_scale);
    const int64_t at = group * kNvfp4GroupBytes;
    store(d_two, lookup_pairs(d_two, pairs + at, table), at);
  }
#endif
  for (; group < num_groups; ++group) {
    const auto table = scaled_magnitudes<kDtype>(scale_of(group), global_scale);
    for (int64_t at = group * kNvfp4GroupBytes; at < (group + 1) * kNvfp4GroupBytes;
         at += static_cast<int64_t>(hn::Lanes(d)))
      store(d, lookup_pairs(d, pairs + at, table), at);
  }
}

#endif

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
