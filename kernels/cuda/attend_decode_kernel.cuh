// The kernel of tuned attention: every warp streams its stretch of the call's tiles by itself, and
// meets the others of its CTA once, at the end.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_merge.cuh"
#include "kernels/cuda/attend_decode_steps.cuh"

namespace larder::kernels::cuda {

// Begins with the columns' sums over a prefix that has been attended for many sequences at once.
template <typename Shape>
__device__ inline void start_from_prefix(const DecodeCall& call, const Walk& walk,
                                         PieceState<Shape>& state) {
  using Format = typename Shape::Format;
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t pair = walk.column_tile * Shape::kColumns + 8 * tile + 2 * lane_column() + i;
      const ColumnPlace place =
          place_of(call, walk.first_row, walk.plan.rows * call.group, walk.head, pair);
      if (!place.is_there) continue;
      const int64_t at = place.row * call.output.out.shape[1] + place.head;
      const float2 other = __ldcg(call.prefix.states + at);
      const bool is_empty = other.y == 0.0f;
      // The eight lanes of a column count their own tokens; the prefix counts in one.
      if (lane_row() == 0) state.total[tile][i] = other.y;
      if (!is_empty) state.max[tile][i] = other.x;
#pragma unroll
      for (int four = 0; four < Shape::kDim / 32; ++four) {
        float4 sums = __ldcg(reinterpret_cast<const float4*>(call.prefix.sums + at * Shape::kDim +
                                                             sum_dim<Format>(four, lane_row())));
        if (is_empty) sums = {0.0f, 0.0f, 0.0f, 0.0f};
        constexpr float kFactor = 1.0f / Format::kUndo;
        state.sums.at[tile][2 * four][i] = sums.x * kFactor;
        state.sums.at[tile][2 * four + 1][i] = sums.y * kFactor;
        state.sums.at[tile][2 * four][2 + i] = sums.z * kFactor;
        state.sums.at[tile][2 * four + 1][2 + i] = sums.w * kFactor;
      }
    }
}

// The sums of all eight lanes of a column, and the maximum as other warps' are.
template <typename Shape>
__device__ inline void close_piece(const DecodeCall& call, const ColumnNote* columns,
                                   PieceState<Shape>& state) {
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
#pragma unroll
      for (int lanes = 4; lanes < 32; lanes *= 2)
        state.total[tile][i] += __shfl_xor_sync(~0u, state.total[tile][i], lanes);
      if (call.base2_cap == 0.0f)
        state.max[tile][i] += columns[8 * tile + 2 * lane_column() + i].shift;
    }
}

template <typename Shape>
__device__ void store_segment(const DecodeCall& call, const Walk& walk,
                              const PieceState<Shape>& state) {
  using Format = typename Shape::Format;
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t pair = walk.column_tile * Shape::kColumns + 8 * tile + 2 * lane_column() + i;
      const ColumnPlace place =
          place_of(call, walk.first_row, walk.plan.rows * call.group, walk.head, pair);
      if (!place.is_there) continue;
      const float factor = finish_column<Format>(call, place, state.max[tile][i],
                                                 state.total[tile][i], lane_row() == 0);
#pragma unroll
      for (int four = 0; four < Shape::kDim / 32; ++four)
        store_four(call, place, sum_dim<Format>(four, lane_row()),
                   four_sums(state.sums, tile, four, i), factor);
    }
}

template <typename Shape>
__device__ void keep_piece(const PieceSlot<Shape>& slot, const PieceState<Shape>& state) {
  using Format = typename Shape::Format;
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * tile + 2 * lane_column() + i;
      if (lane_row() == 0) slot.state(column) = {state.max[tile][i], state.total[tile][i]};
#pragma unroll
      for (int four = 0; four < Shape::kDim / 32; ++four)
        slot.at(column, sum_dim<Format>(four, lane_row()) / 4) =
            four_sums(state.sums, tile, four, i);
    }
}

