// Plain parameter structs, one per op. Every pointer carries its shape, dtype and nullability.
//
// Strides are in elements unless the name ends in _bytes. On the CPU every pointer is a host
// pointer. The caller validates lengths and indices that come from an untrusted side before it
// fills these structs (the validate_* functions in kernels/kernel_table.h). Semantics that all
// attention ops share: logit = scale * q.k; a soft cap c makes it c * tanh(logit / c), before
// masks; a sink adds exp(sink) to the denominator once (a NaN makes the head's outputs NaN); a row
// that sees no key gives out = 0, whatever the sink, and lse = -inf (with the sink included: the
// sink). A NaN among the keys that a row sees makes the row NaN.
#pragma once

#include <cstddef>
#include <cstdint>

#include "larder/attend_sharing.h"
#include "larder/context_shard.h"
#include "larder/kv_format.h"
#include "larder/lse_form.h"
#include "larder/paged_kv.h"
#include "larder/rope.h"
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
  KeyTransform key_transform = KeyTransform::kNone;
  const float* key_offset = nullptr;  // [num_kv_heads, k_dim]; nullptr unless centred
  // Decode scales of K and V: finite, > 0. Of MLA rows fp8_mla alone is stored with k_scale; for
  // the others it is the scale of FP8 staging (GatherParams).
  float k_scale = 1.0f;
  float v_scale = 1.0f;
};

// A further layer that an append writes at the same slots and positions: its geometry, strides,
// encoder, transform and tensors' shapes, dtypes and strides are those of the first.
struct FurtherLayer {
  std::byte* base = nullptr;
  void* k = nullptr;
  void* v = nullptr;
  const float* key_offset = nullptr;
  float k_scale = 1.0f;
  float v_scale = 1.0f;
};

// Rows are written in order, so of two rows with one slot the later stays.
struct AppendParams {
  LayerView layer;
  TensorView k;  // [num_rows, num_kv_heads, k_dim]; MLA: latent [num_rows, 1, 512]
  TensorView v;  // [num_rows, num_kv_heads, v_dim]; MLA: rope [num_rows, 1, 64]
  // Either of the two: block * block_tokens + offset; < 0 skips the row.
  const int64_t* slots = nullptr;    // [num_slots]
  const int32_t* slots32 = nullptr;  // [num_slots]
  int64_t num_slots = 0;             // <= num_rows; further rows are ignored
  Rope rope;
  const FurtherLayer* further_layers = nullptr;  // [num_further_layers], on the host
  int64_t num_further_layers = 0;
};

inline int64_t slot_of(const AppendParams& params, int64_t row) {
  return params.slots32 != nullptr ? params.slots32[row] : params.slots[row];
}

// The append of one further layer alone.
inline AppendParams further_append(const AppendParams& params, int64_t index) {
  const FurtherLayer& further = params.further_layers[index];
  AppendParams result = params;
  result.layer.base = further.base;
  result.layer.key_offset = further.key_offset;
  result.layer.k_scale = further.k_scale;
  result.layer.v_scale = further.v_scale;
  result.k.data = further.k;
  result.v.data = further.v;
  result.further_layers = nullptr;
  result.num_further_layers = 0;
  return result;
}

// Dequantises tokens into dense or strided tensors: those of a block table, or of single slots.
// Keys come as they were appended: rotated back, the offset added.
//
// MLA: k_out is [rows, 1, 576] (latent, then rope) and v_out is not used. With dtype fp8_e4m3 k_out
// is the FP8 staging of other libraries: each byte is e4m3 of dequantised * (1 / k_scale),
// saturating, so that their kernel folds k_scale into both of its scales.
struct GatherParams {
  LayerView layer;
  TensorView k_out;  // [rows, num_kv_heads, k_dim]; bf16, fp16 or fp32; shape[0] = 0: not wanted
  TensorView v_out;  // [rows, num_kv_heads, v_dim]; likewise
  // Either: sequence s fills rows from s * rows_per_sequence on, or, where that is 0, from the end
  // of sequence s - 1 on. Rows of no token keep their bytes.
  const int32_t* block_table = nullptr;  // [num_seqs, block_table_stride]
  const int32_t* seq_lens = nullptr;     // [num_seqs]
  // [num_seqs], 0 to seq_len, or nullptr: 0. The sequence's tokens before it are left out, as if it
  // began there; blocks that lie wholly before it are not looked up.
  const int32_t* first_tokens = nullptr;
  int64_t num_seqs = 0;
  int64_t block_table_stride = 0;
  int64_t rows_per_sequence = 0;
  // Or: row i is the token in slots[i]; < 0: the row keeps its bytes.
  const int64_t* slots = nullptr;  // [num_slots] or nullptr
  int64_t num_slots = 0;
};

