// Memory of one GPU as segments: allocations of the driver's virtual memory management, exported as
// POSIX fds. It needs cuInit and no context, so a fault of a kernel cannot take down who uses it.
#pragma once

#include <atomic>
#include <chrono>
#include <memory>
#include <string>
#include <string_view>

#include "allocator/cuda_driver.h"
#include "allocator/memory_provider.h"

namespace larder {

struct CudaVmmOptions {
  // How long create() goes on trying while there is no memory: the driver takes back that of a
  // process that was killed some time after its end. It blocks the caller meanwhile. After a wait
  // that was in vain there is none for a second.
  std::chrono::milliseconds reclaim_wait{0};
};

class CudaVmmProvider final : public MemoryProvider {
 public:
  // UNSUPPORTED where the device cannot share memory by fd, or not in units that divide
  // kSegmentGranularityBytes; what CudaDriver::find_device says of the UUID.
  static Result<std::unique_ptr<CudaVmmProvider>> open(std::shared_ptr<const CudaDriver> driver,
                                                       std::string_view uuid,
                                                       CudaVmmOptions options = {});

  std::string_view name() const override { return "cuda_vmm"; }
  int64_t granularity_bytes() const override { return granularity_bytes_; }
  const CudaDevice& device() const { return device_; }

  // The driver does not say what is in new memory: whoever must not see old bytes clears it. The
  // driver exports fds that an exec would inherit, so a thread that forks and execs in the moment
  // before they are marked passes one on. `name` is dropped: the driver shows none.
  Segment create(const std::string& name, int64_t size_bytes) const override;
  // Whether the driver takes the fd for memory that it has exported. It tells neither its size nor
  // its device before it is mapped: map_at() throws for memory that is smaller than stated.
  Status check(int fd, int64_t size_bytes) const override;
  // Each segment that is mapped costs an import, a map and one change of access: tens of
  // microseconds, more for many GiB. The mapping is all that the range keeps of the memory.
  std::unique_ptr<AddressRange> reserve(int64_t max_bytes) const override;

 private:
  using Clock = std::chrono::steady_clock;

  CudaVmmProvider(std::shared_ptr<const CudaDriver> driver, CudaDevice device,
                  int64_t granularity_bytes, CudaVmmOptions options)
      : driver_(std::move(driver)),
        device_(std::move(device)),
        granularity_bytes_(granularity_bytes),
        options_(options) {}

  cuda::MemoryHandle allocate(int64_t size_bytes) const;

  std::shared_ptr<const CudaDriver> driver_;
  CudaDevice device_;
  int64_t granularity_bytes_;
  CudaVmmOptions options_;
  mutable std::atomic<Clock::time_point> no_wait_before_ = Clock::time_point();
};

}  // namespace larder
