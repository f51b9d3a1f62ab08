// Eight consecutive elements of a stored row in one thread's registers: read with one load (and
// one scale byte), decoded by arithmetic on pairs of halves, and written as 16 bytes of bf16 or
// fp16, or as 8 bytes of e4m3. The bits are those of codes.cuh and encode.cuh as long as there is
// no NaN, whose bits the conversion instructions forget.
#pragma once

#include <cmath>
#include <cstdint>
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "kernels/cuda/codes.cuh"
#include "kernels/cuda/encode.cuh"

namespace larder::kernels::cuda {

inline constexpr int kEight = 8;

// As they lie in a row: 4 bytes of nvfp4 in `words[0]`, 8 of fp8, 16 of 16-bit formats.
struct StoredEight {
  uint32_t words[4];
  uint32_t scale;  // nvfp4: the byte of their group
};

struct Eight {
  float values[kEight];
};

__host__ __device__ constexpr int eight_bytes(KvFormat format) {
  return format == KvFormat::kNvfp4                                     ? 4
         : format == KvFormat::kFp8E4m3 || format == KvFormat::kFp8E5m2 ? 8
                                                                        : 16;
}

// `data` is aligned to eight_bytes.
template <KvFormat kFormat>
__device__ inline StoredEight load_eight(const uint8_t* data, const uint8_t* scale) {
  if constexpr (kFormat == KvFormat::kNvfp4) {
    return {{__ldg(reinterpret_cast<const uint32_t*>(data)), 0, 0, 0}, __ldg(scale)};
  } else if constexpr (eight_bytes(kFormat) == 8) {
    const uint2 words = __ldg(reinterpret_cast<const uint2*>(data));
    return {{words.x, words.y, 0, 0}, 0};
  } else {
    const uint4 words = __ldg(reinterpret_cast<const uint4*>(data));
    return {{words.x, words.y, words.z, words.w}, 0};
  }
}

__device__ inline __half2 half2_of(uint32_t bits) {
  return *reinterpret_cast<const __half2*>(&bits);
}
__device__ inline void set_pair(Eight& eight, int low, int high, __half2 pair) {
  const float2 values = __half22float2(pair);
  eight.values[low] = values.x;
  eight.values[high] = values.y;
}

__device__ inline __nv_bfloat162 bfloats2_of(uint32_t bits) {
  return *reinterpret_cast<const __nv_bfloat162*>(&bits);
}
__device__ inline uint32_t product_of_pairs(uint32_t a, uint32_t b, bool is_bf16) {
  if (is_bf16) {
    const __nv_bfloat162 product = __hmul2(bfloats2_of(a), bfloats2_of(b));
    return *reinterpret_cast<const uint32_t*>(&product);
  }
  const __half2 product = __hmul2(half2_of(a), half2_of(b));
  return *reinterpret_cast<const uint32_t*>(&product);
}

// Bits of an e4m3 byte are those of a bf16 times 2^-120, or of a half times 2^-8, when they stand
// at the lower end of its exponent: so far to the right of the upper byte.
__host__ __device__ constexpr int e4m3_shift(bool is_bf16) { return is_bf16 ? 4 : 1; }
__host__ __device__ constexpr uint32_t e4m3_factor(bool is_bf16) {
  return is_bf16 ? 0x7B807B80u : 0x5C005C00u;
}

// Pairs of bf16, or of halves, that are equal to the stored elements.
struct Pairs {
  uint32_t words[4];
};

// The bytes of the magnitude of a code are looked up by PRMT, four codes at a time. A product of
// code and scale has at most 6 bits and lies between 2^-10 and 2688: exact in both formats.
template <bool kBf16>
__device__ inline Pairs nvfp4_pairs(const StoredEight& stored) {
  constexpr int kShift = e4m3_shift(kBf16);
  const uint32_t scale_bits = (stored.scale & 0x80u) << 8 | (stored.scale & 0x7Fu) << (8 - kShift);
  const uint32_t scale = product_of_pairs(scale_bits * 0x10001u, e4m3_factor(kBf16), kBf16);
  const uint32_t codes = stored.words[0] & 0x77777777u;
  const uint32_t even_signs = stored.words[0] << 4;  // in the top bits of bytes
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < 2; ++i) {  // four codes
    const uint32_t selector = codes >> 16 * i;
    const uint32_t signs = __byte_perm(even_signs, stored.words[0], i == 0 ? 0x5140 : 0x7362);
    uint32_t upper = kBf16 ? __byte_perm(0x3F3F3F00u, 0x40404040u, selector)
                           : __byte_perm(0x3E3C3800u, 0x46444240u, selector);
    upper |= signs & 0x80808080u;
    const uint32_t lower = kBf16 ? __byte_perm(0xC0800000u, 0xC0804000u, selector) : 0;
    pairs.words[2 * i] = product_of_pairs(__byte_perm(lower, upper, 0x5140), scale, kBf16);
    pairs.words[2 * i + 1] = product_of_pairs(__byte_perm(lower, upper, 0x7362), scale, kBf16);
  }
  return pairs;
}

