// What all of tuned attention shares: the call by value, the shape of an instance, and what CTAs
// leave in the workspace for each other.
//
// "Column": a query row and a head of one KV head, as the columns of matrix products. "Tile": 16
// consecutive tokens of one KV head. "Segment": the tiles that the columns of one column tile see,
// in order. "Piece": consecutive tiles of one segment, taken by one warp. "Unit": what CTAs share
// out, a tile or a tile's worth of what it costs to begin a segment; or, of calls that give a CTA
// one piece of a segment after the other, such a piece.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attend_prefix.h"
#include "kernels/cuda/attend_shared_plan.h"
#include "kernels/cuda/early_launch.cuh"
#include "kernels/cuda/output.cuh"
#include "kernels/cuda/shard.cuh"
#include "kernels/cuda/stored.cuh"
#include "kernels/params.h"

namespace larder::kernels::cuda {

inline constexpr int kTileTokens = 16;
inline constexpr int kMaxDecodeWarps = 12;
inline constexpr int kRingHalves = 3;  // of a warp; a half holds a step's keys, or its values
inline constexpr float kLog2E = 1.44269504088896340736f;
inline constexpr float kLn2 = 0.69314718055994530942f;
// Of base-2 logits before any key: below every finite one, and no infinity that could meet another.
inline constexpr float kLowestMax = -3.402823466e38f;

// The bytes of one layer, as decode reads them. Offsets and strides are multiples of 16.
struct DecodeLayer {
  const uint8_t* base;
  int64_t num_blocks;
  uint32_t block_stride_bytes;
  uint32_t keys_offset_bytes;        // in a block: data of head 0
  uint32_t key_scales_offset_bytes;  // nvfp4 only
  int64_t values_offset_bytes;       // from keys to their values; may be below 0
  int64_t value_scales_offset_bytes;
  uint32_t head_bytes;  // data of one head of K, or V, in a block
  uint32_t head_scale_bytes;
  int32_t block_shift;  // log2 of the tiles in a block
  uint32_t block_mask;  // those tiles less one
};

// What a CTA leaves of a segment that others have a part of, in a slot of the workspace: packets of
// numbers and the call's stamp (attend_decode_packets.cuh). The CTA with a segment's last part
// waits until those of all its slots have come, adds them up and takes the stamps back. It waits
// for CTAs of lower numbers alone, which have begun before it.
inline constexpr int kPacketBytes = 16;
constexpr int part_bytes(int columns, int dim) { return columns * (1 + dim / 4) * kPacketBytes; }
// Of a stamp, so many bits lie in each of four words.
inline constexpr int kMarkBits = 10;
inline constexpr uint32_t kMarkMask = (1u << kMarkBits) - 1;

struct DecodeCall {
  DecodeLayer layer;
  const int32_t* q_lens;
  const int32_t* seq_lens;
  const int32_t* block_table;
  const uint8_t* mask;  // nullptr: none
  const int64_t* mask_offsets;
  int64_t mask_bytes;
  int64_t block_table_stride;
  int32_t num_rows;
  int32_t max_tokens;  // what a row of the block table holds, on this rank
  const void* q;
  int64_t q_row_stride;  // elements
  int64_t q_head_stride;
  OutputView output;
  const float* sinks;
  const float* key_offset;  // nullptr unless keys are centred
  PrefixView prefix;        // tokens nullptr: none
  uint8_t* parts;           // [slots, part_bytes of the instance]; of the workspace
  uint64_t stamp;           // of no other call
  uint32_t marks[4];        // its lower bits
  SharedPlan shared;
  Shard shard;
  int32_t num_seqs;
  int32_t num_kv_heads;
  int32_t group;
  uint32_t group_inverse;  // 2^32 / group
  int32_t window_left;
  int32_t piece_tiles;   // least tiles of a CTA's piece; 0: the tiles are dealt out evenly
  int32_t max_pieces;    // of a segment, where piece_tiles > 0
  int32_t begin_tiles;   // what it costs to begin a segment, in tiles; 0 with pieces
  int32_t num_segments;  // of sequences of as many rows each; if their lengths are alike too,
  int32_t whole_ctas;    // so many CTAs take whole segments alone; 0: no good number does
  float scale;
  float logit_factor;  // scale * k_scale * log2 e
  float value_factor;  // v_scale
  float base2_cap;     // soft cap * log2 e; 0: none
  bool is_causal;      // and has no mask
  bool is_q_bf16;
  bool is_rotated;
  float rotation_factor;
  PointOfUse use;
};

// Whether the call begins with a plan that an earlier one has made.
__device__ inline bool takes_plan(const DecodeCall& call) {
  return call.shared.memory != nullptr && !call.shared.is_made;
}

// The shape of an instance. kColumnTiles: MMA tiles of 8 columns that a warp takes at once.
template <typename Rows, int kTiles>
struct DecodeShape {
  using Format = Rows;
  static constexpr int kColumnTiles = kTiles;
  static constexpr int kColumns = 8 * kTiles;
  static constexpr int kDim = Rows::kDim;
  static constexpr int kSumTiles = kDim / 16;  // MMA tiles of the sums
  static constexpr int kHalfBytes = Rows::kStepTiles * (Rows::kTileBytes + Rows::kTileScaleBytes);
  static constexpr int kRingBytes = kRingHalves * kHalfBytes;
  static constexpr int kSlotBytes = kColumns * (kDim + 2) * 4;  // of shared memory
  static_assert(kSlotBytes <= kRingBytes);
  static constexpr int kPartBytes = part_bytes(kColumns, kDim);
  // With more registers for sums, fewer warps.
  static constexpr int kWarps = kColumnTiles * kDim > 128 || kColumnTiles > 1 ? 8 : 12;
};

// Per warp, in shared memory: what its pieces left, two at most.
struct PieceNote {
  int32_t segment;  // its first unit in the row of all, or a number as good; -1: no piece
  int32_t first_row;
  int32_t num_pairs;
  int32_t first_pair;
  int32_t kv_head;
  int32_t tiles;  // of the segment
  bool begins;    // whether it has the segment's first tile
  bool ends;      // or its last
};

// Of a warp's column, in shared memory too: the keys that it sees, as far as causality and the
// window go, and what its base-2 logits lack where keys are centred.
struct ColumnNote {
  int32_t begin;
  int32_t end;  // 0: sees nothing, or is none
  int32_t row;  // of the sequence
  float shift;
};

// threadIdx.x, read anew: what follows from a value that is read once lives as long as the kernel,
// in registers that the loop needs, or in local memory, whose first use takes half a microsecond.
__device__ inline int thread_index() {
  int index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  __builtin_assume(index >= 0 && index < 32 * kMaxDecodeWarps);
  return index;
}

}  // namespace larder::kernels::cuda
