// What tests on a GPU share: whether there is one, and device memory with known bytes in it.
#pragma once

#include <cstdlib>
#include <cstring>
#include <cuda_runtime_api.h>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

namespace larder::test {

// Empty where a GPU can be used, else the reason. A test program prints it and skips its cases,
// unless $LARDER_REQUIRE_GPU is set: then it fails.
inline std::string why_no_gpu() {
  int count = 0;
  const cudaError_t error = cudaGetDeviceCount(&count);
  if (error != cudaSuccess) return cudaGetErrorString(error);
  return count > 0 ? "" : "there is no GPU";
}

// At the beginning of each case: `if (!has_gpu()) return;`
inline bool has_gpu() {
  static const std::string reason = why_no_gpu();
  if (reason.empty()) return true;
  if (std::getenv("LARDER_REQUIRE_GPU") != nullptr) FAIL("a GPU is required: " << reason);
  MESSAGE("skipped, no usable GPU: " << reason);
  return false;
}

// A copy of host bytes in device memory, between guard bytes that nobody may change: overruns are
// found when the bytes come back, and reads beyond the end find NaNs.
class DeviceBytes {
 public:
  DeviceBytes(const void* bytes, size_t size) : DeviceBytes(size) {
    if (size > 0)
      REQUIRE(cudaMemcpy(memory_ + kGuard, bytes, size, cudaMemcpyHostToDevice) == cudaSuccess);
    // A small copy from pageable memory may return while it is still on its way.
    REQUIRE(cudaStreamSynchronize(nullptr) == cudaSuccess);
  }
  // Poison: 0xFF in every byte, a NaN in every format but e2m1. It is there for every stream.
  explicit DeviceBytes(size_t size) : size_(size) {
    REQUIRE(cudaMalloc(reinterpret_cast<void**>(&memory_), size + 2 * kGuard) == cudaSuccess);
    REQUIRE(cudaMemset(memory_, 0xFF, size + 2 * kGuard) == cudaSuccess);
    REQUIRE(cudaStreamSynchronize(nullptr) == cudaSuccess);
  }
  template <typename T>
  explicit DeviceBytes(const std::vector<T>& values)
      : DeviceBytes(values.data(), values.size() * sizeof(T)) {}
  DeviceBytes(DeviceBytes&& other) noexcept
      : memory_(std::exchange(other.memory_, nullptr)), size_(other.size_) {}
  DeviceBytes& operator=(DeviceBytes&&) = delete;
  ~DeviceBytes() { cudaFree(memory_); }

  template <typename T = std::byte>
  T* data() const {
    return reinterpret_cast<T*>(memory_ + kGuard);
  }
  size_t size() const { return size_; }
  // Waits for the device.
  void check_guards() const {
    REQUIRE(cudaDeviceSynchronize() == cudaSuccess);
    for (const size_t at : {size_t{0}, kGuard + size_}) {
      std::vector<std::byte> guard(kGuard);
      REQUIRE(cudaMemcpy(guard.data(), memory_ + at, kGuard, cudaMemcpyDeviceToHost) ==
              cudaSuccess);
      REQUIRE(guard == std::vector<std::byte>(kGuard, std::byte{0xFF}));
    }
  }
  // Waits for the device. Checks the guards.
  template <typename T = std::byte>
  std::vector<T> read() const {
    check_guards();
    std::vector<T> values(size_ / sizeof(T));
    if (!values.empty())
      REQUIRE(cudaMemcpy(values.data(), memory_ + kGuard, values.size() * sizeof(T),
                         cudaMemcpyDeviceToHost) == cudaSuccess);
    return values;
  }

 private:
  static constexpr size_t kGuard = 4096;
  std::byte* memory_ = nullptr;
  size_t size_;
};

}  // namespace larder::test
