// Calls of a GPU pool in a stream of the engine, with tables in device memory.
#include <string>
#include <vector>

#include "client/client_impl.h"

namespace larder {

Status Pool::Impl::check_stream_call(const char* call, int32_t layer_index) const {
  if (Status status = check_layer(layer_index); !status.ok()) return status;
  if (calls != nullptr) return {};
  return {ErrorCode::kUnsupported,
          std::string(call) + " is for pools on a GPU, in process: this one is memory of " +
              opened.device +
              (execution == Execution::kOnRequest ? ", on request" : ", in process")};
}

namespace {

// On axes of size 1 strides may differ: they are never used.
bool lies_like(const TensorView& view, const TensorView& first) {
  if (view.dtype != first.dtype || view.shape != first.shape) return false;
  for (size_t axis = 0; axis < 3; ++axis)
    if (view.shape[axis] > 1 && view.strides[axis] != first.strides[axis]) return false;
  return true;
}

Status refuse_unlike(const char* field, int32_t layer, int32_t first_layer) {
  return {ErrorCode::kInvalidArgument,
          std::string(field) + " of layer " + std::to_string(layer) + " is not as that of layer " +
              std::to_string(first_layer) + ": expected one dtype, shape and strides"};
}

}  // namespace

Status Pool::append_in_stream(int32_t layer, const TensorView& k, const TensorView& v,
                              const int64_t* slots, int64_t num_slots, void* stream) {
  DeviceAppendBatch batch;
  batch.slots = slots;
  batch.num_slots = num_slots;
  return append_in_stream(layer, k, v, batch, stream);
}

Status Pool::append_in_stream(int32_t layer, const TensorView& k, const TensorView& v,
                              const DeviceAppendBatch& batch, void* stream) {
  const LayerRows rows = {layer, k, v};
  return append_layers_in_stream({&rows, 1}, batch, stream);
}

Status Pool::append_layers_in_stream(std::span<const LayerRows> layers,
                                     const DeviceAppendBatch& batch, void* stream) {
  if (layers.empty())
    return {ErrorCode::kInvalidArgument, "layers is empty: expected one layer or more"};
  const LayerRows& first = layers.front();
  std::vector<kernels::FurtherLayer> further;
  for (const LayerRows& rows : layers) {
    if (Status s = impl_->check_stream_call("append_in_stream", rows.layer); !s.ok()) return s;
    if (&rows == &first) continue;
    if (!lies_like(rows.k, first.k)) return refuse_unlike("k", rows.layer, first.layer);
    if (!lies_like(rows.v, first.v)) return refuse_unlike("v", rows.layer, first.layer);
    const kernels::LayerView layer = impl_->layer(rows.layer);
    further.push_back(
        {layer.base, rows.k.data, rows.v.data, layer.key_offset, layer.k_scale, layer.v_scale});
  }
  kernels::AppendParams params;
  params.layer = impl_->layer(first.layer);
  params.k = first.k;
  params.v = first.v;
  params.slots = batch.slots;
  params.slots32 = batch.slots32;
  params.num_slots = batch.num_slots;
  params.rope = batch.rope;
  params.further_layers = further.data();
  params.num_further_layers = static_cast<int64_t>(further.size());
  return impl_->calls->append_on(params, stream);
}

Status Pool::gather_in_stream(int32_t layer, const DeviceGatherBatch& batch, void* stream) {
  if (Status s = impl_->check_stream_call("gather_in_stream", layer); !s.ok()) return s;
  kernels::GatherParams params;
  params.layer = impl_->layer(layer);
  params.k_out = batch.k_out;
  params.v_out = batch.v_out;
  params.block_table = batch.block_table;
  params.seq_lens = batch.seq_lens;
  params.first_tokens = batch.first_tokens;
  params.num_seqs = batch.num_seqs;
  params.block_table_stride = batch.block_table_stride;
  params.rows_per_sequence = batch.rows_per_sequence;
  return impl_->calls->gather_on(params, stream);
}

Status Pool::gather_in_stream(int32_t layer, const TensorView& k_out, const TensorView& v_out,
                              const int64_t* slots, int64_t num_slots, void* stream) {
  if (Status s = impl_->check_stream_call("gather_in_stream", layer); !s.ok()) return s;
  kernels::GatherParams params;
  params.layer = impl_->layer(layer);
  params.k_out = k_out;
  params.v_out = v_out;
  params.slots = slots;
  params.num_slots = num_slots;
  return impl_->calls->gather_on(params, stream);
}

Status Pool::attend_in_stream(int32_t layer, const DeviceAttendBatch& batch,
                              const AttendOptions& options, void* stream) {
  if (Status s = impl_->check_stream_call("attend_in_stream", layer); !s.ok()) return s;
  if (!options.sinks.empty() || !options.alibi_slopes.empty())
    return {ErrorCode::kInvalidArgument,
            "options.sinks and options.alibi_slopes are host memory and must be empty: the batch "
            "names those in device memory"};
  const auto scale = impl_->scale_of(options);
  if (!scale) return scale.status();
  kernels::AttendParams params;
  params.layer = impl_->layer(layer);
  params.q = batch.q;
  params.output.out = batch.out;
  params.output.lse = batch.lse;
  params.output.lse_form = options.lse_form;
  params.output.out_scale = options.out_scale;
  params.q_lens = batch.q_lens;
  params.seq_lens = batch.seq_lens;
  params.block_table = batch.block_table;
  params.num_seqs = batch.num_seqs;
  params.block_table_stride = batch.block_table_stride;
  params.scale = *scale;
  params.causal = options.causal;
  params.window_left = options.window_left;
  params.soft_cap = options.soft_cap;
  params.sinks = batch.sinks;
  params.alibi_slopes = batch.alibi_slopes;
  params.partial = options.partial;
  params.num_splits = options.num_splits;
  params.deterministic = options.deterministic;
  params.shared_prefix_tokens = options.shared_prefix_tokens;
  params.shard = options.shard;
  params.plan = batch.plan;
  return impl_->calls->attend_on(params, stream);
}

}  // namespace larder
