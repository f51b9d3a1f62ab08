// convert on any GPU: pages of blocks to or from an engine's own memory, byte for byte.
#include <numeric>

#include "kernels/cuda/divider.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/units.cuh"
#include "kernels/paged_kv_check.h"

namespace larder::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kParts = 4;  // of a CTA: a thread loads a unit of each before it stores the first
constexpr int kRegions = 4;
constexpr int kTileTokens = 4;  // of swizzled scales

enum class Order : uint8_t {
  kLinear,
  kSwizzledTiles,  // a unit is 4 scales of 4 tokens, as 4 words on either side
  kSwizzledBytes,
};

// K data, K scales, V data or V scales in both memories, as rows of `run` tokens of one head that
// are contiguous in both.
struct Region {
  int64_t page_offset_bytes;  // in the pool's page
  uint8_t* foreign;
  int64_t page_stride_bytes;
  int64_t head_stride_bytes;
  int64_t run_stride_bytes;
  int64_t token_stride_bytes;
  int64_t part_end;  // of the block's parts, those of this region end before it
  int64_t num_units;
  int row_bytes;
  int unit_bytes;     // divides every address and size (tiles: 4)
  Divider row_units;  // in a row
  Divider inner;      // heads, or runs of a block, whichever follow each other in the units' order
  Divider page_runs;  // of the foreign page
  uint32_t block_runs;
  int quarter;  // of a token's scales, where swizzled
  bool heads_inner;
  Order order;
};

struct Call {
  uint8_t* base;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  const int32_t* blocks;
  Region regions[kRegions];
  Divider block_parts;  // of a block
  int64_t num_parts;    // of all listed blocks
  bool to_pool;
};

// Up to kThreads units of one region of one block.
struct Part {
  uint8_t* pool;     // the region in its page
  uint8_t* foreign;  // page and head 0 of the block's first run
  int region;
  int num_units;      // 0: past the last part, or the block may not be used
  uint32_t page_run;  // of the block's first run, in its page
  uint32_t row;       // of the first unit
  uint32_t in_row;
};

// A row in both memories, and which unit of it.
struct Place {
  uint8_t* pool;
  uint8_t* foreign;
  uint32_t page_run;
  uint32_t in_row;
};

__device__ Part find_part(const Call& call, const PointOfUse& use, int64_t number) {
  Part found = {};
  if (number >= call.num_parts) return found;
  const int64_t entry = call.block_parts.quotient(number);
  const int64_t part = number - entry * call.block_parts.divisor;
  int64_t first_part = 0;
  for (int i = 0; part >= call.regions[i].part_end; ++i) {
    first_part = call.regions[i].part_end;
    found.region = i + 1;
  }
  const Region& region = call.regions[found.region];
  PointOfUse reporting = use;
  if (part != 0) reporting.faults = nullptr;
  const int64_t block = load_once(call.blocks + entry);
  if (!reporting.may_use(block, call.num_blocks, call.to_pool, block)) return found;
  found.pool = call.base + block * call.block_stride_bytes + region.page_offset_bytes;
  const int64_t run = entry * region.block_runs;
  const int64_t page = region.page_runs.quotient(run);
  found.page_run = static_cast<uint32_t>(run - page * region.page_runs.divisor);
  found.foreign = region.foreign + page * region.page_stride_bytes;
  const int64_t unit = (part - first_part) * kThreads;
  const int64_t row = region.row_units.quotient(unit);
  found.row = static_cast<uint32_t>(row);
  found.in_row = static_cast<uint32_t>(unit - row * region.row_units.divisor);
  found.num_units = static_cast<int>(min(int64_t{kThreads}, region.num_units - unit));
  return found;
}

__device__ Place place_of(const Region& region, const Part& part) {
  const auto [rows, in_row] = region.row_units.divide(part.in_row + threadIdx.x);
  const auto [outer, inner] = region.inner.divide(part.row + rows);
  const uint32_t head = region.heads_inner ? inner : outer;
  const uint32_t run = region.heads_inner ? outer : inner;
  const auto [page, page_run] = region.page_runs.divide(part.page_run + run);
  return {part.pool + static_cast<int64_t>(head * region.block_runs + run) * region.row_bytes,
          part.foreign + page * region.page_stride_bytes + page_run * region.run_stride_bytes +
              head * region.head_stride_bytes,
          page_run, in_row};
}

// Swizzled: scale s of token t lies at row t / 4 * 4 + s / (S / 4), byte s % (S / 4) * 4 + t % 4.
// The offset is from row t.
__device__ int64_t swizzled_offset(const Region& region, uint32_t token, int scale) {
  const int in_tile = static_cast<int>(token % kTileTokens);
  return (scale / region.quarter - in_tile) * region.token_stride_bytes +
         scale % region.quarter * kTileTokens + in_tile;
}

// The unit of each linear part that a thread moves, between its load and its store.
struct Loaded {
  uint4 units[kParts];
  uint8_t* targets[kParts];  // nullptr: none
};

