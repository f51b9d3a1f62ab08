// Kernels that may begin while the one before them in their stream ends. From compute
// capability 9.0 on; elsewhere they begin after it.
#pragma once

#include <cstdint>

#include "kernels/cuda/launch.h"

namespace larder::kernels::cuda {

// Everything that earlier kernels wrote is there afterwards. A kernel that is launched early does
// this before it reads or writes memory, or what comes next, and this before it ends.
__device__ inline void wait_for_previous_kernel() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

// Instead, where the kernel before waited in all of its CTAs before it let this one start: what had
// been written before that one began is there afterwards, whatever this multiprocessor has cached.
__device__ inline void rely_on_previous_wait() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  __threadfence();
#endif
}

// The same for what had been written before the word was, by that kernel or an earlier one, at the
// cost of a load.
__device__ inline uint64_t load_and_rely(const uint64_t* word) {
  uint64_t value;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(value) : "l"(word) : "memory");
  return value;
}

// Brings a line of memory to the L2. Nothing is read: the kernel before may still write it.
__device__ inline void prefetch_line(const void* line) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(line));
}

// The next kernel of the stream may begin once all CTAs have said so, if it was launched early.
__device__ inline void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// `grid`: of CTAs, in up to three dimensions. `is_early`: whether it may begin before the one
// before it has ended, if its code is such that it waits: that compiled for devices before 9.0,
// which later ones may run too, does not.
template <typename Call>
Status launch(std::string_view name, void (*kernel)(Call), dim3 grid, int threads, int shared_bytes,
              const Call& call, cudaStream_t stream, bool is_early) {
  cudaFuncAttributes code = {};
  if (Status s = to_status(name, cudaFuncGetAttributes(&code, kernel)); !s.ok()) return s;
  cudaLaunchAttribute overlap = {};
  overlap.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  overlap.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config = {};
  config.gridDim = grid;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &overlap;
  config.numAttrs = is_early && code.ptxVersion >= 90 ? 1 : 0;
  return to_status(name, cudaLaunchKernelEx(&config, kernel, call));
}

}  // namespace larder::kernels::cuda
