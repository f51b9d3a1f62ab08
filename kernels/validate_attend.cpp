// The checks of attend and sparse_mla calls.
#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/layer_scale.h"
#include "kernels/kernel_table.h"
#include "kernels/refuse.h"
#include "kernels/validate.h"
#include "kernels/visible.h"

namespace larder::kernels {
namespace {

Status validate_query_tensors(const LayerView& layer, const TensorView& q,
                              const AttentionOutput& output) {
  const AttentionGeometry& geometry = layer.geometry;
  const int64_t num_q_heads = q.shape[1];
  if (num_q_heads < 1 || num_q_heads > kMaxQueryHeads || num_q_heads % geometry.num_kv_heads != 0)
    return refuse(kInvalid, "q has ", num_q_heads, " heads: expected a multiple of num_kv_heads ",
                  geometry.num_kv_heads, " up to ", kMaxQueryHeads);
  if (Status s = validate_float_tensor("q", q, num_q_heads, geometry.k_dim); !s.ok()) return s;
  return validate_output(output, q.shape[0], num_q_heads, geometry.v_dim);
}

Status validate_logit_scale(const LayerView& layer, float scale) {
  if (!std::isfinite(scale)) return refuse(kInvalid, "scale is ", scale, ": expected a number");
  if (!std::isfinite(scale * cpu::key_scale(layer)))
    return refuse(kInvalid, "scale is ", scale, ": its product with k_scale ", layer.k_scale,
                  " passes the largest float");
  return {};
}

Status validate_arrays(const AttendParams& params) {
  if (params.num_seqs < 0) return refuse(kInvalid, "num_seqs is ", params.num_seqs);
  if (params.block_table_stride < 0)
    return refuse(kInvalid, "block_table_stride is ", params.block_table_stride);
  if (Status s = validate_array("sinks", params.sinks, alignof(float)); !s.ok()) return s;
  if (Status s = validate_array("alibi_slopes", params.alibi_slopes, alignof(float)); !s.ok())
    return s;
  if (params.num_seqs == 0) return {};
  if (Status s = validate_array("q_lens", params.q_lens, alignof(int32_t), params.num_seqs);
      !s.ok())
    return s;
  if (Status s = validate_array("seq_lens", params.seq_lens, alignof(int32_t), params.num_seqs);
      !s.ok())
    return s;
  if (Status s = validate_array("block_table", params.block_table, alignof(int32_t)); !s.ok())
    return s;
  int64_t unused = 0;
  if (__builtin_mul_overflow(params.num_seqs, params.block_table_stride, &unused))
    return refuse(kInvalid, "block_table_stride is ", params.block_table_stride, " with ",
                  params.num_seqs, " sequences: the table passes 2^63 entries");
  if (params.mask == nullptr) return {};
  if (params.mask_bytes < 0) return refuse(kInvalid, "mask_bytes is ", params.mask_bytes);
  return validate_array("mask_offsets", params.mask_offsets, alignof(int64_t), params.num_seqs);
}

// What can be said of it without the tables.
Status validate_shared_prefix(const AttendParams& params) {
  const int32_t tokens = params.shared_prefix_tokens;
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  if (tokens < kFindSharedPrefix || (tokens > 0 && tokens % block_tokens != 0))
    return refuse(kInvalid, "shared_prefix_tokens is ", tokens, ": expected ", kFindSharedPrefix,
                  " (find it), 0 (none) or a multiple of block_tokens ", block_tokens);
  if (params.num_seqs == 0 || tokens <= 0) return {};
  if (local_tokens(params.shard, tokens) / block_tokens > params.block_table_stride)
    return refuse(kInvalid, "shared_prefix_tokens is ", tokens, ": a block_table row has ",
                  params.block_table_stride, " blocks of ", block_tokens, " tokens");
  return {};
}

Status validate_options(const AttendParams& params) {
  if (Status s = validate_logit_scale(params.layer, params.scale); !s.ok()) return s;
  if (params.window_left < -1)
    return refuse(kInvalid, "window_left is ", params.window_left,
                  ": expected -1 (no window) or more");
  if (!std::isfinite(params.soft_cap) || params.soft_cap < 0)
    return refuse(kInvalid, "soft_cap is ", params.soft_cap,
                  ": expected 0 (none) or a finite number above it");
  if (params.num_splits < 0 || params.num_splits > kMaxSplits)
    return refuse(kInvalid, "num_splits is ", params.num_splits, ": expected 0 to ", kMaxSplits);
  if (Status s = validate_shard(params.shard); !s.ok()) return s;
  if (Status s = validate_shared_prefix(params); !s.ok()) return s;
  if (params.sinks != nullptr && params.partial)
    return refuse(kInvalid,
                  "sinks are given with partial: a partial result has none, merge applies them");
  if (params.alibi_slopes != nullptr && params.soft_cap > 0)
    return refuse(
        ErrorCode::kUnsupported, "soft_cap is ", params.soft_cap,
        " with alibi_slopes: attention has one of the two, since libraries differ in what "
        "both mean");
  return {};
}

// Each sequence's bits begin at a byte of their own. Both lengths are below 2^31.
Status validate_mask(const AttendParams& params, int64_t sequence) {
  const int64_t bits = int64_t{params.q_lens[sequence]} * params.seq_lens[sequence];
  const int64_t needed = (bits + 7) / 8;
  const int64_t offset = params.mask_offsets[sequence];
  if (offset >= 0 && offset <= params.mask_bytes && needed <= params.mask_bytes - offset) return {};
  return refuse(kInvalid, "mask_offsets[", sequence, "] is ", offset, ": the mask has ",
                params.mask_bytes, " bytes, of which the sequence's ", bits, " bits take ", needed);
}

Status validate_sequence(const AttendParams& params, int64_t sequence) {
  const int64_t q_len = params.q_lens[sequence];
  const int64_t seq_len = params.seq_lens[sequence];
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  if (q_len < 0) return refuse(kInvalid, "q_lens[", sequence, "] is ", q_len);
  if (seq_len < 0) return refuse(kInvalid, "seq_lens[", sequence, "] is ", seq_len);
  const int64_t cached = cached_keys(params, sequence);
  const int64_t num_blocks = (cached + block_tokens - 1) / block_tokens;
  if (num_blocks > params.block_table_stride && params.shard.num_ranks == 1)
    return refuse(kInvalid, "seq_lens[", sequence, "] is ", seq_len, ": its block_table row has ",
                  params.block_table_stride, " blocks of ", block_tokens, " tokens");
  if (num_blocks > params.block_table_stride)
    return refuse(kInvalid, "seq_lens[", sequence, "] is ", seq_len, ", of which rank ",
                  params.shard.rank, " has ", cached, ": its block_table row has ",
                  params.block_table_stride, " blocks of ", block_tokens, " tokens");
  if (params.mask != nullptr) {
    if (Status s = validate_mask(params, sequence); !s.ok()) return s;
  }
  const KeyRange keys = touched_keys(params, sequence);
  if (keys.begin >= keys.end) return {};
  if (params.block_table == nullptr)
    return refuse(kInvalid, "block_table is null with seq_lens[", sequence, "] ", seq_len);
  const int32_t* row = params.block_table + sequence * params.block_table_stride;
  for (int64_t i = keys.begin / block_tokens; i < num_blocks; ++i)
    if (row[i] < 0 || row[i] >= params.layer.num_blocks)
      return refuse(kInvalid, "block_table[", sequence, ", ", i, "] is ", row[i], ": the pool has ",
                    params.layer.num_blocks, " blocks");
  return {};
}

// That the prefix which the call names is one. Lengths and capacity of the table are checked.
Status validate_prefix_blocks(const AttendParams& params) {
  const int64_t tokens = params.shared_prefix_tokens;
  if (tokens <= 0 || params.num_seqs == 0) return {};
  if (params.block_table == nullptr)
    return refuse(kInvalid, "block_table is null with shared_prefix_tokens ", tokens);
  const int64_t num_blocks =
      local_tokens(params.shard, tokens) / params.layer.geometry.block_tokens;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int64_t before = int64_t{params.seq_lens[sequence]} - params.q_lens[sequence];
    if (tokens > before)
      return refuse(kInvalid, "shared_prefix_tokens is ", tokens, ": sequence ", sequence, " has ",
                    before, " tokens before its rows");
    const int32_t* row = params.block_table + sequence * params.block_table_stride;
    const auto [first, other] =
        std::mismatch(params.block_table, params.block_table + num_blocks, row);
    if (other != row + num_blocks)
      return refuse(kInvalid, "shared_prefix_tokens is ", tokens, ": block_table[", sequence, ", ",
                    other - row, "] is ", *other, ", that of sequence 0 is ", *first);
  }
  return {};
}

Status validate_topk(const SparseMlaParams& params, Tables tables) {
  const int64_t num_rows = params.q.shape[0];
  int64_t num_indices = 0;
  if (params.top_k < 0) return refuse(kInvalid, "top_k is ", params.top_k, ": expected 0 or more");
  if (__builtin_mul_overflow(num_rows, params.top_k, &num_indices))
    return refuse(kInvalid, "top_k is ", params.top_k, " with ", num_rows,
                  " rows: the indices pass 2^63 entries");
  if (Status s = validate_array("indices", params.indices, alignof(int32_t), num_indices); !s.ok())
    return s;
  if (Status s = validate_array("topk_lens", params.topk_lens, alignof(int32_t)); !s.ok()) return s;
  if (params.topk_lens == nullptr || tables == Tables::kDevice) return {};
  for (int64_t row = 0; row < num_rows; ++row)
    if (params.topk_lens[row] < 0 || params.topk_lens[row] > params.top_k)
      return refuse(kInvalid, "topk_lens[", row, "] is ", params.topk_lens[row],
                    ": expected 0 to top_k ", params.top_k);
  return {};
}

}  // namespace

