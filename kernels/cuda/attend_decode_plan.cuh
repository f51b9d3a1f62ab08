// Who takes which tiles, decided by each CTA from the lengths in device memory, so that a captured
// launch serves other lengths.
//
// All tiles of a call stand in one row: sequences, then KV heads, then column tiles, then tokens.
// CTAs, and warps within them, take even stretches of it; or, where pieces are given, CTAs take
// even stretches of the row of pieces, one piece after the other.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_walk.cuh"

namespace larder::kernels::cuda {

// Even stretches of `total` units for `parts`: the first ones have one more.
struct EvenSplit {
  int32_t each;
  int32_t more;

  __device__ EvenSplit(int32_t total, int32_t parts)
      : each(total / parts), more(total - each * parts) {}
  __device__ int32_t begin(int32_t part) const { return part * each + min(part, more); }
  __device__ int32_t part_of(int32_t unit) const {
    const int32_t cut = more * (each + 1);
    return unit < cut ? unit / (each + 1) : more + (unit - cut) / max(each, 1);
  }
};

// Least tiles of the pieces of a segment of `tiles`, and their number.
__device__ inline int32_t tiles_of_piece(const DecodeCall& call, int32_t tiles) {
  return max(call.piece_tiles, (tiles + call.max_pieces - 1) / call.max_pieces);
}
__device__ inline int32_t pieces_of(int32_t tiles, int32_t piece_tiles) {
  return (tiles + piece_tiles - 1) / piece_tiles;
}
// Tiles, or pieces, of a sequence: below 2^31, since its rows are no more than q's and its keys no
// more than a row of the block table holds, for which the host has counted the tiles.
__device__ inline int32_t units_of(const DecodeCall& call, const SequencePlan& plan) {
  if (plan.tiles == 0) return 0;
  const int32_t units =
      call.piece_tiles == 0 ? plan.tiles : pieces_of(plan.tiles, tiles_of_piece(call, plan.tiles));
  return units * call.num_kv_heads * plan.column_tiles;
}

// What a CTA takes.
struct CtaPlan {
  int32_t total;  // units of the call
  int32_t begin;  // the CTA's first
  int32_t count;
  int32_t num_ctas;   // with work
  int32_t num_warps;  // of the CTA
  bool is_in_steps;   // whether stretches begin at whole steps
};

__device__ inline CtaPlan split_units(const DecodeCall& call, int32_t total) {
  CtaPlan plan = {total, 0, 0, 1, static_cast<int32_t>(blockDim.x / 32), false};
  plan.num_ctas = max(min(total, static_cast<int32_t>(gridDim.x)), 1);
  const auto cta = static_cast<int32_t>(blockIdx.x);
  if (cta >= plan.num_ctas) return plan;
  const EvenSplit split(total, plan.num_ctas);
  plan.begin = split.begin(cta);
  plan.count = split.begin(cta + 1) - plan.begin;
  // A step has 8 tiles at most, so that no stretch is empty.
  plan.is_in_steps = call.piece_tiles == 0 && split.each >= 16 * plan.num_warps;
  if (call.piece_tiles == 0)
    plan.num_warps =
        max(min((split.each + call.min_tiles - 1) / call.min_tiles, plan.num_warps), 1);
  return plan;
}

// `units` from the beginning of the walk's sequence, where a segment has `per_segment` of them.
// Returns the rest within the segment.
__device__ inline int32_t find_segment(int32_t units, int32_t per_segment, Walk& walk) {
  const int32_t segment = units / per_segment;
  walk.head = walk.plan.column_tiles == 1 ? segment : segment / walk.plan.column_tiles;
  walk.column_tile = segment - walk.head * walk.plan.column_tiles;
  return units - segment * per_segment;
}

struct StartNote {
  Walk walk;       // of the sequence; with the first warp that begins in it
  int32_t source;  // that warp
  int32_t units;   // from the sequence's first on
};

struct PlanShared {
  StartNote starts[kMaxDecodeWarps + 1];
  uint64_t warp_sums[kMaxDecodeWarps];
};

// Notes the warps that begin in [first, first + units) of the sequence of `walk`, and where the
// stretch after the last one's does; with pieces, the CTA alone. By the thread that has planned the
// sequence, which leaves the walk with the first of them.
__device__ inline void note_starts(const DecodeCall& call, const CtaPlan& cta, const Walk& walk,
                                   int32_t first, int32_t units, PlanShared& shared) {
  if (first > cta.begin + cta.count || first + units <= cta.begin) return;
  const bool is_pieces = call.piece_tiles > 0;
  const EvenSplit split(cta.count, is_pieces ? 1 : cta.num_warps);
  const int32_t num_starts = is_pieces ? 1 : cta.num_warps + 1;
  int32_t source = -1;
#pragma unroll 1
  for (int32_t warp = 0; warp < num_starts; ++warp) {
    const int32_t begin = cta.begin + split.begin(warp);
    if (begin >= first && begin < first + units) {
      if (source < 0) {
        source = warp;
        shared.starts[warp].walk = walk;
      }
      shared.starts[warp].source = source;
      shared.starts[warp].units = begin - first;
    }
  }
}

// What a warp begins with, by one of its lanes; with pieces, what the CTA begins with. Warps of
// many tiles begin at whole steps of their segments: where they end is what the next one begins
// with.
template <int kColumns, int kStepTiles>
__device__ inline void begin_warp(const DecodeCall& call, const CtaPlan& cta, int32_t warp,
                                  const PlanShared& shared, WarpPlaces& places) {
  const bool is_pieces = call.piece_tiles > 0;
  const EvenSplit split(cta.count, cta.num_warps);
  places.unit = cta.begin + split.begin(warp);
  if (places.unit >= cta.total) return;  // the end of all
  const StartNote& start = shared.starts[warp];
  Walk& walk = places.products;
  walk = shared.starts[start.source].walk;
  int32_t per_segment = walk.plan.tiles;
  if (is_pieces) per_segment = pieces_of(per_segment, tiles_of_piece(call, per_segment));
  places.from = find_segment(start.units, per_segment, walk);
  if (cta.is_in_steps) {
    const int32_t over = places.from % kStepTiles;
    places.from -= over;
    places.unit -= over;
  }
  view_segment<kColumns>(call, walk);
}

// Two figures below 2^31, and their sums, which stay at 2^31 - 1 once they would pass it: that
// many rows or units are of wrong lengths.
__device__ inline uint64_t pack_figures(int32_t rows, int32_t units) {
  return uint64_t{static_cast<uint32_t>(rows)} << 32 | static_cast<uint32_t>(units);
}
__device__ inline uint64_t add_figures(uint64_t a, uint64_t b) {
  constexpr uint32_t kMost = 0x7FFFFFFFu;
  const uint64_t sum = a + b;  // nothing is carried from one half to the other
  return uint64_t{min(static_cast<uint32_t>(sum >> 32), kMost)} << 32 |
         min(static_cast<uint32_t>(sum), kMost);
}

// Sum of two figures over the threads before this one and, in `total`, over all.
__device__ inline uint64_t running_sum(uint64_t value, PlanShared& shared, uint64_t& total) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const uint64_t other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value = add_figures(value, other);
  }
  __syncthreads();  // the last round's sums have been read
  if (lane == 31) shared.warp_sums[warp] = value;
  const uint64_t in_warp = __shfl_up_sync(~0u, value, 1);
  __syncthreads();
  uint64_t sum = lane == 0 ? total : add_figures(total, in_warp);
