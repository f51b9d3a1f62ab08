// The kernel of tuned attention: every warp streams its stretch of the call's tiles by itself, and
// meets the others of its CTA once, at the end.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_merge.cuh"
#include "kernels/cuda/attend_decode_shared.cuh"
#include "kernels/cuda/attend_decode_steps.cuh"

namespace larder::kernels::cuda {

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
        state.max[tile][i] += columns[8 * tile + 2 * (thread_index() % 4) + i].shift;
    }
}

// Adds the columns' sums over a prefix that is attended for many sequences at once, to a piece of
// which each lane has the total. Some splits at a time, of both of the lane's columns, whose loads
// are on their way at once: no branch is between them, so splits without a key count as often as
// others, nothing. More of them at once take more code, which is slow to come where it runs once.
template <typename Shape>
__device__ inline void add_prefix(const DecodeCall& call, const Walk& walk,
                                  PieceState<Shape>& state) {
  using Format = typename Shape::Format;
  constexpr int kFours = Shape::kDim / 32;
  constexpr int kAtOnce = kFours > 4 ? 1 : 2;
  constexpr float kFactor = 1.0f / Format::kUndo;
  const PrefixView& prefix = call.prefix;
  const auto results = static_cast<uint32_t>(prefix.num_results);
  wait_for_previous_kernel();
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile) {
    uint32_t result[2];
    bool is_there[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t pair = walk.column_tile * Shape::kColumns + 8 * tile + 2 * lane_column() + i;
      const ColumnPlace place =
          place_of(call, walk.first_row, walk.plan.rows * call.group, walk.head, pair);
      is_there[i] = place.is_there;
      result[i] = static_cast<uint32_t>(place.row * call.output.out.shape[1] + place.head);
    }
    if (!is_there[0]) continue;
    if (!is_there[1]) result[1] = result[0];
#pragma unroll 1
    for (int32_t first = 0; first < prefix.num_splits; first += kAtOnce) {
      float2 states[kAtOnce][2];
      float4 sums[kAtOnce][2][kFours];
#pragma unroll
      for (int n = 0; n < kAtOnce; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
          const auto split = static_cast<uint32_t>(min(first + n, prefix.num_splits - 1));
          const uint32_t at = split * results + result[i];
          states[n][i] = __ldcg(prefix.states + at);
          const auto* fours = reinterpret_cast<const float4*>(
              prefix.sums + uint64_t{at} * Shape::kDim + sum_dim<Format>(0, lane_row()));
#pragma unroll
          for (int four = 0; four < kFours; ++four)
            sums[n][i][four] = __ldcg(fours + sum_dim<Format>(four, 0) / 4);
        }
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float max = state.max[tile][i];
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          if (first + n >= prefix.num_splits) states[n][i] = {kLowestMax, 0.0f};
          max = fmaxf(max, states[n][i].x);
        }
        const float own_weight = exp2_fast(state.max[tile][i] - max);
        state.max[tile][i] = max;
        state.total[tile][i] *= own_weight;
#pragma unroll
        for (int m = 0; m < 2 * kFours; ++m) {
          state.sums.at[tile][m][i] *= own_weight;
          state.sums.at[tile][m][2 + i] *= own_weight;
        }
#pragma unroll
        for (int n = 0; n < kAtOnce; ++n) {
          const float weight = exp2_fast(states[n][i].x - max);
          const float factor = first + n < prefix.num_splits ? weight * kFactor : 0.0f;
          state.total[tile][i] += weight * states[n][i].y;
#pragma unroll
          for (int four = 0; four < kFours; ++four) {
            const float4 of = sums[n][i][four];
            state.sums.at[tile][2 * four][i] += factor * of.x;
            state.sums.at[tile][2 * four + 1][i] += factor * of.y;
            state.sums.at[tile][2 * four][2 + i] += factor * of.z;
            state.sums.at[tile][2 * four + 1][2 + i] += factor * of.w;
          }
        }
      }
    }
  }
}

template <typename Shape>
__device__ void store_segment(const DecodeCall& call, const Walk& walk,
                              const PieceState<Shape>& state) {
  using Format = typename Shape::Format;
  const int g = thread_index() % 32 / 4;
  const int c = thread_index() % 4;
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int32_t pair = walk.column_tile * Shape::kColumns + 8 * tile + 2 * c + i;
      const ColumnPlace place =
          place_of(call, walk.first_row, walk.plan.rows * call.group, walk.head, pair);
      if (!place.is_there) continue;
      const float factor =
          finish_column<Format>(call, place, state.max[tile][i], state.total[tile][i], g == 0);
#pragma unroll
      for (int four = 0; four < Shape::kDim / 32; ++four)
        store_four(call, place, sum_dim<Format>(four, g), four_sums(state.sums, tile, four, i),
                   factor);
    }
}

