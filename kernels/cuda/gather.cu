// gather on any GPU: tokens of one layer, dequantised, into dense or strided tensors. The bits are
// those of kernels/cpu/gather.cpp. Compiled with -fmad=false.
#include <algorithm>

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/gather_call.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/units.cuh"

namespace larder::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kChunkTokens = 16;  // of one block, for a CTA

// How the tokens of sequences are shared out.
struct Chunks {
  int64_t num_items;     // slots, or num_seqs * per_sequence
  int64_t per_sequence;  // chunks of a sequence as long as can be
  int chunks_per_block;
};

struct Shared {
  float values[kWarps][kRowFloats];
  NamedSequence named;  // the item's
  unsigned long long first_row;
  GatherRun run;
};

__device__ void gather_row(const GatherCall& call, const GatherSide& side, const GatherRun& run,
                           int i, int head, float* values, int lane) {
  const int64_t source_row = int64_t{head} * call.block_tokens + run.token + i;
  const uint8_t* data = run.page + side.data_offset_bytes + source_row * side.data_bytes;
  const uint8_t* scales = run.page + side.scale_offset_bytes + source_row * side.scale_bytes;
  uint8_t* target = out_row(side.out, run.row + i, head);
  if (side.keeps_bits) {
    for (int e = lane; e < side.dim; e += kWarp)
      reinterpret_cast<uint16_t*>(target)[e] = load_u16(data + 2 * e);
    return;
  }
  const float* offsets =
      side.key_offset == nullptr ? nullptr : side.key_offset + int64_t{head} * side.dim;
  if (!side.rotated) {
    for (int e = lane; e < side.dim; e += kWarp)
      write_element(side, data, scales, offsets, target, e);
    return;
  }
  for (int e = lane; e < side.dim; e += kWarp) {
    const float value = decoded(side.format, data, scales, e);
    values[place(e)] = side.scale != 1.0f ? product(value, side.scale) : value;
  }
  __syncwarp();
  rotate(values, side.dim, lane);
  for (int e = lane; e < side.dim; e += kWarp) {
    const float value = values[place(e)];
    store_value(side.out.dtype, target, e * side.out.stride,
                offsets != nullptr ? sum(value, offsets[e]) : value);
  }
  __syncwarp();  // before the values of the next row
}

__device__ void gather_mla_row(const GatherCall& call, const GatherRun& run, int i, int lane) {
  const GatherSide& side = call.sides[0];
  const uint8_t* row = run.page + (run.token + i) * side.data_bytes;
  uint8_t* target = out_row(side.out, run.row + i, 0);
  for (int e = lane; e < kMlaKeyDim; e += kWarp) {
    if (side.keeps_bits)
      reinterpret_cast<uint16_t*>(target)[e] = load_u16(row + 2 * e);
    else
      write_mla_element(call, row, target, e);
  }
}

// All threads of the CTA: the output row of the sequence's first token, in shared.first_row.
__device__ void find_first_row(const GatherCall& call, int64_t sequence, Shared& shared) {
  if (threadIdx.x == 0)
    shared.first_row = static_cast<unsigned long long>(sequence * call.rows_per_sequence);
  if (call.rows_per_sequence > 0) return;
  __syncthreads();
  unsigned long long rows = 0;
  for (int64_t before = threadIdx.x; before < sequence; before += blockDim.x)
    rows += static_cast<unsigned long long>(kept_tokens(call, named_sequence(call, before)).count);
  if (rows > 0) atomicAdd(&shared.first_row, rows);
  __syncthreads();
}

// One thread. Chunks are counted from the block of the first token kept on. A sequence's first
// chunk reports what is wrong with its length, a block's first chunk with tokens to keep the block.
__device__ GatherRun run_of_chunk(const GatherCall& call, const Chunks& chunks, PointOfUse use,
                                  int64_t sequence, int64_t chunk, const NamedSequence& named,
                                  int64_t first_row) {
  if (chunk == 0) report_cuts(call, use, named, first_row);
  const KeptTokens kept = kept_tokens(call, named);
  const int64_t end = kept.first + min(kept.count, max(int64_t{0}, call.out_rows - first_row));
  const int64_t entry = kept.first / call.block_tokens + chunk / chunks.chunks_per_block;
  const int64_t block_begin = entry * call.block_tokens;
  const int64_t chunk_begin = block_begin + chunk % chunks.chunks_per_block * kChunkTokens;
  const int64_t chunk_end = min(chunk_begin + kChunkTokens, block_begin + call.block_tokens);
  const int64_t position = max(chunk_begin, kept.first);
  const int64_t count = min(chunk_end, end) - position;
  if (count <= 0) return {};
  if (position != max(block_begin, kept.first)) use.faults = nullptr;
  const int64_t block = load_once(call.block_table + sequence * call.block_table_stride + entry);
  if (!use.may_use(block, call.num_blocks, false, block)) return {};
  return {call.base + block * call.block_stride_bytes, first_row + position - kept.first,
          static_cast<int>(position - block_begin), static_cast<int>(count)};
}

