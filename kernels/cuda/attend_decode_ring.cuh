// A warp's tiles on their way into shared memory: a ring of halves, keys and values of a step in
// turn, filled by asynchronous copies two halves before they are used. The way through the segments
// is walked ahead of the arithmetic, so loads run on into the next segment.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_plan.cuh"
#include "kernels/cuda/attend_decode_queries.cuh"

namespace larder::kernels::cuda {

// What is streamed leaves the L2 first, so that code, lengths and tables stay there.
__device__ inline void stream_async(uint32_t to, const uint8_t* from) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
      "cp.async.cg.shared.global.L2::cache_hint [%0], [%1], 16, policy;\n"
      "}" ::"r"(to),
      "l"(from)
      : "memory");
}
__device__ inline void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }
template <int kLater>
__device__ inline void wait_for_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(kLater) : "memory");
  __syncwarp();
}

// Whether the sequence may read a block: its rights are looked at, and a fault is counted. Apart
// from the loop that asks, as most calls have no rights and no faults.
__device__ __noinline__ inline bool may_read(const DecodeCall& call, int32_t block) {
  return call.use.may_use(block, call.layer.num_blocks, false, block);
}

template <typename Shape>
class Ring {
 public:
  using Format = typename Shape::Format;
  static constexpr int kStepTiles = Format::kStepTiles;

  // From where `place` says on, across segments: it lies in shared memory and is the ring's.
  __device__ Ring(const DecodeCall& call, LoadPlace& place, uint8_t* memory)
      : call_(call),
        place_(place),
        memory_(static_cast<uint32_t>(__cvta_generic_to_shared(memory))) {
    begin_segment();
  }

  // Begins to load the first step, once.
  __device__ void fill() {
    issue<0>();
    next();
    issue<1>();
    next();
  }

  // Byte offset of the half that is used next, once it is there; two halves after it, which is the
  // one before, is where the next load goes.
  __device__ int slot() const { return used_; }
  __device__ void wait() { wait_for_copies<1>(); }
  __device__ void next() { used_ = used_ == 2 * Shape::kHalfBytes ? 0 : used_ + Shape::kHalfBytes; }
  // Tiles that were loaded of the step whose keys were issued last, as bits; not those past the end
  // of the segment's stretch, nor those of blocks that must not be looked at.
  __device__ uint32_t loaded_tiles() const { return loaded_; }

  // Begins to load the keys (0) or values (1) of the step after; nothing at the end. A lane copies
  // of one tile.
  template <int kSide>
  __device__ void issue() {
    const int lane = Ring::lane();
    if constexpr (kSide == 0) find_tiles(lane);
    if (data_at_ != kNothing) {
      const uint32_t to =
          memory_ + (used_ == 0 ? 2 * Shape::kHalfBytes : used_ - Shape::kHalfBytes);
      const uint8_t* block = call_.layer.base + uint64_t{block_} * call_.layer.block_stride_bytes;
      copy_data<kSide>(lane, to, block + (call_.layer.side_offset_bytes[kSide] + data_at_));
      if constexpr (Format::kTileScaleBytes > 0)
        stream_async(to + kStepTiles * Format::kTileBytes + lane * 16,
                     block + (call_.layer.scale_offset_bytes[kSide] + scale_at_));
    }
    commit_copies();
    if constexpr (kSide == 1) {
      tile_ += kStepTiles;
      if (tile_ >= place_.end && place_.left > 0) go_on();
    }
  }

 private:
  static constexpr int kMovesAt = 24;  // of the 32 block ids that lanes hold, so many are passed
  static constexpr uint32_t kAllTiles = (1u << kStepTiles) - 1;
  static constexpr int kTileLanes = 32 / kStepTiles;
  static constexpr uint32_t kNothing = ~0u;

  static __device__ int lane() { return thread_index() % 32; }