template <typename Shape>
__device__ void keep_piece(const PieceSlot<Shape>& slot, const PieceState<Shape>& state) {
  using Format = typename Shape::Format;
  const int g = thread_index() % 32 / 4;
  const int c = thread_index() % 4;
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      const int column = 8 * tile + 2 * c + i;
      if (g == 0) slot.state(column) = {state.max[tile][i], state.total[tile][i]};
#pragma unroll
      for (int four = 0; four < Shape::kDim / 32; ++four)
        slot.at(column, sum_dim<Format>(four, g) / 4) = four_sums(state.sums, tile, four, i);
    }
}

// A piece becomes a result if it is a whole segment. Of other segments, the first and the last of
// the warp's stretch, the sums stay in shared memory. Whether the warp has more to take, from the
// segment's first tile on.
template <typename Shape>
__device__ inline bool end_piece(const DecodeCall& call, uint8_t* memory, PieceNote* notes,
                                 WarpPlaces* all_places, PieceState<Shape>& state) {
  const int warp = thread_index() / 32;
  WarpPlaces& places = all_places[warp];
  const Walk& walk = places.products;
  const bool begins = places.from == 0;
  close_piece<Shape>(call, places.columns, state);
  const int32_t count = places.tiles();
  const int32_t left = places.left - count;
  const bool ends = places.from + count == walk.plan.tiles;
  // There is no window then: what is passed over at a sequence's head is its prefix.
  if (begins && call.prefix.tokens != nullptr && walk.plan.begin > 0)
    add_prefix<Shape>(call, walk, state);
  if (begins && ends) {
    store_segment<Shape>(call, walk, state);
  } else {
    const int which = places.done == 0 ? 0 : 1;
    if (which == 1) wait_for_copies<0>();
    keep_piece(PieceSlot<Shape>(slot_of<Shape>(memory, warp, which)), state);
    if (thread_index() % 32 == 0)
      notes[2 * warp + which] = note_of<Shape::kColumns>(call, walk, places.segment, begins, ends);
  }
  if (left == 0) return false;
  __syncwarp();
  if (thread_index() % 32 == 0) go_on_after<Shape::kColumns>(call, left, places);
  __syncwarp();
  return true;
}

// Where a warp begins its share of a piece. Few calls have pieces.
template <typename Shape>
__device__ __noinline__ void enter_piece(const DecodeCall& call, WarpPlaces& places) {
  if (places.left > 0) enter_first<Shape::kColumns>(call, Shape::Format::kStepTiles, places);
}

// What the places of the warp say, where it has entered its first segment.
template <typename Shape>
__device__ inline void take_stretch(const DecodeCall& call, uint8_t* memory, PieceNote* notes,
                                    WarpPlaces* all_places) {
  const int warp = thread_index() / 32;
  WarpPlaces& places = all_places[warp];
  const Walk& walk = places.products;
  uint8_t* ring_memory = memory + warp * Shape::kRingBytes;
  Ring<Shape> ring(call, places.loads, ring_memory);
  PieceState<Shape> state;
  if (takes_plan(call) && call.prefix.tokens == nullptr) wait_for_previous_kernel();
  do {
    QueryRows<Shape> query_rows;
    fetch_queries<Shape>(call, walk, query_rows);
    if (places.done == 0) ring.fill();
    // After the first loads have begun, which would else wait for it.
    const int lane = thread_index() % 32;
    const typename Shape::Format::Lane lane_places = Shape::Format::lane(lane / 4, lane % 4);
    Queries<Shape> queries;
    ColumnFactors<Shape> factors;
    place_queries<Shape>(call, walk, query_rows, queries, factors, places.columns);
    state.clear();
    take_steps<Shape>({call, places, lane_places, queries, factors}, ring, state);
  } while (end_piece<Shape>(call, memory, notes, all_places, state));
}

// Lengths and block ids take a while when they are first looked at: the first CTA brings the
// lengths near for all, and each thread of the grid a line of the block table. Done while the
// kernel before may still run: nothing is read.
__device__ inline void bring_near(const DecodeCall& call) {
  constexpr int kLineInts = 32;
  const int64_t at = int64_t{blockIdx.x * blockDim.x + thread_index()} * kLineInts;
  if (blockIdx.x == 0 && at < call.num_seqs) {
    prefetch_line(call.q_lens + at);
    prefetch_line(call.seq_lens + at);
  }
  if (at < call.num_seqs * call.block_table_stride) prefetch_line(call.block_table + at);
}