// All threads of the CTA; shared.run is there after the next __syncthreads.
__device__ void find_chunk(const GatherCall& call, const Chunks& chunks, const PointOfUse& use,
                           int64_t item, Shared& shared) {
  const int64_t sequence = item / chunks.per_sequence;
  const int64_t chunk = item % chunks.per_sequence;
  // One thread reads the length, so that all take the same way to the barriers.
  if (threadIdx.x == 0) shared.named = named_sequence(call, sequence);
  __syncthreads();
  const NamedSequence named = shared.named;
  const KeptTokens kept = kept_tokens(call, named);
  const int64_t begin =
      (kept.first / call.block_tokens + chunk / chunks.chunks_per_block) * call.block_tokens;
  const bool is_used = chunk == 0 || begin < kept.first + kept.count;
  if (is_used) find_first_row(call, sequence, shared);
  if (threadIdx.x == 0)
    shared.run = is_used ? run_of_chunk(call, chunks, use, sequence, chunk, named,
                                        static_cast<int64_t>(shared.first_row))
                         : GatherRun{};
}

// Grid: a CTA per slot, or per 16 tokens of a block-table entry (of as many entries as a sequence
// can use: CTAs past its length leave at once), up to 2^20 CTAs, which then take every 2^20th.
// Block: 4 warps, each of which has one head's K or V of a token (or a whole MLA row) at a time.
// Moves the stored bytes of a token in and 2 * heads * dim * element bytes out; bound by the width
// of its loads (an element per lane) and, where lengths are prefix sums, by O(num_seqs) reads per
// CTA.
__global__ void __launch_bounds__(kWarps* kWarp)
    gather_kernel(const __grid_constant__ GatherCall call, const Chunks chunks,
                  const PointOfUse use) {
  __shared__ Shared shared;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int64_t item = blockIdx.x; item < chunks.num_items; item += gridDim.x) {
    if (call.slots != nullptr) {
      if (threadIdx.x == 0) shared.run = run_of_slot(call, use, item);
    } else {
      find_chunk(call, chunks, use, item, shared);
    }
    __syncthreads();
    const GatherRun run = shared.run;
    const int rows = call.mla_row != MlaRow::kNone ? run.count : run.count * 2 * call.num_kv_heads;
    for (int r = warp; r < rows; r += kWarps) {
      if (call.mla_row != MlaRow::kNone) {
        gather_mla_row(call, run, r, lane);
        continue;
      }
      // Tokens of one head one after another, as they lie in the page.
      const int head = r / run.count % call.num_kv_heads;
      const GatherSide& side = call.sides[r / run.count / call.num_kv_heads];
      if (side.out.data != nullptr)
        gather_row(call, side, run, r % run.count, head, shared.values[warp], lane);
    }
    __syncthreads();
  }
}

// A sequence has at least one chunk, so that its length is looked at, and no more than the longest
// that can be written has.
Chunks chunks_of(const GatherCall& call) {
  if (call.slots != nullptr) return {call.num_slots, 1, 1};
  const int64_t block_tokens = call.block_tokens;
  const int64_t written = std::min({call.table_tokens, call.window, call.out_rows});
  // A first token within a block leaves the last ones to one more.
  const int64_t entries =
      (written + block_tokens - 1) / block_tokens + (call.first_tokens != nullptr ? 1 : 0);
  const int64_t chunks_per_block = (block_tokens + kChunkTokens - 1) / kChunkTokens;
  const int64_t per_sequence = std::max<int64_t>(entries * chunks_per_block, 1);
  return {call.num_seqs * per_sequence, per_sequence, static_cast<int>(chunks_per_block)};
}

}  // namespace

// Whatever passes validate_gather.
Status supports_gather(const GatherParams&) { return {}; }

Status gather(const GatherParams& params, const Target& target) {
  if (gathers_nothing(params)) return {};
  const GatherCall call = gather_call(params);
  const Chunks chunks = chunks_of(call);
  gather_kernel<<<grid_of(chunks.num_items), kWarps * kWarp, 0, stream_of(target)>>>(
      call, chunks, point_of_use(target));
  return launched("gather");
}

}  // namespace larder::kernels::cuda
