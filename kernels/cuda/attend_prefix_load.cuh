// How keys and values of a shared prefix get to shared memory: copied as they are stored, some
// tiles ahead, and decoded to halves by warps that do nothing else.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_tile.cuh"
#include "kernels/cuda/attend_prefix_wgmma.cuh"
#include "kernels/cuda/early_launch.cuh"

namespace larder::kernels::cuda::prefix {

// A group of 16 stored elements.
template <KvFormat kFormat>
struct StoredGroup;
template <>
struct StoredGroup<KvFormat::kNvfp4> {
  uint2 codes;
  uint32_t scale;  // its byte

  // As two chunks of halves.
  __device__ void decode(uint4& first, uint4& second) const {
    const uint32_t factor = halves_of_e4m3(scale * 0x0101u);
    const CodeBytes low = code_bytes(codes.x);
    const CodeBytes high = code_bytes(codes.y);
    const auto lower = [&](uint32_t bytes) {
      return multiply_halves(__byte_perm(bytes, 0, 0x1404), factor);
    };
    const auto upper = [&](uint32_t bytes) {
      return multiply_halves(__byte_perm(bytes, 0, 0x3424), factor);
    };
    first = {lower(low.even), upper(low.even), lower(high.even), upper(high.even)};
    second = {lower(low.odd), upper(low.odd), lower(high.odd), upper(high.odd)};
  }
};
template <>
struct StoredGroup<KvFormat::kFp8E4m3> {
  uint4 codes;

  __device__ void decode(uint4& first, uint4& second) const {
    first = {halves_of_e4m3(codes.x & 0xFFFFu), halves_of_e4m3(codes.x >> 16),
             halves_of_e4m3(codes.y & 0xFFFFu), halves_of_e4m3(codes.y >> 16)};
    second = {halves_of_e4m3(codes.z & 0xFFFFu), halves_of_e4m3(codes.z >> 16),
              halves_of_e4m3(codes.w & 0xFFFFu), halves_of_e4m3(codes.w >> 16)};
  }
};

// A lane's groups of a run of K or V in shared memory: in each of kCount turns eight lanes take
// four groups of two tokens, so that they write to all banks.
template <typename T>
struct StoredRun {
  static constexpr int kTokens = 8 / T::kPanels;  // that a warp takes at once
  static constexpr int kCount = kRunTokens / kTokens;
  StoredGroup<T::kFormat> groups[kCount];

  static __device__ int panel(int lane) { return lane / 8 % T::kPanels; }
  static __device__ int token(int lane) { return lane / 8 / T::kPanels * 2 + lane / 4 % 2; }

  __device__ void load(const uint8_t* raw, int lane) {
    const int group = panel(lane) * 4 + lane % 4;
    const uint8_t* scales = raw + kRunTokens * T::kRowBytes + token(lane) * T::kScaleBytes + group;
    raw += token(lane) * T::kRowBytes + group * (T::kRowBytes * 16 / T::kDim);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      const auto* codes = raw + n * kTokens * T::kRowBytes;
      groups[n].codes = *reinterpret_cast<const decltype(groups[n].codes)*>(codes);
      if constexpr (T::kScaleBytes > 0) groups[n].scale = scales[n * kTokens * T::kScaleBytes];
    }
  }

  // To rows of halves from `first_row` on.
  __device__ void decode(uint8_t* halves, int first_row, int lane) const {
    halves += (panel(lane) * kKeys + first_row + token(lane)) * 128;
    // Its XOR with the row's number mod 8, of which the token has the bits below those of
    // kTokens * n.
    const int chunk = 2 * (lane % 4) ^ token(lane);
#pragma unroll
    for (int n = 0; n < kCount; ++n) {
      uint4 first;
      uint4 second;
      groups[n].decode(first, second);
      uint8_t* row = halves + n * kTokens * 128;
      const int place = chunk ^ (kTokens * n & 7);
      *reinterpret_cast<uint4*>(row + place * 16) = first;
      *reinterpret_cast<uint4*>(row + (place ^ 1) * 16) = second;
    }
  }
};

