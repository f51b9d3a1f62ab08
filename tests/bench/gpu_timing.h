// How kernels are timed on one GPU, and the raw figures of a run as JSON.
//
// An item is one call with one shape. Every row of the kernel table that takes it is a variant: a
// CUDA graph of one launch per buffer, over so many distinct buffers that the data goes past the L2
// cache. A replay is timed by events behind an untimed replay, so that neither the host nor a cold
// start is measured; where the buffers of an item would fit in the L2, 256 MiB are read in between.
// Variants take turns in random order, which is recorded.
#pragma once

#include <cuda_runtime_api.h>
#include <functional>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include <nlohmann/json.hpp>

#include "larder/check.h"
#include "larder/status.h"

namespace larder::test {

using nlohmann::json;

inline constexpr int64_t kMiB = int64_t{1} << 20;
inline constexpr int64_t kGiB = int64_t{1} << 30;

inline void check(cudaError_t error) {
  LARDER_CHECK(error == cudaSuccess, cudaGetErrorName(error), cudaGetErrorString(error));
}
inline void must(const Status& status) { LARDER_CHECK(status.ok(), status.to_string()); }
template <typename Value>
Value must(Result<Value> result) {
  must(result.status());
  return std::move(*result);
}

class DeviceMemory {
 public:
  explicit DeviceMemory(int64_t bytes) : bytes_(bytes) {
    check(cudaMalloc(reinterpret_cast<void**>(&data_), static_cast<size_t>(bytes + 16)));
  }
  template <typename T>
  explicit DeviceMemory(const std::vector<T>& values)
      : DeviceMemory(static_cast<int64_t>(values.size() * sizeof(T))) {
    check(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  DeviceMemory(DeviceMemory&& other) noexcept
      : data_(std::exchange(other.data_, nullptr)), bytes_(other.bytes_) {}
  DeviceMemory& operator=(DeviceMemory&&) = delete;
  ~DeviceMemory() { cudaFree(data_); }

  std::byte* data() const { return data_; }
  template <typename T>
  T* as() const {
    return reinterpret_cast<T*>(data_);
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::byte* data_ = nullptr;
  int64_t bytes_;
};

// Waits for the device.
inline std::vector<std::byte> to_host(const void* from, int64_t bytes) {
  std::vector<std::byte> result(static_cast<size_t>(bytes));
  check(cudaDeviceSynchronize());
  check(cudaMemcpy(result.data(), from, result.size(), cudaMemcpyDeviceToHost));
  return result;
}

struct Variant {
  std::string row;
  std::function<Status(int64_t buffer, void* stream)> launch;
};

struct Item {
  std::string label;  // what a filter looks at: "append/nvfp4/..."
  json fields;        // op and shape
  int64_t bytes_read = 0;
  int64_t bytes_written = 0;
  int64_t buffers = 1;
  std::vector<Variant> variants;
  // After one launch of a variant on buffer 0: empty, or where its bytes differ from the CPU row's.
  std::function<std::string()> difference;
  std::function<void()> poison;  // before that launch
};

// Distinct buffers that an item needs, for so many bytes that a call reads and writes.
int64_t buffers_for(int64_t bytes_per_call);

struct BenchOptions {
  std::string commit;
  int replays = 21;
  std::vector<std::string> filters;  // parts of labels; none: everything
  // Of attention alone (see gpu_states.h):
  double load_seconds = 1.5;
  bool burst = true;
  bool sustained = true;
  std::vector<std::string> rows;  // rows to time; none: the one that serves the call
};

class Bench {
 public:
  explicit Bench(BenchOptions options);
  ~Bench();
  Bench(const Bench&) = delete;
  Bench& operator=(const Bench&) = delete;

  bool wants(const std::string& label) const;
  // Items between two of these share one look at clocks, power and temperature on either side.
  void begin_group(const std::string& name);
  void measure(const Item& item);
  // A call of the host, `body(0)` to be compared with `body(1)`; both done when they return.
  void measure_host(const std::string& label, json fields, int64_t bytes, const std::string& row,
                    const std::function<void(int)>& body, bool checked);
  // An item that the validation or every row refuses.
  void skip(const std::string& label, json fields, const Status& reason);
  // A result that was measured elsewhere.
  void add(json result, bool checked);
  // Everything, with the ceilings measured again.
  json finish();

  cudaStream_t stream() const { return stream_; }
  const BenchOptions& options() const { return options_; }
  bool all_checked() const { return all_checked_; }

 private:
  json measure_ceilings();
  double replay_us(cudaGraphExec_t graph, int64_t launches, bool flush);
  void end_group();

  BenchOptions options_;
  cudaStream_t stream_ = nullptr;
  cudaEvent_t begin_ = nullptr, end_ = nullptr;
  std::mt19937 order_{20261130};
  json before_, groups_ = json::array(), results_ = json::array();
  bool all_checked_ = true;
  DeviceMemory flushed_;
};

}  // namespace larder::test
