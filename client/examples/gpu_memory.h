// What the GPU runner owns: device and pinned memory, a stream, a graph; and the error of a CUDA or
// cuBLAS call. All of it is of the device that is current when it is made.
#pragma once

#include <cstddef>
#include <cstdint>
#include <cuda_runtime_api.h>
#include <memory>
#include <span>
#include <stdexcept>
#include <string>

#include "larder/status.h"

namespace larder::examples {

class GpuError : public std::runtime_error {
 public:
  GpuError(ErrorCode code, const std::string& sentence)
      : std::runtime_error(sentence), code_(code) {}
  Status status() const { return {code_, what()}; }

 private:
  ErrorCode code_;
};

// Throws GpuError, RESOURCE_EXHAUSTED for memory that is not there and INTERNAL for anything else,
// and clears the error.
void check_cuda(cudaError_t error, const std::string& call);

struct FreeDevice {
  void operator()(void* memory) const { (void)cudaFree(memory); }
};
struct FreePinned {
  void operator()(void* memory) const { (void)cudaFreeHost(memory); }
};

// Uninitialised.
void* allocate_device(size_t size_bytes);
void* allocate_pinned(size_t size_bytes);

// An array in device memory.
template <typename T>
class DeviceArray {
 public:
  DeviceArray() = default;
  explicit DeviceArray(int64_t size)
      : memory_(static_cast<T*>(allocate_device(static_cast<size_t>(size) * sizeof(T)))),
        size_(size) {}

  T* data() const { return memory_.get(); }
  int64_t size() const { return size_; }
  // Host values to `first` and on, in the default stream. They have been read when it returns.
  void upload(int64_t first, std::span<const T> values) {
    check_cuda(
        cudaMemcpy(data() + first, values.data(), values.size_bytes(), cudaMemcpyHostToDevice),
        "cudaMemcpy(" + std::to_string(values.size_bytes()) + " bytes to the device)");
  }

 private:
  std::unique_ptr<T, FreeDevice> memory_;
  int64_t size_ = 0;
};

// Does not wait for the default stream. Waits for its work before it goes.
class GpuStream {
 public:
  GpuStream();
  ~GpuStream();
  GpuStream(const GpuStream&) = delete;
  GpuStream& operator=(const GpuStream&) = delete;
  cudaStream_t get() const { return stream_; }
  void wait() const;

 private:
  cudaStream_t stream_ = nullptr;
};

// A captured graph, ready to launch.
struct DestroyGraph {
  void operator()(cudaGraphExec_t graph) const { (void)cudaGraphExecDestroy(graph); }
};
using GpuGraph = std::unique_ptr<CUgraphExec_st, DestroyGraph>;

// Makes the device with this UUID ("GPU-...") the thread's current one. Throws GpuError.
void use_device(const std::string& uuid);

}  // namespace larder::examples
