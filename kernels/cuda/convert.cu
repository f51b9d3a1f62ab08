// convert on any GPU: pages of blocks to or from an engine's own memory, byte for byte.
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/units.cuh"
#include "kernels/paged_kv_check.h"

namespace larder::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kChunkTokens = 64;  // of one block, head and region, for a CTA
constexpr int kRegions = 4;

// K data, K scales, V data or V scales in both memories.
struct Region {
  int64_t page_offset_bytes;  // in the pool's page
  uint8_t* foreign;
  int64_t page_stride_bytes;
  int64_t head_stride_bytes;
  int64_t token_stride_bytes;
  int row_bytes;   // 0: there is no such region
  int unit_bytes;  // divides every address and size
  bool swizzled;
};

struct Call {
  uint8_t* base;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int block_tokens;
  int num_kv_heads;
  int page_tokens;
  bool to_pool;
  const int32_t* blocks;
  Region regions[kRegions];
  int num_chunks;  // of a block's tokens
  int64_t num_items;
};

// Tokens of one head of one block, and where they lie in the foreign memory.
struct Chunk {
  uint8_t* pool;     // row of the first token
  uint8_t* foreign;  // page and head of the first token
  int page_token;    // of the first token, in its page
  int tokens;
};

// Swizzled: scale s of token t lies at row t / 4 * 4 + s / (S / 4), byte s % (S / 4) * 4 + t % 4.
__device__ int64_t foreign_offset(const Call& call, const Region& region, int page_token,
                                  int byte) {
  const int page = page_token / call.page_tokens;
  int row = page_token % call.page_tokens;
  if (region.swizzled) {
    const int quarter = region.row_bytes / 4;
    const int in_tile = row % 4;
    row += byte / quarter - in_tile;
    byte = byte % quarter * 4 + in_tile;
  }
  return page * region.page_stride_bytes + row * region.token_stride_bytes + byte;
}

__device__ void move_chunk(const Call& call, const Region& region, const Chunk& chunk) {
  with_unit(region.unit_bytes, [&](auto unit) {
    using Unit = decltype(unit);
    constexpr int kBytes = sizeof(Unit);
    const int row_units = region.row_bytes / kBytes;
    for (int i = static_cast<int>(threadIdx.x); i < chunk.tokens * row_units; i += kThreads) {
      const int64_t offset =
          foreign_offset(call, region, chunk.page_token + i / row_units, i % row_units * kBytes);
      auto* pool = reinterpret_cast<Unit*>(chunk.pool) + i;
      auto* foreign = reinterpret_cast<Unit*>(chunk.foreign + offset);
      if (call.to_pool)
        *pool = *foreign;
      else
        *foreign = *pool;
    }
  });
}

// Grid: a CTA per 64 tokens of a listed block, head and region, up to 2^20, which then take every
// 2^20th. Block: 256 threads that move units of up to 16 bytes, in the pool's order. Reads and
// writes every byte once; bound by memory where rows are long, else by transactions per row.
__global__ void __launch_bounds__(kThreads, 4)
    convert_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ uint8_t* page;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    const Region& region = call.regions[item % kRegions];
    const int64_t of_block = item / kRegions;
    const int64_t part = of_block % (int64_t{call.num_chunks} * call.num_kv_heads);
    const int64_t entry = of_block / (int64_t{call.num_chunks} * call.num_kv_heads);
    const int head = static_cast<int>(part / call.num_chunks);
    const int first = static_cast<int>(part % call.num_chunks) * kChunkTokens;
    if (threadIdx.x == 0) {
      // Every geometry has K data: its first chunk reports the block.
      PointOfUse reporting = use;
      if (item % kRegions != 0 || part != 0) reporting.faults = nullptr;
      const int64_t block = load_once(call.blocks + entry);
      page = reporting.may_use(block, call.num_blocks, call.to_pool, block)
                 ? call.base + block * call.block_stride_bytes
                 : nullptr;
    }
    __syncthreads();
    if (page != nullptr && region.row_bytes > 0) {
      const int64_t position = entry * call.block_tokens + first;
      const int64_t row = int64_t{head} * call.block_tokens + first;
      move_chunk(call, region,
                 {page + region.page_offset_bytes + row * region.row_bytes,
                  region.foreign + position / call.page_tokens * region.page_stride_bytes +
                      head * region.head_stride_bytes,
                  static_cast<int>(position % call.page_tokens),
                  min(kChunkTokens, call.block_tokens - first)});
    }
    __syncthreads();
  }
}

Region region_of(const ConvertParams& params, const PagedRegion& region) {
  const PagedRows& rows = region.rows;
  const AttentionGeometry& paged = params.paged.geometry;
  // Strides of axes of size 1 are never used.
  const int64_t page_stride = params.paged.num_pages > 1 ? rows.page_stride_bytes : 0;
  const int64_t head_stride = paged.num_kv_heads > 1 ? rows.head_stride_bytes : 0;
  const int64_t token_stride = paged.block_tokens > 1 ? rows.token_stride_bytes : 0;
  const int foreign_unit =
      unit_bytes(rows.base, {page_stride, head_stride, token_stride, region.row_bytes});
  const int pool_unit =
      unit_bytes(params.layer.base, {params.layer.block_stride_bytes, region.page_offset_bytes});
  return {region.page_offset_bytes,
          reinterpret_cast<uint8_t*>(rows.base),
          page_stride,
          head_stride,
          token_stride,
          static_cast<int>(region.row_bytes),
          region.swizzled ? 1 : std::min(foreign_unit, pool_unit),
          region.swizzled};
}

}  // namespace

// Whatever passes validate_convert.
Status supports_convert(const ConvertParams&) { return {}; }

Status convert(const ConvertParams& params, const Target& target) {
  if (params.num_blocks == 0) return {};
  const AttentionGeometry& geometry = params.layer.geometry;
  Call call = {};
  call.base = reinterpret_cast<uint8_t*>(params.layer.base);
  call.block_stride_bytes = params.layer.block_stride_bytes;
  call.num_blocks = params.layer.num_blocks;
  call.block_tokens = geometry.block_tokens;
  call.num_kv_heads = geometry.num_kv_heads;
  call.page_tokens = params.paged.geometry.block_tokens;
  call.to_pool = params.to_pool;
  call.blocks = params.blocks;
  const auto regions = paged_regions(params.paged, params.layer.page);
  for (size_t i = 0; i < kRegions; ++i) call.regions[i] = region_of(params, regions[i]);
  call.num_chunks = (call.block_tokens + kChunkTokens - 1) / kChunkTokens;
  call.num_items = params.num_blocks * call.num_kv_heads * call.num_chunks * kRegions;
  convert_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(call,
                                                                              point_of_use(target));
  return launched("convert");
}

}  // namespace larder::kernels::cuda
