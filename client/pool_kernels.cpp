// Append and attend of a pool: here, or handed to the daemon's executor. Both ways check a call
// with the same functions before anything is written.
#include <algorithm>
#include <cmath>

#include "client/client_impl.h"
#include "kernels/kernel_table.h"
#include "protocol/limits.h"

namespace larder {

kernels::LayerView Pool::Impl::layer(int32_t index) const {
  return view_layer(view, layout, memory.base(), index);
}

Status Pool::Impl::check_layer(int32_t index) const {
  if (index >= 0 && index < view.geometry.num_layers) return {};
  return {ErrorCode::kInvalidArgument, "layer is " + std::to_string(index) + ", the pool has " +
                                           std::to_string(view.geometry.num_layers)};
}

protocol::Submission Pool::Impl::submission(protocol::Op op, int32_t layer_index) const {
  protocol::Submission record;
  record.op = static_cast<uint32_t>(op);
  record.pool = id;
  record.layer = static_cast<uint32_t>(layer_index);
  return record;
}

Status Pool::Impl::append(int32_t layer_index, const TensorView& k, const TensorView& v,
                          std::span<const int64_t> slots) {
  if (Status status = check_layer(layer_index); !status.ok()) return status;
  kernels::AppendParams params;
  params.layer = layer(layer_index);
  params.k = k;
  params.v = v;
  params.slots = slots.data();
  params.num_slots = static_cast<int64_t>(slots.size());
  if (execution == Execution::kInProcess) return kernels::run_append(params);
  if (Status status = kernels::validate_append(params); !status.ok()) return status;
  return append_on_request(layer_index, params);
}

// Rows go in portions that fit the arena; they are independent of each other.
Status Pool::Impl::append_on_request(int32_t layer_index, const kernels::AppendParams& params) {
  RequestRing& ring = *client->ring;
  const AttentionGeometry& geometry = view.geometry;
  const int64_t row_bytes = geometry.num_kv_heads * (geometry.k_dim * dtype_bytes(params.k.dtype) +
                                                     geometry.v_dim * dtype_bytes(params.v.dtype)) +
                            static_cast<int64_t>(sizeof(int64_t));
  const int64_t rows_that_fit = (static_cast<int64_t>(ring.capacity_bytes()) - 4096) / row_bytes;
  const int64_t portion = std::clamp<int64_t>(rows_that_fit, 1, protocol::kMaxRowsPerCall);
  for (int64_t first = 0; first < params.num_slots; first += portion) {
    const int64_t count = std::min(portion, params.num_slots - first);
    const auto deadline = client->deadline();
    if (Status status = ring.start(deadline); !status.ok()) return status;
    protocol::Submission record = submission(protocol::Op::kAppend, layer_index);
    auto k = ring.stage_rows(params.k, first, count);
    if (!k) return k.status();
    auto v = ring.stage_rows(params.v, first, count);
    if (!v) return v.status();
    auto slots = ring.stage(params.slots + first, static_cast<size_t>(count));
    if (!slots) return slots.status();
    record.first = *k;
    record.second = *v;
    record.slots = *slots;
    if (Status status = ring.run(record, deadline); !status.ok()) return status;
  }
  return {};
}

Status Pool::Impl::attend(int32_t layer_index, const AttendBatch& batch,
                          const AttendOptions& options) {
  if (Status status = check_layer(layer_index); !status.ok()) return status;
  const auto num_seqs = static_cast<int64_t>(batch.q_lens.size());
  const auto num_entries = static_cast<int64_t>(batch.block_table.size());
  // Divided, not multiplied: the stride may be any number.
  if (batch.seq_lens.size() != batch.q_lens.size() || batch.block_table_stride < 0 ||
      (num_seqs > 0 && batch.block_table_stride > num_entries / num_seqs))
    return {ErrorCode::kInvalidArgument,
            "q_lens has " + std::to_string(num_seqs) + " entries, seq_lens " +
                std::to_string(batch.seq_lens.size()) + ", block_table " +
                std::to_string(batch.block_table.size()) + " with a stride of " +
                std::to_string(batch.block_table_stride)};
  kernels::AttendParams params;
  params.layer = layer(layer_index);
  params.q = batch.q;
  params.out = batch.out;
  params.lse = batch.lse;
  params.q_lens = batch.q_lens.data();
  params.seq_lens = batch.seq_lens.data();
  params.block_table = batch.block_table.data();
  params.num_seqs = num_seqs;
  params.block_table_stride = batch.block_table_stride;
  params.scale = options.scale != 0.0f ? options.scale
                                       : 1.0f / std::sqrt(static_cast<float>(view.geometry.k_dim));
  params.causal = options.causal;
  params.window_left = options.window_left;
  if (execution == Execution::kInProcess) return kernels::run_attend(params);
  if (Status status = kernels::validate_attend(params); !status.ok()) return status;
  return attend_on_request(layer_index, params);
}

Status Pool::Impl::attend_on_request(int32_t layer_index, const kernels::AttendParams& params) {
  RequestRing& ring = *client->ring;
  const auto deadline = client->deadline();
  if (Status status = ring.start(deadline); !status.ok()) return status;
  protocol::Submission record = submission(protocol::Op::kAttend, layer_index);
  const auto num_seqs = static_cast<size_t>(params.num_seqs);
  auto q = ring.stage_rows(params.q, 0, params.q.shape[0]);
  if (!q) return q.status();
  auto out = ring.reserve_output(params.out);
  if (!out) return out.status();
  auto q_lens = ring.stage(params.q_lens, num_seqs);
  if (!q_lens) return q_lens.status();
  auto seq_lens = ring.stage(params.seq_lens, num_seqs);
  if (!seq_lens) return seq_lens.status();
  auto table =
      ring.stage(params.block_table, num_seqs * static_cast<size_t>(params.block_table_stride));
  if (!table) return table.status();
  if (params.lse != nullptr) {
    const auto count = static_cast<uint64_t>(params.q.shape[0] * params.q.shape[1]);
    auto lse = ring.reserve(count * sizeof(float));
    if (!lse) return lse.status();
    record.lse = {lse->offset_bytes, count};
  }
  record.first = *q;
  record.second = *out;
  record.q_lens = *q_lens;
  record.seq_lens = *seq_lens;
  record.block_table = *table;
  record.block_table_stride = static_cast<uint64_t>(params.block_table_stride);
  record.scale = params.scale;
  record.window_left = params.window_left;
  if (params.causal) record.flags |= protocol::kFlagCausal;
  if (Status status = ring.run(record, deadline); !status.ok()) return status;
  ring.copy_out(*out, params.out);
  if (params.lse != nullptr) ring.copy_out(record.lse, params.lse);
  return {};
}

}  // namespace larder
