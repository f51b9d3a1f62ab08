#include "client/examples/gpu_memory.h"

#include <cstdio>

namespace larder::examples {
namespace {

// "GPU-8-4-4-4-12", as the driver and Pool::device() write it.
std::string uuid_text(const cudaUUID_t& uuid) {
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof(uuid.bytes); ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    char digits[3] = {};
    std::snprintf(digits, sizeof(digits), "%02x", static_cast<unsigned char>(uuid.bytes[i]));
    text += digits;
  }
  return text;
}

}  // namespace

void check_cuda(cudaError_t error, const std::string& call) {
  if (error == cudaSuccess) return;
  (void)cudaGetLastError();
  throw GpuError(
      error == cudaErrorMemoryAllocation ? ErrorCode::kResourceExhausted : ErrorCode::kInternal,
      call + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error));
}

void* allocate_device(size_t size_bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, size_bytes),
             "cudaMalloc(" + std::to_string(size_bytes) + " bytes)");
  return memory;
}

void* allocate_pinned(size_t size_bytes) {
  void* memory = nullptr;
  check_cuda(cudaMallocHost(&memory, size_bytes),
             "cudaMallocHost(" + std::to_string(size_bytes) + " bytes)");
  return memory;
}

GpuStream::GpuStream() {
  check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking),
             "cudaStreamCreateWithFlags");
}

GpuStream::~GpuStream() {
  // What failed in the stream has been the answer to a call, or nobody asks any more.
  (void)cudaStreamSynchronize(stream_);
  (void)cudaStreamDestroy(stream_);
  (void)cudaGetLastError();
}

void GpuStream::wait() const { check_cuda(cudaStreamSynchronize(stream_), "the stream"); }

void use_device(const std::string& uuid) {
  int count = 0;
  check_cuda(cudaGetDeviceCount(&count), "cudaGetDeviceCount");
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    check_cuda(cudaGetDeviceProperties(&properties, device), "cudaGetDeviceProperties");
    if (uuid_text(properties.uuid) != uuid) continue;
    check_cuda(cudaSetDevice(device), "cudaSetDevice(" + std::to_string(device) + ")");
    return;
  }
  throw GpuError(ErrorCode::kUnavailable, "none of the " + std::to_string(count) +
                                              " GPUs that this process sees has the UUID " + uuid);
}

}  // namespace larder::examples