#pragma unroll
  for (int other = 0; other < kMaxDecodeWarps; ++other) {
    if (other >= static_cast<int>(blockDim.x / 32)) break;
    const uint64_t of_warp = shared.warp_sums[other];
    if (other < warp) sum = add_figures(sum, of_warp);
    total = add_figures(total, of_warp);
  }
  return sum;
}

// By all threads of the CTA, a sequence each and round: first the sums over all, then, knowing
// them, where the CTA's warps begin. One round does both. Where there are more q_lens than rows,
// those past the last row are left out and the units summed up again, so that there are no more of
// them than the host has counted.
template <int kColumns>
__device__ CtaPlan plan_cta(const DecodeCall& call, PlanShared& shared) {
  const auto threads = static_cast<int32_t>(blockDim.x);
  CtaPlan cta = {};
#pragma unroll 1
  for (int pass = call.num_seqs <= threads ? 1 : 0; pass < 2; ++pass) {
    uint64_t total = 0;  // q_lens above units
    Walk rest = {};
    int32_t rest_units = 0;
#pragma unroll 1
    for (int32_t round = 0; round == 0 || round < call.num_seqs; round += threads) {
      Walk walk = {};
      walk.sequence = round + static_cast<int32_t>(threadIdx.x);
      const bool reports = pass == 1 && blockIdx.x == 0;
      if (walk.sequence < call.num_seqs)
        walk.plan = plan_sequence<kColumns>(call, walk.sequence, call.num_rows, reports);
      const uint64_t before = total;
      int32_t units = 0;
      uint64_t first = 0;
#pragma unroll 1
      for (bool is_cut = false;; is_cut = true) {
        units = units_of(call, walk.plan);
        total = before;
        first = running_sum(pack_figures(walk.plan.q_len, units), shared, total);
        walk.first_row = static_cast<int32_t>(first >> 32);
        if (is_cut || static_cast<int32_t>(total >> 32) <= call.num_rows) break;
        const int32_t left = max(call.num_rows - walk.first_row, 0);
        if (reports && walk.first_row <= call.num_rows && walk.plan.q_len > left)
          call.use.report(walk.plan.q_len);
        take_rows<kColumns>(call, left, walk.plan);
      }
      if (round + threads >= call.num_seqs) {
        rest.first_row = static_cast<int32_t>(total >> 32);
        rest.sequence = call.num_seqs;
        rest.plan.q_len = rest.plan.rows = max(call.num_rows - rest.first_row, 0);
        rest.plan.column_tiles = (rest.plan.rows * call.group + kColumns - 1) / kColumns;
        rest.plan.tiles = rest.plan.rows > 0 ? 1 : 0;
        rest_units = rest.plan.column_tiles * call.num_kv_heads;
        if (pass == 0 || round == 0)
          cta = split_units(call, static_cast<int32_t>(total) + rest_units);
      }
      if (pass == 1) note_starts(call, cta, walk, static_cast<int32_t>(first), units, shared);
    }
    if (pass == 1 && rest_units > 0 && threadIdx.x == 0)
      note_starts(call, cta, rest, static_cast<int32_t>(total), rest_units, shared);
  }
  __syncthreads();
  return cta;
}

}  // namespace larder::kernels::cuda
