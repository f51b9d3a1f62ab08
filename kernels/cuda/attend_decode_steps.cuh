// Attention of a warp's columns over the tiles of a piece: whole steps that every column sees, and
// tiles of which only some tokens are there or are seen by some columns.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_queries.cuh"
#include "kernels/cuda/attend_decode_ring.cuh"

namespace larder::kernels::cuda {

// A base-2 logit may pass the maximum that weights refer to by so much before that is raised: then
// weights stay below 2^8, and sums are seldom rescaled.
inline constexpr float kSlack = 8.0f;

// What a warp has of a piece. Per lane: of its columns 2c and 2c + 1; `total` of its tokens alone.
template <typename Shape>
struct PieceState {
  Sums<Shape> sums;
  float max[Shape::kColumnTiles][2];
  float total[Shape::kColumnTiles][2];

  __device__ void clear() {
#pragma unroll
    for (int tile = 0; tile < Shape::kColumnTiles; ++tile) {
      max[tile][0] = max[tile][1] = kLowestMax;
      total[tile][0] = total[tile][1] = 0.0f;
#pragma unroll
      for (auto& four : sums.at[tile])
#pragma unroll
        for (float& sum : four) sum = 0.0f;
    }
  }

  // Makes room for logits up to `top` (of the lane's tokens), by the whole warp.
  __device__ void raise(const float (&top)[Shape::kColumnTiles][2]) {
    bool is_over = false;
#pragma unroll
    for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) is_over = is_over || top[tile][i] > max[tile][i] + kSlack;
    if (!__any_sync(~0u, is_over)) return;
#pragma unroll
    for (int tile = 0; tile < Shape::kColumnTiles; ++tile) {
      float shrink[2];
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        float raised = top[tile][i];
#pragma unroll
        for (int lanes = 4; lanes < 32; lanes *= 2)
          raised = fmaxf(raised, __shfl_xor_sync(~0u, raised, lanes));
        raised = fmaxf(raised, max[tile][i]);
        shrink[i] = exp2_fast(max[tile][i] - raised);
        max[tile][i] = raised;
        total[tile][i] *= shrink[i];
      }
#pragma unroll
      for (auto& four : sums.at[tile])
#pragma unroll
        for (int i = 0; i < 4; ++i) four[i] *= shrink[i % 2];
    }
  }

  // Weights of a tile's logits, which are `scores` times `factors`.
  __device__ void weigh(const Scores<Shape>& scores, const ColumnFactors<Shape>& factors,
                        Weights<Shape>& weights) {
#pragma unroll
    for (int tile = 0; tile < Shape::kColumnTiles; ++tile) {
      float values[4];
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        values[i] = exp2_fast(fmaf(scores.at[tile][i], factors.at[tile][i % 2], -max[tile][i % 2]));
        total[tile][i % 2] += values[i];
      }
      place_weights<Shape>(tile, values, weights);
    }
  }
};

// cap * tanh(logit / cap), in base 2. Through the exponential function: the approximate tanh is
// good for 11 bits.
__device__ inline float cap_logit(float logit, float cap) {
  const float power = exp2_fast(fabsf(logit) * __fdividef(2.0f * kLog2E, cap));
  return copysignf(cap - __fdividef(2.0f * cap, power + 1.0f), logit);
}

// What the steps of a piece share.
template <typename Shape>
struct StepView {
  const DecodeCall& call;
  const WarpPlaces& places;
  const typename Shape::Format::Lane& lane;
  const Queries<Shape>& queries;
  const ColumnFactors<Shape>& factors;

  __device__ const Walk& walk() const { return places.products; }
};

// Applies the soft cap to what scores times their factors are.
template <typename Shape>
__device__ inline void cap_scores(const StepView<Shape>& view, Scores<Shape>& scores) {
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      float& score = scores.at[tile][i];
      const float factor = view.factors.at[tile][i % 2];
      const float shift = view.places.columns[8 * tile + 2 * lane_column() + i % 2].shift;
      score = __fdividef(cap_logit(score * factor + shift, view.call.base2_cap), factor);
    }
}

