#include "allocator/host_memory.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <system_error>
#include <unistd.h>

#include "allocator/mapped_range.h"
#include "allocator/segment_places.h"
#include "larder/check.h"
#include "larder/system_error.h"

namespace larder {
namespace {

class HostRange final : public AddressRange {
 public:
  HostRange(int64_t max_bytes, int64_t granularity_bytes)
      : places_(max_bytes, granularity_bytes), range_(MappedRange::reserve(places_.max_bytes())) {}

  std::byte* base() const override { return range_.base(); }
  int64_t max_bytes() const override { return range_.max_bytes(); }

  void map_at(int64_t offset_bytes, int fd, int64_t size_bytes) override {
    const auto replaced = places_.within(offset_bytes, size_bytes);
    range_.map_at(offset_bytes, fd, size_bytes, true);
    for (const SegmentPlaces::Place& place : replaced) places_.remove(place.offset_bytes);
    places_.add(offset_bytes, size_bytes);
  }
  void unmap_at(int64_t offset_bytes, int64_t size_bytes) override {
    const auto unmapped = places_.within(offset_bytes, size_bytes);
    range_.unmap_at(offset_bytes, size_bytes);
    for (const SegmentPlaces::Place& place : unmapped) places_.remove(place.offset_bytes);
  }

 private:
  SegmentPlaces places_;
  MappedRange range_;
};

}  // namespace

Segment create_host_segment(const std::string& name, int64_t size_bytes) {
  LARDER_CHECK(size_bytes > 0, size_bytes);
  OwnFd fd(::memfd_create(name.c_str(), MFD_CLOEXEC | MFD_ALLOW_SEALING));
  if (!fd.valid())
    throw SystemError("memfd_create(\"" + name + "\") for " + std::to_string(size_bytes) +
                      " bytes");
  if (::ftruncate(fd.get(), size_bytes) != 0)
    throw SystemError("ftruncate(memfd \"" + name + "\", " + std::to_string(size_bytes) +
                      " bytes)");
  if (::fcntl(fd.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) != 0)
    throw SystemError("fcntl(memfd \"" + name + "\", F_ADD_SEALS)");
  return {std::move(fd), size_bytes};
}

Status check_host_segment(int fd, int64_t size_bytes) {
  struct stat status {};
  if (::fstat(fd, &status) != 0)
    return {ErrorCode::kInvalidArgument,
            "fd " + std::to_string(fd) + ": " + std::generic_category().message(errno)};
  // Only memfds and files of shmem have seals: everything else answers EINVAL.
  const int seals = S_ISREG(status.st_mode) ? ::fcntl(fd, F_GET_SEALS) : -1;
  if (seals < 0) return {ErrorCode::kInvalidArgument, "fd " + std::to_string(fd) + " is no memfd"};
  if ((seals & F_SEAL_SHRINK) == 0)
    return {ErrorCode::kInvalidArgument, "fd " + std::to_string(fd) + " has seals " +
                                             std::to_string(seals) + ", but needs F_SEAL_SHRINK (" +
                                             std::to_string(F_SEAL_SHRINK) + ")"};
  if (size_bytes <= 0 || status.st_size != size_bytes)
    return {ErrorCode::kInvalidArgument, "fd " + std::to_string(fd) + " has " +
                                             std::to_string(status.st_size) + " bytes, but " +
                                             std::to_string(size_bytes) + " are stated"};
  return {};
}

int64_t HostMemoryProvider::granularity_bytes() const { return ::sysconf(_SC_PAGESIZE); }

Segment HostMemoryProvider::create(const std::string& name, int64_t size_bytes) const {
  LARDER_CHECK(size_bytes % granularity_bytes() == 0, size_bytes);
  return create_host_segment(name, size_bytes);
}

Status HostMemoryProvider::check(int fd, int64_t size_bytes) const {
  return check_host_segment(fd, size_bytes);
}

std::unique_ptr<AddressRange> HostMemoryProvider::reserve(int64_t max_bytes) const {
  return std::make_unique<HostRange>(max_bytes, granularity_bytes());
}

}  // namespace larder
