// What only host memory does. What it does as every provider: memory_provider_test.cpp.
#include "allocator/host_memory.h"

#include <algorithm>
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>

#include <doctest/doctest.h>

#include "allocator/mapped_range.h"
#include "larder/system_error.h"
#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using test::check_status;
using enum ErrorCode;
constexpr int64_t kSize = kSegmentGranularityBytes;

TEST_CASE("a host segment starts zeroed") {
  const Segment segment = create_host_segment("larder-test", kSize);
  const auto mapping = SharedMapping::map(segment.fd.get(), kSize, false);
  CHECK(std::all_of(mapping.data(), mapping.data() + kSize,
                    [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_CASE("an fd of another size is refused, with both sizes") {
  const Segment segment = create_host_segment("larder-test", kSize);
  check_status(check_host_segment(segment.fd.get(), kSize + 1), kInvalidArgument,
               {"2097152", "2097153"});
  check_status(check_host_segment(segment.fd.get(), 0), kInvalidArgument, {"2097152", "0"});
}

TEST_CASE("a host segment can neither shrink, grow nor be unsealed") {
  const Segment segment = create_host_segment("larder-test", kSize);
  CHECK(::ftruncate(segment.fd.get(), kSize - 1) != 0);
  CHECK(::ftruncate(segment.fd.get(), kSize + 1) != 0);
  CHECK(::fcntl(segment.fd.get(), F_ADD_SEALS, F_SEAL_WRITE) != 0);
}

TEST_CASE("an fd that its sender could shrink is refused") {
  const OwnFd unsealed(::memfd_create("larder-test", MFD_CLOEXEC | MFD_ALLOW_SEALING));
  REQUIRE(::ftruncate(unsealed.get(), kSize) == 0);
  check_status(check_host_segment(unsealed.get(), kSize), kInvalidArgument,
               {"seals 0", "F_SEAL_SHRINK"});
  REQUIRE(::fcntl(unsealed.get(), F_ADD_SEALS, F_SEAL_SHRINK) == 0);
  CHECK(check_host_segment(unsealed.get(), kSize).ok());
}

TEST_CASE("a segment that the system cannot make is an error with the call and the size") {
  try {
    create_host_segment(std::string(300, 'x'), kSize);  // names have at most 249 bytes
    FAIL("no exception");
  } catch (const SystemError& error) {
    const std::string text = error.what();
    INFO(text);
    CHECK(text.find("memfd_create") != std::string::npos);
    CHECK(text.find("2097152 bytes") != std::string::npos);
  }
}

}  // namespace
}  // namespace larder
