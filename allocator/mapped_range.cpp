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

// A failed MAP_FIXED may have unmapped the place, and the hole would be anybody's. False where the
// old mapping is still there.
bool fill_hole(std::byte* address, size_t size) {
  void* const filled = ::mmap(address, size, PROT_NONE, kReserved | MAP_FIXED_NOREPLACE, -1, 0);
  LARDER_CHECK(filled != MAP_FAILED || errno == EEXIST, errno, size);
  return filled != MAP_FAILED;
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

std::byte* MappedRange::place(int64_t offset_bytes, int64_t size_bytes) const {
  const int64_t page_bytes = ::sysconf(_SC_PAGESIZE);
  LARDER_CHECK(size_bytes > 0 && size_bytes % page_bytes == 0, size_bytes);
  LARDER_CHECK(offset_bytes >= 0 && offset_bytes % page_bytes == 0, offset_bytes);
  LARDER_CHECK(offset_bytes <= max_bytes_ && size_bytes <= max_bytes_ - offset_bytes, size_bytes,
               offset_bytes, max_bytes_);
  return base_ + offset_bytes;
}

void MappedRange::map(int fd, int64_t size_bytes, bool writable) {
  map_at(size_bytes_, fd, size_bytes, writable);
  size_bytes_ += size_bytes;
}

void MappedRange::unmap_at(int64_t offset_bytes, int64_t size_bytes) {
  std::byte* const address = place(offset_bytes, size_bytes);
  const auto size = static_cast<size_t>(size_bytes);
  // Replaced in one step: no moment at which the addresses could become somebody else's.
  if (::mmap(address, size, PROT_NONE, kReserved | MAP_FIXED, -1, 0) != MAP_FAILED) return;
  const int error = errno;
  if (!fill_hole(address, size))
    throw SystemError("mmap(" + std::to_string(size_bytes) + " bytes of address space)", error);
}

void MappedRange::map_at(int64_t offset_bytes, int fd, int64_t size_bytes, bool writable) {
  std::byte* const address = place(offset_bytes, size_bytes);
  const auto size = static_cast<size_t>(size_bytes);
  if (::mmap(address, size, protection(writable), MAP_SHARED | MAP_FIXED, fd, 0) == MAP_FAILED) {
    const int error = errno;
    (void)fill_hole(address, size);
    throw SystemError(mmap_text(fd, size_bytes, writable), error);
  }
}

}  // namespace larder
