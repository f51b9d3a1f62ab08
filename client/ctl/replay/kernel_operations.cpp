#include <algorithm>
#include <cstring>
#include <limits>

#include "client/ctl/replay/operations.h"
#include "client/ctl/replay/references.h"

namespace larder::replay {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

Floats floats_of(const TensorView& view) {
  return {{view.shape[0], view.shape[1], view.shape[2]}, elements_of(view)};
}

Status check_not_opaque(const OpenedPool& pool) {
  if (pool.options.opaque_block_bytes == 0) return {};
  return {ErrorCode::kInvalidArgument,
          "pool \"" + pool.whole->name + "\" is opaque: it has blocks of bytes, not tensors"};
}

}  // namespace

Result<Tensor> make_output(const std::string& what, Dtype dtype, int64_t rows, int64_t heads,
                           int64_t dim, double fill) {
  __extension__ using Wide = __int128;
  if (Wide{rows} * heads * dim > kMaxTensorElements)
    return Status(ErrorCode::kInvalidArgument,
                  what + " would have " + std::to_string(rows) + " x " + std::to_string(heads) +
                      " x " + std::to_string(dim) + " elements, at most " +
                      std::to_string(kMaxTensorElements) + " are kept");
  return make_dense_tensor(dtype, {rows, heads, dim}, fill);
}

AttendOptions attend_options(const AttendFields& fields) {
  AttendOptions options;
  options.scale = fields.scale;
  options.causal = fields.causal;
  options.window_left = fields.window_left;
  options.soft_cap = fields.soft_cap;
  options.sinks = fields.sinks;
  options.alibi_slopes = fields.alibi_slopes;
  options.partial = fields.partial;
  options.num_splits = fields.splits;
  options.deterministic = fields.deterministic;
  options.shared_prefix_tokens = fields.shared_prefix_tokens;
  options.shard = fields.shard;
  return options;
}

Outcome attention_result(const TensorView& out, std::vector<float> lse) {
  Floats lses{{out.shape[0], out.shape[1]}, std::move(lse)};
  return {{}, {Parts{{"out", {floats_of(out)}}, {"lse", {std::move(lses)}}}}};
}

Outcome apply(const Append& step, OpenedPool& pool, const Context& context) {
  if (Status status = check_not_opaque(pool); !status.ok()) return {status, {}};
  const auto slots = resolve_slots(step.slots, pool.options.geometry.block_tokens, context);
  if (!slots) return {slots.status(), {}};
  const Tensor k = make_tensor(step.k);
  const Tensor v = make_tensor(step.v);
  return {pool.pool.append(step.layer, k.view, v.view, *slots), {}};
}

Outcome apply(const Read& step, OpenedPool& pool, const Context& context) {
  if (Status status = check_not_opaque(pool); !status.ok()) return {status, {}};
  if (step.is_mla_word != is_mla(pool))
    return refused(ErrorCode::kInvalidArgument,
                   is_mla(pool) ? "what is \"k\" or \"v\", mla pools have \"latent\" and \"rope\""
                                : "what is \"latent\" or \"rope\", the pool has \"k\" and \"v\"");
  const auto slots = resolve_slots(step.slots, pool.options.geometry.block_tokens, context);
  if (!slots) return {slots.status(), {}};
  const AttentionGeometry& geometry = pool.options.geometry;
  const auto rows = static_cast<int64_t>(slots->size());
  // The rows that are not asked for have no memory; those of mla are read whole.
  const bool wants_k = step.wants_first || is_mla(pool);
  const auto k = make_output("the result", Dtype::kFp32, wants_k ? rows : 0, geometry.num_kv_heads,
                             geometry.k_dim, kNan);
  if (!k) return {k.status(), {}};
  const auto v = make_output("the result", Dtype::kFp32, wants_k ? 0 : rows, geometry.num_kv_heads,
                             geometry.v_dim, kNan);
  if (!v) return {v.status(), {}};
  if (Status status = pool.pool.read(step.layer, k->view, v->view, *slots); !status.ok())
    return {status, {}};
  if (!is_mla(pool)) return {{}, {floats_of(wants_k ? k->view : v->view)}};
  TensorView part = k->view;
  part.shape[2] = step.wants_first ? kMlaLatentDim : kMlaRopeDim;
  if (!step.wants_first) part.data = static_cast<float*>(part.data) + kMlaLatentDim;
  return {{}, {floats_of(part)}};
}

Outcome apply(const Gather& step, OpenedPool& pool, const Context& context) {
  if (Status status = check_not_opaque(pool); !status.ok()) return {status, {}};
  const auto table = resolve_table(step.table.block_table, context);
  if (!table) return {table.status(), {}};
  int64_t rows = 0;
  for (const int32_t seq_len : step.table.seq_lens) rows += std::max(seq_len, 0);
  const AttentionGeometry& geometry = pool.options.geometry;
  const auto k =
      make_output("the result", step.dtype, rows, geometry.num_kv_heads, geometry.k_dim, kNan);
  if (!k) return {k.status(), {}};
  const auto v = make_output("the result", step.dtype, is_mla(pool) ? 0 : rows,
                             geometry.num_kv_heads, geometry.v_dim, kNan);
  if (!v) return {v.status(), {}};
  GatherBatch batch;
  batch.k_out = k->view;
  batch.v_out = v->view;
  batch.seq_lens = step.table.seq_lens;
  batch.block_table = table->ids;
  batch.block_table_stride = table->stride;
  if (Status status = pool.pool.gather(step.layer, batch); !status.ok()) return {status, {}};
  if (is_mla(pool)) return {{}, {Parts{{"rows", {floats_of(k->view)}}}}};
  return {{}, {Parts{{"k", {floats_of(k->view)}}, {"v", {floats_of(v->view)}}}}};
}

