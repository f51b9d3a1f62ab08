// What every provider of memory does.
#include "allocator/memory_provider.h"

#include <algorithm>
#include <cerrno>
#include <fcntl.h>
#include <limits>
#include <map>
#include <random>
#include <sys/mman.h>
#include <thread>
#include <unistd.h>

#include <doctest/doctest.h>

#include "allocator/extent.h"
#include "larder/system_error.h"
#include "tests/allocator/address_probes.h"
#include "tests/allocator/creator_process.h"
#include "tests/allocator/provider_fixtures.h"
#include "tests/support/machine_driver.h"
#include "tests/support/random.h"

namespace larder {
namespace {

using test::aborts;
using test::check_status;
using test::cpu_can_read;
using test::is_mapped;
using enum ErrorCode;
constexpr int64_t kSize = kSegmentGranularityBytes;

// At the beginning of each case: `if (!usable(memory)) return;`
template <typename Memory>
bool usable(const Memory& memory) {
  const auto& reason = memory.why_not();
  if (reason.empty()) return true;
  if (std::getenv("LARDER_REQUIRE_GPU") != nullptr) FAIL("a GPU is required: " << reason);
  MESSAGE("skipped on a real GPU: " << reason);
  return false;
}

// `count` bytes from an address, all of one value.
template <typename Memory>
void fill(const Memory& memory, std::byte* address, int value, int64_t count = kSize) {
  memory.write(address, std::vector<std::byte>(static_cast<size_t>(count), std::byte(value)));
}
template <typename Memory>
bool filled(const Memory& memory, const std::byte* address, int value, int64_t count = kSize) {
  const auto bytes = memory.read(address, static_cast<size_t>(count));
  return std::all_of(bytes.begin(), bytes.end(),
                     [&](std::byte byte) { return byte == std::byte(value); });
}

#define EVERY_MEMORY test::HostMemory, test::FakeGpuMemory, test::RealGpuMemory

TEST_CASE_TEMPLATE("a segment has its size, and an fd that no exec inherits", Memory,
                   EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const MemoryProvider& provider = memory.provider();
  CHECK(kSize % provider.granularity_bytes() == 0);
  CHECK((provider.name() == "host_memfd") == (std::string(Memory::kKind) == "host"));
  const Segment segment = provider.create("larder-test", 3 * kSize);
  CHECK(segment.size_bytes == 3 * kSize);
  CHECK((::fcntl(segment.fd.get(), F_GETFD) & FD_CLOEXEC) != 0);
  CHECK(provider.check(segment.fd.get(), 3 * kSize).ok());
}

TEST_CASE_TEMPLATE("bytes written through one mapping are seen through another", Memory,
                   EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const Segment segment = memory.provider().create("larder-test", kSize);
  const auto writer = memory.provider().reserve(kSize);
  const auto reader = memory.provider().reserve(2 * kSize);
  CHECK(writer->base() != reader->base());
  writer->map_at(0, segment.fd.get(), kSize);
  reader->map_at(kSize, segment.fd.get(), kSize);
  fill(memory, writer->base(), 1);
  fill(memory, writer->base() + kSize - 1, 2, 1);
  CHECK(filled(memory, reader->base() + kSize, 1, kSize - 1));
  CHECK(filled(memory, reader->base() + 2 * kSize - 1, 2, 1));
  fill(memory, reader->base() + kSize, 3);
  CHECK(filled(memory, writer->base(), 3));
}

TEST_CASE_TEMPLATE("bytes stay as long as an fd or a mapping does", Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  Segment segment = memory.provider().create("larder-test", kSize);
  OwnFd duplicate(::fcntl(segment.fd.get(), F_DUPFD_CLOEXEC, 0));
  {
    const auto range = memory.provider().reserve(kSize);
    range->map_at(0, segment.fd.get(), kSize);
    segment.fd.reset();
    fill(memory, range->base(), 42);
  }
  const auto range = memory.provider().reserve(kSize);
  range->map_at(0, duplicate.get(), kSize);
  duplicate.reset();
  CHECK(filled(memory, range->base(), 42));
}

TEST_CASE_TEMPLATE("an fd keeps the bytes when the process that made them is killed", Memory,
                   EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  test::CreatorProcess creator(Memory::kKind, kSize);
  creator.kill();
  const int fd = creator.fd().get();
  REQUIRE(fd >= 0);
  CHECK(memory.provider().check(fd, kSize).ok());
  const auto range = memory.provider().reserve(kSize);
  range->map_at(0, fd, kSize);
  CHECK(filled(memory, range->base(), 0xA5));
}

TEST_CASE_TEMPLATE("segments lie back to back, and the base stays", Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const Segment one = memory.provider().create("one", kSize);
  const Segment two = memory.provider().create("two", 2 * kSize);
  auto range = memory.provider().reserve(int64_t{64} << 30);
  std::byte* const base = range->base();
  CHECK(reinterpret_cast<uintptr_t>(base) % memory.provider().granularity_bytes() == 0);
  CHECK(range->max_bytes() == int64_t{64} << 30);
  range->map_at(0, one.fd.get(), kSize);
  fill(memory, base, 1);
  range->map_at(kSize, two.fd.get(), 2 * kSize);
  fill(memory, base + kSize, 2, 2 * kSize);
  range->map_at((int64_t{64} << 30) - kSize, one.fd.get(), kSize);
  const std::unique_ptr<AddressRange> moved = std::move(range);
  CHECK(moved->base() == base);
  CHECK(filled(memory, base, 1));
  CHECK(filled(memory, base + kSize, 2, 2 * kSize));
  CHECK(filled(memory, base + (int64_t{64} << 30) - kSize, 1));
  // One access over the seam.
  const auto seam = memory.read(base + kSize - 1, 2);
  CHECK(seam == std::vector<std::byte>{std::byte{1}, std::byte{2}});
}

TEST_CASE_TEMPLATE("a segment can be unmapped, and mapped elsewhere and there again", Memory,
                   EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const Segment segment = memory.provider().create("larder-test", kSize);
  const auto range = memory.provider().reserve(4 * kSize);
  std::byte* const base = range->base();
  range->map_at(2 * kSize, segment.fd.get(), kSize);
  fill(memory, base + 2 * kSize, 5);
  range->unmap_at(2 * kSize, kSize);
  range->unmap_at(2 * kSize, kSize);  // nothing is mapped there, and stays so
  range->unmap_at(0, 4 * kSize);
  if constexpr (Memory::kCpuReads) {
    CHECK_FALSE(cpu_can_read(base + 2 * kSize));
    CHECK(is_mapped(base + 2 * kSize));  // the addresses are still ours
  }
  range->map_at(3 * kSize, segment.fd.get(), kSize);
  CHECK(filled(memory, base + 3 * kSize, 5));
  range->map_at(2 * kSize, segment.fd.get(), kSize);
  fill(memory, base + 2 * kSize, 6);
  CHECK(filled(memory, base + 3 * kSize, 6));
  range->unmap_at(0, 4 * kSize);
  if constexpr (Memory::kCpuReads)
    for (int64_t place = 0; place < 4; ++place) CHECK_FALSE(cpu_can_read(base + place * kSize));
}

TEST_CASE_TEMPLATE("a segment replaces those that lie in its place", Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const auto range = memory.provider().reserve(4 * kSize);
  std::vector<Segment> small;
  for (int64_t place = 0; place < 4; ++place) {
    small.push_back(memory.provider().create("small", kSize));
    range->map_at(place * kSize, small.back().fd.get(), kSize);
    fill(memory, range->base() + place * kSize, static_cast<int>(place) + 1);
  }
  const Segment large = memory.provider().create("large", 2 * kSize);
  range->map_at(kSize, large.fd.get(), 2 * kSize);
  fill(memory, range->base() + kSize, 9, 2 * kSize);
  CHECK(filled(memory, range->base(), 1));
  CHECK(filled(memory, range->base() + 3 * kSize, 4));
  range->unmap_at(kSize, 2 * kSize);
  range->map_at(2 * kSize, small[1].fd.get(), kSize);
  CHECK(filled(memory, range->base() + 2 * kSize, 2));  // the old bytes were not overwritten
}

TEST_CASE_TEMPLATE("what cannot be mapped is thrown, and the rest of the range is as it was",
                   Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const Segment segment = memory.provider().create("larder-test", kSize);
  const OwnFd null(::open("/dev/null", O_RDWR | O_CLOEXEC));
  const auto range = memory.provider().reserve(3 * kSize);
  range->map_at(0, segment.fd.get(), kSize);
  range->map_at(2 * kSize, segment.fd.get(), kSize);
  fill(memory, range->base(), 7);
  for (const int fd : {-1, null.get()}) {
    CHECK_THROWS_AS(range->map_at(kSize, fd, kSize), std::runtime_error);
    CHECK_THROWS_AS(range->map_at(2 * kSize, fd, kSize), std::runtime_error);
    CHECK(filled(memory, range->base(), 7));
  }
  if constexpr (Memory::kCpuReads) {
    CHECK_FALSE(cpu_can_read(range->base() + kSize));
    CHECK(is_mapped(range->base() + kSize));
  }
  range->map_at(kSize, segment.fd.get(), kSize);
  range->map_at(2 * kSize, segment.fd.get(), kSize);
  CHECK(filled(memory, range->base() + kSize, 7, 2 * kSize));
}

TEST_CASE_TEMPLATE("a range that goes gives back its addresses, also after its provider", Memory,
                   test::HostMemory, test::FakeGpuMemory) {
  auto memory = std::make_unique<Memory>();
  const Segment segment = memory->provider().create("larder-test", kSize);
  std::unique_ptr<AddressRange> range = memory->provider().reserve(4 * kSize);
  std::byte* const base = range->base();
  range->map_at(kSize, segment.fd.get(), kSize);
  memory.reset();
  base[kSize] = std::byte{1};
  CHECK(is_mapped(base));
  range.reset();
  CHECK_FALSE(is_mapped(base));
  CHECK_FALSE(is_mapped(base + kSize));
}

TEST_CASE_TEMPLATE("sizes and places that nobody may ask for abort", Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const MemoryProvider& provider = memory.provider();
  for (const int64_t size : {int64_t{0}, int64_t{-1}, kSize + 1})
    CHECK(aborts([&] { (void)provider.create("larder-test", size); }));
  CHECK(aborts([&] { (void)provider.reserve(0); }));
  CHECK(aborts([&] { (void)provider.reserve(std::numeric_limits<int64_t>::max()); }));
  const Segment segment = provider.create("larder-test", 2 * kSize);
  const auto range = provider.reserve(4 * kSize);
  range->map_at(kSize, segment.fd.get(), 2 * kSize);
  struct {
    int64_t offset, size;
  } const wrong[] = {
      {0, 0},
      {0, -kSize},
      {0, kSize + 1},
      {1, kSize},
      {-kSize, kSize},
      {0, 5 * kSize},
      {4 * kSize, kSize},
      {int64_t{1} << 62, kSize},
      {0, int64_t{1} << 62},
      {kSize, kSize},  // these cut through the segment
      {0, 2 * kSize},
      {2 * kSize, 2 * kSize},
      {2 * kSize, kSize},
  };
  for (const auto& place : wrong) {
    const int64_t offset = place.offset, size = place.size;
    CAPTURE(offset);
    CAPTURE(size);
    CHECK(aborts([&] { range->map_at(offset, segment.fd.get(), size); }));
    CHECK(aborts([&] { range->unmap_at(offset, size); }));
  }
}

TEST_CASE_TEMPLATE("an fd that is no memory is refused", Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const MemoryProvider& provider = memory.provider();
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const OwnFd others[] = {OwnFd(ends[0]),
                          OwnFd(ends[1]),
                          OwnFd(::open("/dev/null", O_RDWR | O_CLOEXEC)),
                          OwnFd(::open("/", O_RDONLY | O_CLOEXEC)),
                          OwnFd(::memfd_create("unsealed", MFD_CLOEXEC)),
                          OwnFd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0))};
  for (const OwnFd& fd : others)
    check_status(provider.check(fd.get(), kSize), kInvalidArgument,
                 {"fd " + std::to_string(fd.get())});
  check_status(provider.check(-1, kSize), kInvalidArgument, {"fd -1"});
  const Segment segment = provider.create("larder-test", kSize);
  for (const int64_t size : {int64_t{0}, int64_t{-kSize}, kSize + 1})
    check_status(provider.check(segment.fd.get(), size), kInvalidArgument,
                 {"fd " + std::to_string(segment.fd.get()), std::to_string(size)});
}

