#include "allocator/mapped_range.h"

#include <cerrno>
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>
#include <utility>

#include <doctest/doctest.h>

#include "allocator/host_memory.h"
#include "larder/system_error.h"

namespace larder {
namespace {

constexpr int64_t kSize = int64_t{2} << 20;

bool is_mapped(const std::byte* address) {
  unsigned char resident;
  return ::mincore(const_cast<std::byte*>(address), 1, &resident) == 0;
}

TEST_CASE("segments are mapped back to back and the base stays") {
  const Segment first = create_host_segment("first", kSize);
  const Segment second = create_host_segment("second", 2 * kSize);
  MappedRange range = MappedRange::reserve(int64_t{1} << 40);
  std::byte* const base = range.base();
  CHECK(range.size_bytes() == 0);
  range.map(first.fd.get(), kSize, true);
  base[kSize - 1] = std::byte{1};
  range.map(second.fd.get(), 2 * kSize, true);
  base[kSize] = std::byte{2};
  base[3 * kSize - 1] = std::byte{3};
  CHECK(range.base() == base);
  CHECK(range.size_bytes() == 3 * kSize);

  MappedRange reader = MappedRange::reserve(3 * kSize);
  reader.map(first.fd.get(), kSize, false);
  reader.map(second.fd.get(), 2 * kSize, false);
  CHECK(reader.base()[kSize - 1] == std::byte{1});
  CHECK(reader.base()[kSize] == std::byte{2});
  CHECK(reader.base()[3 * kSize - 1] == std::byte{3});
}

TEST_CASE("a range that goes gives back its addresses, and moving keeps them") {
  const Segment segment = create_host_segment("segment", kSize);
  std::byte* base = nullptr;
  {
    MappedRange range = MappedRange::reserve(4 * kSize);
    range.map(segment.fd.get(), kSize, true);
    base = range.base();
    MappedRange moved(std::move(range));
    CHECK(range.base() == nullptr);  // NOLINT(bugprone-use-after-move): it must be empty
    MappedRange assigned;
    assigned = std::move(moved);
    CHECK(assigned.base() == base);
    CHECK(assigned.size_bytes() == kSize);
    CHECK(assigned.max_bytes() == 4 * kSize);
    CHECK(is_mapped(base));
  }
  CHECK(!is_mapped(base));
}

TEST_CASE("a segment that cannot be mapped changes nothing, and the next one can") {
  const Segment segment = create_host_segment("segment", kSize);
  const OwnFd sealed(::memfd_create("sealed", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(sealed.get(), kSize) == 0);
  REQUIRE(::fcntl(sealed.get(), F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_WRITE) == 0);
  MappedRange range = MappedRange::reserve(2 * kSize);
  range.map(segment.fd.get(), kSize, true);
  for (const int fd : {sealed.get(), -1}) {
    try {
      range.map(fd, kSize, true);
      FAIL("no exception");
    } catch (const SystemError& error) {
      CHECK(error.code().value() == (fd < 0 ? EBADF : EPERM));
    }
    CHECK(range.size_bytes() == kSize);
    CHECK(is_mapped(range.base() + kSize));  // still ours
  }
  range.map(segment.fd.get(), kSize, true);
  range.base()[0] = std::byte{7};
  CHECK(range.base()[kSize] == std::byte{7});
}

// Unlike a read, write(2) says EFAULT.
bool is_readable(const std::byte* address) {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const bool readable = ::write(ends[1], address, 1) == 1;
  CHECK((readable || errno == EFAULT));
  ::close(ends[0]);
  ::close(ends[1]);
  return readable;
}

TEST_CASE("a segment can be mapped at its place, unmapped, and mapped there again") {
  const Segment segment = create_host_segment("segment", kSize);
  MappedRange range = MappedRange::reserve(4 * kSize);
  std::byte* const base = range.base();
  range.map_at(2 * kSize, segment.fd.get(), kSize, true);
  base[2 * kSize] = std::byte{5};
  CHECK(range.size_bytes() == 0);
  CHECK_FALSE(is_readable(base + 2 * kSize - 1));
  CHECK(is_readable(base + 3 * kSize - 1));
  CHECK_FALSE(is_readable(base + 3 * kSize));

  range.unmap_at(2 * kSize, kSize);
  CHECK_FALSE(is_readable(base + 2 * kSize));
  CHECK(is_mapped(base + 2 * kSize));  // the addresses are still ours
  range.unmap_at(2 * kSize, kSize);    // twice does no harm

  range.map_at(2 * kSize, segment.fd.get(), kSize, true);
  CHECK(base[2 * kSize] == std::byte{5});
  // The last place of the range, and one that was mapped before.
  range.map_at(3 * kSize, segment.fd.get(), kSize, true);
  range.map_at(2 * kSize, segment.fd.get(), kSize, false);
  CHECK(base[3 * kSize] == std::byte{5});
  CHECK_THROWS_AS(range.map_at(3 * kSize, -1, kSize, true), SystemError);
  CHECK(is_mapped(base + 3 * kSize));
}

TEST_CASE("a shared mapping is one fd, mapped whole, until it goes") {
  const Segment segment = create_host_segment("segment", 4096);
  const std::byte* address = nullptr;
  {
    SharedMapping writer = SharedMapping::map(segment.fd.get(), 4096, true);
    writer.data()[5] = std::byte{9};
    const SharedMapping reader = SharedMapping::map(segment.fd.get(), 4096, false);
    CHECK(reader.data()[5] == std::byte{9});
    const SharedMapping moved(std::move(writer));
    CHECK(writer.data() == nullptr);  // NOLINT(bugprone-use-after-move): it must be empty
    CHECK(moved.size_bytes() == 4096);
    address = moved.data();
    CHECK(is_mapped(address));
  }
  CHECK(!is_mapped(address));
  CHECK_THROWS_AS(SharedMapping::map(-1, 4096, true), SystemError);
  CHECK_THROWS_AS(MappedRange::reserve(int64_t{1} << 60), SystemError);
}

}  // namespace
}  // namespace larder
