// Groups of 16 values in one thread's registers, for tuned rows: the same bytes as encode.cuh, with
// few instructions where all values are finite. What is not finite takes the plain way.
#pragma once

#include <cstdint>

#include "kernels/cuda/encode.cuh"
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define LARDER_E2M1_INSTRUCTION 1
#include <cuda_fp4.h>
#endif

namespace larder::kernels::cuda {

// 16 elements of bf16 or fp16, two in a word.
struct Words {
  uint32_t at[8];
};

__device__ inline Words load_words(const uint8_t* source /* 16-byte aligned */) {
  const auto* vectors = reinterpret_cast<const uint4*>(source);
  const uint4 a = __ldg(vectors);
  const uint4 b = __ldg(vectors + 1);
  return {{a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w}};
}

__device__ inline void store_words(const Words& words, uint8_t* target /* 16-byte aligned */) {
  auto* vectors = reinterpret_cast<uint4*>(target);
  vectors[0] = {words.at[0], words.at[1], words.at[2], words.at[3]};
  vectors[1] = {words.at[4], words.at[5], words.at[6], words.at[7]};
}

// 32 bytes of each lane. Two lanes next to each other exchange halves before, so that both write
// into one sector at a time. Every lane of the warp takes part; those with target == nullptr, in
// pairs, write nothing. The targets of a pair follow each other, 16-byte aligned.
__device__ inline void store_words_in_pairs(const Words& words, uint8_t* target) {
  const bool is_odd = threadIdx.x % 2 != 0;
  uint32_t first[4];
  uint32_t second[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const uint32_t got = __shfl_xor_sync(0xFFFFFFFFu, is_odd ? words.at[i] : words.at[4 + i], 1);
    first[i] = is_odd ? got : words.at[i];
    second[i] = is_odd ? words.at[4 + i] : got;
  }
  if (target == nullptr) return;
  auto* vectors = reinterpret_cast<uint4*>(target);
  vectors[is_odd ? -1 : 0] = {first[0], first[1], first[2], first[3]};
  vectors[is_odd ? 1 : 2] = {second[0], second[1], second[2], second[3]};
}

// What differs between the two 16-bit inputs. exact() keeps a NaN's sign and payload, low() and
// high() do not always.
struct Bf16 {
  static constexpr Dtype kDtype = Dtype::kBf16;
  __device__ static float exact(uint32_t half) { return bf16_value(static_cast<uint16_t>(half)); }
  __device__ static float low(uint32_t word) { return __uint_as_float(word << 16); }
  __device__ static float high(uint32_t word) { return __uint_as_float(word & 0xFFFF0000u); }
  // Halves with the larger magnitude and any sign; NaN where one is.
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
    asm("max.NaN.bf16x2 %0, %1, %2;" : "=r"(result) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
#endif
    return result;
  }
  __device__ static uint32_t bits(float value) { return bf16_bits(value); }
  // Rounded, a in the low half. A NaN becomes 0x7FFF.
  __device__ static uint32_t pair(float a, float b) {
    uint32_t result;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(b), "f"(a));
    return result;
  }
  static constexpr uint32_t kInfinity = 0x7F80u;
  static constexpr uint32_t kUsualNan = 0x7FC0u;
};
struct Fp16 {
  static constexpr Dtype kDtype = Dtype::kFp16;
  __device__ static float exact(uint32_t half) { return fp16_value(static_cast<uint16_t>(half)); }
  __device__ static float low(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word)));
  }
  __device__ static float high(uint32_t word) {
    return __half2float(__ushort_as_half(static_cast<uint16_t>(word >> 16)));
  }
  __device__ static uint32_t larger(uint32_t a, uint32_t b) {
    uint32_t result;
#if __CUDA_ARCH__ >= 860
    asm("max.NaN.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a), "r"(b));
#else
    asm("max.NaN.f16x2 %0, %1, %2;" : "=r"(result) : "r"(a & 0x7FFF7FFFu), "r"(b & 0x7FFF7FFFu));
#endif
    return result;
  }
  __device__ static uint32_t bits(float value) { return fp16_bits(value); }
  __device__ static uint32_t pair(float a, float b) {
    uint32_t result;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(b), "f"(a));
    return result;
  }
  static constexpr uint32_t kInfinity = 0x7C00u;
  static constexpr uint32_t kUsualNan = 0x7E00u;
};

