// Instructions that the attention of shared prefixes is made of: matrix products of warps and loads
// of their fragments, copies to shared memory, barriers, conversions of pairs.
#pragma once

#include <cstdint>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

namespace larder::kernels::cuda::prefix {

__device__ inline uint32_t shared_address(const void* pointer) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(pointer));
}

// 16 bytes; zeros unless is_present. The source is a good address in either case.
__device__ inline void copy_16(uint32_t to, const uint8_t* from, bool is_present) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
               "r"(is_present ? 16 : 0)
               : "memory");
}
// The same of what is streamed, which leaves the L2 first.
__device__ inline void stream_16(uint32_t to, const uint8_t* from, bool is_present) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, %2, policy;\n"
      "}" ::"r"(to),
      "l"(from), "r"(is_present ? 16 : 0)
      : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
// For all but the last kLeft commits.
template <int kLeft>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLeft) : "memory");
}

// Of `count` threads that arrive, those that wait go on once all have.
__device__ inline void arrive(int barrier, int count) {
  asm volatile("bar.arrive %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}
__device__ inline void arrive_and_wait(int barrier, int count) {
  asm volatile("bar.sync %0, %1;" ::"r"(barrier), "r"(count) : "memory");
}

// Four 8x8 matrices of halves: lanes 8m to 8m + 7 give the addresses of the rows of matrix m; lane
// 4r + c gets elements 2c and 2c + 1 of row r, or transposed, of column r.
__device__ inline void load_matrices(uint32_t address, uint32_t (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}
__device__ inline void load_matrices_transposed(uint32_t address, uint32_t (&matrices)[4]) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(matrices[0]), "=r"(matrices[1]), "=r"(matrices[2]), "=r"(matrices[3])
               : "r"(address)
               : "memory");
}

// sums[16 x 8] += a[16 x 16] * b[16 x 8], halves to floats. Lane 4g + c has of the sums columns 2c
// and 2c + 1 of rows g and g + 8.
__device__ inline void multiply_add(float (&sums)[4], const uint32_t (&a)[4], uint32_t b0,
                                    uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
      "{%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

__device__ inline float exp2_fast(float value) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

__device__ inline float reciprocal_fast(float value) {
  float result;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// The first in the lower half.
__device__ inline uint32_t pack_halves(float low, float high) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
  return pair;
}

__device__ inline uint32_t multiply_halves(uint32_t a, uint32_t b) {
  uint32_t product;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(product) : "r"(a), "r"(b));
  return product;
}

// Of each pair, a NaN only where both are.
__device__ inline uint32_t greater_halves(uint32_t a, uint32_t b) {
  uint32_t greater;
  asm("max.f16x2 %0, %1, %2;" : "=r"(greater) : "r"(a), "r"(b));
  return greater;
}

// Of two bytes, the first the lower: exact, NaN stays NaN.
__device__ inline uint32_t halves_of_e4m3(uint32_t two) {
  const __half2_raw pair =
      __nv_cvt_fp8x2_to_halfraw2(static_cast<__nv_fp8x2_storage_t>(two), __NV_E4M3);
  return uint32_t{pair.x} | uint32_t{pair.y} << 16;
}

// The bytes of eight codes of e2m1, each as the upper byte of the half that is 2^-14 of its value:
// those of even elements and those of odd ones.
struct CodeBytes {
  uint32_t even;
  uint32_t odd;
};
__device__ inline CodeBytes code_bytes(uint32_t codes) {
  return {(codes << 1 & 0x0E0E0E0Eu) | (codes << 4 & 0x80808080u),
          (codes >> 3 & 0x0E0E0E0Eu) | (codes & 0x80808080u)};
}

}  // namespace larder::kernels::cuda::prefix
