// Who takes which tiles, decided by each CTA from the lengths in device memory, so that a captured
// launch serves other lengths.
//
// All units of a call stand in one row: sequences, then KV heads, then column tiles, which makes
// segments; of each what it costs to begin it, then its tiles. CTAs, and warps within them, take
// even stretches of the row; or, where pieces are given, CTAs take even stretches of the row of
// pieces, one piece after the other.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_walk.cuh"

namespace larder::kernels::cuda {

// Of numbers that are not negative, which is shorter.
__device__ inline int32_t divide(int32_t a, int32_t b) {
  return static_cast<int32_t>(static_cast<uint32_t>(a) / static_cast<uint32_t>(b));
}

// Even stretches of `total` units for `parts`: the first ones have one more.
struct EvenSplit {
  int32_t each;
  int32_t more;

  __device__ int32_t begin(int32_t part) const { return part * each + min(part, more); }
  // The last part that begins at the unit or before it.
  __device__ int32_t part_of(int32_t unit) const {
    const int32_t cut = more * (each + 1);
    const bool is_cut = unit < cut;
    return divide(is_cut ? unit : unit - cut, is_cut ? each + 1 : each) + (is_cut ? 0 : more);
  }
};

__device__ inline EvenSplit split_evenly(int32_t total, int32_t parts) {
  const int32_t each = divide(total, parts);
  return {each, total - each * parts};
}

// Least tiles of the pieces of a segment of `tiles`, and their number.
__device__ inline int32_t tiles_of_piece(const DecodeCall& call, int32_t tiles) {
  return max(call.piece_tiles, divide(tiles + call.max_pieces - 1, call.max_pieces));
}
__device__ __noinline__ inline int32_t pieces_of(int32_t tiles, int32_t piece_tiles) {
  return divide(tiles + piece_tiles - 1, piece_tiles);
}
// Of a segment of `tiles`.
__device__ inline int32_t units_of(const DecodeCall& call, int32_t tiles) {
  if (call.piece_tiles == 0) return call.begin_tiles + tiles;
  return pieces_of(tiles, tiles_of_piece(call, tiles));
}
// Of a sequence: below 2^31, since its rows are no more than q's and its keys no more than a row of
// the block table holds, for which the host has counted the units.
__device__ inline int32_t units_of(const DecodeCall& call, const SequencePlan& plan) {
  if (plan.tiles == 0) return 0;
  return units_of(call, plan.tiles) * call.num_kv_heads * plan.column_tiles;
}

// CTAs, not many less than `num_ctas`, that take as many whole segments each; 0: there is no such
// number, or it is `num_ctas`. What some CTAs more would read in less time is less than what it
// takes to merge what CTAs have of segments together.
inline int32_t whole_ctas_of(int64_t num_segments, int32_t num_ctas) {
  for (int32_t ctas = num_ctas; 20 * ctas >= 19 * num_ctas; --ctas)
    if (num_segments % ctas == 0) return ctas == num_ctas ? 0 : ctas;
  return 0;
}

// CTAs of the highest numbers that get no work. A CTA that merges a segment ends last, and where
// kernels overlap, the next call's CTA of its multiprocessor, one of the highest numbers, begins
// last: with few segments and little work, others would have to wait for that.
__device__ inline int32_t spare_ctas(const DecodeCall& call, int32_t total, int32_t num_ctas) {
  constexpr int32_t kLeastCtas = 8;  // for one that is spared
  constexpr int32_t kMostUnits = 8;  // more that others take
  const int32_t segments = call.num_segments;
  if (num_ctas < static_cast<int32_t>(gridDim.x) || segments > num_ctas / kLeastCtas) return 0;
  return int64_t{total} * segments <= int64_t{kMostUnits} * num_ctas * num_ctas ? segments : 0;
}

// What a CTA takes.
struct CtaPlan {
  int32_t total;    // units of the call
  EvenSplit split;  // over CTAs with work
  int32_t begin;    // the CTA's first
  int32_t count;
  int32_t num_warps;  // of the CTA
  bool is_in_steps;   // whether stretches begin at whole steps
};

__device__ inline CtaPlan split_units(const DecodeCall& call, int32_t total) {
  CtaPlan plan = {};
  int32_t num_ctas = max(min(total, static_cast<int32_t>(gridDim.x)), 1);
  // Lengths that are not alike may add up to as much: then the work is shared out as evenly.
  if (call.whole_ctas > 0 && total % call.num_segments == 0)
    num_ctas = min(num_ctas, call.whole_ctas);
  num_ctas -= spare_ctas(call, total, num_ctas);
  const auto cta = static_cast<int32_t>(blockIdx.x);
  plan.total = total;
  if (cta >= num_ctas) return plan;
  plan.split = split_evenly(total, num_ctas);
  plan.begin = plan.split.begin(cta);
  plan.count = plan.split.begin(cta + 1) - plan.begin;
  plan.num_warps = static_cast<int32_t>(blockDim.x / 32);
  if (call.piece_tiles > 0) return plan;
  // A step has 8 tiles at most, so that no stretch within a segment is empty.
  plan.is_in_steps = plan.split.each >= 16 * plan.num_warps;
  plan.num_warps = min(plan.split.each + (plan.split.more > 0 ? 1 : 0), plan.num_warps);
  return plan;
}

// Two sums, which stay at 2^31 - 1 once they would pass it: that many rows or units are of wrong
// lengths.
struct Figures {
  uint32_t rows;
  uint32_t units;