// Two halves; each that is a NaN becomes the positive quiet one without payload.
template <class Input>
__device__ inline uint32_t with_usual_nans(uint32_t halves) {
  if ((halves & 0x7FFFu) > Input::kInfinity) halves = (halves & 0xFFFF0000u) | Input::kUsualNan;
  if ((halves >> 16 & 0x7FFFu) > Input::kInfinity)
    halves = (halves & 0xFFFFu) | Input::kUsualNan << 16;
  return halves;
}

// Values, and what encoders want to know of them besides.
struct Group {
  float values[kGroup];
  float amax;         // of their magnitudes; NaN if one of them is
  uint32_t signs[8];  // words whose bits 15 and 31 are the signs of values 2i and 2i + 1
};

__device__ inline float larger_or_nan(float a, float b) {
  float result;
  asm("max.NaN.f32 %0, %1, %2;" : "=f"(result) : "f"(a), "f"(b));
  return result;
}

__device__ inline bool is_finite(float value) {
  return (__float_as_uint(value) & 0x7F800000u) != 0x7F800000u;
}

// For finite values; the amax tells whether they are. kExact: for any.
template <class Input, bool kExact = false>
__device__ inline Group unpack(const Words& words) {
  Group group;
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    const uint32_t word = words.at[i];
    group.values[2 * i] = kExact ? Input::exact(word & 0xFFFFu) : Input::low(word);
    group.values[2 * i + 1] = kExact ? Input::exact(word >> 16) : Input::high(word);
    group.signs[i] = word;
    largest = Input::larger(largest, word);
  }
  group.amax = larger_or_nan(fabsf(Input::low(largest)), fabsf(Input::high(largest)));
  return group;
}

// After the values have changed.
__device__ inline void look_again(Group& group) {
  group.amax = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    group.signs[i] = __byte_perm(__float_as_uint(group.values[2 * i]),
                                 __float_as_uint(group.values[2 * i + 1]), 0x7632);
    group.amax = larger_or_nan(group.amax, fabsf(group.values[2 * i]));
    group.amax = larger_or_nan(group.amax, fabsf(group.values[2 * i + 1]));
  }
}

// Correctly rounded, for magnitudes from 2^-100 to 2^100 (what __frcp_rn does there).
__device__ inline float reciprocal_of(float value) {
  float near;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(near) : "f"(value));
  return __fmaf_rn(near, __fmaf_rn(-value, near, 1.0f), near);
}

// A divisor from 2^-64 to 2^64 with its correctly rounded reciprocal.
struct Divisor {
  float value;
  float reciprocal;
};

// The correctly rounded a / divisor (Markstein) as long as nothing underflows or overflows: for
// quotients from 2^-40 to 2^20. A smaller one may be off in its last bits, which no 8-bit format
// shows; a larger one saturates there. A zero keeps its sign, which the correction would lose.
__device__ inline float quotient(float a, const Divisor& divisor) {
  const float near = __fmul_rn(a, divisor.reciprocal);
  const float miss = __fmaf_rn(-near, divisor.value, a);
  const uint32_t magnitude = __float_as_uint(near) << 1;
  const bool is_usual = magnitude - 1u < (0x49800000u << 1) - 1u;  // neither 0 nor 2^20 and more
  return is_usual ? __fmaf_rn(miss, divisor.reciprocal, near) : near;
}

// Two values as E4M3 bytes, a in the low one, as e4m3_bits does.
__device__ inline uint32_t e4m3_pair(float a, float b) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
#else
  return uint32_t{e4m3_bits(a)} | uint32_t{e4m3_bits(b)} << 8;
#endif
}
__device__ inline uint32_t e5m2_pair(float a, float b) {
#if __CUDA_ARCH__ >= 890
  uint16_t pair;
  asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(b), "f"(a));
  return pair;
#else
  return uint32_t{e5m2_bits(a)} | uint32_t{e5m2_bits(b)} << 8;
#endif
}

// E4M3, for a value that is not negative and not NaN.
__device__ inline uint32_t positive_scale_byte(float wanted) { return e4m3_pair(wanted, 0.0f); }
__device__ inline float positive_scale_value(uint32_t byte) {
  return __fmul_rn(__uint_as_float(byte << 20), 0x1p120f);
}