// What is streamed leaves the L2 first; not what goes straight to the rows of halves, for which
// ptxas 13.0 makes an illegal instruction of such a copy (its policy in an odd uniform register).
template <typename T>
__device__ inline void copy_stored(uint32_t to, const uint8_t* from, bool is_present) {
  if constexpr (T::kIsDirect)
    copy_16(to, from, is_present);
  else
    stream_16(to, from, is_present);
}

// A warp's runs of an item's tiles, one of 16 tokens in each, K and V.
template <typename T>
class RunLoader {
 public:
  __device__ RunLoader(const WideCall& call, const WideItem& item, uint8_t* memory)
      : call_(call),
        item_(item),
        memory_(memory),
        first_token_(item.begin + place_.warp * kRunTokens),
        num_tiles_(item.num_tiles()) {
    const PageLayout& page = call.layer.page;
    const int64_t head_row = int64_t{kv_head_of_cta()} * call.layer.block_tokens;
    const uint8_t* in_block = call.layer.base + place_.lane * 16;
    data_ = in_block + page.k_data_offset_bytes + head_row * T::kRowBytes;
    to_values_ = page.v_data_offset_bytes - page.k_data_offset_bytes;
    if constexpr (T::kScaleBytes > 0) {
      const bool is_key = place_.lane < T::kScaleBytes;
      scales_ = in_block + (is_key ? page.k_scale_offset_bytes : page.v_scale_offset_bytes) +
                head_row * T::kScaleBytes - (is_key ? 0 : T::kScaleBytes * 16);
    }
  }

  // All of them, for the groups that wait for each.
  __device__ void load() {
    take_ids(0);
    bring_near();
    wait_for_previous_kernel();
    let_next_kernel_start();  // not before: it relies on all kernels before this one
    constexpr int kAhead = T::kIsDirect ? 1 : T::kRawStages - 1;
#pragma unroll 1
    for (int tile = 0; tile < kAhead; ++tile) copy(tile);
    int stage = 0;
#pragma unroll 1
    for (int tile = 0; tile < num_tiles_; ++tile) {
      copy(tile + kAhead);
      wait_for_copies<kAhead>();
      __syncwarp();  // the copies of all lanes are there
      if constexpr (!T::kIsDirect) decode(tile, stage);
      if (place_.lane == 0) present()[stage * kRuns + place_.warp] = is_present_ >> tile % 32 & 1;
#pragma unroll
      for (int group = 0; group < T::kGroups; ++group)
        arrive(filled_barrier(stage, group), 2 * kGroupThreads);
      if (++stage == call_.num_stages) stage = 0;
    }
  }

 private:
  // The first tiles' bytes, to the L2. Nothing is read: the kernel before may still run.
  __device__ void bring_near() const {
    constexpr int kTiles = T::kIsDirect ? 2 : T::kRawStages;
#pragma unroll 1
    for (int tile = 0; tile < min(kTiles, num_tiles_); ++tile) {
      const int32_t named = __shfl_sync(~0u, ids_, tile);
      if (named < 0 || named >= call_.layer.num_blocks) continue;
      const int32_t offset = (first_token_ + tile * kKeys) & (call_.layer.block_tokens - 1);
      const int64_t block = named * call_.layer.block_stride_bytes;
      const uint8_t* keys = data_ + block + offset * T::kRowBytes + place_.lane * (kLineBytes - 16);
      for (int at = place_.lane * kLineBytes; at < kRunTokens * T::kRowBytes;
           at += 32 * kLineBytes) {
        prefetch_line(keys);
        prefetch_line(keys + to_values_);
        keys += 32 * kLineBytes;
      }
      if constexpr (T::kScaleBytes > 0)
        if (place_.lane < 2 * T::kScaleBytes)
          prefetch_line(scales_ + block + offset * T::kScaleBytes);
    }
  }
  // The ids of 32 tiles at once, a lane each.
  __device__ void take_ids(int tile) {
    const int32_t token = first_token_ + (tile + place_.lane) * kKeys;
    ids_ = token < item_.tokens ? load_once(item_.blocks + (token >> call_.block_shift)) : -1;
  }

  static __device__ void wait_until_read(int stage) {
    arrive_and_wait(read_barrier(stage), T::kThreads);
  }
  __device__ int* present() const {
    return reinterpret_cast<int*>(memory_ + T::present(call_.num_stages));
  }

