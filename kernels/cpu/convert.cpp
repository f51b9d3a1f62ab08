#include "kernels/cpu/convert.h"

#include <algorithm>
#include <cstring>

#include "kernels/paged_kv_check.h"

namespace larder::kernels::cpu {
namespace {

void move_bytes(std::byte* pool, std::byte* foreign, int64_t bytes, bool to_pool) {
  if (to_pool)
    std::memcpy(pool, foreign, static_cast<size_t>(bytes));
  else
    std::memcpy(foreign, pool, static_cast<size_t>(bytes));
}

// Consecutive tokens that share a block of the pool and a page of the foreign memory.
struct Run {
  std::byte* pool_page = nullptr;
  int64_t block_token = 0;  // of the first token in its block
  int64_t page = 0;
  int64_t page_token = 0;  // of the first token in its page
  int64_t tokens = 0;
};

void move_run(const ConvertParams& params, const PagedRegion& region, const Run& run) {
  const PagedRows& rows = region.rows;
  const int64_t bytes = region.row_bytes;
  const int64_t heads = params.layer.geometry.num_kv_heads;
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  std::byte* pool = run.pool_page + region.page_offset_bytes + run.block_token * bytes;
  std::byte* foreign =
      rows.base + run.page * rows.page_stride_bytes + run.page_token * rows.token_stride_bytes;
  const bool tokens_dense = run.tokens == 1 || rows.token_stride_bytes == bytes;
  if (tokens_dense && run.tokens == block_tokens &&
      (heads == 1 || rows.head_stride_bytes == run.tokens * bytes)) {
    move_bytes(pool, foreign, heads * run.tokens * bytes, params.to_pool);
    return;
  }
  for (int64_t head = 0; head < heads; ++head) {
    std::byte* pool_head = pool + head * block_tokens * bytes;
    std::byte* foreign_head = foreign + head * rows.head_stride_bytes;
    if (tokens_dense) {
      move_bytes(pool_head, foreign_head, run.tokens * bytes, params.to_pool);
      continue;
    }
    for (int64_t token = 0; token < run.tokens; ++token)
      move_bytes(pool_head + token * bytes, foreign_head + token * rows.token_stride_bytes, bytes,
                 params.to_pool);
  }
}

// Scale s of token t lies at row t / 4 * 4 + s / (S / 4), byte s % (S / 4) * 4 + t % 4: each tile
// of 4 tokens is stored transposed (formats.md 2.5).
void move_swizzled_run(const ConvertParams& params, const PagedRegion& region, const Run& run) {
  const PagedRows& rows = region.rows;
  const int64_t scales = region.row_bytes;
  const int64_t quarter = scales / 4;
  std::byte* page = rows.base + run.page * rows.page_stride_bytes;
  for (int64_t head = 0; head < params.layer.geometry.num_kv_heads; ++head)
    for (int64_t i = 0; i < run.tokens; ++i) {
      const int64_t token = run.page_token + i;
      std::byte* pool = run.pool_page + region.page_offset_bytes +
                        (head * params.layer.geometry.block_tokens + run.block_token + i) * scales;
      std::byte* tile = page + head * rows.head_stride_bytes +
                        token / 4 * 4 * rows.token_stride_bytes + token % 4;
      for (int64_t row = 0; row < 4; ++row)
        for (int64_t column = 0; column < quarter; ++column) {
          std::byte& linear = pool[row * quarter + column];
          std::byte& swizzled = tile[row * rows.token_stride_bytes + column * 4];
          if (params.to_pool)
            linear = swizzled;
          else
            swizzled = linear;
        }
    }
}

}  // namespace

Status supports_convert(const ConvertParams&) { return {}; }

void convert(const ConvertParams& params) {
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  const int64_t page_tokens = params.paged.geometry.block_tokens;
  const int64_t total = params.num_blocks * block_tokens;
  const auto regions = paged_regions(params.paged, params.layer.page);
  for (int64_t first = 0; first < total;) {
    Run run;
    run.block_token = first % block_tokens;
    run.page = first / page_tokens;
    run.page_token = first % page_tokens;
    run.tokens = std::min(block_tokens - run.block_token, page_tokens - run.page_token);
    run.pool_page = params.layer.base +
                    int64_t{params.blocks[first / block_tokens]} * params.layer.block_stride_bytes;
    for (const PagedRegion& region : regions) {
      if (region.row_bytes == 0) continue;
      if (region.swizzled)
        move_swizzled_run(params, region, run);
      else
        move_run(params, region, run);
    }
    first += run.tokens;
  }
}

}  // namespace larder::kernels::cpu
