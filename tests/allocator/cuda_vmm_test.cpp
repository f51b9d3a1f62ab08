// What only memory of a GPU does: on a driver whose every call can be made to fail.
#include "allocator/cuda_vmm.h"

#include <fcntl.h>
#include <filesystem>
#include <functional>

#include <doctest/doctest.h>

#include "allocator/extent.h"
#include "tests/allocator/creator_process.h"
#include "tests/allocator/fake_driver.h"
#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using test::check_same;
using test::check_status;
using test::FakeDriver;
using enum ErrorCode;
constexpr int64_t kSize = kSegmentGranularityBytes;

int num_fds() {
  using std::filesystem::directory_iterator;
  const directory_iterator fds("/proc/self/fd");
  return static_cast<int>(std::distance(begin(fds), end(fds)));
}

// Makes `action` fail at its first, second, ... driver call, until it needs no more calls. Each
// time the exception must name the call, and nothing may be left. Some calls only give back, and
// cannot make the action fail; what they could not give back is all that may be left.
struct Injected {
  std::string failed;  // the call that the exception names; empty where the action succeeded
  FakeCudaBooks left;  // more than before
};
std::vector<Injected> inject(const FakeDriver& fake, const std::function<void()>& action) {
  std::vector<Injected> outcomes;
  while (true) {
    const FakeCudaBooks before = fake.books();
    const int fds = num_fds();
    fake.fail_at(static_cast<int>(outcomes.size()) + 1, cuda::kInvalidDevice);
    Injected outcome;
    try {
      action();
    } catch (const CudaError& error) {
      CHECK(error.code() == cuda::kInvalidDevice);
      CHECK(error.code_name() == "CUDA_ERROR_INVALID_DEVICE");
      CHECK_FALSE(error.is_out_of_memory());
      CHECK(std::string(error.what()).starts_with(error.function() + "("));
      outcome.failed = error.function();
    }
    const FakeCudaBooks after = fake.books();
    fake.fail_at(0);
    if (after.calls - before.calls < static_cast<int64_t>(outcomes.size()) + 1) return outcomes;
    outcome.left = {after.handles - before.handles, after.mappings - before.mappings,
                    after.reservations - before.reservations, 0, after.bytes - before.bytes};
    // A handle of the fake that was not released has an fd.
    CHECK(num_fds() - fds == outcome.left.handles);
    outcomes.push_back(outcome);
  }
}

TEST_CASE("creating fails at any driver call and leaves nothing behind") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const auto outcomes = inject(fake, [&] { (void)provider->create("larder-test", kSize); });
  REQUIRE(outcomes.size() == 3);
  CHECK(outcomes[0].failed == "cuMemCreate");
  check_same(outcomes[0].left, {});
  CHECK(outcomes[1].failed == "cuMemExportToShareableHandle");
  check_same(outcomes[1].left, {});
  // The last call gives our reference back: the segment is good, but the reference stays.
  CHECK(outcomes[2].failed == "");
  check_same(outcomes[2].left, {1, 0, 0, 0, kSize});
}

TEST_CASE("reserving and letting go fail at any driver call, and only the first one is told") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const auto outcomes = inject(fake, [&] { (void)provider->reserve(4 * kSize); });
  REQUIRE(outcomes.size() == 2);
  CHECK(outcomes[0].failed == "cuMemAddressReserve");
  check_same(outcomes[0].left, {});
  CHECK(outcomes[1].failed == "");  // cuMemAddressFree, in the destructor
  check_same(outcomes[1].left, {0, 0, 1, 0, 0});
}