Outcome apply(const Attend& step, OpenedPool& pool, const Context& context) {
  if (Status status = check_not_opaque(pool); !status.ok()) return {status, {}};
  const auto table = resolve_table(step.table.block_table, context);
  if (!table) return {table.status(), {}};
  const Tensor q = make_tensor(step.fields.q);
  const auto out = make_output("out", step.fields.out_dtype, q.view.shape[0], q.view.shape[1],
                               pool.options.geometry.v_dim, step.fields.out_fill);
  if (!out) return {out.status(), {}};
  std::vector<float> lse(static_cast<size_t>(q.view.shape[0] * q.view.shape[1]),
                         static_cast<float>(kNan));
  AttendBatch batch;
  batch.q = q.view;
  batch.out = out->view;
  batch.lse = lse.data();
  batch.q_lens = step.q_lens;
  batch.seq_lens = step.table.seq_lens;
  batch.block_table = table->ids;
  batch.block_table_stride = table->stride;
  batch.mask = step.mask;
  batch.mask_offsets = step.mask_offsets;
  const Status status = pool.pool.attend(step.layer, batch, attend_options(step.fields));
  if (!status.ok()) return {status, {}};
  return attention_result(out->view, std::move(lse));
}

Outcome apply(const SparseMla& step, OpenedPool& pool, const Context&) {
  if (Status status = check_not_opaque(pool); !status.ok()) return {status, {}};
  const Tensor q = make_tensor(step.q);
  const auto out = make_output("out", Dtype::kFp32, q.view.shape[0], q.view.shape[1], kMlaLatentDim,
                               step.out_fill);
  if (!out) return {out.status(), {}};
  std::vector<float> lse(static_cast<size_t>(q.view.shape[0] * q.view.shape[1]),
                         static_cast<float>(kNan));
  SparseBatch batch;
  batch.q = q.view;
  batch.out = out->view;
  batch.lse = lse.data();
  batch.indices = step.indices;
  batch.top_k = step.top_k;
  batch.topk_lens = step.topk_lens;
  AttendOptions options;
  options.scale = step.scale;
  options.sinks = step.sinks;
  if (Status status = pool.pool.sparse_attend(step.layer, batch, options); !status.ok())
    return {status, {}};
  return attention_result(out->view, std::move(lse));
}

namespace {

struct StateMemory {
  Tensor out;
  std::vector<float> lse;
};

Result<StateMemory> state_of(const MergeState& state, const Context& context) {
  if (state.result.empty()) return StateMemory{make_tensor(state.out), state.lse};
  const auto found = context.results.find(state.result);
  const Value* out = found == context.results.end() ? nullptr : found->second.part("out");
  const Value* lse = found == context.results.end() ? nullptr : found->second.part("lse");
  const auto* outs = out == nullptr ? nullptr : std::get_if<Floats>(&out->data);
  const auto* lses = lse == nullptr ? nullptr : std::get_if<Floats>(&lse->data);
  if (outs == nullptr || lses == nullptr || outs->shape.size() != 3)
    return Status(ErrorCode::kNotFound,
                  "there is no result \"" + state.result + "\" with \"out\" and \"lse\"");
  StateMemory memory{
      make_dense_tensor(Dtype::kFp32, {outs->shape[0], outs->shape[1], outs->shape[2]}, 0),
      lses->values};
  std::memcpy(memory.out.memory.data(), outs->values.data(), outs->values.size() * sizeof(float));
  return memory;
}

}  // namespace

Outcome apply(const Merge& step, const Context& context) {
  std::vector<StateMemory> memories;
  for (const MergeState& state : step.states) {
    auto memory = state_of(state, context);
    if (!memory) return {memory.status(), {}};
    memories.push_back(std::move(*memory));
  }
  std::vector<AttentionState> states;
  states.reserve(memories.size());
  for (const StateMemory& memory : memories) states.push_back({memory.out.view, memory.lse.data()});
  const std::array<int64_t, 3> shape =
      states.empty() ? std::array<int64_t, 3>{0, 0, 0} : states[0].out.shape;
  const Tensor out = make_dense_tensor(Dtype::kFp32, shape, kNan);
  std::vector<float> lse(static_cast<size_t>(shape[0] * shape[1]), static_cast<float>(kNan));
  MergeOptions options;
  options.sinks = step.sinks;
  if (Status status = merge_states(states, out.view, lse.data(), options); !status.ok())
    return {status, {}};
  return attention_result(out.view, std::move(lse));
}

}  // namespace larder::replay
