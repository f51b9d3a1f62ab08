// Sequences as they are served, and the way through their tiles: what a segment's columns see, and
// which segment comes next. There are less than 2^31 tiles.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode.cuh"

namespace larder::kernels::cuda {

// A sequence as it is served.
struct SequencePlan {
  int32_t q_len;    // decides positions
  int32_t rows;     // those of them that q has
  int32_t seq_len;  // of all ranks
  int32_t keys;     // of this rank
  int32_t begin;    // first tile
  int32_t tiles;    // 0: the sequence has no rows
  int32_t column_tiles;
};

// Tiles [begin, end) of a sequence.
struct Stretch {
  int32_t begin;
  int32_t end;
};

// Where in the row of tiles a warp is: a segment, beside the tile.
struct Walk {
  SequencePlan plan;
  int32_t first_row;
  int32_t sequence;
  int32_t head;
  int32_t column_tile;
  Stretch seen;   // tiles that some column sees
  Stretch whole;  // tiles that all columns see whole, as far as causality and the window go
};

// Tokens of a sequence's first `tokens` that this rank has. Divisions are kept out of line.
__device__ __noinline__ inline int32_t tokens_of_rank(Shard shard, int32_t tokens) {
  return static_cast<int32_t>(shard.local_tokens(tokens));
}
__device__ inline int32_t tokens_here(const DecodeCall& call, int32_t tokens) {
  return call.shard.num_ranks == 1 ? tokens : tokens_of_rank(call.shard, tokens);
}
// The place in its sequence of this rank's key.
__device__ inline int32_t global_key(const DecodeCall& call, int32_t key) {
  return static_cast<int32_t>(call.shard.global_token(key));
}

// Keys [begin, end) of a row, as far as causality and the window go.
__device__ inline int32_t visible_begin(const DecodeCall& call, const SequencePlan& plan,
                                        int32_t row) {
  const int32_t position = plan.seq_len - plan.q_len + row;
  if (call.window_left < 0 || position <= call.window_left) return 0;
  return tokens_here(call, position - call.window_left);
}
__device__ inline int32_t visible_end(const DecodeCall& call, const SequencePlan& plan,
                                      int32_t row) {
  if (!call.is_causal) return plan.keys;
  const int32_t position = plan.seq_len - plan.q_len + row;
  return min(tokens_here(call, max(position + 1, 0)), plan.keys);
}

__device__ inline int32_t tiles_of(int32_t tokens) {
  return static_cast<int32_t>((static_cast<uint32_t>(tokens) + kTileTokens - 1) / kTileTokens);
}

// What the caller says of a sequence.
struct Lengths {
  int32_t q_len;
  int32_t seq_len;
};
// Through the L1: where every warp plans by itself, all want the same words at the same time.
__device__ inline int32_t load_length(const int32_t* length) {
#ifdef __CUDA_ARCH__
  int32_t value;
  asm volatile("ld.global.ca.b32 %0, [%1];" : "=r"(value) : "l"(length));
  return value;
#else  // where a test plans on the host
  return *length;
#endif
}
__device__ inline Lengths lengths_of(const DecodeCall& call, int32_t sequence) {
  return {load_length(call.q_lens + sequence), load_length(call.seq_lens + sequence)};
}

// Code that few calls need is kept out of line: what a kernel runs once costs it the fetch.
__device__ __noinline__ inline void report_wrong(const DecodeCall& call, int64_t value) {
  call.use.report(value);
}

// A length that is wrong, cut to what fits: keys of this rank, and tokens of all.
__device__ __noinline__ inline int2 cut_length(const DecodeCall& call, int32_t seq_len,
                                               bool reports) {
  if (reports) call.use.report(seq_len);
  if (seq_len < 0) return {0, 0};
  return {call.max_tokens, global_key(call, call.max_tokens)};
}

// Whether the sequence's bits lie within the mask.
__device__ __noinline__ inline bool has_mask(const DecodeCall& call, int32_t sequence,
                                             int32_t q_len, int32_t seq_len, bool reports) {
  const int64_t offset = load_once(call.mask_offsets + sequence);
  const int64_t needed = (int64_t{q_len} * seq_len + 7) / 8;
  if (offset >= 0 && offset <= call.mask_bytes && needed <= call.mask_bytes - offset) return true;
  if (reports) call.use.report(offset);
  return false;
}

// What is wrong in lengths is reported where `reports`.
__device__ inline void plan_keys(const DecodeCall& call, int32_t sequence, bool reports,
                                 SequencePlan& plan) {
  plan.keys = tokens_here(call, max(plan.seq_len, 0));
  if (plan.seq_len < 0 || plan.keys > call.max_tokens) {
    const int2 cut = cut_length(call, plan.seq_len, reports);
    plan.keys = cut.x;
    plan.seq_len = cut.y;
  }
  if (call.mask != nullptr && !has_mask(call, sequence, plan.q_len, plan.seq_len, reports))
    plan.keys = 0;
}

// Tokens at the sequence's head that are attended for many sequences at once.
__device__ inline int32_t prefix_tokens(const DecodeCall& call, int32_t sequence) {
  const PrefixView& prefix = call.prefix;
  if (prefix.tokens == nullptr) return 0;
  if (prefix.key != nullptr && *prefix.key != prefix.wanted_key) return 0;
  return prefix.tokens[sequence];
}

// Gives the sequence its rows, of which q has `left`.
template <int kColumns>
__device__ inline void take_rows(const DecodeCall& call, int32_t left, SequencePlan& plan) {
  plan.rows = min(plan.q_len, left);
  plan.column_tiles = (plan.rows * call.group + kColumns - 1) / kColumns;
  if (plan.rows == 0) plan.tiles = 0;
}

// Of q's rows `left` are not those of sequences before. The sequence `num_seqs` stands for the rows
// that no sequence covers and that see nothing.
template <int kColumns>
__device__ inline SequencePlan plan_sequence(const DecodeCall& call, int32_t sequence,
                                             const Lengths& lengths, int32_t left, bool reports) {
  SequencePlan plan = {};
  plan.q_len = lengths.q_len;
  plan.seq_len = lengths.seq_len;
  int32_t begin = 0;
  if (sequence < call.num_seqs) {
    if (plan.q_len < 0) {
      if (reports) report_wrong(call, plan.q_len);
      plan.q_len = 0;
    }
    plan_keys(call, sequence, reports, plan);
    begin = visible_begin(call, plan, 0);
    begin = max(begin, prefix_tokens(call, sequence));
  }
  plan.begin = min(begin, plan.keys) / kTileTokens;
  plan.tiles = max(tiles_of(plan.keys) - plan.begin, 1);  // a row that sees nothing has a result
  take_rows<kColumns>(call, left, plan);
  return plan;
}

__device__ inline int32_t row_of(const DecodeCall& call, int32_t pair) {
  auto row = static_cast<int32_t>(__umulhi(static_cast<uint32_t>(pair), call.group_inverse));
  if (pair - row * call.group >= call.group) ++row;
  return row;
}

// Fills in what the segment's columns see.
template <int kColumns>
__device__ inline void view_segment(const DecodeCall& call, Walk& walk) {
  const SequencePlan& plan = walk.plan;
  int32_t first = 0;
  int32_t last = plan.rows - 1;
  if (plan.column_tiles > 1) {
    const int32_t pair = walk.column_tile * kColumns;
    first = row_of(call, pair);
    last = row_of(call, min(pair + kColumns, plan.rows * call.group) - 1);
  }
  const int32_t whole_end = visible_end(call, plan, first);
  const int32_t end = last == first ? whole_end : visible_end(call, plan, last);
  walk.seen = {visible_begin(call, plan, first) / kTileTokens, tiles_of(end)};
  walk.whole = {tiles_of(visible_begin(call, plan, last)), whole_end / kTileTokens};
}

// To the next segment; there is one. One copy serves loads and products, so that one of the two
// finds it fetched.
template <int kColumns>
__device__ __noinline__ void next_segment(const DecodeCall& call, Walk& walk) {
  if (++walk.column_tile >= walk.plan.column_tiles) {
    walk.column_tile = 0;
    if (++walk.head >= call.num_kv_heads) {
      walk.head = 0;
      do {
        walk.first_row += walk.plan.rows;
        ++walk.sequence;
        const int32_t left = call.num_rows - walk.first_row;
        const Lengths lengths =
            walk.sequence < call.num_seqs ? lengths_of(call, walk.sequence) : Lengths{left, 0};
        walk.plan = plan_sequence<kColumns>(call, walk.sequence, lengths, left, false);
      } while (walk.plan.tiles == 0 && walk.sequence < call.num_seqs);
    }
  }
  view_segment<kColumns>(call, walk);
}

// Where a warp's loads are: tiles [tile, end) of the walk's segment, then `left` more units: those
// of a segment are its tiles and, before them, what it costs to begin it.
struct LoadPlace {
  Walk walk;
  int32_t left;
  int32_t tile;
  // Keys of the walk's head in block 0, as addresses: what a step looks at, together.
  alignas(16) uint64_t data;
  uint64_t scales;
  const int32_t* table;  // of the walk's sequence
  int32_t end;
  uint32_t bad_ids;  // of the block ids in use, a bit per lane: those that must not be used

