// copy, scrub and checksum of whole blocks on any GPU: exactly the bytes of their layers.
#include "kernels/cpu/stretches.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/units.cuh"

namespace larder::kernels::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int64_t kChunkBytes = 64 * 1024;  // for a CTA, or less at the end of a stretch
constexpr int64_t kWordBytes = 8;           // of checksums

// Blocks as stretches of contiguous bytes, and a list of them.
struct Call {
  uint8_t* base;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int64_t stretch_bytes;
  int64_t stretch_stride_bytes;
  int64_t num_stretches;
  int unit_bytes;         // divides every address and size
  int64_t num_chunks;     // of a stretch (checksum: of a block)
  int64_t num_items;      // chunks of all listed blocks
  const int32_t* from;    // copy only
  const int32_t* blocks;  // that are written; checksum: read
};

// One chunk of one listed block. `is_first` of the block's chunks: that which reports faults.
struct Chunk {
  int64_t entry;
  int64_t offset_bytes;  // in the block
  int64_t bytes;
  bool is_first;
};

__device__ Chunk chunk_of(const Call& call, int64_t item) {
  const int64_t per_block = call.num_stretches * call.num_chunks;
  const int64_t part = item % per_block;
  const int64_t begin = part % call.num_chunks * kChunkBytes;
  return {item / per_block, part / call.num_chunks * call.stretch_stride_bytes + begin,
          min(kChunkBytes, call.stretch_bytes - begin), part == 0};
}

// The block in entry i of a list, or nullptr if it may not be used.
__device__ uint8_t* block_at(const Call& call, PointOfUse use, const int32_t* list, int64_t i,
                             bool write, bool reports) {
  const int64_t block = load_once(list + i);
  if (!reports) use.faults = nullptr;
  if (!use.may_use(block, call.num_blocks, write, block)) return nullptr;
  return call.base + block * call.block_stride_bytes;
}

// Grid: a CTA per 64 KiB of a stretch of a listed block, up to 2^20, which then take every 2^20th.
// Block: 256 threads that move units of 16 bytes side by side (less where an address or a size is
// not a multiple of 16). Reads and writes every byte once; bound by memory.
__global__ void __launch_bounds__(kThreads)
    copy_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ const uint8_t* from;
  __shared__ uint8_t* to;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    const Chunk chunk = chunk_of(call, item);
    if (threadIdx.x == 0) {
      from = block_at(call, use, call.from, chunk.entry, false, chunk.is_first);
      to = block_at(call, use, call.blocks, chunk.entry, true, chunk.is_first);
    }
    __syncthreads();
    if (from != nullptr && to != nullptr)
      with_unit(call.unit_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        const auto* source = reinterpret_cast<const Unit*>(from + chunk.offset_bytes);
        auto* target = reinterpret_cast<Unit*>(to + chunk.offset_bytes);
        const auto count = static_cast<int>(chunk.bytes / static_cast<int64_t>(sizeof(Unit)));
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) target[i] = source[i];
      });
    __syncthreads();
  }
}

// As copy_kernel, but that it writes zeros and reads nothing.
__global__ void __launch_bounds__(kThreads)
    scrub_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ uint8_t* block;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    const Chunk chunk = chunk_of(call, item);
    if (threadIdx.x == 0)
      block = block_at(call, use, call.blocks, chunk.entry, true, chunk.is_first);
    __syncthreads();
    if (block != nullptr)
      with_unit(call.unit_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        auto* target = reinterpret_cast<Unit*>(block + chunk.offset_bytes);
        const auto count = static_cast<int>(chunk.bytes / static_cast<int64_t>(sizeof(Unit)));
        for (int i = static_cast<int>(threadIdx.x); i < count; i += kThreads) target[i] = Unit{};
      });
    __syncthreads();
  }
}

// The finalizer of SplitMix64.
__device__ uint64_t mix(uint64_t z) {
  z = (z ^ (z >> 30)) * 0xBF58476D1CE4E5B9u;
  z = (z ^ (z >> 27)) * 0x94D049BB133111EBu;
  return z ^ (z >> 31);
}

