// Calls of a GPU pool in a stream of the engine, with tables in device memory.
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

Status Pool::append_in_stream(int32_t layer, const TensorView& k, const TensorView& v,
                              const int64_t* slots, int64_t num_slots, void* stream) {
  if (Status s = impl_->check_stream_call("append_in_stream", layer); !s.ok()) return s;
  kernels::AppendParams params;
  params.layer = impl_->layer(layer);
  params.k = k;
  params.v = v;
  params.slots = slots;
  params.num_slots = num_slots;
  return impl_->calls->append_on(params, stream);
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
  return impl_->calls->attend_on(params, stream);
}

}  // namespace larder
