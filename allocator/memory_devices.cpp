#include "allocator/memory_devices.h"

#include "allocator/host_memory.h"

namespace larder {

Result<std::shared_ptr<const CudaDriver>> MemoryDevices::driver() {
  if (driver_ == nullptr) {
    auto loaded = CudaDriver::load();
    if (!loaded) return loaded.status();
    driver_ = std::move(*loaded);
  }
  return driver_;
}

Result<std::string> MemoryDevices::first_gpu() {
  const auto loaded = driver();
  if (!loaded) return loaded.status();
  Status refusal;
  for (const CudaDevice& device : (*loaded)->devices()) {
    const auto usable = provider(device.uuid);
    if (usable) return device.uuid;
    refusal = usable.status();
  }
  return refusal;
}

Result<std::string> MemoryDevices::resolve(const std::string& device) {
  if (device == kHostDevice) return device;
  if (device == "auto") {
    if (!auto_device_) {
      const auto gpu = first_gpu();
      if (!gpu) why_no_gpu_ = gpu.status().message();
      auto_device_ = gpu ? *gpu : kHostDevice;
    }
    return *auto_device_;
  }
  const auto loaded = driver();
  if (!loaded)
    return Status(loaded.status().code(), "device " + device + ": " + loaded.status().message());
  const auto found = (*loaded)->find_device(device);
  if (!found) return found.status();
  return found->uuid;
}

Result<const MemoryProvider*> MemoryDevices::provider(const std::string& device) {
  const auto found = providers_.find(device);
  if (found != providers_.end()) return found->second.get();
  std::unique_ptr<MemoryProvider> made;
  if (device == kHostDevice) {
    made = std::make_unique<HostMemoryProvider>();
  } else {
    const auto loaded = driver();
    if (!loaded) return loaded.status();
    auto opened = CudaVmmProvider::open(*loaded, device, options_);
    if (!opened) return opened.status();
    made = std::move(*opened);
  }
  return providers_.emplace(device, std::move(made)).first->second.get();
}

}  // namespace larder
