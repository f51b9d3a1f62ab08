// Append, gather and read of a pool: here, or handed to the daemon's executor. Both ways check a
// call with the same functions before anything is written.
#include <algorithm>

#include "client/client_impl.h"
#include "kernels/kernel_table.h"
#include "protocol/limits.h"

namespace larder {
namespace {

int64_t row_bytes(const TensorView& tensor) {
  return tensor.shape[0] == 0 ? 0 : tensor.shape[1] * tensor.shape[2] * dtype_bytes(tensor.dtype);
}

// Rows [first, first + count) where the tensor is wanted at all.
TensorView rows_of(TensorView tensor, int64_t count) {
  if (tensor.shape[0] != 0) tensor.shape[0] = count;
  return tensor;
}

// The token of every row of a gather over a block table, as slots; -1 where a row has none.
std::vector<int64_t> slots_of(const kernels::GatherParams& params) {
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  std::vector<int64_t> slots(
      static_cast<size_t>(std::max(params.k_out.shape[0], params.v_out.shape[0])), -1);
  int64_t row = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    if (params.rows_per_sequence > 0) row = sequence * params.rows_per_sequence;
    for (int64_t token = kernels::first_token_of(params, sequence);
         token < params.seq_lens[sequence]; ++token, ++row)
      slots[static_cast<size_t>(row)] =
          int64_t{params.block_table[sequence * params.block_table_stride + token / block_tokens]} *
              block_tokens +
          token % block_tokens;
  }
  return slots;
}

}  // namespace

int64_t Pool::Impl::rows_that_fit(int64_t bytes_of_a_row) const {
  constexpr int64_t kAlignmentSlack = 4096;
  const int64_t fit = (static_cast<int64_t>(client->ring->capacity_bytes()) - kAlignmentSlack) /
                      std::max<int64_t>(bytes_of_a_row, 1);
  return std::clamp<int64_t>(fit, 1, protocol::kMaxRowsPerCall);
}

Status Pool::Impl::append(int32_t layer_index, const TensorView& k, const TensorView& v,
                          std::span<const int64_t> slots, const AppendOptions& options) {
  if (Status status = check_layer(layer_index); !status.ok()) return status;
  if (execution == Execution::kOnRequest && options.rope.dim != 0)
    return {ErrorCode::kUnsupported,
            "rope.dim is " + std::to_string(options.rope.dim) +
                ": append on request takes keys as they are to be stored: turn them before, or "
                "open the pool in process"};
  kernels::AppendParams params;
  params.layer = layer(layer_index);
  params.k = k;
  params.v = v;
  params.slots = slots.data();
  params.num_slots = static_cast<int64_t>(slots.size());
  params.rope = options.rope;
  if (execution == Execution::kInProcess) {
    if (Status status = check_mapped_slots("slots", slots); !status.ok()) return status;
    return run_here(params);
  }
  if (Status status = kernels::validate_append(params); !status.ok()) return status;
  return append_on_request(layer_index, params);
}

// Rows go in portions that fit the arena; they are independent of each other.
Status Pool::Impl::append_on_request(int32_t layer_index, const kernels::AppendParams& params) {
  RequestRing& ring = *client->ring;
  const int64_t portion = rows_that_fit(row_bytes(params.k) + row_bytes(params.v) +
                                        static_cast<int64_t>(sizeof(int64_t)));
  for (int64_t first = 0; first < params.num_slots; first += portion) {
    const int64_t count = std::min(portion, params.num_slots - first);
    const auto deadline = client->deadline();
    if (Status status = client->start_ring(deadline); !status.ok()) return status;
    protocol::Submission record = submission(protocol::Op::kAppend, layer_index);
    auto k = client->place_input(record, protocol::ImportPlace::kFirst, params.k, first, count);
    if (!k) return k.status();
    auto v = client->place_input(record, protocol::ImportPlace::kSecond, params.v, first, count);
    if (!v) return v.status();
    auto slots = ring.stage(params.slots + first, static_cast<size_t>(count));
    if (!slots) return slots.status();
    record.first = *k;
    record.second = *v;
    record.slots = *slots;
    if (Status status = client->run(record, deadline); !status.ok()) return status;
  }
  return {};
}

