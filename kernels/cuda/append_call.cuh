// What tuned append kernels are told, and how their threads share the work.
#pragma once

#include <cstdint>

#include "kernels/cuda/groups.cuh"
#include "kernels/cuda/rope.cuh"
#include "kernels/cuda/stored.cuh"

namespace larder::kernels::cuda {

inline constexpr int kMaxLaunchLayers = 32;  // of one launch: its arguments stay below 4 KiB

// k_scale or v_scale, and what encoders divide by.
struct TensorScale {
  Divisor one;  // the scale
  Divisor six;  // six times the scale
};

struct RowsLayer {
  uint8_t* base;
  const uint8_t* sources[2];
  const float* key_offset;  // [num_kv_heads, k_dim], or nullptr
  TensorScale scales[2];
};

// Rows of 2^groups_shift groups of 16. A warp takes as many tokens as have 32 groups of one head.
//
// An item is K or V of one head. Arrays of two go by an item's parity: where K and V are alike,
// items are K and V of head 0, of head 1, ...; else there is a launch for each, whose items are the
// heads. Of MLA rows there is one item, and the two are latent and rope.
struct RowsCall {
  int64_t block_stride_bytes;
  int64_t num_blocks;
  const int64_t* slots;    // or
  const int32_t* slots32;  // this
  int64_t num_slots;
  int64_t row_stride_bytes[2];    // of the sources
  int64_t step_source_bytes[2];   // from an item to the next but one
  int64_t second_unit_bytes[2];   // from a lane's first unit of 16 bytes in an item to its second
  uint32_t data_offset_bytes[2];  // of the first item of either parity, in a page
  uint32_t scale_offset_bytes[2];
  uint32_t step_groups;  // in a page, from an item to the next but one
  int block_shift;       // log2 of block_tokens
  int groups_shift;
  int num_parts;   // of a tile's items, for different CTAs
  int part_items;  // items of one part
  int num_items;
  bool is_key[2];
  int head_shift;     // the head of item i is i >> head_shift
  bool changes_keys;  // centred or rotated
  bool centred;
  bool rotated;
  bool looks_at_positions;  // without turning anything
  RopeCall rope;
  RowsLayer layers[kMaxLaunchLayers];
};

// A token's place in its page, found once per thread. page == nullptr: the row is skipped.
struct TokenPlace {
  uint8_t* page;
  int token;  // within the block
};

__device__ inline TokenPlace find_token(const RowsCall& call, const PointOfUse& use, uint8_t* base,
                                        int64_t row) {
  if (row >= call.num_slots) return {nullptr, 0};
  const int64_t slot =
      call.slots != nullptr ? load_once(call.slots + row) : int64_t{load_once(call.slots32 + row)};
  if (slot < 0) return {nullptr, 0};
  const int64_t block = slot >> call.block_shift;
  if (!use.may_use(block, call.num_blocks, true, slot)) return {nullptr, 0};
  return {base + block * call.block_stride_bytes,
          static_cast<int>(slot & ((int64_t{1} << call.block_shift) - 1))};
}

}  // namespace larder::kernels::cuda