inline int64_t first_token_of(const GatherParams& params, int64_t sequence) {
  return params.first_tokens == nullptr ? 0 : params.first_tokens[sequence];
}

// Where attention's result goes. dtype fp8_e4m3 stores value / out_scale, saturating. dtype e2m1x2
// is NVFP4: out is [rows, heads, v_dim / 2], and a group of 16 with maximum amax has the scale byte
// e4m3(out_sf_scale * amax / 6), at the place of row out_sf_first_row + row and column
// head * v_dim / 16 + group in 128x4 tiles (formats.md 7.12): out_sf holds
// round_up(rows + out_sf_first_row, 128) * round_up(heads * v_dim / 16, 4) bytes, of which only
// those of groups are written. Codes are e2m1(value * (out_sf_scale / decoded scale byte)), in
// float; NaN and infinities as in kv_format.h.
struct AttentionOutput {
  TensorView out;        // [rows, num_q_heads, v_dim]; bf16, fp16, fp32, fp8_e4m3 or e2m1x2
  float* lse = nullptr;  // [rows, num_q_heads], or as lse_form says; nullptr: not wanted
  LseForm lse_form;
  float out_scale = 1.0f;
  float out_sf_scale = 1.0f;
  uint8_t* out_sf = nullptr;  // e2m1x2 only
  int64_t out_sf_first_row = 0;
};

// Bytes of out_sf; 0 unless out is e2m1x2. The shape is that of a tensor that exists.
inline int64_t out_sf_bytes(const AttentionOutput& output) {
  if (output.out.dtype != Dtype::kE2m1x2) return 0;
  const auto& [rows, heads, pairs] = output.out.shape;
  constexpr auto round_up = [](int64_t value, int64_t multiple) {
    return (value + multiple - 1) / multiple * multiple;
  };
  return round_up(rows + output.out_sf_first_row, 128) * round_up(heads * pairs / 8, 4);
}

// Decode and chunked prefill in one: the q rows of sequence s are its last q_lens[s] tokens, so
// row i of q_len rows sees keys 0 .. seq_len - q_len + i when causal (bottom-right aligned).
// Dense MLA is the same call: q is [rows, heads, 576], out [rows, heads, 512].
struct AttendParams {
  LayerView layer;
  TensorView q;  // [num_rows, num_q_heads, k_dim]; bf16, fp16 or fp32
  AttentionOutput output;
  const int32_t* q_lens = nullptr;       // [num_seqs]; their sum is num_rows
  const int32_t* seq_lens = nullptr;     // [num_seqs]; tokens in the cache, the q rows included
  const int32_t* block_table = nullptr;  // [num_seqs, block_table_stride]; an entry is read only
                                         // if causality and the window let some row of the
                                         // sequence see a key of its block, mask or not
  int64_t num_seqs = 0;
  int64_t block_table_stride = 0;
  float scale = 1.0f;
  bool causal = true;
  int32_t window_left = -1;  // w >= 0: a row sees itself and the w keys before it; -1: no window
  float soft_cap = 0.0f;     // > 0, or 0: none; not together with alibi_slopes
  const float* sinks = nullptr;         // [num_q_heads] logits, or nullptr; not with partial
  const float* alibi_slopes = nullptr;  // [num_q_heads] or nullptr: logit += slope * (key - row),
                                        // row counted within the sequence's q rows
  // Packed bits, or nullptr: row i of sequence s may see key j if bit (i * seq_len + j) from byte
  // mask_offsets[s] on is set (the lowest bit of a byte first). Replaces causal; the window stays.
  const uint8_t* mask = nullptr;          // [mask_bytes]
  const int64_t* mask_offsets = nullptr;  // [num_seqs], bytes
  int64_t mask_bytes = 0;
  // One part of a larger attention, to be merged: sinks wait until then.
  bool partial = false;
  // The keys that a sequence's rows see are taken in so many parts of equal length (the last ones
  // may be empty), merged at the end; 0: as the kernel likes.
  int32_t num_splits = 0;
  // A sequence's results have the same bits whatever else is in the batch: its keys are then cut
  // where its own lengths say, and shared_prefix_tokens is not used, which would depend on its
  // neighbours. Not a promise between rows of the kernel tables.
  bool deterministic = false;
  // Tokens at the head of every sequence that lie in the same blocks, so that they need be read
  // once for all: a multiple of block_tokens, at most the least seq_len - q_len; 0: none;
  // kFindSharedPrefix: runs of neighbouring sequences with equal heads of their block-table rows
  // are found where the tables lie. Results differ in rounding alone. With a shard it counts the
  // tokens of all ranks, and blocks that lie wholly before it are the same.
  int32_t shared_prefix_tokens = 0;
  // seq_lens count the tokens of all ranks, the block table has those of this rank alone. Rows,
  // causality, the window, the mask and ALiBi are about places in the whole sequence; num_splits
  // cuts the rank's own keys.
  ContextShard shard;
  // For calls whose tables are in device memory; others, and those with rights, plan for
  // themselves.
  AttendPlan plan;
};

