// A random case as the call that the kernel's code plans. Included after cuda_threads.h.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attend_decode_ends.cuh"
#include "tests/kernels/cuda/attend_plan_model.h"

namespace larder::test {

namespace cuda = kernels::cuda;

inline constexpr uint32_t kHeadBytes = 4096;  // data of a head in a block
inline constexpr uint32_t kHeadScaleBytes = 512;
inline constexpr uint32_t kKeysAt = 1 << 16;  // in a block; blocks begin at address 0
inline constexpr uint32_t kScalesAt = 1 << 20;

inline cuda::DecodeCall call_of(const PlanCase& one, kernels::CallFaults& faults) {
  static const int32_t table = 0;  // addresses count from it, and none is looked at
  static const uint8_t mask = 0;
  cuda::DecodeCall call = {};
  call.layer.keys_offset_bytes = kKeysAt;
  call.layer.key_scales_offset_bytes = kScalesAt;
  call.layer.head_bytes = kHeadBytes;
  call.layer.head_scale_bytes = kHeadScaleBytes;
  call.q_lens = one.q_lens.data();
  call.seq_lens = one.seq_lens.data();
  call.block_table = &table;
  call.block_table_stride = one.block_table_stride;
  if (!one.mask_offsets.empty()) {
    call.mask = &mask;
    call.mask_offsets = one.mask_offsets.data();
    call.mask_bytes = one.mask_bytes;
  }
  if (!one.prefix_tokens.empty()) call.prefix.tokens = one.prefix_tokens.data();
  call.num_rows = one.num_rows;
  call.max_tokens = one.max_tokens;
  call.shard = cuda::Shard(one.shard);
  call.num_seqs = one.num_seqs();
  call.num_kv_heads = one.num_kv_heads;
  call.group = one.group;
  call.group_inverse = static_cast<uint32_t>(
      std::min<uint64_t>((uint64_t{1} << 32) / static_cast<uint64_t>(one.group), 0xFFFFFFFFu));
  call.window_left = one.window_left;
  call.is_causal = one.is_causal;
  call.piece_tiles = one.piece_tiles;
  call.max_pieces = one.max_pieces;
  call.begin_tiles = one.begin_tiles;
  call.num_segments = one.num_segments;
  call.whole_ctas = one.whole_ctas;
  call.use.faults = &faults;
  return call;
}

}  // namespace larder::test