TEST_CASE("mapping fails at any driver call, and the place is empty and can be mapped") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const Segment segment = provider->create("larder-test", kSize);
  const auto range = provider->reserve(2 * kSize);
  range->map_at(kSize, segment.fd.get(), kSize);
  range->base()[kSize] = std::byte{3};
  FakeCudaBooks before = fake.books();
  const char* const calls[] = {"cuMemImportFromShareableHandle", "cuMemMap", "cuMemSetAccess"};
  for (int k = 1; k <= 3; ++k) {
    const int fds = num_fds();
    fake.fail_at(k);
    try {
      range->map_at(0, segment.fd.get(), kSize);
      FAIL("no exception");
    } catch (const CudaError& error) {
      CHECK(error.function() == calls[k - 1]);
      CHECK(error.is_out_of_memory());
    }
    check_same(fake.books(), before);
    CHECK(num_fds() == fds);
    range->map_at(0, segment.fd.get(), kSize);
    CHECK(range->base()[0] == std::byte{3});
    range->unmap_at(0, kSize);
  }
  // The mapping is good, but the reference that it was made with stays.
  fake.fail_at(4);
  range->map_at(0, segment.fd.get(), kSize);
  ++before.handles;
  ++before.mappings;
  check_same(fake.books(), before);
  // Still mapped whole.
  fake.fail_at(1);
  CHECK_THROWS_AS(range->unmap_at(0, 2 * kSize), CudaError);
  CHECK(range->base()[0] == std::byte{3});
  CHECK(range->base()[kSize] == std::byte{3});
  range->unmap_at(0, 2 * kSize);
  before.mappings -= 2;
  check_same(fake.books(), before);
}

TEST_CASE("replacing fails at any driver call, and the place is as it was, or empty") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const Segment old = provider->create("old", kSize);
  const Segment fresh = provider->create("fresh", 2 * kSize);
  const auto range = provider->reserve(2 * kSize);
  const FakeCudaBooks before = fake.books();
  // Import, two unmaps, map, set access.
  const int mapped_after[] = {2, 2, 1, 0, 0};
  for (int k = 1; k <= 5; ++k) {
    CAPTURE(k);
    range->map_at(0, old.fd.get(), kSize);
    range->map_at(kSize, old.fd.get(), kSize);
    range->base()[0] = std::byte{1};
    fake.fail_at(k);
    CHECK_THROWS_AS(range->map_at(0, fresh.fd.get(), 2 * kSize), CudaError);
    const FakeCudaBooks after = fake.books();
    CHECK(after.handles == before.handles);
    CHECK(after.mappings == before.mappings + mapped_after[k - 1]);
    if (mapped_after[k - 1] >= 1) CHECK(range->base()[kSize] == std::byte{1});
  }
  range->map_at(0, fresh.fd.get(), 2 * kSize);
  range->base()[2 * kSize - 1] = std::byte{2};
  range->unmap_at(0, 2 * kSize);
  check_same(fake.books(), before);
}

TEST_CASE("what a lost GPU does not give back throws nothing more, and is given back later") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const Segment segment = provider->create("larder-test", kSize);
  FakeCudaBooks before = fake.books();
  {
    const auto range = provider->reserve(kSize);
    fake.fail_from(3, cuda::kNotPermitted);
    try {
      range->map_at(0, segment.fd.get(), kSize);
      FAIL("no exception");
    } catch (const CudaError& error) {
      CHECK(error.function() == "cuMemSetAccess");  // the first one, not what followed
    }
    fake.fail_at(0);
    // A mapping without access, and the reference that it was made with.
    ++before.handles;
    CHECK(fake.books().mappings == before.mappings + 1);
    range->map_at(0, segment.fd.get(), kSize);
    range->base()[0] = std::byte{1};
  }
  check_same(fake.books(), before);
  {
    const auto range = provider->reserve(kSize);
    range->map_at(0, segment.fd.get(), kSize);
    fake.fail_from(1, cuda::kNotPermitted);
  }
  CHECK(fake.books().mappings == before.mappings + 1);
  CHECK_THROWS_AS((void)provider->create("larder-test", kSize), CudaError);
  CHECK_THROWS_AS((void)provider->reserve(kSize), CudaError);
}

TEST_CASE("a range that goes unmaps, and then frees its addresses, whatever fails") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const Segment segment = provider->create("larder-test", kSize);
  const FakeCudaBooks before = fake.books();
  const auto range_with_two = [&] {
    auto range = provider->reserve(4 * kSize);
    range->map_at(0, segment.fd.get(), kSize);
    range->map_at(3 * kSize, segment.fd.get(), kSize);
    return range;
  };
  range_with_two().reset();
  check_same(fake.books(), before);
  // With a mapping that stays, the addresses stay as well: nobody else may get them.
  const FakeCudaBooks left[] = {{0, 1, 1, 0, 0}, {0, 1, 1, 0, 0}, {0, 0, 1, 0, 0}};
  FakeCudaBooks expected = before;
  for (int k = 1; k <= 3; ++k) {
    CAPTURE(k);
    auto range = range_with_two();
    fake.fail_at(k);
    CHECK_NOTHROW(range.reset());
    const FakeCudaBooks& more = left[k - 1];
    expected.mappings += more.mappings;
    expected.reservations += more.reservations;
    check_same(fake.books(), expected);
  }
}

