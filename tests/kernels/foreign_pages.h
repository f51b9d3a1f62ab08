// A pool's pages and an engine's, both as plain bytes: where each byte must be comes from the page
// formula of formats.md 2.2 and the golden table of swizzled places, not from the kernels.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <random>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "kernels/kernel_table.h"

namespace larder::test {

inline constexpr std::byte kPoison{0xE7};

inline int64_t bits_per_element(KvFormat format) {
  if (format == KvFormat::kNvfp4) return 4;
  return format == KvFormat::kBf16 || format == KvFormat::kFp16 ? 16 : 8;
}

// Bytes of one row of K data, K scales, V data, V scales.
inline std::array<int64_t, 4> row_sizes(const AttentionGeometry& g) {
  if (g.mla_row != MlaRow::kNone) {
    constexpr std::array<int64_t, 5> kRows = {0, 352, 656, 576, 1152};
    return {kRows[static_cast<size_t>(g.mla_row)], 0, 0, 0};
  }
  return {g.k_dim * bits_per_element(g.k_format) / 8,
          g.k_format == KvFormat::kNvfp4 ? g.k_dim / 16 : 0,
          g.v_dim * bits_per_element(g.v_format) / 8,
          g.v_format == KvFormat::kNvfp4 ? g.v_dim / 16 : 0};
}

// [t % 4][s] -> row in the tile, byte in the row; S = 4, 8 or 16.
inline const std::vector<std::vector<std::array<int64_t, 2>>>& swizzled_places(int64_t columns) {
  static std::array<std::vector<std::vector<std::array<int64_t, 2>>>, 17> tables;
  auto& table = tables.at(static_cast<size_t>(columns));
  if (table.empty()) {
    std::ifstream file(LARDER_TEST_DATA "/nvfp4_goldens.json");
    nlohmann::json::parse(file)["swizzle_v"][std::to_string(columns)].get_to(table);
  }
  return table;
}

inline PagedRows& rows_of(PagedKv& kv, size_t region) {
  return *std::array{&kv.k_data, &kv.k_scale, &kv.v_data, &kv.v_scale}[region];
}

// A pool of random bytes, and poisoned foreign memory for some of its blocks.
class Exchange {
 public:
  // gap_bytes > 0: strides of the foreign memory are random and have gaps of up to so many bytes.
  // pool_gap_bytes lie between the pool's pages.
  Exchange(const AttentionGeometry& geometry, int32_t page_tokens, int64_t num_pages,
           PageOrder order, VScaleOrder v_order, std::mt19937_64& engine, int64_t gap_bytes = 0,
           int64_t pool_gap_bytes = 5)
      : g_(geometry), sizes_(row_sizes(geometry)) {
    const int64_t tokens = page_tokens * num_pages;
    REQUIRE(tokens % g_.block_tokens == 0);
    for (size_t r = 0; r < 4; ++r) {
      region_begin_[r] = page_bytes_;
      page_bytes_ += sizes_[r] * g_.num_kv_heads * g_.block_tokens;
    }
    const int64_t num_blocks = tokens / g_.block_tokens;
    for (int64_t i = 0; i < num_blocks + 2; ++i) blocks.push_back(static_cast<int32_t>(i));
    std::shuffle(blocks.begin(), blocks.end(), engine);
    blocks.resize(static_cast<size_t>(num_blocks));
    stride_ = page_bytes_ + pool_gap_bytes;
    pool.resize(static_cast<size_t>((num_blocks + 2) * stride_));
    for (std::byte& byte : pool) byte = static_cast<std::byte>(engine());
    make_foreign(page_tokens, num_pages, order, engine, gap_bytes);
    params.paged.v_scale_order = v_order;
    params.layer.base = pool.data();
    params.layer.block_stride_bytes = stride_;
    params.layer.num_blocks = num_blocks + 2;
    params.layer.geometry = g_;
    params.layer.page = page_layout(g_);
    params.blocks = blocks.data();
    params.num_blocks = num_blocks;
  }
  Exchange(const Exchange&) = delete;  // params point into the members
  Exchange& operator=(const Exchange&) = delete;