  // Its first block ids are on their way when find_tiles wants them.
  __device__ void begin_segment() {
    tile_ = place_.tile;
    const int32_t first = tile_ >> call_.layer.block_shift;
    ids_from_ = first - kMovesAt;
    next_ids_ = load_ids(first + lane());
  }
  __device__ void go_on() {
    enter_next<Shape::kColumns>(call_, place_);
    begin_segment();
    prefetch_queries<Shape>(call_, place_.walk);
  }

  // Of block number `index` of the sequence. Entries past the last block that is wanted are not
  // looked at.
  __device__ int32_t load_ids(int32_t index) const {
    return index <= (place_.end - 1) >> call_.layer.block_shift ? __ldg(place_.table + index) : 0;
  }
  // The ids that have been loaded become those in use, and the next ones are loaded.
  __device__ void take_ids(int lane) {
    ids_ = next_ids_;
    const bool is_wanted = ids_from_ + lane <= (place_.end - 1) >> call_.layer.block_shift;
    bool is_good = ids_ >= 0 && ids_ < call_.layer.num_blocks;
    if (is_wanted && (!is_good || call_.use.rights.words != nullptr))
      is_good = may_read(call_, ids_);
    const uint32_t bad = __ballot_sync(~0u, is_wanted && !is_good);
    if (lane == 0) place_.bad_ids = bad;
    __syncwarp();
    next_ids_ = load_ids(ids_from_ + kMovesAt + lane);
  }

  __device__ void find_tiles(int lane) {
    if (tile_ >= place_.end) {
      loaded_ = 0;
      data_at_ = kNothing;
      return;
    }
    if ((tile_ >> call_.layer.block_shift) - ids_from_ >= kMovesAt) {
      ids_from_ += kMovesAt;
      take_ids(lane);
    }
    const int32_t last = min(place_.end - tile_, kStepTiles) - 1;
    loaded_ = kAllTiles >> (kStepTiles - 1 - last);
    // Past the last tile that one again, so that a step may be taken as a whole.
    const int tile = min(lane / kTileLanes, last);
    block_ = static_cast<uint32_t>(__shfl_sync(~0u, ids_, id_lane(tile)));
    const uint32_t in_block =
        static_cast<uint32_t>(tile_ + tile) & ((1u << call_.layer.block_shift) - 1);
    const uint32_t unit = static_cast<uint32_t>(lane % kTileLanes) * 16;
    data_at_ = place_.data_offset + in_block * Format::kTileBytes + unit;
    scale_at_ = place_.scale_offset + in_block * Format::kTileScaleBytes + unit;
    const uint32_t bad = place_.bad_ids;
    if (bad == 0) return;
    if ((bad >> id_lane(tile) & 1u) != 0) data_at_ = kNothing;
    for (int i = 0; i <= last; ++i)
      if ((bad >> id_lane(i) & 1u) != 0) loaded_ &= ~(1u << i);
  }

  // The lane that holds the block of tile number `i` of the step.
  __device__ int id_lane(int i) const {
    return ((tile_ + i) >> call_.layer.block_shift) - ids_from_;
  }

  template <int kSide>
  __device__ void copy_data(int lane, uint32_t to, const uint8_t* from) {
    constexpr int kMoves = Format::kTileBytes / 16 / kTileLanes;
    to += lane / kTileLanes * Format::kTileBytes;
#pragma unroll
    for (int move = 0; move < kMoves; ++move) {
      const int unit = kTileLanes * move + lane % kTileLanes;
      const int place = kSide == 0 ? Format::key_unit(unit) : Format::value_unit(unit);
      stream_async(to + place * 16, from + move * kTileLanes * 16);
    }
  }

  const DecodeCall& call_;
  LoadPlace& place_;
  uint32_t memory_;
  int used_ = Shape::kHalfBytes;
  int32_t tile_ = 0;
  int32_t ids_from_ = 0;
  int32_t ids_ = 0;
  int32_t next_ids_ = 0;
  uint32_t loaded_ = 0;
  // Of the lane's tile: its block and its first unit there; kNothing: it is not loaded.
  uint32_t block_ = 0;
  uint32_t data_at_ = kNothing;
  uint32_t scale_at_ = 0;
};

}  // namespace larder::kernels::cuda
