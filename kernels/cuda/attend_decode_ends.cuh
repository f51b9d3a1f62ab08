// Where the stretches of warps and the pieces of CTAs begin and end, and what CTAs have to merge
// there. Like the plan, without instructions that a host lacks: a test runs it there.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_plan.cuh"

namespace larder::kernels::cuda {

template <int kColumns>
__device__ inline PieceNote note_of(const DecodeCall& call, const Walk& walk, int32_t segment,
                                    bool begins, bool ends) {
  return {segment,
          walk.first_row,
          walk.plan.rows * call.group,
          walk.column_tile * kColumns,
          walk.head,
          walk.plan.tiles,
          begins,
          ends};
}

// A warp's stretch of an even one, from its place to `next_unit`, where the next warp begins; empty
// unless it has work.
__device__ inline void share_stretch(const DecodeCall& call, const StretchPlace& place,
                                     bool has_work, int32_t next_unit, WarpPlaces& places) {
  places.products = place.walk;
  places.from = place.from;
  places.segment = place.segment;
  places.done = 0;
  places.left = has_work ? next_unit - place.unit : 0;
  if (places.left > 0 && place.from == 0) places.left -= call.begin_tiles;
}
// To the segment after the one that the warp has done, `left` units before the stretch ends.
template <int kColumns>
__device__ inline void go_on_after(const DecodeCall& call, int32_t left, WarpPlaces& places) {
  places.segment += call.begin_tiles + places.products.plan.tiles;
  places.left = left - call.begin_tiles;
  places.from = 0;
  ++places.done;
  next_segment<kColumns>(call, places.products);
}

// Pieces of a CTA, one after another, all its warps on each.
struct PieceWalk {
  Walk walk;
  int32_t tiles;  // of a piece
  int32_t count;  // pieces of the segment
  int32_t piece;

  __device__ void enter(const DecodeCall& call) {
    tiles = tiles_of_piece(call, walk.plan.tiles);
    count = pieces_of(walk.plan.tiles, tiles);
    piece = 0;
  }
  template <int kColumns>
  __device__ void next(const DecodeCall& call) {
    if (++piece < count) return;
    next_segment<kColumns>(call, walk);
    enter(call);
  }
};

// A warp's share of the piece.
__device__ __noinline__ inline void share_piece(const PieceWalk& at, int32_t index,
                                                WarpPlaces& places) {
  const int32_t from = at.piece * at.tiles;
  const EvenSplit split =
      split_evenly(min(at.tiles, at.walk.plan.tiles - from), static_cast<int32_t>(blockDim.x / 32));
  const auto warp = static_cast<int32_t>(threadIdx.x / 32);
  places.products = at.walk;
  places.done = 0;
  places.from = from + split.begin(warp);
  places.left = split.begin(warp + 1) - split.begin(warp);
  places.segment = index;
}

// A segment whose last part the CTA has: `first_slot`, then next_slot, next_slot + slot_step, ...
// num_slots 0: none.
struct alignas(16) MergeJob {
  PieceNote note;  // of the columns
  int32_t num_slots;
  int32_t first_slot;
  int32_t next_slot;
  int32_t slot_step;

  __device__ int64_t slot(int32_t i) const {
    return i == 0 ? first_slot : next_slot + int64_t{i - 1} * slot_step;
  }
};

// Of an even stretch that begins at one place and ends at another: a segment that began before and
// ends here is this CTA's to merge. By a thread.
template <int kColumns, int kStepTiles>
__device__ inline void find_even_end(const DecodeCall& call, const CtaPlan& cta,
                                     const StretchPlace& begin, int32_t end_unit,
                                     MergeJob& result) {
  const PieceNote note = note_of<kColumns>(call, begin.walk, begin.segment, true, true);
  result.num_slots = 0;
  if (begin.from == 0 || begin.segment + call.begin_tiles + note.tiles > end_unit) return;
  // The last CTA whose begin was moved to that of the segment, or that begins before it.
  const int32_t moved = call.begin_tiles + (cta.is_in_steps ? kLastOfFirstStep<kStepTiles> : 0);
  const int32_t first = cta.split.part_of(begin.segment + moved);
  result = {note, static_cast<int32_t>(blockIdx.x) - first + 1, 2 * first + 1, 2 * first + 2, 2};
}
template <int kColumns>
__device__ inline void find_piece_end(const DecodeCall& call, const PieceWalk& at, int32_t index,
                                      MergeJob& result) {
  result = {};
  if (at.piece + 1 < at.count || at.count == 1) return;
  const int32_t first = index - at.piece;
  result = {note_of<kColumns>(call, at.walk, 0, true, true), at.count, first, first + 1, 1};
}

}  // namespace larder::kernels::cuda
