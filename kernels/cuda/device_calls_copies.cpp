// Bytes between device memory and host memory: many copies as one batch.
#include <algorithm>
#include <functional>
#include <vector>

#include "kernels/cuda/device_calls_gpu.h"
#include "kernels/cuda/launch.h"

namespace larder::kernels::cuda {
namespace {

// Whether no copy writes what one of them reads or another one writes, so that their order does not
// matter.
bool are_independent(std::span<const ByteCopy> copies) {
  std::vector<ByteCopy> targets(copies.begin(), copies.end());
  const std::less<> before;  // of any two addresses
  std::sort(targets.begin(), targets.end(),
            [&](const ByteCopy& a, const ByteCopy& b) { return before(a.to, b.to); });
  for (size_t i = 1; i < targets.size(); ++i)
    if (before(targets[i].to, targets[i - 1].to + targets[i - 1].size_bytes)) return false;
  return std::all_of(copies.begin(), copies.end(), [&](const ByteCopy& copy) {
    // Targets are apart, so only the last one that begins before the source's end can reach it.
    const auto after = std::partition_point(
        targets.begin(), targets.end(),
        [&](const ByteCopy& target) { return before(target.to, copy.from + copy.size_bytes); });
    return after == targets.begin() || !before(copy.from, after[-1].to + after[-1].size_bytes);
  });
}

// Copies that follow each other on both sides, as one. They are independent.
std::vector<ByteCopy> merged(std::span<const ByteCopy> copies) {
  std::vector<ByteCopy> result;
  for (const ByteCopy& copy : copies) {
    if (copy.size_bytes == 0) continue;
    if (!result.empty()) {
      ByteCopy& last = result.back();
      if (last.to + last.size_bytes == copy.to && last.from + last.size_bytes == copy.from) {
        last.size_bytes += copy.size_bytes;
        continue;
      }
    }
    result.push_back(copy);
  }
  return result;
}

cudaError_t copy_one_by_one(std::span<const ByteCopy> copies, cudaStream_t stream) {
  for (const ByteCopy& copy : copies)
    if (const cudaError_t error =
            cudaMemcpyAsync(copy.to, copy.from, copy.size_bytes, cudaMemcpyDefault, stream);
        error != cudaSuccess)
      return error;
  return cudaSuccess;
}

#if CUDART_VERSION >= 13000

// Of one call, so that the device begins while the next ones are prepared.
constexpr size_t kBatchCopies = 128;

bool is_pageable(const void* memory) {
  cudaPointerAttributes attributes{};
  if (cudaPointerGetAttributes(&attributes, memory) == cudaSuccess)
    return attributes.type == cudaMemoryTypeUnregistered;
  (void)cudaGetLastError();
  return true;
}

cudaError_t copy_batch(std::span<const ByteCopy> copies, cudaStream_t stream) {
  std::vector<void*> to;
  std::vector<const void*> from;
  std::vector<size_t> sizes;
  for (const ByteCopy& copy : copies) {
    to.push_back(copy.to);
    from.push_back(copy.from);
    sizes.push_back(copy.size_bytes);
  }
  cudaMemcpyAttributes attributes{};
  attributes.srcAccessOrder = cudaMemcpySrcAccessOrderStream;
  attributes.flags = cudaMemcpyFlagPreferOverlapWithCompute;  // copy engines, not SMs
  size_t first = 0;
  return cudaMemcpyBatchAsync(to.data(), from.data(), sizes.data(), sizes.size(), &attributes,
                              &first, 1, stream);
}

cudaError_t copy_in_any_order(std::span<const ByteCopy> copies, cudaStream_t stream) {
  // Pageable memory goes through the driver's own staging, copy by copy. All of a call's host
  // memory is mostly of one kind, and either way copies every kind.
  if (copies.size() < 2 || is_pageable(copies[0].to) || is_pageable(copies[0].from))
    return copy_one_by_one(copies, stream);
  for (size_t first = 0; first < copies.size(); first += kBatchCopies)
    if (const cudaError_t error = copy_batch(
            copies.subspan(first, std::min(kBatchCopies, copies.size() - first)), stream);
        error != cudaSuccess)
      return error;
  return cudaSuccess;
}

#else

cudaError_t copy_in_any_order(std::span<const ByteCopy> copies, cudaStream_t stream) {
  return copy_one_by_one(copies, stream);
}

#endif

}  // namespace

Status GpuCalls::copy_bytes(std::span<const ByteCopy> copies) {
  return with_device([&]() -> Status {
    cudaError_t error = cudaErrorNotSupported;
    if (are_independent(copies)) error = copy_in_any_order(merged(copies), stream_);
    // A driver or a stream without batches, or a copy that has grown over two registrations.
    if (error == cudaErrorNotSupported || error == cudaErrorInvalidValue) {
      (void)cudaGetLastError();
      error = copy_one_by_one(copies, stream_);
    }
    if (error != cudaSuccess)
      return to_status(std::to_string(copies.size()) + " copies of bytes", error);
    return to_status("the stream", cudaStreamSynchronize(stream_));
  });
}

}  // namespace larder::kernels::cuda
