// Rows for MLA pools, by the definition of each format (formats.md 5.2).
#pragma once

#include <cmath>
#include <cstring>
#include <random>

#include "tests/support/nvfp4_pool.h"

namespace larder::test {

inline void put_bf16(std::byte* at, float value) {
  const uint16_t bits = nearest_bf16(value);
  std::memcpy(at, &bits, sizeof(bits));
}

// A row of values around 1 in size, not from a codec: any byte that means a number may stand there.
inline void fill_mla_row(Pool& pool, int64_t slot, std::mt19937_64& engine) {
  std::normal_distribution<float> normal;
  std::byte* row = pool.bytes().data() + pool.mla_offset(slot);
  // 2^-6 to 2 in size, or 2 to 448, either sign.
  const auto small = [&] {
    return static_cast<std::byte>(0x08 + engine() % 0x39 + engine() % 2 * 0x80);
  };
  const auto large = [&] {
    return static_cast<std::byte>(0x40 + engine() % 0x3F + engine() % 2 * 0x80);
  };
  switch (pool.geometry().mla_row) {
    case MlaRow::kNvfp4Ds:
      for (int i = 0; i < 256; ++i) row[i] = static_cast<std::byte>(engine());
      for (int i = 0; i < 64; ++i) row[256 + i] = small();
      for (int i = 0; i < 32; ++i) row[320 + i] = small() & std::byte{0x7F};
      return;
    case MlaRow::kFp8Ds:
      for (int i = 0; i < 512; ++i) row[i] = large();
      for (int tile = 0; tile < 4; ++tile) {
        const float scale = (1 + std::fabs(normal(engine))) / 200;
        std::memcpy(row + 512 + 4 * tile, &scale, sizeof(scale));
      }
      for (int i = 0; i < 64; ++i) put_bf16(row + 528 + 2 * i, normal(engine));
      return;
    case MlaRow::kFp8:
      for (int i = 0; i < 576; ++i) row[i] = small();
      return;
    case MlaRow::kBf16:
      for (int i = 0; i < 576; ++i) put_bf16(row + 2 * i, normal(engine));
      return;
    case MlaRow::kNone:
      return;
  }
}

}  // namespace larder::test
