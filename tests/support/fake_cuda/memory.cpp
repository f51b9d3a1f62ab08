// The entry points of virtual memory management.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <fcntl.h>
#include <iterator>
#include <limits>
#include <sys/mman.h>
#include <unistd.h>

#include "tests/support/fake_cuda/state.h"

namespace fake_cuda {

using namespace larder::cuda;

namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

// NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are numbers
void* pointer(Address address) { return reinterpret_cast<void*>(address); }

bool valid_location(const State& state, const MemoryLocation& location) {
  return location.type == kLocationDevice && state.config->has_device(location.id);
}

// A positive multiple of the granularity that fits into an int64_t.
bool valid_size(const State& state, size_t size_bytes) {
  return size_bytes > 0 && state.aligned(size_bytes) &&
         size_bytes <= static_cast<size_t>(std::numeric_limits<int64_t>::max() / 2);
}

std::optional<Result> refuse_properties(const State& state,
                                        const AllocationProperties* properties) {
  if (properties == nullptr || properties->type != kAllocationPinned ||
      (properties->requested_handle_types & ~kHandlePosixFd) != 0 ||
      properties->win32_meta_data != nullptr)
    return kInvalidValue;
  if (!valid_location(state, properties->location)) return kInvalidDevice;
  return std::nullopt;
}

bool in_one_reservation(const State& state, Address address, size_t size_bytes) {
  auto after = state.reservations.upper_bound(address);
  if (after == state.reservations.begin()) return false;
  const auto& [start, reserved] = *std::prev(after);
  const auto size = static_cast<Address>(reserved);
  return address - start <= size && size_bytes <= size - (address - start);
}

bool overlaps_mapping(const State& state, Address address, size_t size_bytes) {
  auto next = state.mappings.lower_bound(address);
  if (next != state.mappings.end() && next->first < address + size_bytes) return true;
  if (next == state.mappings.begin()) return false;
  const auto& [start, mapping] = *std::prev(next);
  return start + static_cast<Address>(mapping.size_bytes) > address;
}

MemoryHandle new_handle(State& state, int fd, const Memory& memory) {
  const MemoryHandle handle = state.next_handle++;
  state.handles.emplace(handle, Handle{fd, memory});
  return handle;
}

}  // namespace

extern "C" {

Result cuMemGetAllocationGranularity(size_t* bytes, const AllocationProperties* properties,
                                     int option) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  if (const auto refused = refuse_properties(driver, properties)) return *refused;
  if (bytes == nullptr || option < 0 || option > 1) return kInvalidValue;
  *bytes = static_cast<size_t>(driver.config->granularity_bytes);
  return kSuccess;
}

Result cuMemCreate(MemoryHandle* handle, size_t size_bytes, const AllocationProperties* properties,
                   unsigned long long flags) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  if (const auto refused = refuse_properties(driver, properties)) return *refused;
  if (handle == nullptr || flags != 0 || !valid_size(driver, size_bytes)) return kInvalidValue;
  const int fd =
      driver.books().take(properties->location.id, static_cast<int64_t>(size_bytes),
                          properties->requested_handle_types != 0, driver.config->memory_bytes);
  if (fd < 0) return kOutOfMemory;
  *handle = new_handle(driver, fd, driver.books().find(fd).value());
  return kSuccess;
}

Result cuMemRelease(MemoryHandle handle) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  const auto found = driver.handles.find(handle);
  if (found == driver.handles.end()) return kInvalidValue;
  ::close(found->second.fd);
  driver.handles.erase(found);
  return kSuccess;
}

Result cuMemExportToShareableHandle(void* shareable, MemoryHandle handle, int handle_type,
                                    unsigned long long flags) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  const auto found = driver.handles.find(handle);
  if (shareable == nullptr || flags != 0 || handle_type != kHandlePosixFd ||
      found == driver.handles.end() || found->second.memory.exportable == 0)
    return kInvalidValue;
  // An fd that an exec inherits, as the driver's may be: whoever does not want that has to say so.
  const int fd = ::dup(found->second.fd);
  if (fd < 0) return kOutOfMemory;
  *static_cast<int*>(shareable) = fd;
  return kSuccess;
}

Result cuMemImportFromShareableHandle(MemoryHandle* handle, void* shareable, int handle_type) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  if (handle == nullptr || handle_type != kHandlePosixFd) return kInvalidValue;
  const int fd = static_cast<int>(reinterpret_cast<intptr_t>(shareable));
  const std::optional<Memory> memory = driver.books().find(fd);
  if (!memory || !driver.config->has_device(memory->device)) return kInvalidValue;
  const int own = ::fcntl(fd, F_DUPFD_CLOEXEC, 0);
  if (own < 0) return kOutOfMemory;
  *handle = new_handle(driver, own, *memory);
  return kSuccess;
}

