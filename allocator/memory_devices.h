// MemoryDevices: the providers of this process by the device whose memory they make: "host", or a
// GPU's UUID. The CUDA driver is loaded when a GPU is asked for first, and not before: that takes
// some tenths of a second, and a restart that only hands on fds does without.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "allocator/cuda_vmm.h"
#include "allocator/memory_provider.h"
#include "larder/status.h"

namespace larder {

inline const std::string kHostDevice = "host";

// One thread at a time. What it returns stays as long as it does.
class MemoryDevices {
 public:
  explicit MemoryDevices(CudaVmmOptions options = {}) : options_(options) {}

  // The name that every process knows the device by: "host" and UUIDs as the driver writes them.
  // "auto": the first GPU that can share its memory, else the host. INVALID_ARGUMENT, NOT_FOUND,
  // UNSUPPORTED or UNAVAILABLE, with the reason, for a GPU that cannot be used.
  Result<std::string> resolve(const std::string& device);
  // `device` is a resolved name.
  Result<const MemoryProvider*> provider(const std::string& device);
  // Why "auto" found no GPU; empty while it was not asked, or where it found one.
  const std::string& why_no_gpu() const { return why_no_gpu_; }

 private:
  Result<std::string> first_gpu();
  Result<std::shared_ptr<const CudaDriver>> driver();

  CudaVmmOptions options_;
  std::shared_ptr<const CudaDriver> driver_;
  std::map<std::string, std::unique_ptr<MemoryProvider>> providers_;
  std::optional<std::string> auto_device_;
  std::string why_no_gpu_;
};

}  // namespace larder