  // Begins the copies of a tile, or none past the last.
  __device__ void copy(int tile) {
    if (tile < num_tiles_) {
      if (tile % 32 == 0 && tile > 0) take_ids(tile);
      const int32_t token = first_token_ + tile * kKeys;
      const int32_t named = __shfl_sync(~0u, ids_, tile % 32);
      const bool is_present =
          token < item_.tokens && call_.use.may_use(named, call_.layer.num_blocks, false, named);
      const uint32_t bit = 1u << tile % 32;
      is_present_ = is_present ? is_present_ | bit : is_present_ & ~bit;
      const int64_t block = is_present ? named * call_.layer.block_stride_bytes : 0;
      copy_run(tile, block, token & (call_.layer.block_tokens - 1), is_present);
    }
    commit_copies();
  }

  // Of a tile, from `block` bytes behind the first block on: raw, or to the rows of halves.
  __device__ void copy_run(int tile, int64_t block, int32_t offset, bool is_present) {
    constexpr int kChunks = kRunTokens * T::kRowBytes / 16;
    const uint8_t* keys = data_ + block + offset * T::kRowBytes;
    const uint8_t* values = keys + to_values_;
    uint32_t to;
    uint32_t to_values;
    if constexpr (T::kIsDirect) {
      const int stage = tile % call_.num_stages;
      if (tile >= call_.num_stages) wait_until_read(stage);
      to = shared_address(memory_ + T::stage(stage));
      to_values = to + T::kHalfTileBytes;
    } else {
      to = shared_address(raw_run(tile)) + place_.lane * 16;
      to_values = to + T::kRawTileBytes;
    }
#pragma unroll
    for (int n = 0; n < kChunks / 32; ++n) {
      int at = n * 512;
      if constexpr (T::kIsDirect) {
        constexpr int kRowChunks = T::kRowBytes / 16;
        const int i = n * 32 + place_.lane;
        at = chunk_offset(place_.warp * kRunTokens + i / kRowChunks, i % kRowChunks, kKeys);
      }
      copy_stored<T>(to + at, keys + n * 512, is_present);
      copy_stored<T>(to_values + at, values + n * 512, is_present);
    }
    // Lanes below kScaleBytes have those of keys, as many behind them those of values.
    if constexpr (T::kScaleBytes > 0)
      if (place_.lane < 2 * T::kScaleBytes)
        copy_stored<T>(
            to + kRunTokens * T::kRowBytes +
                (place_.lane < T::kScaleBytes ? 0 : T::kRawTileBytes - T::kScaleBytes * 16),
            scales_ + block + offset * T::kScaleBytes, is_present);
  }

  // All that the lane takes is loaded before it is decoded, so that no load is waited for alone.
  __device__ void decode(int tile, int stage) const {
    const uint8_t* raw = raw_run(tile);
    uint8_t* halves = memory_ + T::stage(stage);
    const int row = place_.warp * kRunTokens;
    StoredRun<T> keys;
    StoredRun<T> values;
    keys.load(raw, place_.lane);
    values.load(raw + T::kRawTileBytes, place_.lane);
    __syncwarp();  // before other lanes' copies take its place
    if (tile >= call_.num_stages) wait_until_read(stage);
    keys.decode(halves, row, place_.lane);
    values.decode(halves + T::kHalfTileBytes, row, place_.lane);
  }

  __device__ uint8_t* raw_run(int tile) const {
    return memory_ + T::raw(call_.num_stages) + tile % T::kRawStages * 2 * T::kRawTileBytes +
           place_.warp * T::kRunBytes;
  }

  const WideCall& call_;
  const WideItem& item_;
  uint8_t* memory_;
  const Place place_ = current_place();
  const int32_t first_token_;
  const int num_tiles_;
  const uint8_t* data_;      // of the lane, in the first block: of keys
  int64_t to_values_;        // in bytes, from keys
  const uint8_t* scales_;    // of the lane, of keys or of values
  int32_t ids_ = -1;         // of the lane's tile of 32
  uint32_t is_present_ = 0;  // a bit per tile of 32
};

}  // namespace larder::kernels::cuda::prefix
