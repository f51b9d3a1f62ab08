// What the tests of DeviceCalls share: the GPU's calls, and memory of each kind.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "kernels/device_calls.h"
#include "kernels/kernel_table.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/gpu.h"
#include "tests/support/random.h"

namespace larder::test {

using kernels::DeviceCalls;

inline std::string first_gpu_uuid() {
  cudaDeviceProp properties;
  REQUIRE(cudaGetDeviceProperties(&properties, 0) == cudaSuccess);
  std::string text;
  for (const char c : properties.uuid.bytes) {
    constexpr char kHex[] = "0123456789ABCDEF";
    text += kHex[static_cast<unsigned char>(c) >> 4];
    text += kHex[static_cast<unsigned char>(c) & 15];
  }
  return text;
}

inline std::unique_ptr<DeviceCalls> open_gpu() {
  Result<std::unique_ptr<DeviceCalls>> calls = DeviceCalls::create(first_gpu_uuid());
  REQUIRE_MESSAGE(calls.ok(), calls.status().to_string());
  return std::move(*calls);
}

enum class Where { kPageable, kRegistered, kDevice };
inline constexpr Where kEverywhere[] = {Where::kPageable, Where::kRegistered, Where::kDevice};
inline const char* name(Where where) {
  constexpr const char* kNames[] = {"pageable", "registered", "device"};
  return kNames[static_cast<size_t>(where)];
}

// A copy of bytes in memory of one kind.
class Placed {
 public:
  template <typename T>
  Placed(const std::vector<T>& values, Where where, DeviceCalls& calls) : calls_(calls) {
    const auto* bytes = reinterpret_cast<const std::byte*>(values.data());
    const size_t size = values.size() * sizeof(T);
    if (where == Where::kDevice) {
      device_ = std::make_unique<DeviceBytes>(bytes, size);
      return;
    }
    // On pages of its own, as what is registered is whole pages.
    host_.resize(size + 2 * kPage);
    size_ = size;
    const auto address = reinterpret_cast<uintptr_t>(host_.data());
    begin_ = host_.data() + (kPage - address % kPage);
    std::copy(bytes, bytes + size, begin_);
    if (where == Where::kPageable) return;
    Result<kernels::RegisteredMemory> registered =
        calls.register_host_memory(begin_, static_cast<int64_t>(size));
    REQUIRE_MESSAGE(registered.ok(), registered.status().to_string());
    registered_ = std::move(*registered);
  }
  Placed(const Placed&) = delete;
  Placed& operator=(const Placed&) = delete;

  template <typename T = std::byte>
  T* data() {
    return reinterpret_cast<T*>(device_ ? device_->data() : begin_);
  }
  template <typename T = std::byte>
  std::vector<T> read() {
    const Status done = calls_.wait();
    CHECK_MESSAGE(done.ok(), done.to_string());
    if (device_) return device_->read<T>();
    std::vector<T> values(size_ / sizeof(T));
    std::memcpy(values.data(), begin_, values.size() * sizeof(T));
    return values;
  }

 private:
  DeviceCalls& calls_;
  std::unique_ptr<DeviceBytes> device_;
  static constexpr size_t kPage = 4096;
  std::vector<std::byte> host_;
  std::byte* begin_ = nullptr;
  size_t size_ = 0;
  kernels::RegisteredMemory registered_;  // goes before the memory
};

// The layer of a pool, on the device, with the bytes that it has now.
class DevicePool {
 public:
  explicit DevicePool(Pool& pool) : memory(pool.bytes()), layer(pool.layer()) {
    layer.base = memory.data() + (pool.layer().base - pool.bytes().data());
  }
  DeviceBytes memory;
  kernels::LayerView layer;
};

// Fills the pool with normal values, on the CPU.
inline void fill(Pool& pool, std::mt19937_64& engine) {
  const AttentionGeometry& g = pool.geometry();
  const bool is_mla = g.mla_row != MlaRow::kNone;
  const int64_t tokens = pool.layer().num_blocks * g.block_tokens;
  std::vector<float> k = normal_values(engine, tokens * g.num_kv_heads * (is_mla ? 512 : g.k_dim));
  std::vector<float> v = normal_values(engine, tokens * g.num_kv_heads * (is_mla ? 64 : g.v_dim));
  const Status status = append(pool, k, v, consecutive_slots(0, tokens));
  REQUIRE_MESSAGE(status.ok(), status.to_string());
}

#define CHECK_OK(expression)                              \
  do {                                                    \
    const Status status_of = (expression);                \
    CHECK_MESSAGE(status_of.ok(), status_of.to_string()); \
  } while (false)

template <typename T>
void check_same(const std::string& what, const std::vector<T>& got,
                const std::vector<T>& expected) {
  REQUIRE(got.size() == expected.size());
  const auto [at, unused] = std::mismatch(got.begin(), got.end(), expected.begin());
  const auto index = static_cast<size_t>(at - got.begin());
  CHECK_MESSAGE(at == got.end(), what << ": first difference at " << index << " of " << got.size());
}

// Equal where either is NaN, else within 2e-3 of the value or of 1: float32 sums in another order.
inline void check_near(const std::string& what, const std::vector<float>& got,
                       const std::vector<float>& expected) {
  REQUIRE(got.size() == expected.size());
  for (size_t i = 0; i < got.size(); ++i) {
    const bool same = std::isnan(got[i]) ? std::isnan(expected[i])
                                         : got[i] == expected[i] ||
                                               std::abs(got[i] - expected[i]) <=
                                                   2e-3f * std::max(1.0f, std::abs(expected[i]));
    if (same) continue;
    CHECK_MESSAGE(same, what << ": [" << i << "] is " << got[i] << ", expected " << expected[i]);
    return;
  }
}

}  // namespace larder::test
