// Small kernels for tests, on the default device.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace larder::test {

// Keeps the stream busy for about so long.
void spin(cudaStream_t stream, int64_t microseconds);
// values[0 .. count) = value
void fill_floats(cudaStream_t stream, float* values, int64_t count, float value);
// Writes ever larger numbers into words[0 .. 1024) until *stop is not 0.
void write_until(cudaStream_t stream, volatile uint64_t* words, const volatile uint32_t* stop);
// Writes where nothing is mapped.
void fault(cudaStream_t stream);

}  // namespace larder::test