__device__ void load(const Call& call, const Part* parts, Loaded& loaded) {
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    const Part& part = parts[j];
    const Region& region = call.regions[part.region];
    loaded.targets[j] = nullptr;
    if (region.order != Order::kLinear || threadIdx.x >= part.num_units) continue;
    const Place place = place_of(region, part);
    const uint32_t offset = place.in_row * static_cast<uint32_t>(region.unit_bytes);
    const uint8_t* from = (call.to_pool ? place.foreign : place.pool) + offset;
    loaded.targets[j] = (call.to_pool ? place.pool : place.foreign) + offset;
    __builtin_assume(__isGlobal(from));
    with_unit(region.unit_bytes, [&](auto unit) {
      using Unit = decltype(unit);
      reinterpret_cast<Unit&>(loaded.units[j]) = *reinterpret_cast<const Unit*>(from);
    });
  }
}

__device__ void store(const Call& call, const Part* parts, const Loaded& loaded) {
#pragma unroll
  for (int j = 0; j < kParts; ++j) {
    uint8_t* to = loaded.targets[j];
    if (to == nullptr) continue;
    __builtin_assume(__isGlobal(to));
    with_unit(call.regions[parts[j].region].unit_bytes, [&](auto unit) {
      using Unit = decltype(unit);
      *reinterpret_cast<Unit*>(to) = reinterpret_cast<const Unit&>(loaded.units[j]);
    });
  }
}

// Byte j of word i becomes byte i of word j.
__device__ void transpose(uint32_t (&words)[4]) {
  const uint32_t low_01 = __byte_perm(words[0], words[1], 0x5140);
  const uint32_t high_01 = __byte_perm(words[0], words[1], 0x7362);
  const uint32_t low_23 = __byte_perm(words[2], words[3], 0x5140);
  const uint32_t high_23 = __byte_perm(words[2], words[3], 0x7362);
  words[0] = __byte_perm(low_01, low_23, 0x5410);
  words[1] = __byte_perm(low_01, low_23, 0x7632);
  words[2] = __byte_perm(high_01, high_23, 0x5410);
  words[3] = __byte_perm(high_01, high_23, 0x7632);
}

__device__ void move_tile(const Region& region, const Place& place, bool to_pool) {
  const int token_bytes = region.row_bytes / kTileTokens;
  const int scale = static_cast<int>(place.in_row) * 4;
  uint32_t* from[4];
  uint32_t* to[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) {
    auto* pool = reinterpret_cast<uint32_t*>(place.pool + k * token_bytes + scale);
    auto* foreign =
        reinterpret_cast<uint32_t*>(place.foreign + swizzled_offset(region, 0, scale + k));
    from[k] = to_pool ? foreign : pool;
    to[k] = to_pool ? pool : foreign;
  }
  uint32_t words[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) words[k] = *from[k];
  transpose(words);
#pragma unroll
  for (int k = 0; k < 4; ++k) *to[k] = words[k];
}

__device__ void move_swizzled(const Call& call, const Part* parts) {
#pragma unroll 1
  for (int j = 0; j < kParts; ++j) {
    const Part& part = parts[j];
    const Region& region = call.regions[part.region];
    if (region.order == Order::kLinear || threadIdx.x >= part.num_units) continue;
    const Place place = place_of(region, part);
    if (region.order == Order::kSwizzledTiles) {
      move_tile(region, place, call.to_pool);
      continue;
    }
    const int scale = static_cast<int>(place.in_row);
    uint8_t* pool = place.pool + scale;
    uint8_t* foreign = place.foreign + swizzled_offset(region, place.page_run, scale);
    *(call.to_pool ? pool : foreign) = call.to_pool ? *foreign : *pool;
  }
}

// Grid: see grid_of_parts. A part is 128 units of one region of a listed block, 16 bytes each or
// what addresses and sizes divide by. Block: 128 threads that move a unit of each of 4 parts at a
// time, in the order of the memory that is written; so scales of 8 bytes fill whole sectors there,
// and sectors that several warps read come from L1. The next 4 parts are looked up while the loads
// are under way. Reads and writes every byte once; bound by memory: some 100 instructions for a
// unit are half of what an H200 issues while it moves 14 bytes, the mean of nvfp4 at 128 dims.
__global__ void __launch_bounds__(kThreads, 8)
    convert_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ Part parts[2][kParts];
  const int64_t step = int64_t{gridDim.x} * kParts;
  int64_t first = int64_t{blockIdx.x} * kParts;
  if (threadIdx.x < kParts) parts[0][threadIdx.x] = find_part(call, use, first + threadIdx.x);
  __syncthreads();
  for (int turn = 0; first < call.num_parts; turn ^= 1) {
    Loaded loaded;
    load(call, parts[turn], loaded);
    first += step;
    if (threadIdx.x < kParts)
      parts[turn ^ 1][threadIdx.x] = find_part(call, use, first + threadIdx.x);
    store(call, parts[turn], loaded);
    // V scales, the last region, are the only ones that can be.
    if (call.regions[kRegions - 1].order != Order::kLinear) move_swizzled(call, parts[turn]);
    __syncthreads();
  }
}