  __device__ Figures operator+(const Figures& other) const {
    constexpr uint32_t kMost = 0x7FFFFFFFu;
    return {min(rows + other.rows, kMost), min(units + other.units, kMost)};
  }
};

// Of a sequence of the round that is planned.
struct alignas(16) SequenceNote {
  Figures before;  // in the sequences of its warp that come before it
  Lengths lengths;
};

struct PlanShared {
  SequenceNote sequences[32 * kMaxDecodeWarps];
  Figures warps[kMaxDecodeWarps];
};

__device__ inline Figures shuffle(const Figures& value, int lane) {
  return {__shfl_sync(~0u, value.rows, lane), __shfl_sync(~0u, value.units, lane)};
}
// The sum over lanes 0 to this one and, in `before`, over those before this one.
__device__ inline Figures running_sum(Figures value, Figures& before) {
  const int lane = static_cast<int>(threadIdx.x % 32);
#pragma unroll
  for (int step = 1; step < 32; step *= 2) {
    const Figures other = {__shfl_up_sync(~0u, value.rows, step),
                           __shfl_up_sync(~0u, value.units, step)};
    if (lane >= step) value = value + other;
  }
  before = {__shfl_up_sync(~0u, value.rows, 1), __shfl_up_sync(~0u, value.units, 1)};
  if (lane == 0) before = {0, 0};
  return value;
}

// A sequence, and a unit within it.
struct UnitPlace {
  int32_t sequence;
  int32_t first_row;
  int32_t unit;
  Lengths lengths;
};

// What a stretch begins with.
struct StretchPlace {
  Walk walk;
  int32_t from;     // a tile of the walk's segment, or a piece
  int32_t unit;     // in the row of all
  int32_t segment;  // its first unit there
};

// The lanes of a warp stand for places in turn: where the warp begins, where the next one does and,
// in warp 0, where the CTA begins and where the next one does.
__device__ inline int places_of_warp() { return threadIdx.x < 32 ? 4 : 2; }
// The unit of the lane's place. With pieces, all have the CTA's begin.
__device__ inline int32_t wanted_unit(const DecodeCall& call, const CtaPlan& cta) {
  if (call.piece_tiles > 0) return cta.begin;
  const int which = static_cast<int>(threadIdx.x % 32) % places_of_warp();
  if (which >= 2) return cta.begin + (which == 2 ? 0 : cta.count);
  const int32_t warp = min(static_cast<int32_t>(threadIdx.x / 32), cta.num_warps - 1);
  return cta.begin + split_evenly(cta.count, cta.num_warps).begin(warp + which);
}

// Where a stretch of many tiles begins that would begin at tile `from` of a segment: at the nearest
// whole step, so that the last stretch of a segment gets no more steps than others.
template <int kStepTiles>
__device__ inline int32_t nearest_step(int32_t from, int32_t tiles) {
  const int32_t next = from + kStepTiles / 2;
  const int32_t nearest = next - next % kStepTiles;
  return nearest < tiles ? nearest : from - from % kStepTiles;
}
// The last tile of a segment of more than a step to which the first one is nearest.
template <int kStepTiles>
inline constexpr int32_t kLastOfFirstStep = kStepTiles - kStepTiles / 2 - 1;

// The place of a unit. What begins before a segment's second tile begins with the segment, and
// stretches of many tiles begin at whole steps.
template <int kColumns, int kStepTiles>
__device__ inline void place_stretch(const DecodeCall& call, const CtaPlan& cta, int32_t unit,
                                     const UnitPlace& at, StretchPlace& place) {
  place.unit = place.segment = unit;
  place.from = 0;
  if (unit >= cta.total) return;  // the end of all
  Walk& walk = place.walk;
  walk.sequence = at.sequence;
  walk.first_row = at.first_row;
  walk.plan =
      plan_sequence<kColumns>(call, at.sequence, at.lengths, call.num_rows - at.first_row, false);
  const int32_t per_segment = units_of(call, walk.plan.tiles);
  const int32_t segment = divide(at.unit, per_segment);
  walk.head = walk.plan.column_tiles == 1 ? segment : divide(segment, walk.plan.column_tiles);
  walk.column_tile = segment - walk.head * walk.plan.column_tiles;
  const int32_t before = at.unit - segment * per_segment;  // of the segment's units
  place.segment = unit - before;
  place.from = max(before - call.begin_tiles, 0);
  if (cta.is_in_steps) place.from = nearest_step<kStepTiles>(place.from, walk.plan.tiles);
  place.unit = place.segment + (place.from > 0 ? call.begin_tiles + place.from : 0);
  view_segment<kColumns>(call, walk);
}

// A round of plan_cta, a sequence per thread. All threads call it; `before` are the rounds before.
struct PlanRound {
  int32_t first;  // sequence
  int32_t count;  // of them
  Figures before;
  Figures warps_before;  // of the warp whose number is the lane's, within the round
  Figures total;         // of all rounds up to this one