// Whether the mask lets the row see the key of this rank.
__device__ __noinline__ inline bool mask_allows(const DecodeCall& call, const Walk& walk,
                                                int32_t row, int32_t key) {
  const int64_t bit = int64_t{row} * walk.plan.seq_len + global_key(call, key);
  return (call.mask[call.mask_offsets[walk.sequence] + (bit >> 3)] >> (bit & 7) & 1) != 0;
}
template <typename Shape>
__device__ inline bool sees(const StepView<Shape>& view, int column, int32_t key) {
  const ColumnNote& note = view.places.columns[column];
  return key >= note.begin && key < note.end &&
         (view.call.mask == nullptr || mask_allows(view.call, view.walk(), note.row, key));
}

// Whether the mask lets every column see all `tokens` from the tile on.
template <int kColumns>
__device__ __noinline__ bool is_unmasked(const DecodeCall& call, const Walk& walk, int32_t tile,
                                         int32_t tokens) {
  const int32_t pair = walk.column_tile * kColumns;
  const int32_t last = row_of(call, min(pair + kColumns, walk.plan.rows * call.group) - 1);
  bool all = true;
  for (int32_t row = row_of(call, pair); row <= last; ++row)
    for (int32_t token = static_cast<int32_t>(threadIdx.x % 32); token < tokens; token += 32)
      all = all && mask_allows(call, walk, row, tile * kTileTokens + token);
  return __all_sync(~0u, all);
}

// Hides what columns do not see; returns the tokens that some column sees.
template <typename Shape>
__device__ inline uint32_t hide_scores(const StepView<Shape>& view, int32_t first_key,
                                       Scores<Shape>& scores) {
  uint32_t seen = 0;
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) {
      const int column = 8 * tile + 2 * lane_column() + i % 2;
      const int token = key_token(lane_row()) + i / 2 * 2;
      const bool is_seen = sees(view, column, first_key + token);
      if (is_seen) seen |= 1u << token;
      if (!is_seen) scores.at[tile][i] = -INFINITY;
    }
  return __reduce_or_sync(~0u, seen);
}

// Adds values that are not finite to the columns that see them.
template <typename Shape>
__device__ inline void add_specials(const StepView<Shape>& view, int32_t first_key, uint32_t seen,
                                    const TilePlace& values, Sums<Shape>& sums) {
  using Format = typename Shape::Format;
#pragma unroll 1
  for (int token = 0; token < kTileTokens; ++token) {
    if ((seen >> token & 1u) == 0) continue;
#pragma unroll
    for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
      for (int i = 0; i < 2; ++i) {
        if (!sees(view, 8 * tile + 2 * lane_column() + i, first_key + token)) continue;
#pragma unroll
        for (int dim = 0; dim < Shape::kDim / 8; ++dim) {
          const int chunk = dim / Format::kValueChunkDims;
          const float value = Format::special(values.data, values.scales, token, chunk,
                                              dim % Format::kValueChunkDims);
          float& sum = sums.at[tile][2 * (dim / 4) + dim % 2][dim % 4 / 2 * 2 + i];
          if (value != 0.0f) sum += value;
        }
      }
  }
}

// A tile of which tokens are missing or hidden from columns. A weight of 0 would not keep out a NaN
// or an infinity among values: values that no column sees are taken as zeros, and those that are
// not finite are added by themselves.
template <typename Shape>
__device__ inline void boundary_tile(const StepView<Shape>& view, int32_t tile,
                                     const TilePlace& keys, const TilePlace& values,
                                     PieceState<Shape>& state) {
  const int32_t first_key = tile * kTileTokens;
  Scores<Shape> scores;
  key_products<Shape, 1>(keys, view.lane, view.queries, &scores);
  if (view.call.base2_cap > 0.0f) cap_scores(view, scores);
#pragma unroll
  for (int column_tile = 0; column_tile < Shape::kColumnTiles; ++column_tile)
#pragma unroll
    for (int i = 0; i < 4; ++i) scores.at[column_tile][i] *= view.factors.at[column_tile][i % 2];
  const uint32_t seen = hide_scores(view, first_key, scores);
  if (seen == 0) return;
  ColumnFactors<Shape> ones;
  float top[Shape::kColumnTiles][2];
#pragma unroll
  for (int column_tile = 0; column_tile < Shape::kColumnTiles; ++column_tile)
#pragma unroll
    for (int i = 0; i < 2; ++i) {
      ones.at[column_tile][i] = 1.0f;
      top[column_tile][i] = fmaxf(scores.at[column_tile][i], scores.at[column_tile][i + 2]);
    }
  state.raise(top);
  Weights<Shape> weights;
  state.weigh(scores, ones, weights);
  if (__any_sync(~0u, finite_products<Shape>(values, view.lane, seen >> 4 * lane_column() & 0xFu,
                                             weights, state.sums)))
    add_specials(view, first_key, seen, values, state.sums);
}