// Word i of a block's bytes, its layers one after another; zeros behind the last.
__device__ uint64_t word_at(const Call& call, const uint8_t* block, int64_t i, int64_t num_bytes) {
  int64_t stretch = i * kWordBytes / call.stretch_bytes;
  int64_t within = i * kWordBytes % call.stretch_bytes;
  if (call.unit_bytes >= kWordBytes)
    return *reinterpret_cast<const uint64_t*>(block + stretch * call.stretch_stride_bytes + within);
  uint64_t word = 0;
  for (int64_t k = 0; k < min(kWordBytes, num_bytes - i * kWordBytes); ++k) {
    word |= uint64_t{block[stretch * call.stretch_stride_bytes + within]} << 8 * k;
    if (++within == call.stretch_bytes) {
      within = 0;
      ++stretch;
    }
  }
  return word;
}

// Grid: a CTA per 64 KiB of a listed block's bytes, up to 2^20, which then take every 2^20th.
// Block: 256 threads, each of which mixes every 256th word; a warp's sum is one atomic addition to
// the block's figure, which is zero before. Reads every byte once; bound by memory, and by
// arithmetic where words are put together from bytes.
__global__ void __launch_bounds__(kThreads)
    checksum_kernel(const __grid_constant__ Call call, const PointOfUse use,
                    unsigned long long* checksums) {
  __shared__ const uint8_t* block;
  const int64_t num_bytes = call.num_stretches * call.stretch_bytes;
  const int64_t num_words = (num_bytes + kWordBytes - 1) / kWordBytes;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    const int64_t entry = item / call.num_chunks;
    const int64_t first = item % call.num_chunks * (kChunkBytes / kWordBytes);
    if (threadIdx.x == 0) block = block_at(call, use, call.blocks, entry, false, first == 0);
    __syncthreads();
    if (block != nullptr) {
      const int64_t end = min(num_words, first + kChunkBytes / kWordBytes);
      unsigned long long sum = first == 0 && threadIdx.x == 0 ? mix(num_bytes) : 0;
      for (int64_t i = first + threadIdx.x; i < end; i += kThreads)
        sum += mix(word_at(call, block, i, num_bytes) + (i + 1) * 0x9E3779B97F4A7C15u);
      for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
      if (threadIdx.x % 32 == 0) atomicAdd(checksums + entry, sum);
    }
    __syncthreads();
  }
}

int64_t chunks_of(int64_t bytes) { return (bytes + kChunkBytes - 1) / kChunkBytes; }

Call call_of(const BlocksView& view, const int32_t* from, const int32_t* blocks, int64_t count) {
  const cpu::Stretches stretches = cpu::stretches_of(view);
  Call call = {};
  call.base = reinterpret_cast<uint8_t*>(view.base);
  call.block_stride_bytes = view.block_stride_bytes;
  call.num_blocks = view.num_blocks;
  call.stretch_bytes = stretches.bytes;
  call.stretch_stride_bytes = stretches.stride_bytes;
  call.num_stretches = stretches.count;
  // The stride of a single block is never used.
  call.unit_bytes = unit_bytes(view.base, {view.num_blocks > 1 ? view.block_stride_bytes : 0,
                                           stretches.stride_bytes, stretches.bytes});
  call.num_chunks = chunks_of(stretches.bytes);
  call.num_items = count * stretches.count * call.num_chunks;
  call.from = from;
  call.blocks = blocks;
  return call;
}

}  // namespace

// Whatever passes the validation.
Status supports_copy(const CopyParams&) { return {}; }
Status supports_scrub(const ScrubParams&) { return {}; }
Status supports_checksum(const ChecksumParams&) { return {}; }

Status copy(const CopyParams& params, const Target& target) {
  if (params.count == 0) return {};
  const Call call = call_of(params.view, params.from, params.to, params.count);
  copy_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(call,
                                                                           point_of_use(target));
  return launched("copy");
}

Status scrub(const ScrubParams& params, const Target& target) {
  if (params.count == 0) return {};
  const Call call = call_of(params.view, nullptr, params.blocks, params.count);
  scrub_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(call,
                                                                            point_of_use(target));
  return launched("scrub");
}

Status checksum(const ChecksumParams& params, const Target& target) {
  if (params.count == 0) return {};
  Call call = call_of(params.view, nullptr, params.blocks, params.count);
  call.num_chunks = chunks_of(call.num_stretches * call.stretch_bytes);
  call.num_items = params.count * call.num_chunks;
  const auto bytes = static_cast<size_t>(params.count) * sizeof(uint64_t);
  if (Status s =
          to_status("checksum", cudaMemsetAsync(params.checksums, 0, bytes, stream_of(target)));
      !s.ok())
    return s;
  checksum_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(
      call, point_of_use(target), reinterpret_cast<unsigned long long*>(params.checksums));
  return launched("checksum");
}

}  // namespace larder::kernels::cuda