// Segments that the warp has whole become results; of others, the first and the last of its
// stretch, the sums stay in shared memory.
template <typename Shape>
__device__ inline void take_stretch(const DecodeCall& call, uint8_t* memory, DecodeShared& shared,
                                    WarpPlaces& places) {
  const int warp = static_cast<int>(threadIdx.x) / 32;
  const int lane = static_cast<int>(threadIdx.x) % 32;
  uint8_t* ring_memory = memory + warp * Shape::kRingBytes;
  ColumnNote* columns = shared.columns[warp];
  const Walk& walk = places.products;
  const int32_t tiles = places.tiles;
  int32_t from = places.from;
  if (lane == 0) {
    places.loads.walk = walk;
    places.loads.left = tiles;
  }
  enter_segment<Shape::kColumns>(call, places.loads, from, false);
  Ring<Shape> ring(call, places.loads, ring_memory);
  const typename Shape::Format::Lane lane_places = Shape::Format::lane(lane_row(), lane_column());
  int32_t done = 0;
  bool is_filled = false;
#pragma unroll 1
  while (true) {
    const int32_t count = min(walk.plan.tiles - from, tiles - done);
    Queries<Shape> queries;
    ColumnFactors<Shape> factors;
    load_queries<Shape>(call, walk, queries, factors, columns);
    PieceState<Shape> state;
    state.clear();
    if (call.prefix.tokens != nullptr && from == 0 && walk.sequence < call.num_seqs &&
        call.prefix.tokens[walk.sequence] > 0)
      start_from_prefix<Shape>(call, walk, state);
    const StepView<Shape> view = {
        call, walk, columns, lane_places, queries, factors, tiles >= 2 * Shape::Format::kStepTiles};
    const int32_t first = walk.plan.begin + from;
    take_steps<Shape>(view, {max(first, walk.seen.begin), min(first + count, walk.seen.end)},
                      is_filled, ring_memory, ring, state);
    close_piece<Shape>(call, columns, state);

    const bool begins = from == 0;
    const bool ends = from + count == walk.plan.tiles;
    if (begins && ends) {
      store_segment<Shape>(call, walk, state);
    } else {
      const int which = done == 0 ? 0 : 1;
      if (which == 1) wait_for_copies<0>();
      keep_piece(slot_of<Shape>(memory, warp, which), state);
      if (lane == 0)
        shared.notes[2 * warp + which] = {places.unit + done - from,
                                          walk.first_row,
                                          walk.plan.rows * call.group,
                                          walk.column_tile * Shape::kColumns,
                                          walk.head,
                                          walk.plan.tiles,
                                          begins,
                                          ends};
    }
    done += count;
    from = 0;
    if (done == tiles) return;
    walk_on<Shape::kColumns>(call, places.products);
  }
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
__device__ inline void share_piece(const PieceWalk& at, int32_t index, WarpPlaces& places) {
  const int32_t from = at.piece * at.tiles;
  const EvenSplit split(min(at.tiles, at.walk.plan.tiles - from),
                        static_cast<int32_t>(blockDim.x / 32));
  const auto warp = static_cast<int32_t>(threadIdx.x) / 32;
  places.products = at.walk;
  places.from = from + split.begin(warp);
  places.tiles = split.begin(warp + 1) - split.begin(warp);
  places.unit = index + places.from;
}

// What CTAs have to do with each other at their ends. By a thread.
struct CtaEnd {
  bool publishes[2];  // slot 0: of the segment that began before; 1: of one that begins here
  MergeJob job;
};

// Of even stretches: a segment that began before and ends here is this CTA's to merge. The CTA has
// tiles [begin, end).
template <int kStepTiles>
__device__ inline CtaEnd even_end(const CtaPlan& cta, int32_t begin, int32_t end,
                                  const PieceNote* notes) {
  const auto index = static_cast<int32_t>(blockIdx.x);
  CtaEnd result = {};
  int32_t first_note = 0;
  int32_t last_note = 2 * cta.num_warps - 1;
  while (first_note <= last_note && notes[first_note].segment < 0) ++first_note;
  while (first_note <= last_note && notes[last_note].segment < 0) --last_note;
  if (first_note > last_note) return result;
  const PieceNote& note = notes[first_note];
  const PieceNote& last = notes[last_note];
  result.publishes[0] = note.segment < begin;
  result.publishes[1] = last.segment >= begin && last.segment + last.tiles > end;
  if (note.segment >= begin || note.segment + note.tiles > end) return result;
  const EvenSplit split(cta.total, cta.num_ctas);
  int32_t first = split.part_of(note.segment);
  // The next CTA's begin may have been moved to that of the segment.
  if (cta.is_in_steps && split.begin(first + 1) - note.segment < kStepTiles) ++first;
  result.job = {note, index - first + 1, 2 * first + 1, 2 * first + 2, 2};
  return result;
}
__device__ inline CtaEnd piece_end(const DecodeCall& call, const PieceWalk& at, int columns,
                                   int32_t index) {
  CtaEnd result = {};
  if (at.count == 1) return result;
  result.publishes[0] = true;
  if (at.piece + 1 < at.count) return result;
  const Walk& walk = at.walk;
  const int32_t first = index - at.piece;
  result.job = {{0, walk.first_row, walk.plan.rows * call.group, walk.column_tile * columns,
                 walk.head, walk.plan.tiles, 1, 1},
                at.count,
                first,
                first + 1,
                1};
  return result;
}

// Grid: a CTA per multiprocessor; CTA: up to 12 warps, each with a ring of its own. Reads every
// stored byte of the tiles once per column tile. Bound by memory; after that by the decoding of
// codes (about 2.6 instructions an element of NVFP4).
template <typename Shape>
__global__ __launch_bounds__(32 * Shape::kWarps,
                             1) void attend_decode_kernel(const __grid_constant__ DecodeCall call) {
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ PlanShared plan;
  __shared__ DecodeShared shared;
  __shared__ PieceWalk at;
  __shared__ CtaEnd end;
  __shared__ MergeJob deferred;  // until the CTA has done its own pieces: others are at theirs
  __shared__ WarpPlaces all_places[kMaxDecodeWarps + 1];
  let_next_kernel_start();
  const int warp = static_cast<int>(threadIdx.x) / 32;
  WarpPlaces& places = all_places[warp];
  if (threadIdx.x < 2 * kMaxDecodeWarps) shared.notes[threadIdx.x].segment = -1;
  wait_for_previous_kernel();
  if (threadIdx.x == 0) deferred.num_slots = 0;
  const bool is_pieces = call.piece_tiles > 0;
  const CtaPlan cta = plan_cta<Shape::kColumns>(call, plan);
  if (cta.count == 0) return;
  if (!is_pieces) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    if (thread % 32 == 0 && warp < cta.num_warps)
      begin_warp<Shape::kColumns, Shape::Format::kStepTiles>(call, cta, warp, plan, places);
    if (thread == 1)
      begin_warp<Shape::kColumns, Shape::Format::kStepTiles>(call, cta, cta.num_warps, plan,
                                                             all_places[cta.num_warps]);
    __syncthreads();
    if (thread % 32 == 0)
      places.tiles = warp < cta.num_warps ? all_places[warp + 1].unit - places.unit : 0;
    __syncwarp();
  }
  if (is_pieces && threadIdx.x == 0) {
    begin_warp<Shape::kColumns, Shape::Format::kStepTiles>(call, cta, 0, plan, places);
    at.walk = places.products;
    at.enter(call);
    at.piece = places.from;
  }
#pragma unroll 1
  for (int32_t index = is_pieces ? cta.begin : static_cast<int32_t>(blockIdx.x);; ++index) {
    if (is_pieces) {
      __syncthreads();
      if (threadIdx.x < 2 * kMaxDecodeWarps) shared.notes[threadIdx.x].segment = -1;
      if (threadIdx.x % 32 == 0) share_piece(at, index, places);
      __syncthreads();
    }
    if (places.tiles > 0) take_stretch<Shape>(call, memory, shared, places);
    __syncthreads();
    if (threadIdx.x == blockDim.x - 1)
      end = is_pieces ? piece_end(call, at, Shape::kColumns, index)
                      : even_end<Shape::Format::kStepTiles>(
                            cta, all_places[0].unit, all_places[cta.num_warps].unit, shared.notes);
    merge_cta<Shape>(call, shared.notes, memory,
                     [&](bool begins) { return is_pieces ? index : 2 * index + (begins ? 1 : 0); });
    __syncthreads();
    if (threadIdx.x < 2 && end.publishes[threadIdx.x])
      publish_slot(call, is_pieces ? index : 2 * index + static_cast<int32_t>(threadIdx.x));
    const bool is_last = !is_pieces || index + 1 == cta.begin + cta.count;
    if (end.job.num_slots > 0) {
      if (is_last || end.job.first_slot >= cta.begin)
        merge_slots<Shape>(call, end.job);
      else if (threadIdx.x == 0)
        deferred = end.job;
    }
    if (is_last) break;
    __syncthreads();
    if (threadIdx.x == 0) at.next<Shape::kColumns>(call);
  }
  __syncthreads();
  if (deferred.num_slots > 0) merge_slots<Shape>(call, deferred);
}

}  // namespace larder::kernels::cuda
