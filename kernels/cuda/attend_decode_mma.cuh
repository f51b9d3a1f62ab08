// Instructions and number formats of tuned attention: matrix products of 16-bit values, stored
// codes to 16-bit values, powers of two.
#pragma once

#include <cstdint>

namespace larder::kernels::cuda {

__device__ inline float exp2_fast(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// c += A * B with A [16, 16], B [16, 8], fragments as PTX's mma.m16n8k16 has them.
template <bool kIsBf16>
__device__ inline void multiply_add(float (&c)[4], uint32_t a0, uint32_t a1, uint32_t a2,
                                    uint32_t a3, uint32_t b0, uint32_t b1) {
  if constexpr (kIsBf16)
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
  else
    asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, "
        "{%8,%9}, {%0,%1,%2,%3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// An 8x8 matrix of 16-bit values, a row per four lanes, transposed.
__device__ inline uint32_t transpose8(uint32_t two) {
  uint32_t result;
  asm("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(result) : "r"(two));
  return result;
}

// Two floats, the first in the low half.
template <bool kIsBf16>
__device__ inline uint32_t pack(float first, float second) {
  uint32_t result;
  if constexpr (kIsBf16)
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(result) : "f"(second), "f"(first));
  return result;
}

__device__ inline uint32_t permute(uint32_t a, uint32_t b, uint32_t selector) {
  uint32_t result;
  asm("prmt.b32 %0, %1, %2, %3;" : "=r"(result) : "r"(a), "r"(b), "r"(selector));
  return result;
}

__device__ inline uint32_t times(uint32_t two, uint32_t other) {
  uint32_t result;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(result) : "r"(two), "r"(other));
  return result;
}
// Both halves by one half of `scales`, which the instruction selects.
template <bool kHigh>
__device__ inline uint32_t times_half(uint32_t two, uint32_t scales) {
  uint32_t result;
  if constexpr (kHigh)
    asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {h, h}; "
        "mul.rn.f16x2 %0, %1, s;}"
        : "=r"(result)
        : "r"(two), "r"(scales));
  else
    asm("{.reg .b16 l, h; .reg .b32 s; mov.b32 {l, h}, %2; mov.b32 s, {l, l}; "
        "mul.rn.f16x2 %0, %1, s;}"
        : "=r"(result)
        : "r"(two), "r"(scales));
  return result;
}

// Two bytes of E4M3 to fp16, exactly; NaN stays one.
__device__ inline uint32_t e4m3_to_halves(uint32_t two_bytes) {
  uint32_t result;
#if __CUDA_ARCH__ >= 890
  asm("{.reg .b16 t; cvt.u16.u32 t, %1; cvt.rn.f16x2.e4m3x2 %0, t;}"
      : "=r"(result)
      : "r"(two_bytes));
#else
  const uint32_t apart = permute(two_bytes, 0, 0x4140);  // bytes 0 and 1 in a half each
  uint32_t bits = (apart & 0x00800080u) << 8 | (apart & 0x007F007Fu) << 7;
  if ((apart & 0x7Fu) == 0x7Fu) bits |= 0x7C00u;
  if ((apart & 0x7F0000u) == 0x7F0000u) bits |= 0x7C000000u;
  result = times(bits, 0x5C005C00u);  // 2^8
#endif
  return result;
}

// Where instructions for E2M1 exist, codes become themselves; elsewhere bits of a code are moved to
// those of a half, which makes it 2^-14 times itself. The order of a word's eight codes differs.
#if defined(__CUDA_ARCH_FEAT_SM100_ALL) || defined(__CUDA_ARCH_FEAT_SM103_ALL) || \
    defined(__CUDA_ARCH_FEAT_SM120_ALL)
#define LARDER_HAS_E2M1_INSTRUCTIONS 1
#else
#define LARDER_HAS_E2M1_INSTRUCTIONS 0
#endif

#if LARDER_HAS_E2M1_INSTRUCTIONS
template <int kByte>
__device__ inline uint32_t e2m1_to_halves(uint32_t word) {
  uint32_t result;
  asm("{.reg .b8 b0, b1, b2, b3; mov.b32 {b0, b1, b2, b3}, %1; cvt.rn.f16x2.e2m1x2 %0, b%2;}"
      : "=r"(result)
      : "r"(word), "n"(kByte));
  return result;
}
__device__ inline void expand_codes(uint32_t word, uint32_t (&pairs)[4]) {
  pairs[0] = e2m1_to_halves<0>(word);
  pairs[1] = e2m1_to_halves<1>(word);
  pairs[2] = e2m1_to_halves<2>(word);
  pairs[3] = e2m1_to_halves<3>(word);
}
#else
// Codes (0, 4), (2, 6), (1, 5), (3, 7) of the word. As bytes with sign and exponent in place first,
// which are then the upper halves of fp16 values.
__device__ inline void expand_codes(uint32_t word, uint32_t (&pairs)[4]) {
  const uint32_t low = (word << 1 & 0x0E0E0E0Eu) | (word << 4 & 0x80808080u);
  const uint32_t high = (word >> 3 & 0x0E0E0E0Eu) | (word & 0x80808080u);
  pairs[0] = permute(low, 0, 0x2404);
  pairs[1] = permute(low, 0, 0x3414);
  pairs[2] = permute(high, 0, 0x2404);
  pairs[3] = permute(high, 0, 0x3414);
}
#endif

// Four codes of each of two tokens, from bytes 2 * kHalf on: a pair of tokens per dim, in the order
// of dims 0, 2, 1, 3.
template <int kHalf>
__device__ inline void expand_tokens(uint32_t first, uint32_t second, uint32_t (&pairs)[4]) {
#if LARDER_HAS_E2M1_INSTRUCTIONS
  const uint32_t a = e2m1_to_halves<2 * kHalf>(first);
  const uint32_t b = e2m1_to_halves<2 * kHalf>(second);
  const uint32_t c = e2m1_to_halves<2 * kHalf + 1>(first);
  const uint32_t d = e2m1_to_halves<2 * kHalf + 1>(second);
  pairs[0] = permute(a, b, 0x5410);
  pairs[1] = permute(c, d, 0x5410);
  pairs[2] = permute(a, b, 0x7632);
  pairs[3] = permute(c, d, 0x7632);
#else
  expand_codes(permute(first, second, kHalf == 0 ? 0x5410 : 0x7632), pairs);
#endif
}

}  // namespace larder::kernels::cuda