  __device__ void aim(const DecodeCall& call) {
    const auto base = reinterpret_cast<uint64_t>(call.layer.base);
    const auto head = static_cast<uint32_t>(walk.head);
    table = call.block_table + walk.sequence * call.block_table_stride;
    data = base + call.layer.keys_offset_bytes + head * call.layer.head_bytes;
    scales = base + call.layer.key_scales_offset_bytes + head * call.layer.head_scale_bytes;
  }
};

// What a warp takes, in shared memory for want of registers: `left` units from tile `from`
// (relative) of the walk's segment on.
struct WarpPlaces {
  Walk products;  // where the arithmetic is
  LoadPlace loads;
  int32_t from;
  int32_t left;
  int32_t segment;  // its first unit in the row of all; with pieces, any number as good
  int32_t done;     // pieces
  bool is_long;     // many tiles: steps that are not full are taken as if they were
  alignas(16) ColumnNote columns[16];  // of the segment

  __device__ int32_t tiles() const { return min(products.plan.tiles - from, left); }
  // Tiles that are taken of the segment: those that some column sees. Worked out where it is
  // wanted: the loop has no register for it.
  __device__ Stretch taken() const {
    const int32_t first = products.plan.begin + from;
    return {max(first, products.seen.begin), min(first + tiles(), products.seen.end)};
  }
};

// The tiles from `from` (relative) on that are wanted of the walk's segment and seen. Whether there
// are some, or no more are wanted.
__device__ inline bool enter_here(const DecodeCall& call, int32_t from, LoadPlace& place) {
  const Walk& walk = place.walk;
  const int32_t first = walk.plan.begin + from;
  const int32_t count = min(walk.plan.tiles - from, place.left);
  place.left -= count;
  place.tile = max(first, walk.seen.begin);
  place.end = max(min(first + count, walk.seen.end), place.tile);
  place.aim(call);
  return place.tile < place.end || place.left <= 0;
}
// To the next segment of which tiles are wanted and seen. tile == end: there is none. By a warp;
// apart from the code around it, which is run a thousand times as often.
template <int kColumns>
__device__ __noinline__ void enter_next(const DecodeCall& call, LoadPlace& place) {
  __syncwarp();  // all lanes have seen that the place is at its end
  if (threadIdx.x % 32 == 0) {
    do {
      next_segment<kColumns>(call, place.walk);
      place.left -= call.begin_tiles;
    } while (!enter_here(call, 0, place));
  }
  __syncwarp();
}
// Where the warp begins its stretch. Steps have `step_tiles`.
template <int kColumns>
__device__ inline void enter_first(const DecodeCall& call, int32_t step_tiles, WarpPlaces& places) {
  bool is_there = true;
  if (threadIdx.x % 32 == 0) {
    places.is_long = places.left >= 2 * step_tiles;
    places.loads.walk = places.products;
    places.loads.left = places.left;
    is_there = enter_here(call, places.from, places.loads);
  }
  if (__all_sync(~0u, is_there))
    __syncwarp();
  else
    enter_next<kColumns>(call, places.loads);
}

}  // namespace larder::kernels::cuda