// Attention of every row over its own list of tokens, MLA layers only.
struct SparseMlaParams {
  LayerView layer;
  TensorView q;                      // [num_rows, num_q_heads, 576]; bf16, fp16 or fp32
  AttentionOutput output;            // out [num_rows, num_q_heads, 512]
  const int32_t* indices = nullptr;  // [num_rows, top_k]; block * block_tokens + offset; negative
                                     // or past the pool: ignored, wherever it stands; a token
                                     // named twice counts twice
  int64_t top_k = 0;
  const int32_t* topk_lens = nullptr;  // [num_rows], 0 to top_k, or nullptr; entries from there on
                                       // are ignored
  float scale = 1.0f;
  const float* sinks = nullptr;  // [num_q_heads] logits, or nullptr
};

// Joins partial results over disjoint keys: weights exp(lse - max). A state with lse -inf (or NaN,
// or +inf) does not count, whatever its out holds; none that counts gives out = 0, lse = -inf. One
// that counts alone is passed on exactly. Sinks are applied here, once.
struct MergeParams {
  const TensorView* outs = nullptr;    // [num_states] of [rows, heads, dim]; bf16, fp16 or fp32
  const float* const* lses = nullptr;  // [num_states] of [rows, heads] or as state_form says
  int64_t num_states = 0;
  LseForm state_form;            // without sinks
  const float* sinks = nullptr;  // [heads] logits, or nullptr
  AttentionOutput output;        // may be one of the states: the same view, the same lse order
};

// One rank's share of a context-parallel result, when the keys are spread over ranks:
// out *= exp(lse of the rank - log sum over all ranks of exp(lse)); the sum over ranks of what this
// gives is the whole attention. 0 where the rank has no keys, also if its out is NaN.
struct CombineParams {
  TensorView out;               // [rows, heads, dim], in place; bf16, fp16 or fp32
  const float* lses = nullptr;  // [num_ranks, rows, heads], or [num_ranks, heads, rows]
  int64_t num_ranks = 0;
  int64_t rank = 0;
  LseForm lse_form;              // of lses (without sinks) and of total_lse
  const float* sinks = nullptr;  // [heads] logits, or nullptr: part of every rank's denominator
  float* total_lse = nullptr;    // [rows, heads] or as lse_form says; nullptr: not wanted
};

// Pages of blocks to or from an engine's own memory, byte for byte: never requantised. Tokens are
// numbered through: token t of the list is in blocks[t / block_tokens], and in page
// t / paged.block_tokens of the foreign memory.
struct ConvertParams {
  LayerView layer;
  const int32_t* blocks = nullptr;  // [num_blocks]
  int64_t num_blocks = 0;
  PagedKv paged;  // geometry and formats as the layer's; as many tokens as num_blocks blocks
  bool to_pool = false;
};

// Whole blocks of a group, all layers, without the padding between blocks. No dtypes: opaque groups
// too.
struct BlocksView {
  std::byte* base = nullptr;
  int64_t block_stride_bytes = 0;
  int64_t layer_stride_bytes = 0;
  int64_t layer_bytes = 0;  // of one layer of one block
  int64_t num_layers = 0;
  int64_t num_blocks = 0;
};

struct CopyParams {
  BlocksView view;
  const int32_t* from = nullptr;  // [count]
  const int32_t* to = nullptr;    // [count]; none of them in from, none twice
  int64_t count = 0;
};

struct ScrubParams {  // zeroes
  BlocksView view;
  const int32_t* blocks = nullptr;  // [count]
  int64_t count = 0;
};

// One 64-bit figure per block over the bytes of its layers, one layer after another: the sum mod
// 2^64 over 8-byte little-endian words i (the last one padded with zeros) of mix(word + (i + 1) *
// 0x9E3779B97F4A7C15), plus mix(number of bytes), where mix is the finalizer of SplitMix64. For
// detecting change, not against an adversary.
struct ChecksumParams {
  BlocksView view;
  const int32_t* blocks = nullptr;  // [count]
  int64_t count = 0;
  uint64_t* checksums = nullptr;  // [count]
};

}  // namespace larder::kernels