Status Pool::gather(int32_t layer, const GatherBatch& batch) {
  if (Status status = impl_->check_layer(layer); !status.ok()) return status;
  const auto num_seqs = static_cast<int64_t>(batch.seq_lens.size());
  if (Status status = check_table(num_seqs, batch.block_table, batch.block_table_stride);
      !status.ok())
    return status;
  if (!batch.first_tokens.empty() && batch.first_tokens.size() != batch.seq_lens.size())
    return {ErrorCode::kInvalidArgument, "first_tokens has " +
                                             std::to_string(batch.first_tokens.size()) +
                                             " entries, seq_lens " + std::to_string(num_seqs)};
  kernels::GatherParams params;
  params.layer = impl_->layer(layer);
  params.k_out = batch.k_out;
  params.v_out = batch.v_out;
  params.seq_lens = batch.seq_lens.data();
  params.num_seqs = num_seqs;
  params.block_table = batch.block_table.data();
  params.block_table_stride = batch.block_table_stride;
  params.rows_per_sequence = batch.rows_per_sequence;
  params.first_tokens = batch.first_tokens.empty() ? nullptr : batch.first_tokens.data();
  if (Status status = kernels::validate_gather(params); !status.ok()) return status;
  if (impl_->execution == Execution::kInProcess) {
    if (Status status = impl_->check_mapped_table(batch.seq_lens, batch.block_table,
                                                  batch.block_table_stride, batch.first_tokens);
        !status.ok())
      return status;
    return impl_->run_here(params);
  }
  if (params.k_out.shape[0] == 0 && params.v_out.shape[0] == 0) return {};  // nothing is wanted
  const std::vector<int64_t> slots = slots_of(params);
  return impl_->gather_on_request(layer, params, slots);
}

Status Pool::read(int32_t layer, const TensorView& k_out, const TensorView& v_out,
                  std::span<const int64_t> slots) {
  if (Status status = impl_->check_layer(layer); !status.ok()) return status;
  kernels::GatherParams params;
  params.layer = impl_->layer(layer);
  params.k_out = k_out;
  params.v_out = v_out;
  params.slots = slots.data();
  params.num_slots = static_cast<int64_t>(slots.size());
  if (slots.empty()) return {};
  if (impl_->execution == Execution::kInProcess) {
    if (Status status = impl_->check_mapped_slots("slots", slots); !status.ok()) return status;
    return impl_->run_here(params);
  }
  if (Status status = kernels::validate_gather(params); !status.ok()) return status;
  return impl_->gather_on_request(layer, params, slots);
}

// Rows in portions that fit the arena; those of no token are left alone.
Status Pool::Impl::gather_on_request(int32_t layer_index, const kernels::GatherParams& params,
                                     std::span<const int64_t> slots) {
  for (const TensorView* out : {&params.k_out, &params.v_out})
    if (Status status = client->check_copied(*out); !status.ok()) return status;
  RequestRing& ring = *client->ring;
  const auto num_rows = static_cast<int64_t>(slots.size());
  const int64_t portion = rows_that_fit(row_bytes(params.k_out) + row_bytes(params.v_out) +
                                        static_cast<int64_t>(sizeof(int64_t)));
  for (int64_t first = 0; first < num_rows; first += portion) {
    const int64_t count = std::min(portion, num_rows - first);
    const auto part = slots.subspan(static_cast<size_t>(first), static_cast<size_t>(count));
    const auto deadline = client->deadline();
    if (Status status = client->start_ring(deadline); !status.ok()) return status;
    protocol::Submission record = submission(protocol::Op::kGather, layer_index);
    auto k_out = ring.reserve_output(rows_of(params.k_out, count));
    if (!k_out) return k_out.status();
    auto v_out = ring.reserve_output(rows_of(params.v_out, count));
    if (!v_out) return v_out.status();
    auto staged = ring.stage(part.data(), part.size());
    if (!staged) return staged.status();
    record.first = *k_out;
    record.second = *v_out;
    record.slots = *staged;
    if (Status status = client->run(record, deadline); !status.ok()) return status;
    ring.copy_out_rows(*k_out, params.k_out, first, part);
    ring.copy_out_rows(*v_out, params.v_out, first, part);
  }
  return {};
}

}  // namespace larder