// The products of values, loads one ahead of them.
template <typename Shape, int kTiles>
__device__ inline void add_values(const StepView<Shape>& view, const TilePlace& place,
                                  const Scores<Shape>* scores, PieceState<Shape>& state) {
  using Format = typename Shape::Format;
  constexpr int kChunks = Format::kValueChunks;
  const auto load = [&](int at, typename Format::Values& loaded) {
    const int tile = at / kChunks;
    Format::load_values(place.data + tile * Format::kTileBytes,
                        place.scales + tile * Format::kTileScaleBytes, view.lane, at % kChunks,
                        loaded);
  };
  typename Format::Values loaded[2];
  load(0, loaded[0]);
  Weights<Shape> weights;
#pragma unroll
  for (int at = 0; at < kTiles * kChunks; ++at) {
    if (at + 1 < kTiles * kChunks) load(at + 1, loaded[(at + 1) % 2]);
    if (at % kChunks == 0) state.weigh(scores[at / kChunks], view.factors, weights);
    add_chunk<Shape>(loaded[at % 2], at % kChunks, weights, state.sums);
  }
}

// A tile that all columns see whole, by itself. Of values that have no infinities: a weight that
// has become 0 would make NaN of one.
template <typename Shape>
__device__ inline void whole_tile(const StepView<Shape>& view, const TilePlace& keys,
                                  const TilePlace& values, PieceState<Shape>& state) {
  Scores<Shape> scores;
  key_products<Shape, 1>(keys, view.lane, view.queries, &scores);
  if (view.call.base2_cap > 0.0f) cap_scores(view, scores);
  float top[Shape::kColumnTiles][2];
#pragma unroll
  for (int tile = 0; tile < Shape::kColumnTiles; ++tile)
#pragma unroll
    for (int i = 0; i < 2; ++i)
      top[tile][i] = fmaxf(scores.at[tile][i], scores.at[tile][i + 2]) * view.factors.at[tile][i];
  state.raise(top);
  add_values<Shape, 1>(view, values, &scores, state);
}

// Products of a step's keys that all columns see, and room for their maximum; those of tiles past
// the last one do not count.
template <typename Shape>
__device__ inline void whole_keys(const StepView<Shape>& view, bool is_full, int32_t tile,
                                  const uint8_t* keys,
                                  Scores<Shape> (&scores)[Shape::Format::kStepTiles],
                                  PieceState<Shape>& state) {
  using Format = typename Shape::Format;
  constexpr int kTiles = Format::kStepTiles;
  constexpr int kAtOnce = kTiles > 1 ? 2 : 1;
#pragma unroll
  for (int i = 0; i < kTiles; i += kAtOnce)
    key_products<Shape, kAtOnce>({keys + i * Format::kTileBytes,
                                  keys + kTiles * Format::kTileBytes + i * Format::kTileScaleBytes},
                                 view.lane, view.queries, scores + i);
  if (__builtin_expect(view.call.base2_cap > 0.0f, 0))
#pragma unroll
    for (int i = 0; i < kTiles; ++i) cap_scores(view, scores[i]);
  if (!is_full) {
    const int32_t count = view.places.taken().end - tile;
#pragma unroll
    for (int i = 1; i < kTiles; ++i)
      if (i >= count)
        for (auto& four : scores[i].at)
          for (float& score : four) score = -INFINITY;
  }
  float top[Shape::kColumnTiles][2];
#pragma unroll
  for (int column_tile = 0; column_tile < Shape::kColumnTiles; ++column_tile)
#pragma unroll
    for (int j = 0; j < 2; ++j) {
      float& highest = top[column_tile][j];
      highest = fmaxf(scores[0].at[column_tile][j], scores[0].at[column_tile][j + 2]);
#pragma unroll
      for (int i = 1; i < kTiles; ++i)
        highest =
            fmaxf(highest, fmaxf(scores[i].at[column_tile][j], scores[i].at[column_tile][j + 2]));
      highest *= view.factors.at[column_tile][j];
    }
  state.raise(top);
}

