// The CUDA driver, loaded when it is asked for: one binary runs with and without it. Only what
// creates, shares and maps memory, for which cuInit suffices; nothing here makes a context.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "allocator/cuda_abi.h"
#include "allocator/cuda_error.h"
#include "larder/status.h"

namespace larder {

struct CudaDevice {
  int ordinal = 0;          // of this process: CUDA_VISIBLE_DEVICES changes it
  std::string uuid;         // "GPU-0f1e2d3c-...": the name that every process agrees on
  std::string name;         // "NVIDIA H200"
  int64_t total_bytes = 0;  // its memory, used or not
};

// Thread-safe once it is loaded. The library stays loaded until the process ends: the driver has
// threads and exit handlers of its own.
class CudaDriver {
 public:
  static constexpr const char* kLibrary = "libcuda.so.1";

  // UNAVAILABLE with the reason where there is no driver, it does not start, or it has no device.
  // It is shared by the providers made of it and their ranges, which may outlive each other.
  static Result<std::shared_ptr<const CudaDriver>> load(const std::string& library = kLibrary);

  int version() const { return version_; }  // 13000 is CUDA 13.0
  const std::vector<CudaDevice>& devices() const { return devices_; }
  // The device of a UUID: with or without "GPU-" or "MIG-" before it, in either case.
  // INVALID_ARGUMENT for what is no UUID, NOT_FOUND naming the devices that there are.
  //
  // A visible MIG instance is a device with a UUID of its own. The driver does not say whether a
  // device is one (NVML does), so devices() has "GPU-" before every UUID, and the prefix asked for
  // is not compared: no two devices have the same UUID.
  Result<CudaDevice> find_device(std::string_view uuid) const;

  const cuda::EntryPoints& calls() const { return calls_; }
  // The entry point failed: what to throw. `arguments` are in words, with sizes.
  CudaError error(const char* function, const std::string& arguments, cuda::Result result) const;
  // "CUDA_ERROR_OUT_OF_MEMORY"; "CUDA error 12345" for codes that the driver does not know.
  std::string error_name(cuda::Result result) const;

 private:
  CudaDriver() = default;
  Status resolve(const std::string& library);
  Status start(const std::string& library);
  Status add_device(int ordinal);

  cuda::EntryPoints calls_;
  int version_ = 0;
  std::vector<CudaDevice> devices_;
};

}  // namespace larder
