// A warp's tiles on their way into shared memory: a ring of halves, keys and values of a step in
// turn, filled by asynchronous copies two halves before they are used. The way through the segments
// is walked ahead of the arithmetic, so loads run on into the next segment.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_plan.cuh"
#include "kernels/cuda/attend_decode_queries.cuh"

namespace larder::kernels::cuda {

// What is streamed leaves the L2 first, so that code, lengths and tables stay there. From SM90 on
// the policy is what createpolicy makes there, as machine code for SM90 to SM121 shows: to have it
// made took six instructions each time.
__device__ inline void stream_async(uint32_t to, const uint8_t* from) {
  asm volatile(
      "{\n"
      ".reg .b64 policy;\n"
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
      "mov.b64 policy, 0x12F0000000000000;\n"
#else
      "createpolicy.fractional.L2::evict_first.b64 policy, 1.0;\n"
#endif
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
  if (call.use.rights.words == nullptr) wait_for_previous_kernel();  // a fault is written
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
        memory_(keep(static_cast<int>(__cvta_generic_to_shared(memory)))),
        lane_(keep(thread_index() % 32)) {
    begin_segment();
  }

  // Begins to load the first step, once.
  __device__ void fill() {
    issue<0>();
    issue<1>();
    next();
  }

  // The halves of the step that is used next, each once it is there. The keys of the step after go
  // to the half that is neither, its values to where this step's keys were.
  __device__ const uint8_t* keys() const { return bytes(used_); }
  __device__ const uint8_t* values() const {
    return bytes(min(used_ - 2 * kHalf, used_ + kHalf));  // modulo three halves
  }
  __device__ void wait() { wait_for_copies<1>(); }
  __device__ void next() { used_ = before(); }
  // Tiles that were loaded of the step whose keys were issued last, as bits; not those past the end
  // of the segment's stretch, nor those of blocks that must not be looked at.
  __device__ uint32_t loaded_tiles() const { return loaded_ & kAllTiles; }
  __device__ bool has_all_tiles() const { return loaded_ == kAllTiles; }

  // Begins to load the keys (0) or values (1) of the step after; nothing at the end. A lane copies
  // of one tile.
  template <int kSide>
  __device__ void issue() {
    if constexpr (kSide == 0) find_tiles();
    const uint32_t to = memory_ + (kSide == 0 ? before() : used_);
    const int64_t data_side = kSide == 0 ? 0 : call_.layer.values_offset_bytes;
    if (is_there()) {
      copy_data<kSide>(to, reinterpret_cast<const uint8_t*>(data_ + data_side));
      if constexpr (Format::kTileScaleBytes > 0) {
        const int64_t scale_side = kSide == 0 ? 0 : call_.layer.value_scales_offset_bytes;
        stream_async(to + kStepTiles * Format::kTileBytes + lane() * 16,
                     reinterpret_cast<const uint8_t*>(scales_ + scale_side));
      }
    }
    commit_copies();
    if constexpr (kSide == 1) {
      tile_ += kStepTiles;
      if (is_rare() && tile_ >= place_.end && place_.left > 0) go_on();
    }
  }

 private:
  static constexpr int kMovesAt = 24;  // of the 32 block ids that lanes hold, so many are passed
  static constexpr uint32_t kAllTiles = (1u << kStepTiles) - 1;
  static constexpr uint32_t kNothing = 1u << 31;
  static constexpr int kTileLanes = 32 / kStepTiles;
  static constexpr uint32_t kHalf = Shape::kHalfBytes;

  __device__ bool is_there() const { return static_cast<int32_t>(loaded_) >= 0; }
  // The lane's own value, from a shuffle so that it stays in a register: what the compiler can make
  // anew it makes anew in every step, by five to seven instructions.
  static __device__ int keep(int value) { return __shfl_sync(~0u, value, thread_index() % 32); }
  __device__ int lane() const {
    __builtin_assume(lane_ >= 0 && lane_ < 32);
    return lane_;
  }

  __device__ const uint8_t* bytes(uint32_t offset) const {
    return static_cast<const uint8_t*>(__cvta_shared_to_generic(memory_ + offset));
  }
  __device__ uint32_t before() const { return min(used_ - kHalf, used_ + 2 * kHalf); }

  // Whether the step may be another than the usual, as find_rare says. A vote, since a branch that
  // all lanes take together, as the compiler then knows, costs less.
  __device__ bool is_rare() const { return __any_sync(~0u, tile_ >= rare_from_); }

  // Its first block ids are on their way when find_tiles wants them.
  __device__ void begin_segment() {
    tile_ = place_.tile;
    rare_from_ = tile_;
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
  __device__ void take_ids() {
    ids_from_ += kMovesAt;
    ids_ = next_ids_;
    const int lane = this->lane();
    const bool is_wanted = ids_from_ + lane <= (place_.end - 1) >> call_.layer.block_shift;
    bool is_good = ids_ >= 0 && ids_ < call_.layer.num_blocks;
    if (is_wanted && (!is_good || call_.use.rights.words != nullptr))
      is_good = may_read(call_, ids_);
    const uint32_t bad = __ballot_sync(~0u, is_wanted && !is_good);
    if (lane == 0) place_.bad_ids = bad;
    __syncwarp();
    next_ids_ = load_ids(ids_from_ + kMovesAt + lane);
    const int32_t moves_at = (ids_from_ + kMovesAt) << call_.layer.block_shift;
    rare_from_ = bad != 0 ? tile_ : min(moves_at, place_.end - kStepTiles + 1);
  }

  // Most steps are full, of blocks whose ids are at hand and good: one comparison says so.
  __device__ void find_tiles() {
    const int lane = this->lane();
    int32_t tile = tile_ + lane / kTileLanes;
    loaded_ = kAllTiles;
    if (is_rare()) tile = find_rare(tile);
    const auto id = static_cast<uint32_t>(__shfl_sync(~0u, ids_, id_lane(tile)));
    const uint32_t in_block = static_cast<uint32_t>(tile) & call_.layer.block_mask;
    const uint32_t unit = static_cast<uint32_t>(lane % kTileLanes) * 16;
    const uint32_t stride = call_.layer.block_stride_bytes;
    data_ = place_.data + uint64_t{id} * stride + (in_block * Format::kTileBytes + unit);
    if constexpr (Format::kTileScaleBytes > 0)
      scales_ = place_.scales + uint64_t{id} * stride + (in_block * Format::kTileScaleBytes + unit);
  }
  // Where the step is not full, wants further ids, or may have bad blocks; returns the lane's tile.
  __device__ int32_t find_rare(int32_t tile) {
    if (tile_ >= place_.end) {
      loaded_ = kNothing;
      return tile;
    }
    if ((tile_ >> call_.layer.block_shift) - ids_from_ >= kMovesAt) take_ids();
    const int32_t last = min(place_.end - tile_, kStepTiles) - 1;
    loaded_ = kAllTiles >> (kStepTiles - 1 - last);
    // Past the last tile that one again, so that a step may be taken as a whole.
    tile = min(tile, tile_ + last);
    const uint32_t bad = place_.bad_ids;
    if (bad != 0) {
      for (int i = 0; i <= last; ++i)
        if ((bad >> id_lane(tile_ + i) & 1u) != 0) loaded_ &= ~(1u << i);
      if ((bad >> id_lane(tile) & 1u) != 0) loaded_ |= kNothing;
    }
    return tile;
  }

  // The lane that holds the tile's block.
  __device__ int id_lane(int32_t tile) const {
    return (tile >> call_.layer.block_shift) - ids_from_;
  }

  // Where a unit of a tile goes, by the format.
  template <int kSide>
  static __device__ constexpr int place_of_unit(int unit) {
    return kSide == 0 ? Format::key_unit(unit) : Format::value_unit(unit);
  }
  static constexpr int kMoves = Format::kTileBytes / 16 / kTileLanes;
  // A lane's units, one a move, go to where its first one goes, but for bits turned and a distance
  // that depend on the move alone. So a lane has few addresses, and the distance costs nothing.
  template <int kSide>
  static __device__ constexpr bool is_turned_by_move() {
    for (int move = 0; move < kMoves; ++move)
      for (int lane = 0; lane < kTileLanes; ++lane) {
        const int first = place_of_unit<kSide>(lane);
        const int of_move = place_of_unit<kSide>(move * kTileLanes);
        const int turned = of_move % kTileLanes;
        const bool is_near = first < kTileLanes && turned < kBaseUnits;
        if (!is_near ||
            place_of_unit<kSide>(move * kTileLanes + lane) != (first ^ turned) + of_move - turned)
          return false;
      }
    return true;
  }
  static constexpr int kBaseUnits = 8;  // tiles begin at multiples of 128 bytes
  static_assert(kHalf % (16 * kBaseUnits) == 0 && Format::kTileBytes % (16 * kBaseUnits) == 0);

  template <int kSide>
  __device__ void copy_data(uint32_t to, const uint8_t* from) {
    static_assert(is_turned_by_move<kSide>());
    const int lane = this->lane();
    const uint32_t first =
        to + lane / kTileLanes * Format::kTileBytes + place_of_unit<kSide>(lane % kTileLanes) * 16;
#pragma unroll
    for (int move = 0; move < kMoves; ++move) {
      const int of_move = place_of_unit<kSide>(move * kTileLanes);
      const int turned = of_move % kTileLanes;
      stream_async((first ^ turned * 16) + (of_move - turned) * 16, from + move * kTileLanes * 16);
    }
  }

  const DecodeCall& call_;
  LoadPlace& place_;
  uint32_t memory_;
  int lane_;
  uint32_t used_ = kHalf;  // where the keys of the step that is used next are
  int32_t tile_ = 0;
  int32_t ids_from_ = 0;
  int32_t ids_ = 0;
  int32_t next_ids_ = 0;
  int32_t rare_from_ = 0;  // tiles before are usual; no further than the end of the stretch
  uint32_t loaded_ = 0;    // and kNothing where the lane has nothing to copy
  // Of the lane's tile, the addresses of its first units: of keys, and of their scales.
  uint64_t data_ = 0;
  uint64_t scales_ = 0;
};

}  // namespace larder::kernels::cuda
