#include "tests/gpu/gpu_kernels.h"

namespace larder::test {
namespace {

__global__ __launch_bounds__(32) void spin_kernel(int64_t nanoseconds) {
  uint64_t begin = 0, now = 0;
  asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(begin));
  do {
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
  } while (now - begin < static_cast<uint64_t>(nanoseconds));
}

__global__ __launch_bounds__(256) void fill_kernel(float* values, int64_t count, float value) {
  for (int64_t i = blockIdx.x * 256ll + threadIdx.x; i < count; i += 256ll * gridDim.x)
    values[i] = value;
}

__global__ __launch_bounds__(1024) void write_kernel(volatile uint64_t* words,
                                                     const volatile uint32_t* stop) {
  for (uint64_t number = 1; *stop == 0; ++number) words[threadIdx.x] = number;
}

__global__ __launch_bounds__(32) void fault_kernel(volatile uint32_t* nowhere) { *nowhere = 1; }

}  // namespace

void spin(cudaStream_t stream, int64_t microseconds) {
  spin_kernel<<<1, 1, 0, stream>>>(1000 * microseconds);
}
void fill_floats(cudaStream_t stream, float* values, int64_t count, float value) {
  fill_kernel<<<64, 256, 0, stream>>>(values, count, value);
}
void write_until(cudaStream_t stream, volatile uint64_t* words, const volatile uint32_t* stop) {
  write_kernel<<<1, 1024, 0, stream>>>(words, stop);
}
void fault(cudaStream_t stream) {
  fault_kernel<<<1, 1, 0, stream>>>(reinterpret_cast<uint32_t*>(uint64_t{1} << 46));
}

}  // namespace larder::test
