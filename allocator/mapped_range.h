// Mappings of shared memory fds into this process.
//
// Nothing here checks what an fd is: one that came from another process has passed
// check_host_segment first, or the mapping may fault later.
#pragma once

#include <cstddef>
#include <cstdint>

namespace larder {

// One fd, mapped whole. Move-only; unmapped by the destructor.
class SharedMapping {
 public:
  SharedMapping() = default;
  // The fd may be closed afterwards. Throws SystemError.
  static SharedMapping map(int fd, int64_t size_bytes, bool writable);
  SharedMapping(SharedMapping&& other) noexcept;
  SharedMapping& operator=(SharedMapping&& other) noexcept;
  ~SharedMapping();

  std::byte* data() const { return data_; }  // nullptr when empty; writes fault if not writable
  int64_t size_bytes() const { return size_bytes_; }

 private:
  SharedMapping(std::byte* data, int64_t size_bytes) : data_(data), size_bytes_(size_bytes) {}

  std::byte* data_ = nullptr;
  int64_t size_bytes_ = 0;
};

// Address space for a group's maximum, into which its segments are mapped: back to back as they
// come, or each at its place. The base never changes, and the addresses stay ours until the
// destructor, which unmaps everything and gives them back, in this order. Move-only.
class MappedRange {
 public:
  MappedRange() = default;
  // Takes addresses but no memory. Throws SystemError.
  static MappedRange reserve(int64_t max_bytes);
  MappedRange(MappedRange&& other) noexcept;
  MappedRange& operator=(MappedRange&& other) noexcept;
  ~MappedRange();

  // Appends a segment: a multiple of the page size, within what is left of the range. The fd may be
  // closed afterwards. Throws SystemError, and then nothing has changed.
  void map(int fd, int64_t size_bytes, bool writable);
  // The same at an offset, a multiple of the page size; what was mapped there is replaced, and what
  // map() appends next is not moved by it. Throws SystemError, and then the place is as it was, or
  // empty.
  void map_at(int64_t offset_bytes, int fd, int64_t size_bytes, bool writable);
  // From then on an access there faults, until something is mapped there again. Throws SystemError,
  // and then nothing has changed.
  void unmap_at(int64_t offset_bytes, int64_t size_bytes);

  std::byte* base() const { return base_; }
  int64_t size_bytes() const { return size_bytes_; }  // appended by map() so far
  int64_t max_bytes() const { return max_bytes_; }

 private:
  std::byte* place(int64_t offset_bytes, int64_t size_bytes) const;

  std::byte* base_ = nullptr;
  int64_t size_bytes_ = 0;
  int64_t max_bytes_ = 0;
};

}  // namespace larder
