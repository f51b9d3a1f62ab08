// copy, scrub and checksum of whole blocks on any GPU: exactly the bytes of their layers.
#include "kernels/cpu/stretches.h"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/units.cuh"

namespace larder::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kInFlight = 4;              // units that a thread loads before it stores the first
constexpr int64_t kMoveBytes = 8 * 1024;  // of copy and scrub, at most, for a CTA
constexpr int64_t kChecksumBytes = 32 * 1024;
constexpr int64_t kWordBytes = 8;  // of checksums

// Blocks as stretches of contiguous bytes, and a list of them.
struct Call {
  uint8_t* base;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int64_t stretch_bytes;
  int64_t stretch_stride_bytes;
  int64_t num_stretches;
  int unit_bytes;         // divides every address and size
  int64_t chunk_bytes;    // a multiple of 128, but for the last one of a stretch
  int64_t num_chunks;     // of a stretch (checksum_bytes_kernel: of a block)
  int64_t num_items;      // chunks of all listed blocks
  const int32_t* from;    // copy only
  const int32_t* blocks;  // that are written; checksum: read
};

// One chunk of one listed block. `is_first` of the block's chunks: that which reports faults.
struct Chunk {
  int64_t entry;
  int64_t stretch;
  int64_t begin_bytes;  // in the stretch
  int64_t bytes;
  bool is_first;
};

__device__ Chunk chunk_of(const Call& call, int64_t item) {
  const int64_t stretch = item / call.num_chunks;
  const int64_t chunk = item % call.num_chunks;
  const int64_t entry = stretch / call.num_stretches;
  const int64_t begin = chunk * call.chunk_bytes;
  return {entry, stretch % call.num_stretches, begin,
          min(call.chunk_bytes, call.stretch_bytes - begin),
          item == entry * call.num_stretches * call.num_chunks};
}

// The chunk's bytes in the block in entry i of a list, or nullptr if that may not be used.
__device__ uint8_t* chunk_in(const Call& call, PointOfUse use, const int32_t* list,
                             const Chunk& chunk, bool write) {
  const int64_t block = load_once(list + chunk.entry);
  if (!chunk.is_first) use.faults = nullptr;
  if (!use.may_use(block, call.num_blocks, write, block)) return nullptr;
  return call.base + block * call.block_stride_bytes + chunk.stretch * call.stretch_stride_bytes +
         chunk.begin_bytes;
}

// use(i, unit) for each of this thread's units among `count`. kInFlight are loaded before the first
// of them is used.
template <class Unit, class Use>
__device__ void for_units(const Unit* units, int count, const Use& use) {
#pragma unroll 1
  for (int begin = static_cast<int>(threadIdx.x); begin < count; begin += kInFlight * kThreads) {
    Unit loaded[kInFlight] = {};  // else registers hold the last turn's
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (begin + j * kThreads < count) loaded[j] = units[begin + j * kThreads];
#pragma unroll
    for (int j = 0; j < kInFlight; ++j)
      if (begin + j * kThreads < count) use(begin + j * kThreads, loaded[j]);
  }
}

// Grid: a CTA per 8 KiB, or less, of a stretch of a listed block, up to 2^20, which then take every
// 2^20th. Block: 128 threads that move units of 16 bytes side by side (less where an address or a
// size is not a multiple of 16), 4 of them at a time. Reads and writes every byte once; bound by
// memory: 12 CTAs a multiprocessor keep up to 96 KiB in flight.
__global__ void __launch_bounds__(kThreads, 12)
    copy_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ const uint8_t* from;
  __shared__ uint8_t* to;
  __shared__ int bytes;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    if (threadIdx.x == 0) {
      const Chunk chunk = chunk_of(call, item);
      bytes = static_cast<int>(chunk.bytes);
      from = chunk_in(call, use, call.from, chunk, false);
    } else if (threadIdx.x == 32) {  // of another warp, so that the two waits are one
      to = chunk_in(call, use, call.blocks, chunk_of(call, item), true);
    }
    __syncthreads();
    if (from != nullptr && to != nullptr)
      with_unit(call.unit_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        const auto* source = reinterpret_cast<const Unit*>(from);
        auto* target = reinterpret_cast<Unit*>(to);
        __builtin_assume(__isGlobal(source));
        __builtin_assume(__isGlobal(target));
        for_units(source, bytes / static_cast<int>(sizeof(Unit)),
                  [&](int i, const Unit& loaded) { target[i] = loaded; });
      });
    __syncthreads();
  }
}

