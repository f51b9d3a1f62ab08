// What one attention, gather or merge call takes: batches and options.
//
// Semantics on every path: logit = scale * q.k; causal is bottom-right aligned; window_left = w
// sees the row itself and w keys before it; LSE is natural log and excludes the sink unless LseForm
// says otherwise; a row that sees no key gives out = 0 and lse = -inf; query head h uses KV head h
// / (num_q_heads / num_kv_heads). Strides are in elements, any strides are taken.
//
// Inputs are bf16, fp16 or fp32; attention's outputs also fp8_e4m3 (value / out_scale, saturating)
// or e2m1x2: NVFP4, two values to a byte, with scale bytes e4m3(out_sf_scale * amax / 6) in 128x4
// tiles in out_sf.
#pragma once

#include <cstdint>
#include <span>

#include "larder/attend_sharing.h"
#include "larder/context_shard.h"
#include "larder/lse_form.h"
#include "larder/status.h"
#include "larder/tensor.h"

namespace larder {

struct AttendOptions {
  float scale = 0.0f;  // 0: 1 / sqrt(k_dim); MLA pools have no default
  bool causal = true;
  int32_t window_left = -1;                  // -1: no window
  float soft_cap = 0.0f;                     // c > 0: logits become c * tanh(logit / c); 0: off
  std::span<const float> sinks = {};         // [num_q_heads] logits, or empty
  std::span<const float> alibi_slopes = {};  // [num_q_heads] or empty; not with a soft cap
  bool partial = false;    // one part of a larger attention, for merge_states; without sinks
  int32_t num_splits = 0;  // keys are taken in so many parts; 0: automatic
  // A sequence's results have the same bits alone and in any batch, on one machine and backend.
  bool deterministic = false;
  // Tokens at the head of every sequence that lie in the same blocks, which are then read once for
  // all: a multiple of block_tokens, at most the least seq_len - q_len; 0: none; kFindSharedPrefix:
  // neighbouring sequences whose block-table rows begin alike are found. Speed alone: not used with
  // `deterministic`, nor where a backend has no way to.
  int32_t shared_prefix_tokens = 0;
  // This rank's share of a context that is spread over ranks: seq_lens and masks are those of the
  // whole sequences, a block table has local_tokens(shard, seq_len) tokens of each. Its results are
  // joined by merge_states or combine_rank, so take `partial`, or no sinks. Pool::attend alone.
  ContextShard shard = {};
  LseForm lse_form = {};
  float out_scale = 1.0f;        // fp8_e4m3 output
  float out_sf_scale = 1.0f;     // e2m1x2 output: an encode scale
  int64_t out_sf_first_row = 0;  // e2m1x2 output: row of out_sf that the first row's scales go to
};

// A batch of sequences for Pool::attend. Row i of q belongs to the sequence whose q_lens cover it,
// and is one of that sequence's last q_lens[s] tokens. MLA pools: k_dim is 576, v_dim 512.
struct AttendBatch {
  TensorView q;                          // [sum of q_lens, num_q_heads, k_dim]
  TensorView out;                        // [sum of q_lens, num_q_heads, v_dim]; e2m1x2: v_dim / 2
  float* lse = nullptr;                  // [sum of q_lens, num_q_heads] or as lse_form says
  std::span<const int32_t> q_lens;       // [num_seqs]
  std::span<const int32_t> seq_lens;     // [num_seqs], the q rows included
  std::span<const int32_t> block_table;  // [num_seqs, block_table_stride], block ids
  int64_t block_table_stride = 0;
  // Empty, or packed bits: row i of sequence s may see key j if bit i * seq_lens[s] + j from byte
  // mask_offsets[s] on is set (lowest bit first). Replaces causal; the window stays.
  std::span<const uint8_t> mask = {};
  std::span<const int64_t> mask_offsets = {};  // [num_seqs]
  // e2m1x2 only: round_up(rows + out_sf_first_row, 128) * round_up(heads * v_dim / 16, 4) bytes.
  std::span<uint8_t> out_sf = {};
};

// The same with everything in device memory (Pool::attend_in_stream). The grid of the launch comes
// from the shapes, the lengths are read when it runs: at most block_table_stride blocks a sequence.
// They must not change while it runs: its results are then anything.
struct DeviceAttendBatch {
  TensorView q;
  TensorView out;
  float* lse = nullptr;
  const int32_t* q_lens = nullptr;       // [num_seqs]; rows past their sum get out = 0, lse = -inf
  const int32_t* seq_lens = nullptr;     // [num_seqs]
  const int32_t* block_table = nullptr;  // [num_seqs, block_table_stride]
  int64_t num_seqs = 0;
  int64_t block_table_stride = 0;
  // Instead of the options' spans, which must be empty.
  const float* sinks = nullptr;         // [num_q_heads]
  const float* alibi_slopes = nullptr;  // [num_q_heads]
  AttendPlan plan = {};                 // shared by the layers of a step
};

// Attention of every row over its own tokens, MLA pools only (Pool::sparse_attend). Of the options
// scale, sinks, lse_form and out_scale are used; the others must keep their defaults.
struct SparseBatch {
  TensorView q;                      // [num_rows, num_q_heads, 576]
  TensorView out;                    // [num_rows, num_q_heads, 512]
  float* lse = nullptr;              // [num_rows, num_q_heads] or as lse_form says
  std::span<const int32_t> indices;  // [num_rows, top_k] slots; negative or past the pool: ignored
  int64_t top_k = 0;
  std::span<const int32_t> topk_lens =
      {};  // [num_rows] or empty; entries from there on are ignored
};

// Dequantised tokens of a batch of sequences (Pool::gather). A tensor with shape[0] = 0 is not
// wanted. Sequence s fills rows from s * rows_per_sequence on, or, where that is 0, from the end of
// sequence s - 1 on, with its tokens from first_tokens[s] on: as many as a window needs, say
// (larder/gather_scratch.h). Rows of no token keep their bytes. MLA pools: k_out is [rows, 1, 576]
// (latent, then rope) and v_out is unused; k_out of dtype fp8_e4m3 is the staging of FP8-only
// kernels, e4m3(value * (1 / k_scale)).
struct GatherBatch {
  TensorView k_out;                      // [rows, num_kv_heads, k_dim]
  TensorView v_out;                      // [rows, num_kv_heads, v_dim]
  std::span<const int32_t> seq_lens;     // [num_seqs]
  std::span<const int32_t> block_table;  // [num_seqs, block_table_stride]
  int64_t block_table_stride = 0;
  int64_t rows_per_sequence = 0;
  // [num_seqs], 0 to seq_len, or empty: 0. Blocks that lie wholly before it are not looked up.
  std::span<const int32_t> first_tokens = {};
};

// The same with everything in device memory (Pool::gather_in_stream). Lengths and first tokens are
// read when it runs; what does not fit a row of the table, the window of the output or the output
// itself is left out.
struct DeviceGatherBatch {
  TensorView k_out;
  TensorView v_out;
  const int32_t* seq_lens = nullptr;      // [num_seqs]
  const int32_t* first_tokens = nullptr;  // [num_seqs] or nullptr: 0
  const int32_t* block_table = nullptr;   // [num_seqs, block_table_stride]
  int64_t num_seqs = 0;
  int64_t block_table_stride = 0;
  int64_t rows_per_sequence = 0;
};

// One part of an attention over disjoint keys, computed without sinks.
struct AttentionState {
  TensorView out;              // [rows, heads, dim]
  const float* lse = nullptr;  // [rows, heads] or as state_form says
};

struct MergeOptions {
  LseForm state_form = {};
  LseForm lse_form = {};
  std::span<const float> sinks = {};  // [heads] logits, or empty: applied once, to the result
  float out_scale = 1.0f;
};

// Joins the states with weights exp(lse - max). A state whose lse is -inf, +inf or NaN does not
// count, whatever its out holds. `out` and `lse` (or nullptr) may be one of the states' memory.
// INVALID_ARGUMENT when the shapes differ. Any thread.
Status merge_states(std::span<const AttentionState> states, const TensorView& out, float* lse,
                    const MergeOptions& options = {});

struct CombineOptions {
  LseForm lse_form = {};              // of lses and of total_lse
  std::span<const float> sinks = {};  // [heads] logits, or empty
};

// One rank's share of a context-parallel attention, in place: out *= exp(lse of the rank - total),
// total = log of the sum over ranks of exp(lse). The sum over ranks of these is the attention.
// lses: [num_ranks, rows, heads]. total_lse: [rows, heads] or nullptr. Any thread.
Status combine_rank(const TensorView& out, std::span<const float> lses, int64_t num_ranks,
                    int64_t rank, float* total_lse = nullptr, const CombineOptions& options = {});

}  // namespace larder
