// Calls on request that attend: over sequences, or over each row's own tokens (sparse MLA).
#include <algorithm>

#include "daemon/submission_call.h"
#include "kernels/kernel_table.h"
#include "kernels/visible.h"

namespace larder::daemon {
namespace {

// The tables of a call, which the params point into.
struct AttendTables {
  std::vector<int32_t> q_lens, seq_lens, block_table;
  std::vector<int64_t> mask_offsets;
  std::vector<float> sinks, alibi_slopes;
};

const float* data_or_null(const std::vector<float>& values) {
  return values.empty() ? nullptr : values.data();
}

Status check_per_head(const char* field, size_t count, int64_t num_q_heads) {
  if (count == 0 || count == static_cast<size_t>(num_q_heads)) return {};
  return invalid(std::string(field) + " has " + std::to_string(count) + " entries, q has " +
                 std::to_string(num_q_heads) + " heads");
}

// Writes into `table` or answers why not.
template <typename T>
Status copy_into(std::vector<T>& table, const SubmissionCall& call, const char* field,
                 const protocol::ArenaArray& array, int64_t max_count) {
  auto copied = call.copy_table<T>(field, array, max_count);
  if (!copied) return copied.status();
  table = std::move(*copied);
  return {};
}

LseForm lse_form(const protocol::Submission& record) {
  return {(record.flags & protocol::kFlagLseBase2) != 0,
          (record.flags & protocol::kFlagLseIncludesSink) != 0,
          (record.flags & protocol::kFlagLseHeadsFirst) != 0};
}

Result<ContextShard> shard_of(const protocol::Submission& record) {
  const auto& [num_ranks, rank, interleave] = record.shard;
  if (num_ranks != 0) return ContextShard{num_ranks, rank, interleave};
  if (rank == 0 && interleave == 0) return ContextShard();
  return invalid("shard.num_ranks is 0 with shard.rank " + std::to_string(rank) +
                 " and shard.interleave " + std::to_string(interleave) + ": expected 0 with it");
}

Result<kernels::AttentionOutput> view_attention_output(const SubmissionCall& call,
                                                       const TensorView& q) {
  const protocol::Submission& record = call.record;
  kernels::AttentionOutput output;
  const auto out = call.view_tensor("out", record.second, protocol::ImportPlace::kSecond);
  if (!out) return out.status();
  output.out = *out;
  const auto lse = call.view_array<float>("lse", record.lse,
                                          protocol::kMaxRowsPerCall * kernels::kMaxQueryHeads);
  if (!lse) return lse.status();
  const uint64_t wanted = static_cast<uint64_t>(q.shape[0]) * static_cast<uint64_t>(q.shape[1]);
  if (!lse->empty() && lse->size() != wanted)
    return invalid("lse has " + std::to_string(lse->size()) + " entries, " +
                   std::to_string(wanted) + " are needed");
  if (!lse->empty()) output.lse = lse->data();
  output.lse_form = lse_form(record);
  output.out_scale = record.out_scale;
  output.out_sf_scale = record.out_sf_scale;
  if (record.out_sf_first_row > static_cast<uint64_t>(protocol::kMaxRowsPerCall))
    return invalid("out_sf_first_row is " + std::to_string(record.out_sf_first_row) + ", at most " +
                   std::to_string(protocol::kMaxRowsPerCall) + " is allowed");
  output.out_sf_first_row = static_cast<int64_t>(record.out_sf_first_row);
  const auto out_sf = call.view_array<uint8_t>("out_sf", record.out_sf, protocol::kMaxArenaBytes);
  if (!out_sf) return out_sf.status();
  const auto needed = static_cast<uint64_t>(kernels::out_sf_bytes(output));
  if (out_sf->size() != needed)
    return invalid("out_sf has " + std::to_string(out_sf->size()) + " bytes, " +
                   std::to_string(needed) + " are needed");
  if (needed > 0) output.out_sf = out_sf->data();
  return output;
}

// A part of the keys costs as much as some keys more, however few it has.
constexpr double kKeysPerSplit = 32;

Status check_products(double products) {
  if (products <= static_cast<double>(protocol::kMaxAttendProductsPerCall)) return {};
  return invalid("the attention has " +
                 std::to_string(static_cast<int64_t>(std::min(products, 9e18))) +
                 " products (rows * keys * heads * (dims + 64)), at most " +
                 std::to_string(protocol::kMaxAttendProductsPerCall) +
                 " go in one call: attend fewer rows at a time");
}

// What one key of one row and head costs, in products: those of both dims, and the rest of its way.
double products_per_key(const AttentionGeometry& geometry) {
  constexpr double kOtherWork = 64;
  return geometry.k_dim + geometry.v_dim + kOtherWork;
}

// What a client could ask for without end: keys that repeat, in tables that cost nothing.
Status check_attend_size(const kernels::AttendParams& params) {
  // Below 2^20 rows, 2^31 keys and 2^12 heads a double holds the sum well enough to compare.
  double keys_of_rows = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const auto keys = kernels::touched_keys(params, sequence);
    keys_of_rows += static_cast<double>(params.q_lens[sequence]) *
                    (static_cast<double>(std::max<int64_t>(keys.end - keys.begin, 0)) +
                     kKeysPerSplit * params.num_splits);
  }
  return check_products(keys_of_rows * static_cast<double>(params.q.shape[1]) *
                        products_per_key(params.layer.geometry));
}

Status check_attended_blocks(const SubmissionCall& call, const kernels::AttendParams& params) {
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const auto keys = kernels::touched_keys(params, sequence);
    for (int64_t column = keys.begin / block_tokens; column * block_tokens < keys.end; ++column) {
      const int32_t block = params.block_table[sequence * params.block_table_stride + column];
      if (Status status = call.may_read("sequence " + std::to_string(sequence), block);
          !status.ok())
        return status;
    }
  }
  return {};
}