// As copy_kernel, but that it writes zeros and reads nothing.
__global__ void __launch_bounds__(kThreads)
    scrub_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ uint8_t* to;
  __shared__ int bytes;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    if (threadIdx.x == 0) {
      const Chunk chunk = chunk_of(call, item);
      bytes = static_cast<int>(chunk.bytes);
      to = chunk_in(call, use, call.blocks, chunk, true);
    }
    __syncthreads();
    if (to != nullptr)
      with_unit(call.unit_bytes, [&](auto unit) {
        using Unit = decltype(unit);
        auto* target = reinterpret_cast<Unit*>(to);
        __builtin_assume(__isGlobal(target));
        const int count = bytes / static_cast<int>(sizeof(Unit));
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

constexpr uint64_t kStep = 0x9E3779B97F4A7C15u;  // between what is added to two words

__device__ uint64_t mix_unit(uint2 unit, uint64_t added) {
  return mix((unit.x | uint64_t{unit.y} << 32) + added);
}
__device__ uint64_t mix_unit(uint4 unit, uint64_t added) {
  return mix_unit(uint2{unit.x, unit.y}, added) + mix_unit(uint2{unit.z, unit.w}, added + kStep);
}

// This thread's share of the sum over contiguous units, the first of which begins with word
// `first_word` of its block.
template <class Unit>
__device__ uint64_t sum_units(const uint8_t* bytes, int num_bytes, uint64_t first_word) {
  constexpr uint64_t kWords = sizeof(Unit) / kWordBytes;
  const auto* source = reinterpret_cast<const Unit*>(bytes);
  __builtin_assume(__isGlobal(source));
  uint64_t added = (first_word + threadIdx.x * kWords + 1) * kStep;
  uint64_t sum = 0;
  for_units(source, num_bytes / static_cast<int>(sizeof(Unit)), [&](int, const Unit& unit) {
    sum += mix_unit(unit, added);
    added += kThreads * kWords * kStep;
  });
  return sum;
}

// Adds what every thread has to the block's figure. `warp_sums` is free when all threads have come.
__device__ void add_sums(uint64_t sum, unsigned long long (&warp_sums)[kThreads / 32],
                         unsigned long long* checksum) {
  for (int apart = 16; apart > 0; apart /= 2) sum += __shfl_xor_sync(0xFFFFFFFFu, sum, apart);
  if (threadIdx.x % 32 == 0) warp_sums[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x != 0) return;
  for (int warp = 1; warp < kThreads / 32; ++warp) sum += warp_sums[warp];
  atomicAdd(checksum, static_cast<unsigned long long>(sum));
}

// Grid: a CTA per 32 KiB, or less, of a stretch of a listed block, up to 2^20, which then take
// every 2^20th. Block: 128 threads that load units of 16 or 8 bytes side by side, 4 at a time, and
// mix their words; one atomic addition to the block's figure, which is zero before. Reads every
// byte once; bound by memory: 28 instructions for a word of 8 bytes are half of what an H200 issues
// at the speed of its memory.
__global__ void __launch_bounds__(kThreads, 12)
    checksum_kernel(const __grid_constant__ Call call, const PointOfUse use,
                    unsigned long long* checksums) {
  __shared__ Chunk chunk;
  __shared__ const uint8_t* bytes;
  __shared__ unsigned long long warp_sums[kThreads / 32];
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    if (threadIdx.x == 0) {
      chunk = chunk_of(call, item);
      bytes = chunk_in(call, use, call.blocks, chunk, false);
    }
    __syncthreads();
    if (bytes != nullptr) {
      const auto first_word = static_cast<uint64_t>(
          (chunk.stretch * call.stretch_bytes + chunk.begin_bytes) / kWordBytes);
      const auto num_bytes = static_cast<int>(chunk.bytes);
      uint64_t sum = call.unit_bytes == 16 ? sum_units<uint4>(bytes, num_bytes, first_word)
                                           : sum_units<uint2>(bytes, num_bytes, first_word);
      if (chunk.is_first && threadIdx.x == 0) sum += mix(call.num_stretches * call.stretch_bytes);
      add_sums(sum, warp_sums, checksums + chunk.entry);
    }
    __syncthreads();
  }
}

// Word i of a block's bytes, its layers one after another; zeros behind the last.
__device__ uint64_t word_at(const Call& call, const uint8_t* block, int64_t i, int64_t num_bytes) {
  int64_t stretch = i * kWordBytes / call.stretch_bytes;
  int64_t within = i * kWordBytes % call.stretch_bytes;
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

// As checksum_kernel where an address or a size is not a multiple of 8, with a CTA per 32 KiB of a
// block's bytes: words are put together from bytes, and may lie in two layers. Bound by arithmetic.
__global__ void __launch_bounds__(kThreads)
    checksum_bytes_kernel(const __grid_constant__ Call call, const PointOfUse use,
                          unsigned long long* checksums) {
  __shared__ const uint8_t* block;
  __shared__ unsigned long long warp_sums[kThreads / 32];
  const int64_t num_bytes = call.num_stretches * call.stretch_bytes;
  const int64_t num_words = (num_bytes + kWordBytes - 1) / kWordBytes;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    const int64_t entry = item / call.num_chunks;
    const int64_t first = item % call.num_chunks * (kChecksumBytes / kWordBytes);
    if (threadIdx.x == 0)
      block = chunk_in(call, use, call.blocks, {entry, 0, 0, 0, first == 0}, false);
    __syncthreads();
    if (block != nullptr) {
      const int64_t end = min(num_words, first + kChecksumBytes / kWordBytes);
      uint64_t sum = first == 0 && threadIdx.x == 0 ? mix(num_bytes) : 0;
      for (int64_t i = first + threadIdx.x; i < end; i += kThreads)
        sum += mix(word_at(call, block, i, num_bytes) + (i + 1) * kStep);
      add_sums(sum, warp_sums, checksums + entry);
    }
    __syncthreads();
  }
}

int64_t chunks_of(int64_t bytes, int64_t chunk_bytes) {
  return (bytes + chunk_bytes - 1) / chunk_bytes;
}

// Chunks of one size, or nearly, so that CTAs end together; whole lines, so that they share none.
Call call_of(const BlocksView& view, const int32_t* from, const int32_t* blocks, int64_t count,
             int64_t most_bytes) {
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
  const int64_t least_chunks = chunks_of(stretches.bytes, most_bytes);
  call.chunk_bytes = chunks_of(chunks_of(stretches.bytes, least_chunks), 128) * 128;
  call.num_chunks = chunks_of(stretches.bytes, call.chunk_bytes);
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
  const Call call = call_of(params.view, params.from, params.to, params.count, kMoveBytes);
  copy_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(call,
                                                                           point_of_use(target));
  return launched("copy");
}

Status scrub(const ScrubParams& params, const Target& target) {
  if (params.count == 0) return {};
  const Call call = call_of(params.view, nullptr, params.blocks, params.count, kMoveBytes);
  scrub_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(call,
                                                                            point_of_use(target));
  return launched("scrub");
}

Status checksum(const ChecksumParams& params, const Target& target) {
  if (params.count == 0) return {};
  Call call = call_of(params.view, nullptr, params.blocks, params.count, kChecksumBytes);
  const auto bytes = static_cast<size_t>(params.count) * sizeof(uint64_t);
  if (Status s =
          to_status("checksum", cudaMemsetAsync(params.checksums, 0, bytes, stream_of(target)));
      !s.ok())
    return s;
  auto* checksums = reinterpret_cast<unsigned long long*>(params.checksums);
  if (call.unit_bytes >= kWordBytes) {
    checksum_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(
        call, point_of_use(target), checksums);
  } else {
    call.num_chunks = chunks_of(call.num_stretches * call.stretch_bytes, kChecksumBytes);
    call.num_items = params.count * call.num_chunks;
    checksum_bytes_kernel<<<grid_of(call.num_items), kThreads, 0, stream_of(target)>>>(
        call, point_of_use(target), checksums);
  }
  return launched("checksum");
}

}  // namespace larder::kernels::cuda