Result cuMemAddressReserve(Address* address, size_t size_bytes, size_t alignment_bytes,
                           Address hint, unsigned long long flags) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  const auto granularity = static_cast<size_t>(driver.config->granularity_bytes);
  const bool power_of_two = (alignment_bytes & (alignment_bytes - 1)) == 0;
  if (address == nullptr || flags != 0 || !valid_size(driver, size_bytes) || !power_of_two ||
      !driver.aligned(hint))
    return kInvalidValue;
  const size_t alignment = alignment_bytes > granularity ? alignment_bytes : granularity;
  // More than wanted, so that an aligned part can be kept.
  void* const taken = ::mmap(nullptr, size_bytes + alignment, PROT_NONE, kReserved, -1, 0);
  if (taken == MAP_FAILED) return kOutOfMemory;
  const auto start = reinterpret_cast<Address>(taken);
  const Address aligned = (start + alignment - 1) / alignment * alignment;
  if (aligned > start) ::munmap(taken, aligned - start);
  const Address end = start + size_bytes + alignment;
  if (end > aligned + size_bytes)
    ::munmap(pointer(aligned + size_bytes), end - aligned - size_bytes);
  driver.reservations[aligned] = static_cast<int64_t>(size_bytes);
  *address = aligned;
  return kSuccess;
}

Result cuMemAddressFree(Address address, size_t size_bytes) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  const auto found = driver.reservations.find(address);
  if (found == driver.reservations.end() || found->second != static_cast<int64_t>(size_bytes) ||
      overlaps_mapping(driver, address, size_bytes))
    return kInvalidValue;
  ::munmap(pointer(address), size_bytes);
  driver.reservations.erase(found);
  return kSuccess;
}

Result cuMemMap(Address address, size_t size_bytes, size_t offset_bytes, MemoryHandle handle,
                unsigned long long flags) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  const auto found = driver.handles.find(handle);
  if (found == driver.handles.end() || flags != 0 || offset_bytes != 0 ||
      !valid_size(driver, size_bytes) || !driver.aligned(address) ||
      static_cast<int64_t>(size_bytes) > found->second.memory.size_bytes ||
      !in_one_reservation(driver, address, size_bytes) ||
      overlaps_mapping(driver, address, size_bytes))
    return kInvalidValue;
  if (::mmap(pointer(address), size_bytes, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd,
             0) == MAP_FAILED)
    return kOutOfMemory;
  driver.mappings[address] = {static_cast<int64_t>(size_bytes), found->second.memory.device};
  return kSuccess;
}

Result cuMemUnmap(Address address, size_t size_bytes) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  const auto found = driver.mappings.find(address);
  if (found == driver.mappings.end() ||
      found->second.size_bytes != static_cast<int64_t>(size_bytes))
    return kInvalidValue;
  if (::mmap(pointer(address), size_bytes, PROT_NONE, kReserved | MAP_FIXED, -1, 0) == MAP_FAILED) {
    // The addresses would be anybody's: no test goes on from there.
    std::perror("fake_cuda: cuMemUnmap");
    std::abort();
  }
  driver.mappings.erase(found);
  return kSuccess;
}

Result cuMemSetAccess(Address address, size_t size_bytes, const AccessDescription* descriptions,
                      size_t count) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  if (descriptions == nullptr || count != 1 || !valid_size(driver, size_bytes))
    return kInvalidValue;
  if (!valid_location(driver, descriptions->location)) return kInvalidDevice;
  const int flags = descriptions->flags;
  if (flags != 0 && flags != 1 && flags != kAccessReadWrite) return kInvalidValue;
  // Whole mappings, one after the other, and their device: there is no access between devices.
  for (Address next = address; next < address + size_bytes;) {
    const auto found = driver.mappings.find(next);
    if (found == driver.mappings.end()) return kInvalidValue;
    if (found->second.device != descriptions->location.id) return kInvalidDevice;
    next += static_cast<Address>(found->second.size_bytes);
    if (next > address + size_bytes) return kInvalidValue;
  }
  const int protection = (flags != 0 ? PROT_READ : PROT_NONE) | (flags == 3 ? PROT_WRITE : 0);
  return ::mprotect(pointer(address), size_bytes, protection) == 0 ? kSuccess : kOutOfMemory;
}

}  // extern "C"

}  // namespace fake_cuda