Status copy_per_head_tables(const SubmissionCall& call, AttendTables& tables) {
  const protocol::Submission& record = call.record;
  if (Status s = copy_into(tables.sinks, call, "sinks", record.sinks, kernels::kMaxQueryHeads);
      !s.ok())
    return s;
  return copy_into(tables.alibi_slopes, call, "alibi_slopes", record.alibi_slopes,
                   kernels::kMaxQueryHeads);
}

Status copy_tables(const SubmissionCall& call, AttendTables& tables) {
  const protocol::Submission& record = call.record;
  const auto copy = [&](auto& table, const char* field, const protocol::ArenaArray& array,
                        int64_t max_count) {
    return copy_into(table, call, field, array, max_count);
  };
  using namespace protocol;
  if (Status s = copy(tables.q_lens, "q_lens", record.q_lens, kMaxSequencesPerCall); !s.ok())
    return s;
  if (Status s = copy(tables.seq_lens, "seq_lens", record.seq_lens, kMaxSequencesPerCall); !s.ok())
    return s;
  if (Status s =
          copy(tables.block_table, "block_table", record.block_table, kMaxTableEntriesPerCall);
      !s.ok())
    return s;
  if (Status s =
          copy(tables.mask_offsets, "mask_offsets", record.mask_offsets, kMaxSequencesPerCall);
      !s.ok())
    return s;
  if (Status s = copy_per_head_tables(call, tables); !s.ok()) return s;
  const size_t num_seqs = tables.q_lens.size();
  const uint64_t stride = record.block_table_stride;
  if (tables.seq_lens.size() != num_seqs ||
      stride > static_cast<uint64_t>(kMaxTableEntriesPerCall) ||
      stride * num_seqs != tables.block_table.size())
    return invalid("q_lens has " + std::to_string(num_seqs) + " entries, seq_lens " +
                   std::to_string(tables.seq_lens.size()) + ", block_table " +
                   std::to_string(tables.block_table.size()) + " with a stride of " +
                   std::to_string(stride));
  if (record.mask.count != 0 && tables.mask_offsets.size() != num_seqs)
    return invalid("mask_offsets has " + std::to_string(tables.mask_offsets.size()) +
                   " entries, q_lens " + std::to_string(num_seqs));
  return {};
}

}  // namespace

