// The rules that the fake driver holds its callers to, called directly.
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "allocator/extent.h"
#include "tests/allocator/address_probes.h"
#include "tests/allocator/fake_driver.h"

namespace larder {
namespace {

using namespace cuda;
using test::FakeDriver;
constexpr auto kSize = static_cast<size_t>(kSegmentGranularityBytes);

bool cpu_can_read(Address address) {
  // NOLINTNEXTLINE(performance-no-int-to-ptr): the driver's addresses are numbers
  return test::cpu_can_read(reinterpret_cast<const std::byte*>(address));
}

// One allocation, its fd and a reservation of four times its size.
struct Scene {
  Scene() {
    const auto loaded = fake.load();
    REQUIRE(loaded.ok());
    driver = *loaded;
    const AllocationProperties properties;
    REQUIRE(calls().create(&handle, kSize, &properties, 0) == kSuccess);
    int exported = -1;
    REQUIRE(calls().export_to_shareable_handle(&exported, handle, kHandlePosixFd, 0) == kSuccess);
    fd = OwnFd(exported);
    REQUIRE(calls().address_reserve(&base, 4 * kSize, 0, 0, 0) == kSuccess);
  }
  // A test leaves all that it has made, as one process has all the fake's cases.
  ~Scene() {
    (void)calls().unmap(base, kSize);
    (void)calls().address_free(base, 4 * kSize);
    (void)calls().release(handle);
  }
  const EntryPoints& calls() const { return driver->calls(); }

  FakeDriver fake;
  std::shared_ptr<const CudaDriver> driver;
  MemoryHandle handle = 0;
  OwnFd fd;
  Address base = 0;
};

TEST_CASE("the fake maps only what is aligned, reserved, free and not larger than the memory") {
  const Scene scene;
  const EntryPoints& calls = scene.calls();
  CHECK(scene.base % kSize == 0);
  CHECK(calls.map(scene.base + 4096, kSize, 0, scene.handle, 0) == kInvalidValue);
  CHECK(calls.map(scene.base, 4096, 0, scene.handle, 0) == kInvalidValue);
  CHECK(calls.map(scene.base, 0, 0, scene.handle, 0) == kInvalidValue);
  CHECK(calls.map(scene.base, 2 * kSize, 0, scene.handle, 0) == kInvalidValue);
  CHECK(calls.map(scene.base, kSize, kSize, scene.handle, 0) == kInvalidValue);
  CHECK(calls.map(scene.base, kSize, 0, scene.handle + 1, 0) == kInvalidValue);
  CHECK(calls.map(scene.base + 4 * kSize, kSize, 0, scene.handle, 0) == kInvalidValue);
  CHECK(calls.map(scene.base - kSize, kSize, 0, scene.handle, 0) == kInvalidValue);
  CHECK(calls.map(scene.base, kSize, 0, scene.handle, 0) == kSuccess);
  CHECK(calls.map(scene.base, kSize, 0, scene.handle, 0) == kInvalidValue);
}

TEST_CASE("the fake lets nobody access a mapping before it is told so, nor after it is gone") {
  const Scene scene;
  const EntryPoints& calls = scene.calls();
  const AccessDescription access;
  CHECK(calls.set_access(scene.base, kSize, &access, 1) == kInvalidValue);
  REQUIRE(calls.map(scene.base, kSize, 0, scene.handle, 0) == kSuccess);
  CHECK_FALSE(cpu_can_read(scene.base));
  CHECK(calls.set_access(scene.base, 2 * kSize, &access, 1) == kInvalidValue);
  AccessDescription other;
  other.location.id = 1;
  CHECK(calls.set_access(scene.base, kSize, &other, 1) == kInvalidDevice);
  CHECK(calls.set_access(scene.base, kSize, &access, 1) == kSuccess);
  CHECK(cpu_can_read(scene.base + kSize - 1));
  CHECK_FALSE(cpu_can_read(scene.base + kSize));
  CHECK(calls.unmap(scene.base, kSize) == kSuccess);
  CHECK_FALSE(cpu_can_read(scene.base));
}

TEST_CASE("the fake unmaps only whole mappings, and frees no addresses under one") {
  const Scene scene;
  const EntryPoints& calls = scene.calls();
  REQUIRE(calls.map(scene.base, kSize, 0, scene.handle, 0) == kSuccess);
  CHECK(calls.unmap(scene.base + kSize, kSize) == kInvalidValue);
  CHECK(calls.unmap(scene.base, 2 * kSize) == kInvalidValue);
  CHECK(calls.address_free(scene.base, 4 * kSize) == kInvalidValue);
  CHECK(calls.unmap(scene.base, kSize) == kSuccess);
  CHECK(calls.unmap(scene.base, kSize) == kInvalidValue);
  CHECK(calls.address_free(scene.base, kSize) == kInvalidValue);
  CHECK(calls.address_free(scene.base, 4 * kSize) == kSuccess);
  CHECK(calls.address_free(scene.base, 4 * kSize) == kInvalidValue);
}

TEST_CASE("the fake creates and exports only what was asked for") {
  const Scene scene;
  const EntryPoints& calls = scene.calls();
  MemoryHandle handle = 0;
  AllocationProperties properties;
  CHECK(calls.create(&handle, 4096, &properties, 0) == kInvalidValue);
  CHECK(calls.create(&handle, 0, &properties, 0) == kInvalidValue);
  properties.location.id = 1;
  CHECK(calls.create(&handle, kSize, &properties, 0) == kInvalidDevice);
  properties.location.id = 0;
  properties.type = 0;
  CHECK(calls.create(&handle, kSize, &properties, 0) == kInvalidValue);
  properties.type = kAllocationPinned;
  properties.requested_handle_types = 0;
  REQUIRE(calls.create(&handle, kSize, &properties, 0) == kSuccess);
  int fd = -1;
  CHECK(calls.export_to_shareable_handle(&fd, handle, kHandlePosixFd, 0) == kInvalidValue);
  CHECK(calls.release(handle) == kSuccess);
  CHECK(calls.release(handle) == kInvalidValue);
}

TEST_CASE("the fake's memory stays with a mapping alone, and with a reference alone") {
  Scene scene;
  const EntryPoints& calls = scene.calls();
  const auto bytes = static_cast<int64_t>(kSize);
  scene.fd.reset();
  CHECK(scene.fake.books().bytes == bytes);
  REQUIRE(calls.map(scene.base, kSize, 0, scene.handle, 0) == kSuccess);
  REQUIRE(calls.release(scene.handle) == kSuccess);
  CHECK(scene.fake.books().bytes == bytes);
  REQUIRE(calls.unmap(scene.base, kSize) == kSuccess);
  CHECK(scene.fake.books().bytes == 0);
}

TEST_CASE("the fake does nothing in a fork of a process that started it") {
  const Scene scene;
  const pid_t pid = ::fork();
  if (pid == 0) {
    MemoryHandle handle = 0;
    const AllocationProperties properties;
    const bool refused = scene.calls().create(&handle, kSize, &properties, 0) == kNotInitialized &&
                         scene.calls().init(0) == kNotInitialized;
    ::_exit(refused ? 0 : 1);
  }
  int status = -1;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  CHECK(status == 0);
}

}  // namespace
}  // namespace larder