template <bool kBf16>
__device__ inline Pairs e4m3_pairs(const StoredEight& stored) {
  constexpr int kShift = e4m3_shift(kBf16);
  constexpr uint32_t kFactor = e4m3_factor(kBf16);
  Pairs pairs;
#pragma unroll
  for (int i = 0; i < 2; ++i) {
    const uint32_t word = stored.words[i];
    const uint32_t upper =
        (word & 0x80808080u) | (word >> kShift & (0x7Fu >> kShift) * 0x01010101u);
    const uint32_t lower = word << (8 - kShift) & (0xFFu << (8 - kShift) & 0xFFu) * 0x01010101u;
    pairs.words[2 * i] = product_of_pairs(__byte_perm(lower, upper, 0x5140), kFactor, kBf16);
    pairs.words[2 * i + 1] = product_of_pairs(__byte_perm(lower, upper, 0x7362), kFactor, kBf16);
  }
  return pairs;
}

__host__ __device__ constexpr bool has_pairs(KvFormat format) {
  return format == KvFormat::kNvfp4 || format == KvFormat::kFp8E4m3;
}

// Of stored elements without a NaN.
template <KvFormat kFormat, bool kBf16>
__device__ inline Pairs pairs_of(const StoredEight& stored) {
  static_assert(has_pairs(kFormat));
  if constexpr (kFormat == KvFormat::kNvfp4) return nvfp4_pairs<kBf16>(stored);
  return e4m3_pairs<kBf16>(stored);
}

// Whether a part of some word, without its sign, passes 0x7F.. when `add` is added.
__device__ inline bool any_passes(const StoredEight& stored, int num_words, uint32_t magnitudes,
                                  uint32_t add) {
  uint32_t passed = 0;
  for (int i = 0; i < num_words; ++i) passed |= (stored.words[i] & magnitudes) + add;
  return (passed & ~magnitudes) != 0;
}

template <KvFormat kFormat>
__device__ inline bool any_nan(const StoredEight& stored) {
  switch (kFormat) {
    case KvFormat::kNvfp4:
      return (stored.scale & 0x7Fu) == 0x7Fu;
    case KvFormat::kFp8E4m3:
      return any_passes(stored, 2, 0x7F7F7F7Fu, 0x01010101u);
    case KvFormat::kFp8E5m2:
      return any_passes(stored, 2, 0x7F7F7F7Fu, 0x03030303u);
    case KvFormat::kBf16:
      return any_passes(stored, 4, 0x7FFF7FFFu, 0x007F007Fu);
    case KvFormat::kFp16:
      return any_passes(stored, 4, 0x7FFF7FFFu, 0x03FF03FFu);
  }
  return false;
}

// Of stored elements without a NaN.
template <KvFormat kFormat>
__device__ inline Eight decode_eight(const StoredEight& stored) {
  Eight eight;
  if constexpr (has_pairs(kFormat)) {
    const Pairs pairs = pairs_of<kFormat, false>(stored);
    for (int i = 0; i < 4; ++i) set_pair(eight, 2 * i, 2 * i + 1, half2_of(pairs.words[i]));
  } else if constexpr (kFormat == KvFormat::kFp8E5m2) {
    for (int i = 0; i < 2; ++i) {
      set_pair(eight, 4 * i, 4 * i + 1, half2_of(__byte_perm(stored.words[i], 0, 0x1404)));
      set_pair(eight, 4 * i + 2, 4 * i + 3, half2_of(__byte_perm(stored.words[i], 0, 0x3424)));
    }
  } else if constexpr (kFormat == KvFormat::kFp16) {
    for (int i = 0; i < 4; ++i) set_pair(eight, 2 * i, 2 * i + 1, half2_of(stored.words[i]));
  } else {
    for (int i = 0; i < 4; ++i) {
      eight.values[2 * i] = __uint_as_float(stored.words[i] << 16);
      eight.values[2 * i + 1] = __uint_as_float(stored.words[i] & 0xFFFF0000u);
    }
  }
  return eight;
}

// Any NaN in place of those that decode_eight took for numbers.
template <KvFormat kFormat>
__device__ inline void put_nans(const StoredEight& stored, Eight& eight) {
  if constexpr (kFormat == KvFormat::kNvfp4 || kFormat == KvFormat::kFp8E4m3)
    for (int i = 0; i < kEight; ++i)
      if (kFormat == KvFormat::kNvfp4 || (stored.words[i / 4] >> 8 * (i % 4) & 0x7Fu) == 0x7Fu)
        eight.values[i] = NAN;
}