TEST_CASE("a check fails without leaving a reference, and says that the driver refused") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const Segment segment = provider->create("larder-test", kSize);
  const FakeCudaBooks before = fake.books();
  CHECK(provider->check(segment.fd.get(), kSize).ok());
  check_same(fake.books(), before);
  fake.fail_at(1, cuda::kInvalidValue);
  check_status(provider->check(segment.fd.get(), kSize), kInvalidArgument,
               {"no memory of a GPU", "cuMemImportFromShareableHandle", "INVALID_VALUE"});
  check_same(fake.books(), before);
}

TEST_CASE("memory that is smaller than stated is found when it is mapped") {
  const FakeDriver fake;
  const auto provider = fake.open();
  const Segment segment = provider->create("larder-test", kSize);
  const auto range = provider->reserve(4 * kSize);
  const FakeCudaBooks before = fake.books();
  try {
    range->map_at(kSize, segment.fd.get(), 2 * kSize);
    FAIL("no exception");
  } catch (const CudaError& error) {
    const std::string text = error.what();
    INFO(text);
    CHECK(text.starts_with("cuMemMap(4194304 bytes at offset 2097152 of 8388608 on GPU-"));
  }
  check_same(fake.books(), before);
}

TEST_CASE("memory is taken until its last fd and mapping have gone") {
  const FakeDriver fake{{"MEMORY_MIB", "8"}};
  const auto provider = fake.open();
  const FakeCudaBooks before = fake.books();
  CHECK(before.bytes == 0);
  const auto range = provider->reserve(8 * kSize);
  {
    const Segment segment = provider->create("larder-test", 2 * kSize);
    CHECK(fake.books().handles == before.handles);  // the fd is all that there is
    range->map_at(0, segment.fd.get(), 2 * kSize);
  }
  CHECK(fake.books().bytes == 2 * kSize);
  const Segment rest = provider->create("rest", 2 * kSize);
  try {
    (void)provider->create("too much", kSize);
    FAIL("no exception");
  } catch (const CudaError& error) {
    CHECK(is_out_of_memory(error));
    CHECK(std::string(error.what()).find("cuMemCreate(2097152 bytes on GPU-") != std::string::npos);
  }
  range->unmap_at(0, 2 * kSize);
  CHECK(fake.books().bytes == 2 * kSize);
  CHECK(provider->create("now", 2 * kSize).fd.valid());
}

TEST_CASE("devices have memory of their own") {
  const FakeDriver fake{{"DEVICES", "2"}, {"MEMORY_MIB", "4"}};
  const auto driver = fake.load();
  REQUIRE(driver.ok());
  auto first = CudaVmmProvider::open(*driver, (*driver)->devices()[0].uuid);
  auto second = CudaVmmProvider::open(*driver, (*driver)->devices()[1].uuid);
  REQUIRE(first.ok());
  REQUIRE(second.ok());
  CHECK((*second)->device().ordinal == 1);
  const Segment all = (*first)->create("first", 2 * kSize);
  CHECK_THROWS_AS((void)(*first)->create("more", kSize), CudaError);
  const Segment other = (*second)->create("second", 2 * kSize);
  const auto range = (*second)->reserve(2 * kSize);
  range->map_at(0, other.fd.get(), 2 * kSize);
  // Memory of another device cannot be mapped for this one.
  const FakeCudaBooks before = fake.books();
  try {
    range->map_at(0, all.fd.get(), 2 * kSize);
    FAIL("no exception");
  } catch (const CudaError& error) {
    CHECK(error.function() == "cuMemSetAccess");
  }
  CHECK(fake.books().mappings == before.mappings - 1);
  CHECK(fake.books().handles == before.handles);
}

