#include "allocator/cuda_vmm.h"

#include <cerrno>
#include <cstdint>
#include <cstdio>
#include <fcntl.h>
#include <sys/stat.h>
#include <system_error>
#include <thread>
#include <utility>

#include "allocator/extent.h"
#include "allocator/segment_places.h"
#include "larder/check.h"
#include "larder/system_error.h"

namespace larder {
namespace {

// Reclaim takes tens of milliseconds; a try costs microseconds.
constexpr std::chrono::milliseconds kBetweenTries{2};
// Who asks for many segments of memory that is not there waits once, not for each of them.
constexpr auto kNoWaitAfterOne = std::chrono::seconds(1);

std::string bytes_text(int64_t bytes) { return std::to_string(bytes) + " bytes"; }

cuda::AllocationProperties properties_of(cuda::Device device) {
  cuda::AllocationProperties properties;
  properties.location.id = device;
  return properties;
}

// For what is given back where nobody can be told: the process goes on, and what it could not give
// back stays taken until it ends.
void log_failure(const CudaError& error) noexcept {
  std::fprintf(stderr, "larder: event=cuda_release_failed error=\"%s\"\n", error.what());
}

// A reference to memory, released when its owner goes.
class OwnHandle {
 public:
  OwnHandle(const CudaDriver& driver, cuda::MemoryHandle handle)
      : driver_(driver), handle_(handle) {}
  OwnHandle(const OwnHandle&) = delete;
  OwnHandle& operator=(const OwnHandle&) = delete;
  ~OwnHandle() {
    const cuda::Result result = driver_.calls().release(handle_);
    if (result != cuda::kSuccess) log_failure(driver_.error("cuMemRelease", "", result));
  }
  cuda::MemoryHandle get() const { return handle_; }

 private:
  const CudaDriver& driver_;
  cuda::MemoryHandle handle_;
};

cuda::Result import(const CudaDriver& driver, int fd, cuda::MemoryHandle& handle) {
  // The driver takes an fd in the place of a pointer. NOLINTNEXTLINE(performance-no-int-to-ptr)
  void* const shareable = reinterpret_cast<void*>(static_cast<intptr_t>(fd));
  return driver.calls().import_from_shareable_handle(&handle, shareable, cuda::kHandlePosixFd);
}

class CudaRange final : public AddressRange {
 public:
  CudaRange(std::shared_ptr<const CudaDriver> driver, CudaDevice device, int64_t max_bytes,
            int64_t granularity_bytes)
      : driver_(std::move(driver)),
        device_(std::move(device)),
        places_(max_bytes, granularity_bytes) {
    const cuda::Result result =
        driver_->calls().address_reserve(&base_, static_cast<size_t>(places_.max_bytes()),
                                         static_cast<size_t>(granularity_bytes), 0, 0);
    if (result != cuda::kSuccess)
      throw driver_->error("cuMemAddressReserve", bytes_text(places_.max_bytes()), result);
  }

  ~CudaRange() override {
    for (const auto& [offset, size] : places_.all()) {
      const cuda::Result result = try_unmap(offset, size);
      if (result != cuda::kSuccess) log_failure(error("cuMemUnmap", offset, size, result));
    }
    const int64_t size_bytes = places_.max_bytes();
    const cuda::Result result =
        driver_->calls().address_free(base_, static_cast<size_t>(size_bytes));
    if (result != cuda::kSuccess)
      log_failure(driver_->error("cuMemAddressFree", bytes_text(size_bytes), result));
  }

  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are numbers
  std::byte* base() const override { return reinterpret_cast<std::byte*>(base_); }
  int64_t max_bytes() const override { return places_.max_bytes(); }

