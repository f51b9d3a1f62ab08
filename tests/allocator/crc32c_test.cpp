#include "allocator/crc32c.h"

#include <algorithm>
#include <array>
#include <string_view>

#include <doctest/doctest.h>

#include "tests/support/random.h"

namespace larder {
namespace {

std::span<const std::byte> bytes_of(std::string_view text) {
  return std::as_bytes(std::span(text.data(), text.size()));
}

TEST_CASE("every path gives the check value and the vectors of RFC 3720 B.4") {
  std::array<std::byte, 32> zeros{};
  std::array<std::byte, 32> ones{};
  ones.fill(std::byte{0xFF});
  std::array<std::byte, 32> rising{};
  std::array<std::byte, 32> falling{};
  for (size_t i = 0; i < 32; ++i) {
    rising[i] = static_cast<std::byte>(i);
    falling[i] = static_cast<std::byte>(31 - i);
  }
  // An iSCSI read command; the bytes that are not named are zero.
  std::array<std::byte, 48> command{};
  for (const auto& [index, value] : {std::pair{0, 0x01},
                                     {1, 0xC0},
                                     {16, 0x14},
                                     {22, 0x04},
                                     {27, 0x14},
                                     {31, 0x18},
                                     {32, 0x28},
                                     {40, 0x02}})
    command[static_cast<size_t>(index)] = static_cast<std::byte>(value);
  for (const Crc32cPath& path : crc32c_paths()) {
    INFO(path.name);
    CHECK(path.compute(bytes_of("123456789"), 0) == 0xE3069283);
    CHECK(path.compute({}, 0) == 0);
    CHECK(path.compute(zeros, 0) == 0x8A9136AA);
    CHECK(path.compute(ones, 0) == 0x62A8AB43);
    CHECK(path.compute(rising, 0) == 0x46DD794E);
    CHECK(path.compute(falling, 0) == 0x113FDB5C);
    CHECK(path.compute(command, 0) == 0xD9963A56);
  }
  CHECK(crc32c(bytes_of("123456789")) == 0xE3069283);
}

TEST_CASE("all paths agree at every length, alignment and split") {
  auto engine = test::random_engine(0);
  std::vector<std::byte> bytes(300);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
  const auto paths = crc32c_paths();
  for (size_t start = 0; start < 9; ++start)
    for (size_t size = 0; size + start <= bytes.size(); ++size) {
      const auto part = std::span<const std::byte>(bytes).subspan(start, size);
      const uint32_t expected = paths[0].compute(part, 0);
      const size_t split = engine() % (size + 1);
      for (const Crc32cPath& path : paths) {
        REQUIRE(path.compute(part, 0) == expected);
        REQUIRE(path.compute(part.subspan(split), path.compute(part.first(split), 0)) == expected);
      }
    }
}

TEST_CASE("a processor with the instruction uses it") {
#if defined(__x86_64__)
  if (__builtin_cpu_supports("sse4.2")) CHECK(crc32c_paths().size() == 2);
#endif
  CHECK(crc32c_paths().size() >= 1);
}

}  // namespace
}  // namespace larder
