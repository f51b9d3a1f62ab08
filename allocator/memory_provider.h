// MemoryProvider: one kind of memory that blocks can lie in. It makes segments, checks those that
// others sent, and reserves the addresses that they are mapped at. What the bytes mean, who may
// have them and how fds travel is not known here.
//
// Providers: host memory (allocator/host_memory.h), memory of a GPU (allocator/cuda_vmm.h).
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>

#include "allocator/segment.h"
#include "larder/status.h"

namespace larder {

// Addresses for a group's maximum, at which its segments are mapped. The base never changes, and
// the addresses stay ours until the destructor, which unmaps all segments, gives the addresses back
// and lets go of what it had of the memory, in this order; it never throws. One thread at a time.
//
// Offsets and sizes are multiples of the provider's granularity and lie in the range; no place cuts
// through a segment that is mapped. Anything else is a bug of the caller and aborts.
class AddressRange {
 public:
  AddressRange() = default;
  AddressRange(const AddressRange&) = delete;
  AddressRange& operator=(const AddressRange&) = delete;
  virtual ~AddressRange() = default;

  // An address of this process; of a GPU it is a device address, which the CPU must not touch.
  virtual std::byte* base() const = 0;
  virtual int64_t max_bytes() const = 0;  // what was asked for, rounded up to the granularity

  // Maps a segment for reading and writing. What was mapped at the place is replaced. The fd may be
  // closed afterwards. Throws, and then the place is as it was, or empty, and the rest of the range
  // is as it was.
  virtual void map_at(int64_t offset_bytes, int fd, int64_t size_bytes) = 0;
  // From then on an access there faults, until something is mapped there again; a place where
  // nothing is mapped stays so. Throws, and then a segment is still mapped whole or not at all.
  virtual void unmap_at(int64_t offset_bytes, int64_t size_bytes) = 0;
};

// All functions may be called from any thread. What the environment refuses is thrown: SystemError
// by host memory, CudaError (allocator/cuda_error.h) or SystemError by memory of a GPU.
class MemoryProvider {
 public:
  MemoryProvider() = default;
  MemoryProvider(const MemoryProvider&) = delete;
  MemoryProvider& operator=(const MemoryProvider&) = delete;
  virtual ~MemoryProvider() = default;

  virtual std::string_view name() const = 0;      // "host_memfd", "cuda_vmm"
  virtual int64_t granularity_bytes() const = 0;  // sizes and offsets are multiples of it

  // Zeroed or not as the provider says; `name` is for whoever looks for the memory's owner, and is
  // dropped where nothing shows it. `size_bytes` is a positive multiple of the granularity. The fd
  // is close-on-exec, and is all that keeps the memory: the bytes stay as long as some process has
  // it or a mapping. Throws and leaves nothing behind; is_out_of_memory() tells whether the reason
  // was that there is no memory left.
  virtual Segment create(const std::string& name, int64_t size_bytes) const = 0;

  // Whether a received fd is what its sender says, as far as the provider can tell before it maps
  // it. INVALID_ARGUMENT names what is wrong and the numbers.
  virtual Status check(int fd, int64_t size_bytes) const = 0;

  // Takes addresses but no memory. Throws. The range may outlive the provider.
  virtual std::unique_ptr<AddressRange> reserve(int64_t max_bytes) const = 0;
};

// Of what create() and map_at() throw: there is no memory left, and there may be some later.
bool is_out_of_memory(const std::runtime_error& error);

}  // namespace larder