TEST_CASE("a device without what is needed is unsupported, by name") {
  {
    const FakeDriver fake{{"WITHOUT", "vmm"}};
    const auto driver = fake.load();
    REQUIRE(driver.ok());
    check_status(CudaVmmProvider::open(*driver, (*driver)->devices()[0].uuid).status(),
                 kUnsupported, {"Fake GPU 0", "virtual memory"});
    check_status(CudaVmmProvider::open(*driver, "GPU-0").status(), kInvalidArgument, {"GPU-0"});
  }
  {
    const FakeDriver fake{{"WITHOUT", "fds"}};
    const auto driver = fake.load();
    REQUIRE(driver.ok());
    check_status(CudaVmmProvider::open(*driver, (*driver)->devices()[0].uuid).status(),
                 kUnsupported, {"Fake GPU 0", "fds"});
  }
  const FakeDriver fake{{"GRANULARITY_KIB", "4096"}};
  const auto driver = fake.load();
  REQUIRE(driver.ok());
  check_status(CudaVmmProvider::open(*driver, (*driver)->devices()[0].uuid).status(), kUnsupported,
               {"4194304", "2097152"});
  const char* const calls[] = {"cuDeviceGetAttribute", "cuDeviceGetAttribute",
                               "cuMemGetAllocationGranularity"};
  for (int k = 1; k <= 3; ++k) {
    fake.fail_at(k, cuda::kInvalidValue);
    check_status(CudaVmmProvider::open(*driver, (*driver)->devices()[0].uuid).status(),
                 kUnavailable, {calls[k - 1], "CUDA_ERROR_INVALID_VALUE", "Fake GPU 0"});
  }
}

TEST_CASE("sizes and ranges follow a device's granularity") {
  const FakeDriver fake{{"GRANULARITY_KIB", "64"}};
  const auto provider = fake.open();
  CHECK(provider->granularity_bytes() == 65536);
  const Segment segment = provider->create("larder-test", 3 * 65536);
  const auto range = provider->reserve(4 * 65536 + 1);
  CHECK(range->max_bytes() == 5 * 65536);
  range->map_at(2 * 65536, segment.fd.get(), 3 * 65536);
  range->base()[5 * 65536 - 1] = std::byte{1};
}

TEST_CASE("memory of a killed process comes back late: who waits gets it, who does not is told") {
  const FakeDriver fake{{"MEMORY_MIB", "8"}, {"RECLAIM_MS", "60"}};
  const auto impatient = fake.open();
  const auto patient = fake.open({.reclaim_wait = std::chrono::seconds(60)});
  int64_t calls = 0;
  {
    test::CreatorProcess creator(test::FakeGpuMemory::kKind, 4 * kSize);
    REQUIRE(creator.fd().valid());
    CHECK(fake.books().bytes == 4 * kSize);
    creator.kill();
    CHECK(fake.books().bytes == 4 * kSize);  // our fd keeps it
    CHECK_THROWS_AS((void)impatient->create("larder-test", kSize), CudaError);
    calls = fake.books().calls;
  }
  // This is the call that finds the memory gone, from when on the driver takes its time.
  try {
    (void)impatient->create("larder-test", kSize);
    FAIL("no exception");
  } catch (const CudaError& error) {
    CHECK(error.is_out_of_memory());
  }
  CHECK(fake.books().calls == calls + 1);
  CHECK(patient->create("larder-test", 4 * kSize).fd.valid());
}

TEST_CASE("waiting for memory ends at its deadline, and other failures are not waited for") {
  const FakeDriver fake{{"MEMORY_MIB", "2"}};
  const auto provider = fake.open({.reclaim_wait = std::chrono::milliseconds(20)});
  const Segment all = provider->create("all", kSize);
  try {
    (void)provider->create("more", kSize);
    FAIL("no exception");
  } catch (const CudaError& error) {
    CHECK(error.is_out_of_memory());
  }
  const int64_t calls = fake.books().calls;
  fake.fail_at(1, cuda::kInvalidDevice);
  CHECK_THROWS_AS((void)provider->create("more", kSize), CudaError);
  CHECK(fake.books().calls == calls + 1);
}

}  // namespace
}  // namespace larder