Status validate_shard(const ContextShard& shard) {
  const auto& [num_ranks, rank, interleave] = shard;
  if (num_ranks < 1)
    return refuse(kInvalid, "shard.num_ranks is ", num_ranks, ": expected 1 or more");
  if (rank < 0 || rank >= num_ranks)
    return refuse(kInvalid, "shard.rank is ", rank, ": expected 0 to ", num_ranks - 1,
                  " with shard.num_ranks ", num_ranks);
  if (interleave < 1)
    return refuse(kInvalid, "shard.interleave is ", interleave, ": expected 1 or more");
  const int64_t round = int64_t{num_ranks} * interleave;
  if (round > std::numeric_limits<int32_t>::max())
    return refuse(kInvalid, "shard.interleave is ", interleave, ": its product with ", num_ranks,
                  " ranks is ", round, ", expected less than 2^31");
  return {};
}

Status validate_attend(const AttendParams& params, Tables tables) {
  if (Status s = validate_layer(params.layer); !s.ok()) return s;
  if (Status s = validate_query_tensors(params.layer, params.q, params.output); !s.ok()) return s;
  if (Status s = validate_arrays(params); !s.ok()) return s;
  if (Status s = validate_options(params); !s.ok()) return s;
  if (tables == Tables::kDevice) {
    if (reinterpret_cast<uintptr_t>(params.plan.memory) % 16 != 0)
      return refuse(kInvalid, "plan.memory is at ", static_cast<const void*>(params.plan.memory),
                    ": expected a multiple of 16");
    return validate_array("block_table", params.block_table, alignof(int32_t),
                          params.num_seqs * params.block_table_stride);
  }
  int64_t num_rows = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    if (Status s = validate_sequence(params, sequence); !s.ok()) return s;
    num_rows += params.q_lens[sequence];
    // Also what keeps the sum from overflowing.
    if (num_rows > params.q.shape[0]) break;
  }
  if (num_rows != params.q.shape[0])
    return refuse(kInvalid, "q has ", params.q.shape[0], " rows: q_lens add up to ", num_rows,
                  num_rows > params.q.shape[0] ? " and more" : "");
  return validate_prefix_blocks(params);
}

Status validate_sparse_mla(const SparseMlaParams& params, Tables tables) {
  if (Status s = validate_layer(params.layer); !s.ok()) return s;
  if (params.layer.geometry.mla_row == MlaRow::kNone)
    return refuse(kInvalid, "mla_row is none: sparse_mla reads layers of MLA rows only");
  if (Status s = validate_query_tensors(params.layer, params.q, params.output); !s.ok()) return s;
  if (Status s = validate_logit_scale(params.layer, params.scale); !s.ok()) return s;
  if (Status s = validate_array("sinks", params.sinks, alignof(float)); !s.ok()) return s;
  return validate_topk(params, tables);
}

}  // namespace larder::kernels
