// Host memory as segments: memfds that are sealed, so that nobody who gets the fd can make a
// mapping of somebody else fault by changing the size.
#pragma once

#include <cstdint>
#include <string>

#include "allocator/memory_provider.h"
#include "allocator/segment.h"
#include "larder/status.h"

namespace larder {

// Zeroed memory; pages are taken from the system when they are first touched. `name` is what
// /proc shows. Throws SystemError.
Segment create_host_segment(const std::string& name, int64_t size_bytes);

// Whether a received fd is what its sender says: host memory of exactly this size that cannot
// shrink. INVALID_ARGUMENT names what is wrong and the numbers.
Status check_host_segment(int fd, int64_t size_bytes);

// The two as a provider, for memory that blocks lie in. The granularity is the page size, and
// segments start zeroed.
class HostMemoryProvider final : public MemoryProvider {
 public:
  std::string_view name() const override { return "host_memfd"; }
  int64_t granularity_bytes() const override;
  Segment create(const std::string& name, int64_t size_bytes) const override;
  Status check(int fd, int64_t size_bytes) const override;
  std::unique_ptr<AddressRange> reserve(int64_t max_bytes) const override;
};

}  // namespace larder
