// CRC32C (Castagnoli, RFC 3720 appendix B.4): finds damage, proves nothing against intent.
//
// Runs on the processor's own instruction where it has one (SSE 4.2, ARMv8 CRC), else on a table.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

namespace larder {

// `crc` is what the bytes before gave, so that bytes in several places are one sequence.
uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc = 0);

// The ways in which this machine can compute it, for tests and benchmarks; the last is the one that
// crc32c() takes.
struct Crc32cPath {
  const char* name;
  uint32_t (*compute)(std::span<const std::byte> bytes, uint32_t crc);
};
std::vector<Crc32cPath> crc32c_paths();

}  // namespace larder