Result<SubmissionWork> run_attend(const SubmissionCall& call) {
  const protocol::Submission& record = call.record;
  const auto q = call.view_tensor("q", record.first, protocol::ImportPlace::kFirst);
  if (!q) return q.status();
  const auto output = view_attention_output(call, *q);
  if (!output) return output.status();
  AttendTables tables;
  const bool device_tables = call.has_device_tables();
  if (Status status =
          device_tables ? copy_per_head_tables(call, tables) : copy_tables(call, tables);
      !status.ok())
    return status;
  if (device_tables)
    if (Status status = check_attend_device_tables(call); !status.ok()) return status;
  const int64_t num_q_heads = q->shape[1];
  if (Status s = check_per_head("sinks", tables.sinks.size(), num_q_heads); !s.ok()) return s;
  if (Status s = check_per_head("alibi_slopes", tables.alibi_slopes.size(), num_q_heads); !s.ok())
    return s;
  const auto mask = call.view_array<uint8_t>("mask", record.mask, protocol::kMaxArenaBytes);
  if (!mask) return mask.status();
  const auto shard = shard_of(record);
  if (!shard) return shard.status();
  kernels::AttendParams params;
  params.layer = call.layer();
  params.q = *q;
  params.output = *output;
  params.q_lens = tables.q_lens.data();
  params.seq_lens = tables.seq_lens.data();
  params.block_table = tables.block_table.data();
  params.num_seqs = static_cast<int64_t>(tables.q_lens.size());
  params.block_table_stride = static_cast<int64_t>(record.block_table_stride);
  params.scale = record.scale;
  params.causal = (record.flags & protocol::kFlagCausal) != 0;
  params.window_left = record.window_left;
  params.soft_cap = record.soft_cap;
  params.sinks = data_or_null(tables.sinks);
  params.alibi_slopes = data_or_null(tables.alibi_slopes);
  if (!mask->empty()) {
    params.mask = mask->data();
    params.mask_bytes = static_cast<int64_t>(mask->size());
    params.mask_offsets = tables.mask_offsets.data();
  }
  params.partial = (record.flags & protocol::kFlagPartial) != 0;
  params.num_splits = record.num_splits;
  params.deterministic = (record.flags & protocol::kFlagDeterministic) != 0;
  params.shared_prefix_tokens = record.shared_prefix_tokens;
  params.shard = *shard;
  if (device_tables) {
    const double keys =
        static_cast<double>(record.block_table_stride) * params.layer.geometry.block_tokens +
        kKeysPerSplit * params.num_splits;
    if (Status status = check_products(keys * static_cast<double>(q->shape[0] * num_q_heads) *
                                       products_per_key(params.layer.geometry));
        !status.ok())
      return status;
    return run_attend_device_tables(call, params);
  }
  if (Status status = kernels::validate_attend(params); !status.ok()) return status;
  if (Status status = check_attend_size(params); !status.ok()) return status;
  if (Status status = check_attended_blocks(call, params); !status.ok()) return status;
  if (Status status = kernels::run_on(call.group.device, params); !status.ok()) return status;
  return SubmissionWork{0, static_cast<uint64_t>(q->shape[0])};
}

Result<SubmissionWork> run_sparse_attend(const SubmissionCall& call) {
  const protocol::Submission& record = call.record;
  const auto q = call.view_tensor("q", record.first, protocol::ImportPlace::kFirst);
  if (!q) return q.status();
  const auto output = view_attention_output(call, *q);
  if (!output) return output.status();
  AttendTables tables;
  std::vector<int32_t> indices, topk_lens;
  if (Status s =
          copy_into(indices, call, "indices", record.indices, protocol::kMaxTableEntriesPerCall);
      !s.ok())
    return s;
  if (Status s =
          copy_into(topk_lens, call, "topk_lens", record.topk_lens, protocol::kMaxRowsPerCall);
      !s.ok())
    return s;
  if (Status s = copy_into(tables.sinks, call, "sinks", record.sinks, kernels::kMaxQueryHeads);
      !s.ok())
    return s;
  const int64_t rows = q->shape[0];
  if (Status s = check_per_head("sinks", tables.sinks.size(), q->shape[1]); !s.ok()) return s;
  const auto num_indices = static_cast<int64_t>(indices.size());
  if (rows == 0 ? num_indices != 0 : num_indices % rows != 0)
    return invalid("indices has " + std::to_string(num_indices) + " entries, q has " +
                   std::to_string(rows) + " rows");
  if (!topk_lens.empty() && static_cast<int64_t>(topk_lens.size()) != rows)
    return invalid("topk_lens has " + std::to_string(topk_lens.size()) + " entries, q has " +
                   std::to_string(rows) + " rows");
  kernels::SparseMlaParams params;
  params.layer = call.layer();
  params.q = *q;
  params.output = *output;
  params.indices = indices.data();
  params.top_k = rows == 0 ? 0 : num_indices / rows;
  params.topk_lens = topk_lens.empty() ? nullptr : topk_lens.data();
  params.scale = record.scale;
  params.sinks = data_or_null(tables.sinks);
  if (Status status = kernels::validate_sparse_mla(params); !status.ok()) return status;
  if (Status status =
          check_products(static_cast<double>(num_indices) * static_cast<double>(q->shape[1]) *
                         (kMlaKeyDim + kMlaLatentDim));
      !status.ok())
    return status;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t entry = 0; entry < params.top_k; ++entry) {
      const int64_t slot = kernels::sparse_mla_slot(params, row, entry);
      if (slot < 0) continue;
      if (Status status =
              call.may_read("indices[" + std::to_string(row) + ", " + std::to_string(entry) + "]",
                            slot / params.layer.geometry.block_tokens);
          !status.ok())
        return status;
    }
  if (Status status = kernels::run_on(call.group.device, params); !status.ok()) return status;
  return SubmissionWork{0, static_cast<uint64_t>(rows)};
}

}  // namespace larder::daemon
