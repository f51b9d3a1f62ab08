#include "allocator/crc32c.h"

#include <array>
#include <cstring>

#if defined(__x86_64__)
#include <nmmintrin.h>
#elif defined(__aarch64__)
#include <arm_acle.h>
#include <sys/auxv.h>
#endif

namespace larder {
namespace {

constexpr uint32_t kPolynomial = 0x82F63B78;  // reflected

constexpr std::array<uint32_t, 256> make_table() {
  std::array<uint32_t, 256> table{};
  for (uint32_t byte = 0; byte < 256; ++byte) {
    uint32_t crc = byte;
    for (int bit = 0; bit < 8; ++bit) crc = (crc >> 1) ^ ((crc & 1) != 0 ? kPolynomial : 0);
    table[byte] = crc;
  }
  return table;
}
constexpr std::array<uint32_t, 256> kTable = make_table();

uint32_t compute_by_table(std::span<const std::byte> bytes, uint32_t crc) {
  crc = ~crc;
  for (const std::byte byte : bytes)
    crc = (crc >> 8) ^ kTable[(crc ^ static_cast<uint32_t>(byte)) & 0xFF];
  return ~crc;
}

#if defined(__x86_64__)

bool has_instruction() { return __builtin_cpu_supports("sse4.2") != 0; }
constexpr const char* kInstructionName = "sse4.2";

__attribute__((target("sse4.2"))) uint32_t compute_by_instruction(std::span<const std::byte> bytes,
                                                                  uint32_t crc) {
  uint64_t state = static_cast<uint32_t>(~crc);
  const std::byte* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    state = _mm_crc32_u64(state, word);
  }
  auto last = static_cast<uint32_t>(state);
  if (left >= sizeof(uint32_t)) {
    uint32_t word = 0;
    std::memcpy(&word, data, sizeof word);
    last = _mm_crc32_u32(last, word);
    left -= sizeof word;
    data += sizeof word;
  }
  for (; left > 0; --left, ++data) last = _mm_crc32_u8(last, static_cast<uint8_t>(*data));
  return ~last;
}

#elif defined(__aarch64__)

bool has_instruction() { return (::getauxval(AT_HWCAP) & HWCAP_CRC32) != 0; }
constexpr const char* kInstructionName = "armv8-crc";

__attribute__((target("+crc"))) uint32_t compute_by_instruction(std::span<const std::byte> bytes,
                                                                uint32_t crc) {
  crc = ~crc;
  const std::byte* data = bytes.data();
  size_t left = bytes.size();
  for (; left >= sizeof(uint64_t); left -= sizeof(uint64_t), data += sizeof(uint64_t)) {
    uint64_t word = 0;
    std::memcpy(&word, data, sizeof word);
    crc = __crc32cd(crc, word);
  }
  for (; left > 0; --left, ++data) crc = __crc32cb(crc, static_cast<uint8_t>(*data));
  return ~crc;
}

#else

bool has_instruction() { return false; }
constexpr const char* kInstructionName = "none";

uint32_t compute_by_instruction(std::span<const std::byte> bytes, uint32_t crc) {
  return compute_by_table(bytes, crc);
}

#endif

}  // namespace

uint32_t crc32c(std::span<const std::byte> bytes, uint32_t crc) {
  return has_instruction() ? compute_by_instruction(bytes, crc) : compute_by_table(bytes, crc);
}

std::vector<Crc32cPath> crc32c_paths() {
  std::vector<Crc32cPath> paths = {{"table", compute_by_table}};
  if (has_instruction()) paths.push_back({kInstructionName, compute_by_instruction});
  return paths;
}

}  // namespace larder