TEST_CASE_TEMPLATE("a lack of memory can be told from other failures", Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  const MemoryProvider& provider = memory.provider();
  try {
    if constexpr (Memory::kHasLimit)
      (void)provider.create("larder-test", int64_t{1} << 45);
    else
      (void)provider.reserve(int64_t{1} << 60);
    FAIL("no exception");
  } catch (const std::runtime_error& error) {
    const std::string text = error.what();
    INFO(text);
    CHECK(is_out_of_memory(error));
    CHECK(text.find(std::to_string(Memory::kHasLimit ? int64_t{1} << 45 : int64_t{1} << 60)) !=
          std::string::npos);
  }
  try {
    provider.reserve(kSize)->map_at(0, -1, kSize);
    FAIL("no exception");
  } catch (const std::runtime_error& error) {
    CHECK_FALSE(is_out_of_memory(error));
  }
  CHECK(is_out_of_memory(SystemError("mmap", ENOMEM)));
  CHECK_FALSE(is_out_of_memory(SystemError("mmap", EPERM)));
  CHECK(provider.create("larder-test", kSize).fd.valid());
}

TEST_CASE_TEMPLATE("many threads create, map and let go at once", Memory, EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  constexpr int kThreads = 8;
  std::vector<std::string> troubles(kThreads);
  std::vector<std::thread> threads;
  for (int thread = 0; thread < kThreads; ++thread)
    threads.emplace_back([&, thread] {
      try {
        for (int round = 0; round < 10; ++round) {
          const Segment segment = memory.provider().create("larder-test", kSize);
          const auto range = memory.provider().reserve(2 * kSize);
          range->map_at(kSize, segment.fd.get(), kSize);
          fill(memory, range->base() + kSize, thread * 16 + round, 4096);
          if (!filled(memory, range->base() + kSize, thread * 16 + round, 4096))
            troubles[static_cast<size_t>(thread)] = "other bytes";
        }
      } catch (const std::exception& error) {
        troubles[static_cast<size_t>(thread)] = error.what();
      }
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& trouble : troubles) CHECK(trouble == "");
}

TEST_CASE_TEMPLATE("random growing and shrinking never loses or mixes bytes", Memory,
                   EVERY_MEMORY) {
  const Memory memory;
  if (!usable(memory)) return;
  CAPTURE(test::seed());
  std::mt19937_64 random = test::random_engine(1);
  constexpr uint64_t kPlaces = 16;
  const auto range = memory.provider().reserve(kPlaces * kSize);
  struct Mapped {
    std::shared_ptr<const Segment> segment;  // shared by the places where it is mapped
    int value = 0;                           // of its bytes
  };
  std::map<int64_t, Mapped> mapped;  // by offset
  for (int step = 0; step < 400; ++step) {
    const auto offset = static_cast<int64_t>(random() % kPlaces) * kSize;
    switch (random() % 4) {
      case 0:
      case 1: {  // a new segment, replacing what is there
        Segment segment = memory.provider().create("larder-test", kSize);
        const Mapped fresh{std::make_shared<const Segment>(std::move(segment)),
                           static_cast<int>(random() % 255) + 1};
        range->map_at(offset, fresh.segment->fd.get(), kSize);
        fill(memory, range->base() + offset, fresh.value, 4096);
        mapped[offset] = fresh;
        break;
      }
      case 2:
        range->unmap_at(offset, kSize);
        mapped.erase(offset);
        break;
      default:  // a segment that is mapped somewhere, here too
        if (mapped.empty()) break;
        const Mapped other = std::next(mapped.begin(), random() % mapped.size())->second;
        range->map_at(offset, other.segment->fd.get(), kSize);
        mapped[offset] = other;
    }
    for (const auto& [where, what] : mapped)
      REQUIRE(filled(memory, range->base() + where, what.value, 64));
  }
}

}  // namespace
}  // namespace larder