  void map_at(int64_t offset_bytes, int fd, int64_t size_bytes) override {
    (void)places_.within(offset_bytes, size_bytes);
    cuda::MemoryHandle imported = 0;
    if (const cuda::Result result = import(*driver_, fd, imported); result != cuda::kSuccess)
      throw driver_->error("cuMemImportFromShareableHandle", "fd " + std::to_string(fd), result);
    // The mapping keeps the memory, so the reference goes in any case.
    const OwnHandle handle(*driver_, imported);
    unmap_at(offset_bytes, size_bytes);
    map(offset_bytes, handle.get(), size_bytes);
  }

  void unmap_at(int64_t offset_bytes, int64_t size_bytes) override {
    // One by one: the driver unmaps only whole mappings.
    for (const auto& [offset, size] : places_.within(offset_bytes, size_bytes)) {
      const cuda::Result result = try_unmap(offset, size);
      if (result != cuda::kSuccess) throw error("cuMemUnmap", offset, size, result);
      places_.remove(offset);
    }
  }

 private:
  cuda::Address address(int64_t offset_bytes) const {
    return base_ + static_cast<cuda::Address>(offset_bytes);
  }

  void map(int64_t offset_bytes, cuda::MemoryHandle handle, int64_t size_bytes) {
    const auto size = static_cast<size_t>(size_bytes);
    cuda::Result result = driver_->calls().map(address(offset_bytes), size, 0, handle, 0);
    if (result != cuda::kSuccess) throw error("cuMemMap", offset_bytes, size_bytes, result);
    // From here on it is a mapping that must be undone, by us or, if that fails, by the destructor.
    places_.add(offset_bytes, size_bytes);
    cuda::AccessDescription access;
    access.location.id = device_.ordinal;
    result = driver_->calls().set_access(address(offset_bytes), size, &access, 1);
    if (result == cuda::kSuccess) return;
    const cuda::Result undone = try_unmap(offset_bytes, size_bytes);
    if (undone == cuda::kSuccess)
      places_.remove(offset_bytes);
    else
      log_failure(error("cuMemUnmap", offset_bytes, size_bytes, undone));
    throw error("cuMemSetAccess", offset_bytes, size_bytes, result);
  }

  cuda::Result try_unmap(int64_t offset_bytes, int64_t size_bytes) const {
    return driver_->calls().unmap(address(offset_bytes), static_cast<size_t>(size_bytes));
  }

  CudaError error(const char* function, int64_t offset_bytes, int64_t size_bytes,
                  cuda::Result result) const {
    return driver_->error(function,
                          bytes_text(size_bytes) + " at offset " + std::to_string(offset_bytes) +
                              " of " + std::to_string(places_.max_bytes()) + " on " + device_.uuid,
                          result);
  }