  // Few sequences: every warp plans them by itself, and no warp waits for others. Not with pieces,
  // of which all warps of a CTA must count the same even if lengths change meanwhile.
  static __device__ bool is_by_warp(const DecodeCall& call) {
    return call.num_seqs <= 32 && call.piece_tiles == 0;
  }

  template <int kColumns>
  __device__ void sum_up(const DecodeCall& call, bool reports, PlanShared& shared) {
    const int lane = static_cast<int>(threadIdx.x % 32);
    const int warp = static_cast<int>(threadIdx.x / 32);
    const bool by_warp = is_by_warp(call);
    const auto me = static_cast<int32_t>(by_warp ? lane : threadIdx.x);
    if (by_warp && warp > 0) reports = false;
    SequencePlan plan = {};
    Lengths lengths = {0, 0};
    if (me < count) {
      lengths = lengths_of(call, first + me);
      plan = plan_sequence<kColumns>(call, first + me, lengths, call.num_rows, reports);
    }
#pragma unroll 1
    for (bool is_cut = false;; is_cut = true) {
      Figures in_warp;
      const Figures sum = running_sum(
          {static_cast<uint32_t>(plan.q_len), static_cast<uint32_t>(units_of(call, plan))},
          in_warp);
      shared.sequences[threadIdx.x] = {in_warp, lengths};
      Figures of_warps = sum;
      if (by_warp) {
        __syncwarp();
      } else {
        if (lane == 31) shared.warps[warp] = sum;
        __syncthreads();
        of_warps = {0, 0};
        if (lane < static_cast<int>(blockDim.x / 32)) of_warps = shared.warps[lane];
        of_warps = running_sum(of_warps, warps_before);
      }
      total = before + shuffle(of_warps, 31);
      if (is_cut || total.rows <= static_cast<uint32_t>(call.num_rows)) return;
      // More q_lens than rows: those past the last row are left out, so that there are no more
      // units than the host has counted.
      const auto first_row =
          static_cast<int32_t>((before + shuffle(warps_before, me / 32) + in_warp).rows);
      const int32_t left = max(call.num_rows - first_row, 0);
      if (reports && first_row <= call.num_rows && plan.q_len > left)
        report_wrong(call, plan.q_len);
      take_rows<kColumns>(call, left, plan);
      if (by_warp)
        __syncwarp();
      else
        __syncthreads();
    }
  }