// As many CTAs as fill any GPU several times, and where there is more to do, 8 turns for each.
unsigned grid_of_parts(int64_t num_parts) {
  const int64_t turns = (num_parts + kParts - 1) / kParts;
  return grid_of(std::max(std::min<int64_t>(turns, 4096), turns / 8));
}

// Of a region of the foreign memory, with strides of axes of size 1, which are never used, as 0.
PagedRows used_rows(const PagedKv& paged, const PagedRows& rows) {
  return {rows.base, paged.num_pages > 1 ? rows.page_stride_bytes : 0,
          paged.geometry.num_kv_heads > 1 ? rows.head_stride_bytes : 0,
          paged.geometry.block_tokens > 1 ? rows.token_stride_bytes : 0};
}

struct Runs {
  int tokens;
  int unit_bytes;
  Order order;
};

Runs runs_of(const ConvertParams& params, const PagedRegion& region, const PagedRows& rows) {
  const int block_tokens = params.layer.geometry.block_tokens;
  const auto unit = [&](int tokens) {
    return std::min(
        unit_bytes(rows.base, {rows.page_stride_bytes, rows.head_stride_bytes,
                               tokens * rows.token_stride_bytes, tokens * region.row_bytes}),
        unit_bytes(params.layer.base, {params.layer.block_stride_bytes, region.page_offset_bytes}));
  };
  if (!region.swizzled) {
    const int common = std::gcd(block_tokens, params.paged.geometry.block_tokens);
    const int tokens = rows.token_stride_bytes == region.row_bytes ? common : 1;
    return {tokens, unit(tokens), Order::kLinear};
  }
  if (block_tokens % kTileTokens == 0 && unit(1) >= 4)
    return {kTileTokens, 4, Order::kSwizzledTiles};
  return {1, 1, Order::kSwizzledBytes};
}

Region region_of(const ConvertParams& params, const PagedRegion& paged) {
  const int heads = params.layer.geometry.num_kv_heads;
  const PagedRows rows = used_rows(params.paged, paged.rows);
  const Runs runs = runs_of(params, paged, rows);
  Region region = {};
  region.page_offset_bytes = paged.page_offset_bytes;
  region.foreign = reinterpret_cast<uint8_t*>(rows.base);
  region.page_stride_bytes = rows.page_stride_bytes;
  region.head_stride_bytes = rows.head_stride_bytes;
  region.run_stride_bytes = runs.tokens * rows.token_stride_bytes;
  region.token_stride_bytes = rows.token_stride_bytes;
  region.row_bytes = static_cast<int>(runs.tokens * paged.row_bytes);
  region.unit_bytes = runs.unit_bytes;
  region.order = runs.order;
  region.quarter = static_cast<int>(paged.row_bytes / 4);
  region.block_runs = static_cast<uint32_t>(params.layer.geometry.block_tokens / runs.tokens);
  region.page_runs = divider(params.paged.geometry.block_tokens / runs.tokens);
  // A tile's units are its columns of 4 scales.
  region.row_units = divider(
      runs.order == Order::kSwizzledTiles ? region.quarter : region.row_bytes / region.unit_bytes);
  region.num_units = int64_t{heads} * region.block_runs * region.row_units.divisor;
  region.heads_inner = !params.to_pool && region.head_stride_bytes < region.run_stride_bytes;
  region.inner = region.heads_inner ? divider(heads) : divider(static_cast<int>(region.block_runs));
  return region;
}

}  // namespace

// Whatever passes validate_convert.
Status supports_convert(const ConvertParams&) { return {}; }

Status convert(const ConvertParams& params, const Target& target) {
  if (params.num_blocks == 0) return {};
  Call call = {};
  call.base = reinterpret_cast<uint8_t*>(params.layer.base);
  call.block_stride_bytes = params.layer.block_stride_bytes;
  call.num_blocks = params.layer.num_blocks;
  call.blocks = params.blocks;
  call.to_pool = params.to_pool;
  const auto regions = paged_regions(params.paged, params.layer.page);
  int64_t block_parts = 0;
  for (size_t i = 0; i < kRegions; ++i) {
    if (regions[i].row_bytes > 0) call.regions[i] = region_of(params, regions[i]);
    block_parts += (call.regions[i].num_units + kThreads - 1) / kThreads;
    call.regions[i].part_end = block_parts;
  }
  call.block_parts = divider(static_cast<int>(block_parts));
  call.num_parts = params.num_blocks * block_parts;
  convert_kernel<<<grid_of_parts(call.num_parts), kThreads, 0, stream_of(target)>>>(
      call, point_of_use(target));
  return launched("convert");
}

}  // namespace larder::kernels::cuda
