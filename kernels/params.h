// Plain parameter structs, one per op. Every pointer carries its shape, dtype and nullability.
//
// Strides are in elements unless the name ends in _bytes. On the CPU every pointer is a host
// pointer. The caller validates lengths and indices that come from an untrusted side before it
// fills these structs (validate_append and validate_attend in kernels/kernel_table.h).
#pragma once

#include <cstddef>
#include <cstdint>

#include "larder/kv_format.h"
#include "larder/tensor.h"

namespace larder::kernels {

// One layer of a pool. The pages of block b lie at base + b * block_stride_bytes.
struct LayerView {
  std::byte* base = nullptr;       // page of block 0 in this layer
  int64_t block_stride_bytes = 0;  // at least page.page_bytes
  int64_t num_blocks = 0;
  AttentionGeometry geometry;
  PageLayout page;
  Encoder encoder = Encoder::kReference;
  float k_scale = 1.0f;  // decode scale of K: finite, > 0
  float v_scale = 1.0f;  // decode scale of V: finite, > 0
};

struct AppendParams {
  LayerView layer;
  TensorView k;                    // [num_rows, num_kv_heads, k_dim]; bf16, fp16 or fp32
  TensorView v;                    // [num_rows, num_kv_heads, v_dim]; same dtype rules as k
  const int64_t* slots = nullptr;  // [num_slots]; block * block_tokens + offset; < 0 skips the row
  int64_t num_slots = 0;           // <= num_rows; further rows are ignored
};

// Decode and chunked prefill in one: the q rows of sequence s are its last q_lens[s] tokens, so
// row i of q_len rows sees keys 0 .. seq_len - q_len + i when causal (bottom-right aligned).
struct AttendParams {
  LayerView layer;
  TensorView q;                          // [num_rows, num_q_heads, k_dim]; bf16, fp16 or fp32
  TensorView out;                        // [num_rows, num_q_heads, v_dim]; bf16, fp16 or fp32
  float* lse = nullptr;                  // [num_rows, num_q_heads]; natural log, -inf if no keys;
                                         // nullptr if not wanted
  const int32_t* q_lens = nullptr;       // [num_seqs]; their sum is num_rows
  const int32_t* seq_lens = nullptr;     // [num_seqs]; tokens in the cache, the q rows included
  const int32_t* block_table = nullptr;  // [num_seqs, block_table_stride]; an entry is read only
                                         // if some row of the sequence sees a key of its block
  int64_t num_seqs = 0;
  int64_t block_table_stride = 0;
  float scale = 1.0f;  // logit = scale * q.k
  bool causal = true;
  int32_t window_left = -1;  // w >= 0: a row sees itself and the w keys before it; -1: no window
};

}  // namespace larder::kernels
