// What the device's memory can do at best: kernels that only copy or only read, to be measured
// beside the kernels of the tables; and random values for their inputs.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "larder/kv_format.h"

namespace larder::test {

// `bytes` is a multiple of 16 KiB and the pointers of 16. Errors are those of cudaGetLastError.
void launch_copy(void* to, const void* from, int64_t bytes, cudaStream_t stream);
// Reads everything; *unused is written by one thread in 2^32.
void launch_read(const void* from, int64_t bytes, uint32_t* unused, cudaStream_t stream);
// The same with a CTA for every 32 KiB, of which `bytes` is a multiple: which of the two is faster
// depends on the GPU.
void launch_read_once(const void* from, int64_t bytes, uint32_t* unused, cudaStream_t stream);

enum class Fill { kBf16, kFp16, kBits };
// Independent values: of the standard normal distribution, or random bits. `bytes` is even.
void launch_fill(void* to, int64_t bytes, Fill fill, uint64_t seed, cudaStream_t stream);

// Gives all rows of pages, one behind another, valid values of about the standard normal
// distribution. nvfp4: random codes, scale bytes of 0.25 to 0.47. K and V have one format.
void launch_fill_pages(void* to, int64_t num_pages, const AttentionGeometry& geometry,
                       uint64_t seed, cudaStream_t stream);

}  // namespace larder::test