// A step of tiles that all columns see whole. Where it is not full, the tiles that it lacks hold
// the last one again, so their values are as finite as that.
template <typename Shape>
__device__ inline void whole_step(const StepView<Shape>& view, bool is_full, int32_t tile,
                                  Ring<Shape>& ring, PieceState<Shape>& state) {
  using Format = typename Shape::Format;
  constexpr int kTiles = Format::kStepTiles;
  ring.wait();
  ring.template issue<0>();
  Scores<Shape> scores[kTiles];
  whole_keys<Shape>(view, is_full, tile, ring.keys(), scores, state);
  ring.wait();
  ring.template issue<1>();
  const uint8_t* values = ring.values();
  ring.next();
  add_values<Shape, kTiles>(view, {values, values + kTiles * Format::kTileBytes}, scores, state);
}

// One of which tokens are missing or hidden from columns.
template <typename Shape>
__device__ inline void boundary_step(const StepView<Shape>& view, int32_t tile, Ring<Shape>& ring,
                                     PieceState<Shape>& state) {
  using Format = typename Shape::Format;
  constexpr int kTiles = Format::kStepTiles;
  constexpr int kScalesAt = kTiles * Format::kTileBytes;
  const uint32_t loaded = ring.loaded_tiles();
  ring.wait();
  ring.template issue<0>();
  const uint8_t* keys = ring.keys();
  if (loaded != 0) {
    ring.wait();  // the values too: only the next keys are on their way
    const uint8_t* values = ring.values();
#pragma unroll 1
    for (int i = 0; i < kTiles; ++i) {
      if ((loaded >> i & 1u) == 0) continue;
      const int data_at = i * Format::kTileBytes;
      const int scales_at = kScalesAt + i * Format::kTileScaleBytes;
      const TilePlace key_place = {keys + data_at, keys + scales_at};
      const TilePlace value_place = {values + data_at, values + scales_at};
      const Stretch& whole = view.walk().whole;
      if (kTiles > 1 && !Format::kHasInfinities && tile + i >= whole.begin &&
          tile + i < whole.end && view.call.mask == nullptr)
        whole_tile<Shape>(view, key_place, value_place, state);
      else
        boundary_tile<Shape>(view, tile + i, key_place, value_place, state);
    }
  }
  ring.wait();
  ring.template issue<1>();
  ring.next();
}

// Whether the tiles from `tile` on may be taken as a step of whole ones that is not plainly full.
template <typename Shape>
__device__ inline bool is_whole(const StepView<Shape>& view, int32_t tile,
                                const Ring<Shape>& ring) {
  constexpr int kTiles = Shape::Format::kStepTiles;
  constexpr uint32_t kAllTiles = (1u << kTiles) - 1;
  const int count = min(view.places.taken().end - tile, kTiles);
  if ((Shape::Format::kHasInfinities || !view.places.is_long) && count < kTiles) return false;
  if (count <= 0 || tile + count > view.walk().whole.end ||
      ring.loaded_tiles() != kAllTiles >> (kTiles - count))
    return false;
  return view.call.mask == nullptr ||
         is_unmasked<Shape::kColumns>(view.call, view.walk(), tile, count * kTileTokens);
}

// The tiles of a piece, with the ring's halves as they come.
template <typename Shape>
__device__ inline void take_steps(const StepView<Shape>& view, Ring<Shape>& ring,
                                  PieceState<Shape>& state) {
  constexpr int kTiles = Shape::Format::kStepTiles;
  const Stretch& whole = view.walk().whole;
  const Stretch taken = view.places.taken();
  // Steps up to there are full and whole; what a mask says is looked at step by step.
  const int32_t full_to =
      view.call.mask == nullptr ? min(taken.end, whole.end) - kTiles : INT32_MIN;
  int32_t tile = taken.begin;
#pragma unroll 1
  while (tile < view.places.taken().end) {
    if (tile >= whole.begin) {
#pragma unroll 1
      for (;;) {
        const bool is_full = __all_sync(~0u, tile <= full_to && ring.has_all_tiles());
        if (!is_full && !is_whole(view, tile, ring)) break;
        whole_step<Shape>(view, is_full, tile, ring, state);
        tile += kTiles;
      }
      if (tile >= view.places.taken().end) return;
    }
    boundary_step<Shape>(view, tile, ring, state);
    tile += kTiles;
  }
}

}  // namespace larder::kernels::cuda