// Grid: a CTA per multiprocessor; CTA: up to 12 warps, each with a ring of its own. Reads every
// stored byte of the tiles once per column tile. Bound by memory; after that by the decoding of
// codes (about 2.6 instructions an element of NVFP4).
template <typename Shape>
__global__ __launch_bounds__(32 * Shape::kWarps,
                             1) void attend_decode_kernel(const __grid_constant__ DecodeCall call) {
  constexpr int kStepTiles = Shape::Format::kStepTiles;
  extern __shared__ __align__(128) uint8_t memory[];
  __shared__ PlanShared plan;
  __shared__ PieceNote notes[2 * kMaxDecodeWarps];
  __shared__ PieceWalk at;
  __shared__ CtaPlan cta;
  __shared__ int32_t index;  // of the piece, or of the CTA
  __shared__ MergeJob end;
  __shared__ MergeJob deferred;  // until the CTA has done its own pieces: others are at theirs
  __shared__ WarpPlaces all_places[kMaxDecodeWarps];
  if (!call.shared.is_made) let_next_kernel_start();
  if (thread_index() % 32 < 2) notes[2 * (thread_index() / 32) + thread_index() % 32].segment = -1;
  if (thread_index() == 0) deferred.num_slots = 0;
  const bool is_pieces = call.piece_tiles > 0;
  if (!takes_plan(call)) bring_near(call);
  // A plan that is taken, lengths and block tables were there before the kernel that made it let
  // any start: only queries, keys and values are waited for, once the first ids are on their way.
  // That of prefixes waited before it let this one start: of calls with one only what it leaves is
  // waited for, where it is added.
  const bool is_entered = takes_plan(call) && take_plan(call, all_places[thread_index() / 32], end);
  if (!is_entered && call.prefix.tokens == nullptr)
    wait_for_previous_kernel();
  else if (!is_entered)
    rely_on_previous_wait();
  if (thread_index() == 0) index = static_cast<int32_t>(blockIdx.x);
  if (!is_entered) {
    StretchPlace place;
    const CtaPlan planned = plan_cta<Shape::kColumns, kStepTiles>(call, plan, place);
    if (planned.count == 0) {
      if (call.shared.is_made) keep_nothing(call, all_places[thread_index() / 32], end);
      if (call.prefix.tokens != nullptr) wait_for_previous_kernel();
      return;
    }
    if (thread_index() == 0) cta = planned;
    if (is_pieces) {
      if (thread_index() == 0) {
        index = planned.begin;
        at.walk = place.walk;
        at.enter(call);
        at.piece = place.from;
      }
    } else {
      const int32_t next_unit = __shfl_sync(~0u, place.unit, 1);
      const int32_t cta_end = __shfl_sync(~0u, place.unit, 3);
      if (thread_index() % 32 == 0) {
        const int warp = thread_index() / 32;
        share_stretch(call, place, warp < planned.num_warps, next_unit, all_places[warp]);
      }
      if (thread_index() == 2)
        find_even_end<Shape::kColumns, kStepTiles>(call, planned, place, cta_end, end);
      __syncwarp();
      WarpPlaces& places = all_places[thread_index() / 32];
      if (places.left > 0) enter_first<Shape::kColumns>(call, kStepTiles, places);
      if (call.shared.is_made) keep_plan(call, places, end);
    }
  }
#pragma unroll 1
  for (;;) {
    if (is_pieces) {
      __syncthreads();
      if (thread_index() < 2 * kMaxDecodeWarps) notes[thread_index()].segment = -1;
      if (thread_index() % 32 == 0) share_piece(at, index, all_places[thread_index() / 32]);
      __syncthreads();
      enter_piece<Shape>(call, all_places[thread_index() / 32]);
    }
    if (is_pieces && thread_index() == 0) find_piece_end<Shape::kColumns>(call, at, index, end);
    if (all_places[thread_index() / 32].left > 0)
      take_stretch<Shape>(call, memory, notes, all_places);
    else if (call.prefix.tokens == nullptr)
      wait_for_previous_kernel();
    __syncthreads();
    if (call.shared.is_made) let_next_kernel_start();  // all warps have kept their part of the plan
    merge_cta<Shape>(call, notes, memory,
                     [&](bool begins) { return is_pieces ? index : 2 * index + (begins ? 1 : 0); });
    const bool is_last = !is_pieces || index + 1 == cta.begin + cta.count;
    const bool is_put_off = !is_last && end.num_slots > 0 && end.first_slot < cta.begin;
    if (is_put_off && thread_index() == 0) deferred = end;
#pragma unroll 1
    for (const MergeJob* job = &end; !is_put_off; job = &deferred) {
      if (job->num_slots > 0) merge_slots<Shape>(call, *job, memory);
      if (!is_last || job == &deferred) break;
    }
    if (is_last) break;
    __syncthreads();
    if (thread_index() == 0) {
      at.next<Shape::kColumns>(call);
      ++index;
    }
  }
  // The next kernel waits for this one alone.
  if (call.prefix.tokens != nullptr) wait_for_previous_kernel();
}

}  // namespace larder::kernels::cuda
