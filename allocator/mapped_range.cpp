#include "allocator/mapped_range.h"

#include <cerrno>
#include <string>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include "larder/check.h"
#include "larder/system_error.h"

namespace larder {
namespace {

constexpr int kReserved = MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE;

int protection(bool writable) { return writable ? PROT_READ | PROT_WRITE : PROT_READ; }

std::string mmap_text(int fd, int64_t size_bytes, bool writable) {
  return "mmap(fd " + std::to_string(fd) + ", " + std::to_string(size_bytes) + " bytes, " +
         (writable ? "read-write" : "read-only") + ")";
}

// Fails for addresses that were not mapped by us alone, which would be a bug.
void unmap(std::byte* data, int64_t size_bytes) {
  if (data == nullptr) return;
  const int failed = ::munmap(data, static_cast<size_t>(size_bytes));
  LARDER_CHECK(failed == 0, errno, size_bytes);
}

}  // namespace

SharedMapping SharedMapping::map(int fd, int64_t size_bytes, bool writable) {
  LARDER_CHECK(size_bytes > 0, size_bytes);
  void* const data =
      ::mmap(nullptr, static_cast<size_t>(size_bytes), protection(writable), MAP_SHARED, fd, 0);
  if (data == MAP_FAILED) throw SystemError(mmap_text(fd, size_bytes, writable));
  return {static_cast<std::byte*>(data), size_bytes};
}

SharedMapping::SharedMapping(SharedMapping&& other) noexcept
    : data_(std::exchange(other.data_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)) {}

SharedMapping& SharedMapping::operator=(SharedMapping&& other) noexcept {
  std::swap(data_, other.data_);
  std::swap(size_bytes_, other.size_bytes_);
  return *this;
}

SharedMapping::~SharedMapping() { unmap(data_, size_bytes_); }

MappedRange MappedRange::reserve(int64_t max_bytes) {
  LARDER_CHECK(max_bytes > 0, max_bytes);
  void* const base = ::mmap(nullptr, static_cast<size_t>(max_bytes), PROT_NONE, kReserved, -1, 0);
  if (base == MAP_FAILED)
    throw SystemError("mmap(" + std::to_string(max_bytes) + " bytes of address space)");
  MappedRange range;
  range.base_ = static_cast<std::byte*>(base);
  range.max_bytes_ = max_bytes;
  return range;
}

MappedRange::MappedRange(MappedRange&& other) noexcept
    : base_(std::exchange(other.base_, nullptr)),
      size_bytes_(std::exchange(other.size_bytes_, 0)),
      max_bytes_(std::exchange(other.max_bytes_, 0)) {}

MappedRange& MappedRange::operator=(MappedRange&& other) noexcept {
  std::swap(base_, other.base_);
  std::swap(size_bytes_, other.size_bytes_);
  std::swap(max_bytes_, other.max_bytes_);
  return *this;
}

MappedRange::~MappedRange() { unmap(base_, max_bytes_); }

void MappedRange::map(int fd, int64_t size_bytes, bool writable) {
  LARDER_CHECK(size_bytes > 0 && size_bytes % ::sysconf(_SC_PAGESIZE) == 0, size_bytes);
  LARDER_CHECK(size_bytes <= max_bytes_ - size_bytes_, size_bytes, size_bytes_, max_bytes_);
  std::byte* const address = base_ + size_bytes_;
  const auto size = static_cast<size_t>(size_bytes);
  if (::mmap(address, size, protection(writable), MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    // A failed MAP_FIXED may have unmapped the place, and the hole would be anybody's.
    void* const restored = ::mmap(address, size, PROT_NONE, kReserved | MAP_FIXED_NOREPLACE, -1, 0);
    LARDER_CHECK(restored != MAP_FAILED || errno == EEXIST, errno, size_bytes);
    throw SystemError(mmap_text(fd, size_bytes, writable), error);
  }
  size_bytes_ += size_bytes;
}

}  // namespace larder