// What |value| * inverse is rounded to. With e = max(0, exponent of the product), `magic` is
// 2^e * (2^22 + e): a float whose last place is worth 2^(e-1), the step of E2M1 there, and whose
// mantissa already holds the 2e codes below. So the sum, rounded once and to even, has the code as
// its mantissa. Good for products below 7; kClamp: for any.
struct Rounded {
  uint32_t sum;
  uint32_t magic;
  __device__ float value() const { return __fsub_rn(__uint_as_float(sum), __uint_as_float(magic)); }
};
template <bool kClamp>
__device__ inline Rounded round_to_e2m1(float value, float inverse) {
  float product = fabsf(__fmul_rn(value, inverse));
  if (kClamp) product = fminf(product, 6.0f);
  const uint32_t exponent = __float_as_uint(fmaxf(product, 1.0f)) >> 23;
  const uint32_t magic = exponent * 0x800002u + (0x0B000000u - 254u);
  return {__float_as_uint(__fadd_rn(__uint_as_float(magic), product)), magic};
}

// The mantissas of 8 sums as nibbles.
__device__ inline uint32_t pack_codes(const uint32_t* sums /* [8] */) {
  const auto four = [](const uint32_t* s) {
    return (s[0] + (s[1] << 4)) + ((s[2] + (s[3] << 4)) << 8);
  };
  return __byte_perm(four(sums), four(sums + 4), 0x5410);
}

// Bytes of ones where the chosen bytes of a and b are negative.
template <uint32_t kSelector>
__device__ inline uint32_t signs_of_bytes(uint32_t a, uint32_t b) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "n"(kSelector));
  return result;
}

// The signs of 8 values as the highest bits of nibbles. `halves`: their bits 15 and 31.
__device__ inline uint32_t pack_signs(const uint32_t* halves /* [4] */) {
  const uint32_t a = signs_of_bytes<0xFBD9>(halves[0], halves[1]);  // values 0, 2, 1, 3
  const uint32_t b = signs_of_bytes<0xFBD9>(halves[2], halves[3]);
  return (__byte_perm(a, b, 0x5410) & 0x08080808u) | (__byte_perm(a, b, 0x7632) & 0x80808080u);
}

struct Codes {
  uint32_t words[2];
};

template <bool kClamp>
__device__ inline Codes finite_codes(const Group& group, float inverse) {
  Codes codes;
#pragma unroll
  for (int half = 0; half < 2; ++half) {
#ifdef LARDER_E2M1_INSTRUCTION
    uint32_t word = 0;
#pragma unroll
    for (int i = 0; i < 8; i += 2) {
      const float2 pair = {__fmul_rn(group.values[8 * half + i], inverse),
                           __fmul_rn(group.values[8 * half + i + 1], inverse)};
      word |= uint32_t{__nv_cvt_float2_to_fp4x2(pair, __NV_E2M1, cudaRoundNearest)} << 4 * i;
    }
    codes.words[half] = word;
#else
    uint32_t sums[8];
#pragma unroll
    for (int i = 0; i < 8; ++i)
      sums[i] = round_to_e2m1<kClamp>(group.values[8 * half + i], inverse).sum;
    codes.words[half] = pack_codes(sums) | pack_signs(group.signs + 4 * half);
#endif
  }
  return codes;
}

struct EncodedGroup {
  Codes codes;
  uint8_t scale;
};

// By the plain definition, for values that are not finite.
__device__ __noinline__ inline EncodedGroup encode_any_group(Encoder encoder, const float* values,
                                                             float global_scale) {
  EncodedGroup result;
  encode_group(encoder, values, global_scale, reinterpret_cast<uint8_t*>(result.codes.words),
               &result.scale);
  return result;
}
__device__ inline EncodedGroup encode_plainly(Encoder encoder, const Group& group,
                                              float global_scale) {
  float values[kGroup];  // so that the group itself stays in registers
#pragma unroll
  for (int i = 0; i < kGroup; ++i) values[i] = group.values[i];
  return encode_any_group(encoder, values, global_scale);
}

// Whether a group may have products of 7 and more: its scale was rounded down by much, or
// saturated.
__device__ inline bool may_saturate(uint32_t scale_byte) { return scale_byte - 8u >= 0x76u; }

}  // namespace larder::kernels::cuda