  std::shared_ptr<const CudaDriver> driver_;
  CudaDevice device_;
  SegmentPlaces places_;
  cuda::Address base_ = 0;
};

}  // namespace

Result<std::unique_ptr<CudaVmmProvider>> CudaVmmProvider::open(
    std::shared_ptr<const CudaDriver> driver, std::string_view uuid, CudaVmmOptions options) {
  const Result<CudaDevice> device = driver->find_device(uuid);
  if (!device) return device.status();
  const std::string device_text = device->uuid + " (" + device->name + ")";
  const auto failed = [&](const char* function, cuda::Result result) {
    return Status(ErrorCode::kUnavailable, driver->error(function, device_text, result).what());
  };
  for (const int attribute : {cuda::kAttributeVirtualMemory, cuda::kAttributePosixFds}) {
    int has = 0;
    if (const cuda::Result result =
            driver->calls().device_get_attribute(&has, attribute, device->ordinal);
        result != cuda::kSuccess)
      return failed("cuDeviceGetAttribute", result);
    if (has == 0)
      return {ErrorCode::kUnsupported,
              "device " + device_text + " has no " +
                  (attribute == cuda::kAttributePosixFds ? "memory that fds share"
                                                         : "virtual memory management")};
  }
  size_t granularity = 0;
  const cuda::AllocationProperties properties = properties_of(device->ordinal);
  if (const cuda::Result result = driver->calls().get_allocation_granularity(
          &granularity, &properties, cuda::kGranularityMinimum);
      result != cuda::kSuccess)
    return failed("cuMemGetAllocationGranularity", result);
  if (granularity == 0 || static_cast<size_t>(kSegmentGranularityBytes) % granularity != 0)
    return {ErrorCode::kUnsupported,
            "device " + device_text + " gives memory in units of " + std::to_string(granularity) +
                " bytes, which must divide " + std::to_string(kSegmentGranularityBytes)};
  return std::unique_ptr<CudaVmmProvider>(
      new CudaVmmProvider(std::move(driver), *device, static_cast<int64_t>(granularity), options));
}

cuda::MemoryHandle CudaVmmProvider::allocate(int64_t size_bytes) const {
  const cuda::AllocationProperties properties = properties_of(device_.ordinal);
  const Clock::time_point start = Clock::now();
  const Clock::time_point deadline =
      start < no_wait_before_.load() ? start : start + options_.reclaim_wait;
  while (true) {
    cuda::MemoryHandle handle = 0;
    const cuda::Result result =
        driver_->calls().create(&handle, static_cast<size_t>(size_bytes), &properties, 0);
    if (result == cuda::kSuccess) return handle;
    const bool in_vain = result == cuda::kOutOfMemory && Clock::now() >= deadline;
    if (in_vain) no_wait_before_ = Clock::now() + kNoWaitAfterOne;
    if (result != cuda::kOutOfMemory || in_vain)
      throw driver_->error("cuMemCreate", bytes_text(size_bytes) + " on " + device_.uuid, result);
    std::this_thread::sleep_for(kBetweenTries);
  }
}

Segment CudaVmmProvider::create(const std::string& name, int64_t size_bytes) const {
  (void)name;
  LARDER_CHECK(size_bytes > 0 && size_bytes % granularity_bytes_ == 0, size_bytes);
  // The fd is the memory from here on: our own reference goes in any case.
  const OwnHandle handle(*driver_, allocate(size_bytes));
  int exported = -1;
  const cuda::Result result =
      driver_->calls().export_to_shareable_handle(&exported, handle.get(), cuda::kHandlePosixFd, 0);
  if (result != cuda::kSuccess)
    throw driver_->error("cuMemExportToShareableHandle",
                         bytes_text(size_bytes) + " on " + device_.uuid, result);
  OwnFd fd(exported);
  if (::fcntl(fd.get(), F_SETFD, FD_CLOEXEC) != 0)
    throw SystemError("fcntl(fd " + std::to_string(fd.get()) + ", F_SETFD, FD_CLOEXEC)");
  return {std::move(fd), size_bytes};
}

Status CudaVmmProvider::check(int fd, int64_t size_bytes) const {
  const std::string fd_text = "fd " + std::to_string(fd);
  struct stat status {};
  if (::fstat(fd, &status) != 0)
    return {ErrorCode::kInvalidArgument, fd_text + ": " + std::generic_category().message(errno)};
  if (size_bytes <= 0 || size_bytes % granularity_bytes_ != 0)
    return {ErrorCode::kInvalidArgument, fd_text + " is stated to have " +
                                             std::to_string(size_bytes) +
                                             " bytes, which must be a positive multiple of " +
                                             std::to_string(granularity_bytes_)};
  cuda::MemoryHandle imported = 0;
  const cuda::Result result = import(*driver_, fd, imported);
  if (result != cuda::kSuccess)
    return {ErrorCode::kInvalidArgument,
            fd_text + " is no memory of a GPU: " +
                driver_->error("cuMemImportFromShareableHandle", fd_text, result).what()};
  const OwnHandle handle(*driver_, imported);
  return {};
}

std::unique_ptr<AddressRange> CudaVmmProvider::reserve(int64_t max_bytes) const {
  return std::make_unique<CudaRange>(driver_, device_, max_bytes, granularity_bytes_);
}

}  // namespace larder
