// Attention of a pool: here, or handed to the daemon's executor.
#include <cmath>

#include "client/client_impl.h"
#include "kernels/kernel_table.h"

namespace larder {
namespace {

const float* data_or_null(std::span<const float> values) {
  return values.empty() ? nullptr : values.data();
}

Status check_per_head(const char* field, std::span<const float> values, const TensorView& q) {
  if (values.empty() || static_cast<int64_t>(values.size()) == q.shape[1]) return {};
  return {ErrorCode::kInvalidArgument, std::string(field) + " has " +
                                           std::to_string(values.size()) + " entries, q has " +
                                           std::to_string(q.shape[1]) + " heads"};
}

kernels::AttentionOutput output_of(const TensorView& out, float* lse,
                                   const AttendOptions& options) {
  kernels::AttentionOutput output;
  output.out = out;
  output.lse = lse;
  output.lse_form = options.lse_form;
  output.out_scale = options.out_scale;
  output.out_sf_scale = options.out_sf_scale;
  output.out_sf_first_row = options.out_sf_first_row;
  return output;
}

Status check_options_of_sparse(const AttendOptions& options) {
  const AttendOptions defaults;
  if (options.window_left == defaults.window_left && options.soft_cap == 0.0f &&
      options.alibi_slopes.empty() && !options.partial && options.num_splits == 0 &&
      !options.deterministic && options.shared_prefix_tokens == 0 &&
      options.shard == defaults.shard)
    return {};
  return {ErrorCode::kInvalidArgument,
          "sparse_attend takes scale, sinks, lse_form and out_scale: window_left, soft_cap, "
          "alibi_slopes, partial, num_splits, deterministic, shared_prefix_tokens and shard must "
          "keep their defaults"};
}

}  // namespace

Result<float> Pool::Impl::scale_of(const AttendOptions& options) const {
  if (options.scale != 0.0f) return options.scale;
  if (view.geometry.mla_row != MlaRow::kNone)
    return Status(ErrorCode::kInvalidArgument,
                  "scale is 0: MLA pools have no default, since the rows do not tell the dim of "
                  "the keys that they stand for");
  return 1.0f / std::sqrt(static_cast<float>(view.geometry.k_dim));
}

Status Pool::Impl::attend(int32_t layer_index, const AttendBatch& batch,
                          const AttendOptions& options) {
  if (Status status = check_layer(layer_index); !status.ok()) return status;
  const auto num_seqs = static_cast<int64_t>(batch.q_lens.size());
  if (batch.seq_lens.size() != batch.q_lens.size() ||
      (!batch.mask.empty() && batch.mask_offsets.size() != batch.q_lens.size()))
    return {ErrorCode::kInvalidArgument,
            "q_lens has " + std::to_string(num_seqs) + " entries, seq_lens " +
                std::to_string(batch.seq_lens.size()) + ", mask_offsets " +
                std::to_string(batch.mask_offsets.size())};
  if (Status s = check_table(num_seqs, batch.block_table, batch.block_table_stride); !s.ok())
    return s;
  if (Status s = check_per_head("sinks", options.sinks, batch.q); !s.ok()) return s;
  if (Status s = check_per_head("alibi_slopes", options.alibi_slopes, batch.q); !s.ok()) return s;
  const auto scale = scale_of(options);
  if (!scale) return scale.status();
  kernels::AttendParams params;
  params.layer = layer(layer_index);
  params.q = batch.q;
  params.output = output_of(batch.out, batch.lse, options);
  params.output.out_sf = batch.out_sf.empty() ? nullptr : batch.out_sf.data();
  params.q_lens = batch.q_lens.data();
  params.seq_lens = batch.seq_lens.data();
  params.block_table = batch.block_table.data();
  params.num_seqs = num_seqs;
  params.block_table_stride = batch.block_table_stride;
  params.scale = *scale;
  params.causal = options.causal;
  params.window_left = options.window_left;
  params.soft_cap = options.soft_cap;
  params.sinks = data_or_null(options.sinks);
  params.alibi_slopes = data_or_null(options.alibi_slopes);
  if (!batch.mask.empty()) {
    params.mask = batch.mask.data();
    params.mask_bytes = static_cast<int64_t>(batch.mask.size());
    params.mask_offsets = batch.mask_offsets.data();
  }
  params.partial = options.partial;
  params.num_splits = options.num_splits;
  params.deterministic = options.deterministic;
  params.shared_prefix_tokens = options.shared_prefix_tokens;
  params.shard = options.shard;
  if (Status status = kernels::validate_attend(params); !status.ok()) return status;
  if (static_cast<int64_t>(batch.out_sf.size()) != kernels::out_sf_bytes(params.output))
    return {ErrorCode::kInvalidArgument,
            "out_sf has " + std::to_string(batch.out_sf.size()) + " bytes, expected " +
                std::to_string(kernels::out_sf_bytes(params.output)) +
                " (whole 128x4 tiles with out of dtype e2m1x2, else none)"};
  if (execution == Execution::kInProcess) {
    if (Status status = check_mapped_table(batch.seq_lens, batch.block_table,
                                           batch.block_table_stride, {}, options.shard);
        !status.ok())
      return status;
    return run_here(params);
  }
  return attend_on_request(layer_index, params);
}

// Options that a record has one field each for.
void Pool::Impl::fill_output(protocol::Submission& record,
                             const kernels::AttentionOutput& output) const {
  if (output.lse_form.base2) record.flags |= protocol::kFlagLseBase2;
  if (output.lse_form.includes_sink) record.flags |= protocol::kFlagLseIncludesSink;
  if (output.lse_form.heads_first) record.flags |= protocol::kFlagLseHeadsFirst;
  record.out_scale = output.out_scale;
  record.out_sf_scale = output.out_sf_scale;
  record.out_sf_first_row = static_cast<uint64_t>(output.out_sf_first_row);
}

// Room in the arena for what the call writes.
Status Pool::Impl::reserve_output(protocol::Submission& record,
                                  const kernels::AttentionOutput& output) {
  RequestRing& ring = *client->ring;
  auto out = client->place_output(record, protocol::ImportPlace::kSecond, output.out);
  if (!out) return out.status();
  record.second = *out;
  fill_output(record, output);
  if (output.lse != nullptr) {
    const auto count = static_cast<uint64_t>(record.first.shape[0] * record.first.shape[1]);
    auto lse = ring.reserve(count * sizeof(float));
    if (!lse) return lse.status();
    record.lse = {lse->offset_bytes, count};
  }
  if (const auto bytes = static_cast<size_t>(kernels::out_sf_bytes(output)); bytes > 0) {
    // Bytes of no group keep what the caller has there.
    auto out_sf = ring.stage(output.out_sf, bytes);
    if (!out_sf) return out_sf.status();
    record.out_sf = *out_sf;
  }
  return {};
}

void Pool::Impl::copy_output(const protocol::Submission& record,
                             const kernels::AttentionOutput& output) const {
  const RequestRing& ring = *client->ring;
  if (record.imports[static_cast<size_t>(protocol::ImportPlace::kSecond)] == 0)
    ring.copy_out(record.second, output.out);
  if (output.lse != nullptr) ring.copy_out(record.lse, output.lse);
  if (output.out_sf != nullptr) ring.copy_out(record.out_sf, output.out_sf);
}

Status Pool::Impl::attend_on_request(int32_t layer_index, const kernels::AttendParams& params) {
  RequestRing& ring = *client->ring;
  const auto deadline = client->deadline();
  if (Status status = client->start_ring(deadline); !status.ok()) return status;
  protocol::Submission record = submission(protocol::Op::kAttend, layer_index);
  const auto num_seqs = static_cast<size_t>(params.num_seqs);
  const auto num_q_heads = static_cast<size_t>(params.q.shape[1]);
  auto q =
      client->place_input(record, protocol::ImportPlace::kFirst, params.q, 0, params.q.shape[0]);
  if (!q) return q.status();
  record.first = *q;
  if (Status status = reserve_output(record, params.output); !status.ok()) return status;
  // Absent tables have no entries.
  Status staged;
  const auto stage = [&](protocol::ArenaArray& to, const auto* values, size_t count) {
    if (values == nullptr || count == 0 || !staged.ok()) return;
    auto array = ring.stage(values, count);
    if (array) to = *array;
    staged = array.status();
  };
  stage(record.q_lens, params.q_lens, num_seqs);
  stage(record.seq_lens, params.seq_lens, num_seqs);
  stage(record.block_table, params.block_table,
        num_seqs * static_cast<size_t>(params.block_table_stride));
  stage(record.sinks, params.sinks, num_q_heads);
  stage(record.alibi_slopes, params.alibi_slopes, num_q_heads);
  stage(record.mask, params.mask, static_cast<size_t>(params.mask_bytes));
  stage(record.mask_offsets, params.mask_offsets, num_seqs);
  if (!staged.ok()) return staged;
  record.block_table_stride = static_cast<uint64_t>(params.block_table_stride);
  record.scale = params.scale;
  record.window_left = params.window_left;
  record.soft_cap = params.soft_cap;
  record.num_splits = params.num_splits;
  record.shared_prefix_tokens = params.shared_prefix_tokens;
  if (params.shard.num_ranks > 1)
    record.shard = {params.shard.num_ranks, params.shard.rank, params.shard.interleave};
  if (params.causal) record.flags |= protocol::kFlagCausal;
  if (params.partial) record.flags |= protocol::kFlagPartial;
  if (params.deterministic) record.flags |= protocol::kFlagDeterministic;
  if (Status status = client->run(record, deadline); !status.ok()) return status;
  copy_output(record, params.output);
  return {};
}

Status Pool::sparse_attend(int32_t layer, const SparseBatch& batch, const AttendOptions& options) {
  if (Status status = impl_->check_layer(layer); !status.ok()) return status;
  if (Status status = check_options_of_sparse(options); !status.ok()) return status;
  if (Status s = check_per_head("sinks", options.sinks, batch.q); !s.ok()) return s;
  const auto scale = impl_->scale_of(options);
  if (!scale) return scale.status();
  const int64_t rows = batch.q.shape[0];
  const auto num_indices = static_cast<int64_t>(batch.indices.size());
  const bool fits = rows <= 0 || batch.top_k <= 0
                        ? num_indices == 0
                        : num_indices % rows == 0 && num_indices / rows == batch.top_k;
  if (!fits || batch.top_k < 0 ||
      (!batch.topk_lens.empty() && static_cast<int64_t>(batch.topk_lens.size()) != rows))
    return {ErrorCode::kInvalidArgument, "indices has " + std::to_string(num_indices) +
                                             " entries with top_k " + std::to_string(batch.top_k) +
                                             ", topk_lens " +
                                             std::to_string(batch.topk_lens.size()) + ", q has " +
                                             std::to_string(rows) + " rows"};
  kernels::SparseMlaParams params;
  params.layer = impl_->layer(layer);
  params.q = batch.q;
  params.output = output_of(batch.out, batch.lse, options);
  params.indices = batch.indices.data();
  params.top_k = batch.top_k;
  params.topk_lens = batch.topk_lens.empty() ? nullptr : batch.topk_lens.data();
  params.scale = *scale;
  params.sinks = data_or_null(options.sinks);
  if (Status status = kernels::validate_sparse_mla(params); !status.ok()) return status;
  if (impl_->execution == Execution::kInProcess) {
    if (Status s = impl_->check_mapped_slots("indices", batch.indices); !s.ok()) return s;
    return impl_->run_here(params);
  }
  return impl_->sparse_on_request(layer, params);
}

Status Pool::Impl::sparse_on_request(int32_t layer_index, const kernels::SparseMlaParams& params) {
  RequestRing& ring = *client->ring;
  const auto deadline = client->deadline();
  if (Status status = client->start_ring(deadline); !status.ok()) return status;
  protocol::Submission record = submission(protocol::Op::kSparseAttend, layer_index);
  const auto rows = static_cast<size_t>(params.q.shape[0]);
  auto q =
      client->place_input(record, protocol::ImportPlace::kFirst, params.q, 0, params.q.shape[0]);
  if (!q) return q.status();
  record.first = *q;
  if (Status status = reserve_output(record, params.output); !status.ok()) return status;
  auto indices = ring.stage(params.indices, rows * static_cast<size_t>(params.top_k));
  if (!indices) return indices.status();
  record.indices = *indices;
  if (params.topk_lens != nullptr) {
    auto topk_lens = ring.stage(params.topk_lens, rows);
    if (!topk_lens) return topk_lens.status();
    record.topk_lens = *topk_lens;
  }
  if (params.sinks != nullptr) {
    auto sinks = ring.stage(params.sinks, static_cast<size_t>(params.q.shape[1]));
    if (!sinks) return sinks.status();
    record.sinks = *sinks;
  }
  record.scale = params.scale;
  if (Status status = client->run(record, deadline); !status.ok()) return status;
  copy_output(record, params.output);
  return {};
}

}  // namespace larder