__device__ inline void multiply_eight(Eight& eight, float factor) {
  for (int i = 0; i < kEight; ++i) eight.values[i] = __fmul_rn(eight.values[i], factor);
}

__device__ inline bool any_nan(const Eight& eight) {
  bool any = false;
  for (int i = 0; i < kEight; ++i) any |= isnan(eight.values[i]);
  return any;
}

// The Hadamard transform of kernels/cpu/rotate.h by the dim / 8 lanes, a power of two up to 32,
// that have a row: three stages within a thread, the others between lanes. A lane that has the
// second of a pair takes its own value away from the first. All lanes of the warp call it. NaNs
// are left as they come.
__device__ inline void rotate_eight(Eight& eight, int dim, float factor, int lane) {
  for (int h = 1; h < kEight; h *= 2)
    for (int i = 0; i < kEight; ++i) {
      if ((i & h) != 0) continue;
      const float a = eight.values[i];
      const float b = eight.values[i + h];
      eight.values[i] = __fadd_rn(a, b);
      eight.values[i + h] = __fsub_rn(a, b);
    }
#pragma unroll 1
  for (int apart = 1; apart < dim / kEight; apart *= 2) {
    const uint32_t sign = (lane & apart) != 0 ? 0x80000000u : 0u;
    for (int i = 0; i < kEight; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, eight.values[i], apart);
      eight.values[i] = __fadd_rn(other, __uint_as_float(__float_as_uint(eight.values[i]) ^ sign));
    }
  }
  multiply_eight(eight, factor);
}

// `offsets`: eight floats, 16-byte aligned.
__device__ inline Eight sum_of(const Eight& eight, const float* offsets) {
  const float4 low = __ldg(reinterpret_cast<const float4*>(offsets));
  const float4 high = __ldg(reinterpret_cast<const float4*>(offsets) + 1);
  const float terms[kEight] = {low.x, low.y, low.z, low.w, high.x, high.y, high.z, high.w};
  Eight sums;
  for (int i = 0; i < kEight; ++i) sums.values[i] = __fadd_rn(eight.values[i], terms[i]);
  return sums;
}

// As bf16 or fp16; no NaN.
__device__ inline uint4 halves_of(const Eight& eight, Dtype dtype) {
  uint32_t words[4];
  for (int i = 0; i < 4; ++i) {
    const float low = eight.values[2 * i];
    const float high = eight.values[2 * i + 1];
    if (dtype == Dtype::kBf16) {
      const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
      words[i] = uint32_t{__bfloat16_as_ushort(pair.x)} | uint32_t{__bfloat16_as_ushort(pair.y)}
                                                              << 16;
    } else {
      const __half2 pair = __floats2half2_rn(low, high);
      words[i] = uint32_t{__half_as_ushort(pair.x)} | uint32_t{__half_as_ushort(pair.y)} << 16;
    }
  }
  return {words[0], words[1], words[2], words[3]};
}

// Which memory it is cannot be seen any more once the address has been through shared memory.
template <class Words>
__device__ inline void put(uint8_t* out, const Words& words) {
  __builtin_assume(__isGlobal(out));
  *reinterpret_cast<Words*>(out) = words;
}

// Eight elements, no NaN among them, that a 16-bit output holds as they are. False, and nothing is
// written, where the formats need more than a look at pairs.
template <KvFormat kFormat>
__device__ inline bool write_exactly(const StoredEight& stored, Dtype dtype, uint8_t* out) {
  if constexpr (has_pairs(kFormat)) {
    const Pairs pairs =
        dtype == Dtype::kBf16 ? pairs_of<kFormat, true>(stored) : pairs_of<kFormat, false>(stored);
    put(out, uint4{pairs.words[0], pairs.words[1], pairs.words[2], pairs.words[3]});
    return true;
  }
  return false;
}

// Two e4m3 bytes, as e4m3_bits makes them.
__device__ inline uint32_t e4m3_pair(float low, float high) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
#else
  return uint32_t{e4m3_bits(low)} | uint32_t{e4m3_bits(high)} << 8;
#endif
}

// As e4m3 of value * factor; a NaN may be among them.
__device__ inline uint2 e4m3_of(const Eight& eight, float factor) {
  uint32_t words[2];
  for (int i = 0; i < 2; ++i) {
    float v[4];
    for (int j = 0; j < 4; ++j) v[j] = __fmul_rn(eight.values[4 * i + j], factor);
    words[i] = e4m3_pair(v[0], v[1]) | e4m3_pair(v[2], v[3]) << 16;
  }
  return {words[0], words[1]};
}

}  // namespace larder::kernels::cuda
