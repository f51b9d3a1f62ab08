// Rows of every format with random values around 1 in size, written byte by byte from the
// definition of the formats (formats.md 2.2 and 5.2): no codec takes part.
#pragma once

#include <cstring>
#include <random>
#include <vector>

#include "kernels/params.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::test {

struct StoredBytes {
  KvFormat format;
  MlaRow mla_row;
  int64_t dim;
  std::byte* data;
  std::byte* scales;
};

// Row `row` (head * block_tokens + offset) of a block's page.
inline StoredBytes stored_bytes(const kernels::LayerView& layer, std::byte* block, int64_t row,
                                bool is_key) {
  const AttentionGeometry& g = layer.geometry;
  if (g.mla_row != MlaRow::kNone)
    return {KvFormat::kBf16, g.mla_row, 576, block + row * mla_row_bytes(g.mla_row), nullptr};
  const KvFormat format = is_key ? g.k_format : g.v_format;
  const int64_t dim = is_key ? g.k_dim : g.v_dim;
  const int64_t data = is_key ? layer.page.k_data_offset_bytes : layer.page.v_data_offset_bytes;
  const int64_t scale = is_key ? layer.page.k_scale_offset_bytes : layer.page.v_scale_offset_bytes;
  return {format, MlaRow::kNone, dim, block + data + row * row_data_bytes(format, dim),
          block + scale + row * row_scale_bytes(format, dim)};
}

// Nearly: the sum of four values that are uniform in 0 to 65535, with mean 0 and variance 1. Never
// 0. std::normal_distribution took half of the tests' time.
inline float normal(std::mt19937_64& engine) {
  const uint64_t bits = engine();
  const uint64_t sum =
      (bits & 0xFFFF) + (bits >> 16 & 0xFFFF) + (bits >> 32 & 0xFFFF) + (bits >> 48);
  return (static_cast<float>(sum) - 131069.5f) * (1.7320508f / 65536);
}
inline std::vector<float> normals(int64_t count, std::mt19937_64& engine) {
  std::vector<float> values(static_cast<size_t>(count));
  for (float& value : values) value = normal(engine);
  return values;
}

// Element `index` of a tensor of bf16, fp16 or fp32.
inline void put_value(std::vector<std::byte>& bytes, Dtype dtype, int64_t index, float value) {
  if (dtype == Dtype::kFp32) {
    std::memcpy(bytes.data() + 4 * index, &value, 4);
    return;
  }
  const uint16_t half = dtype == Dtype::kBf16 ? nearest_bf16(value) : nearest_fp16(value);
  std::memcpy(bytes.data() + 2 * index, &half, 2);
}

inline void put_half(std::byte* at, uint16_t bits) { std::memcpy(at, &bits, 2); }

// Codes of either sign: e4m3 of 2^-4 to 2^1.9, e5m2 likewise.
inline std::byte random_e4m3(std::mt19937_64& engine) {
  return static_cast<std::byte>(0x18 + engine() % 0x30 + engine() % 2 * 0x80);
}
inline std::byte random_e5m2(std::mt19937_64& engine) {
  return static_cast<std::byte>(0x2C + engine() % 0x18 + engine() % 2 * 0x80);
}
// Of any mantissa, 2^-3 to 2 in size.
inline uint16_t random_bf16(std::mt19937_64& engine) {
  return static_cast<uint16_t>(0x3E00 + engine() % 0x200 + engine() % 2 * 0x8000);
}
inline uint16_t random_fp16(std::mt19937_64& engine) {
  return static_cast<uint16_t>(0x3000 + engine() % 0x1000 + engine() % 2 * 0x8000);
}
// Scales of 0.25 to 0.94, so that values reach about 6.
inline std::byte random_group_scale(std::mt19937_64& engine) {
  return static_cast<std::byte>(0x28 + engine() % 0x10);
}

inline void fill_mla(const StoredBytes& row, std::mt19937_64& engine) {
  switch (row.mla_row) {
    case MlaRow::kNvfp4Ds:
      for (int i = 0; i < 256; ++i) row.data[i] = static_cast<std::byte>(engine());
      for (int i = 256; i < 320; ++i) row.data[i] = random_e4m3(engine);
      for (int i = 320; i < 352; ++i) row.data[i] = random_group_scale(engine);
      return;
    case MlaRow::kFp8Ds:
      for (int i = 0; i < 512; ++i) row.data[i] = random_e4m3(engine);
      for (int tile = 0; tile < 4; ++tile) {
        const float scale = 0.5f + static_cast<float>(engine() % 1000) / 1000;
        std::memcpy(row.data + 512 + 4 * tile, &scale, 4);
      }
      for (int i = 0; i < 64; ++i) put_half(row.data + 528 + 2 * i, random_bf16(engine));
      return;
    case MlaRow::kFp8:
      for (int i = 0; i < 576; ++i) row.data[i] = random_e4m3(engine);
      return;
    case MlaRow::kBf16:
      for (int i = 0; i < 576; ++i) put_half(row.data + 2 * i, random_bf16(engine));
      return;
    case MlaRow::kNone:
      return;
  }
}

inline void fill_row(const StoredBytes& row, std::mt19937_64& engine) {
  if (row.mla_row != MlaRow::kNone) return fill_mla(row, engine);
  for (int64_t i = 0; i < row.dim; ++i) switch (row.format) {
      case KvFormat::kBf16:
        put_half(row.data + 2 * i, random_bf16(engine));
        break;
      case KvFormat::kFp16:
        put_half(row.data + 2 * i, random_fp16(engine));
        break;
      case KvFormat::kFp8E4m3:
        row.data[i] = random_e4m3(engine);
        break;
      case KvFormat::kFp8E5m2:
        row.data[i] = random_e5m2(engine);
        break;
      case KvFormat::kNvfp4:
        if (i % 2 == 0) row.data[i / 2] = static_cast<std::byte>(engine());
        if (i % 16 == 0) row.scales[i / 16] = random_group_scale(engine);
        break;
    }
}

}  // namespace larder::test
