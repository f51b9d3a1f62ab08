// Matrix products of warpgroups, which read one or both factors from shared memory: wgmma, which
// sm_90a alone has. Elsewhere kHasGroupProducts is false, and nothing here may be called.
#pragma once

#include <cstdint>

namespace larder::kernels::cuda::prefix {

#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
#define LARDER_HAS_WGMMA 1
#else
#define LARDER_HAS_WGMMA 0
#endif
inline constexpr bool kHasGroupProducts = LARDER_HAS_WGMMA != 0;

// Of a warpgroup: 64 rows and 64 columns of sums. Warp w's lane 4g + c has of rows 16w + g and
// 16w + g + 8 columns 8n + 2c and 8n + 2c + 1, as mma.sync has them.
using Sums = float[8][4];

// Where a factor lies, in panels of 128 bytes a row whose chunks are XORed with the row's number;
// 1024 bytes are between eight rows and the next eight. `address`: of the panel's first row, at a
// multiple of 1024. The lower word of what wgmma takes; the upper one is the same for all.
__device__ inline uint32_t describe(uint32_t address) {
  constexpr uint32_t kNextPanel = 1u << 16;  // a factor has one
  return kNextPanel | (address & 0x3FFFFu) >> 4;
}
// What is added to a description for a factor so many bytes on.
__device__ constexpr uint32_t described(uint32_t bytes) { return bytes / 16; }

// What was written to shared memory is there for products that this thread begins, or others that
// it meets: what it wrote, and what those did that it has met. (Where copies are on their way it
// waits for them too, so it is not for threads that copy ahead.)
__device__ inline void make_visible_to_products() {
#if LARDER_HAS_WGMMA
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}

// Registers of the threads of a warpgroup, which take those that another has let go.
template <int kCount>
__device__ inline void keep_registers() {
#if LARDER_HAS_WGMMA
  asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}
template <int kCount>
__device__ inline void add_registers() {
#if LARDER_HAS_WGMMA
  asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(kCount));
#endif
}

// Products between the two are a set, which goes on by itself; factors and sums in registers have
// been written before, and are not touched until the set is waited for.
__device__ inline void open_products() {
#if LARDER_HAS_WGMMA
  asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#endif
}
__device__ inline void close_products() {
#if LARDER_HAS_WGMMA
  asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#endif
}
// For all sets but the last kLeft.
template <int kLeft>
__device__ inline void wait_for_products() {
#if LARDER_HAS_WGMMA
  asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(kLeft) : "memory");
#endif
}
// Sums are what they are after the wait, and not looked at before it.
__device__ inline void settle(Sums& sums) {
#pragma unroll
  for (int n = 0; n < 8; ++n)
#pragma unroll
    for (int i = 0; i < 4; ++i) asm volatile("" : "+f"(sums[n][i])::"memory");
}

// The operands of 64 x 64 sums, %0 to %31.
#define LARDER_SUMS_IN_ASM                                                  \
  "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
  "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, "
#define LARDER_FOUR_SUMS(n) "+f"(sums[n][0]), "+f"(sums[n][1]), "+f"(sums[n][2]), "+f"(sums[n][3])
#define LARDER_SUMS                                                                   \
  LARDER_FOUR_SUMS(0), LARDER_FOUR_SUMS(1), LARDER_FOUR_SUMS(2), LARDER_FOUR_SUMS(3), \
      LARDER_FOUR_SUMS(4), LARDER_FOUR_SUMS(5), LARDER_FOUR_SUMS(6), LARDER_FOUR_SUMS(7)

// sums = a * b, added to what they are where `adds`. a [64, 16]: this thread's part, as mma.sync
// has it. b [16, 64]: 16 rows of 64 elements. (A first factor in registers that a loop's next turn
// multiplies by again is given away within the loop by ptxas 13.0: weights are new in each.)
__device__ inline void multiply_group(Sums& sums, const uint32_t (&a)[4], uint32_t b, bool adds) {
#if LARDER_HAS_WGMMA
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 b;\nsetp.ne.b32 adds, %37, 0;\n"
      "mov.b64 b, {%36, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " LARDER_SUMS_IN_ASM
      "{%32, %33, %34, %35}, b, adds, 1, 1, 1;\n}\n"
      : LARDER_SUMS
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b), "r"(static_cast<int>(adds)));
#endif
}

// The same with both factors in shared memory, rows of 16 elements: the 64 rows of a, and the 64
// columns of b.
__device__ inline void multiply_group(Sums& sums, uint32_t a, uint32_t b, bool adds) {
#if LARDER_HAS_WGMMA
  asm volatile(
      "{\n.reg .pred adds;\n.reg .b64 a;\n.reg .b64 b;\nsetp.ne.b32 adds, %34, 0;\n"
      "mov.b64 a, {%32, 0x40000040};\nmov.b64 b, {%33, 0x40000040};\n"
      "wgmma.mma_async.sync.aligned.m64n64k16.f32.f16.f16 " LARDER_SUMS_IN_ASM
      "a, b, adds, 1, 1, 0, 0;\n}\n"
      : LARDER_SUMS
      : "r"(a), "r"(b), "r"(static_cast<int>(adds)));
#endif
}

#undef LARDER_SUMS
#undef LARDER_FOUR_SUMS
#undef LARDER_SUMS_IN_ASM

}  // namespace larder::kernels::cuda::prefix