  // Foreign bytes that differ from the pool's, and gaps that are not poison any more.
  int64_t num_wrong_foreign_bytes() {
    std::vector<bool> owned(foreign.size());
    int64_t wrong = 0;
    each_byte([&](size_t in_pool, size_t in_foreign) {
      wrong += pool[in_pool] != foreign[in_foreign] || owned[in_foreign];
      owned[in_foreign] = true;
    });
    for (size_t i = 0; i < foreign.size(); ++i) wrong += !owned[i] && foreign[i] != kPoison;
    return wrong;
  }

  // visit(index in pool, index in foreign) for every byte of the listed blocks.
  template <typename Visit>
  void each_byte(const Visit& visit) {
    PagedKv& kv = params.paged;
    const int64_t page_tokens = kv.geometry.block_tokens;
    for (int64_t token = 0; token < kv.num_pages * page_tokens; ++token)
      for (int64_t head = 0; head < g_.num_kv_heads; ++head)
        for (size_t r = 0; r < 4; ++r)
          for (int64_t j = 0; j < sizes_[r]; ++j) {
            const int64_t block = blocks[static_cast<size_t>(token / g_.block_tokens)];
            const int64_t in_pool = block * stride_ + region_begin_[r] +
                                    (head * g_.block_tokens + token % g_.block_tokens) * sizes_[r] +
                                    j;
            int64_t row = token % page_tokens;
            int64_t byte = j;
            if (r == 3 && kv.v_scale_order == VScaleOrder::kSwizzled) {
              const auto& place =
                  swizzled_places(sizes_[3])[static_cast<size_t>(row % 4)][static_cast<size_t>(j)];
              row = row / 4 * 4 + place[0];
              byte = place[1];
            }
            const PagedRows& rows = rows_of(kv, r);
            const std::byte* address = rows.base + token / page_tokens * rows.page_stride_bytes +
                                       head * rows.head_stride_bytes +
                                       row * rows.token_stride_bytes + byte;
            visit(static_cast<size_t>(in_pool), static_cast<size_t>(address - foreign.data()));
          }
  }

  std::vector<int32_t> blocks;
  std::vector<std::byte> pool;
  std::vector<std::byte> foreign;
  kernels::ConvertParams params;

 private:
  void make_foreign(int32_t page_tokens, int64_t num_pages, PageOrder order,
                    std::mt19937_64& engine, int64_t gap_bytes) {
    PagedKv& kv = params.paged;
    kv.geometry = g_;
    kv.geometry.num_layers = 1;
    kv.geometry.block_tokens = page_tokens;
    kv.num_pages = num_pages;
    const auto gap = [&] {
      return gap_bytes == 0 ? 0 : std::uniform_int_distribution<int64_t>(0, gap_bytes)(engine);
    };
    std::array<int64_t, 4> begins = {};
    int64_t end = gap();
    for (size_t r = 0; r < 4; ++r) {
      PagedRows& rows = rows_of(kv, r);
      struct Axis {
        int64_t* stride;
        int64_t count;
      };
      std::vector<Axis> axes = {{&rows.token_stride_bytes, page_tokens},
                                {&rows.head_stride_bytes, g_.num_kv_heads},
                                {&rows.page_stride_bytes, num_pages}};
      if (order == PageOrder::kNhd) std::swap(axes[0], axes[1]);
      if (gap_bytes > 0) std::shuffle(axes.begin(), axes.end(), engine);
      int64_t span = sizes_[r];
      for (const Axis& axis : axes) {
        *axis.stride = span + gap();
        span += *axis.stride * (axis.count - 1);
      }
      begins[r] = end;
      if (sizes_[r] > 0) end += span + gap();
    }
    foreign.assign(static_cast<size_t>(end), kPoison);
    for (size_t r = 0; r < 4; ++r)
      if (sizes_[r] > 0) rows_of(kv, r).base = foreign.data() + begins[r];
  }

  AttentionGeometry g_;
  std::array<int64_t, 4> sizes_ = {};
  std::array<int64_t, 4> region_begin_ = {};
  int64_t page_bytes_ = 0;
  int64_t stride_ = 0;
};

}  // namespace larder::test