  // The sequence of the round that has the lane's unit, where one has. By a warp.
  __device__ void find(const DecodeCall& call, int32_t unit, const PlanShared& shared,
                       UnitPlace& place) const {
    const SequenceNote* notes = shared.sequences;
    if (is_by_warp(call)) notes += threadIdx.x / 32 * 32;
    int32_t index = 0;
    Figures sum = before;
#pragma unroll 1
    for (int32_t step = count > 1 ? 1 << (31 - __clz(count - 1)) : 0; step > 0; step /= 2) {
      const int32_t next = min(index + step, count - 1);
      const Figures at = before + shuffle(warps_before, next / 32) + notes[next].before;
      if (at.units > static_cast<uint32_t>(unit)) continue;
      index = next;
      sum = at;
    }
    if (static_cast<uint32_t>(unit) < before.units || static_cast<uint32_t>(unit) >= total.units)
      return;
    place = {first + index, static_cast<int32_t>(sum.rows), unit - static_cast<int32_t>(sum.units),
             notes[index].lengths};
  }
};

// By all threads of the CTA, a sequence each and round: first the sums over all, then, knowing
// them, where the CTA's warps begin. One round does both. `place` is the lane's.
template <int kColumns, int kStepTiles>
__device__ inline CtaPlan plan_cta(const DecodeCall& call, PlanShared& shared,
                                   StretchPlace& place) {
  const auto threads = static_cast<int32_t>(blockDim.x);
  CtaPlan cta = {};
  int32_t unit = 0;
  UnitPlace at = {};
#pragma unroll 1
  for (int pass = call.num_seqs <= threads ? 1 : 0; pass < 2; ++pass) {
    PlanRound round = {};
#pragma unroll 1
    for (;; round.first += threads) {
      round.count = min(call.num_seqs - round.first, threads);
      round.sum_up<kColumns>(call, pass == 1 && blockIdx.x == 0, shared);
      const bool is_last = call.num_seqs - round.first <= threads;
      // Of rows that no sequence covers.
      const auto first_row = static_cast<int32_t>(round.total.rows);
      const int32_t rows = max(call.num_rows - first_row, 0);
      const int32_t column_tiles = (rows * call.group + kColumns - 1) / kColumns;
      if (is_last && (pass == 0 || call.num_seqs <= threads)) {
        cta = split_units(call, static_cast<int32_t>(round.total.units) +
                                    column_tiles * call.num_kv_heads * units_of(call, 1));
        if (cta.count == 0) return cta;
        unit = wanted_unit(call, cta);
      }
      if (pass == 1) round.find(call, unit, shared, at);
      if (is_last) {
        if (static_cast<uint32_t>(unit) >= round.total.units)
          at = {
              call.num_seqs, first_row, unit - static_cast<int32_t>(round.total.units), {rows, 0}};
        break;
      }
      round.before = round.total;
      __syncthreads();
    }
    if (pass == 0) __syncthreads();
  }
  place_stretch<kColumns, kStepTiles>(call, cta, unit, at, place);
  return cta;
}

}  // namespace larder::kernels::cuda
