// The C API: attention and its relatives, over pools and over results.
#include "client/c_api_support.h"

using namespace larder;
using namespace larder::c_api;

namespace {

// A shard that must be there, unlike that of attend's options.
ContextShard shard_of(Arguments& in, const larder_context_shard* shard) {
  return in.required("shard", shard) ? in.context_shard(*shard) : ContextShard();
}

// Tokens of a sequence are counted in int32.
void check_token(Arguments& in, const char* field, int64_t value) {
  constexpr int64_t kMax = std::numeric_limits<int32_t>::max();
  if (value < 0 || value > kMax)
    in.refuse(std::string(field) + " is " + std::to_string(value) + ", expected 0 to " +
              std::to_string(kMax));
}

}  // namespace

extern "C" {

larder_code larder_pool_append(larder_pool* pool, int32_t layer, const larder_tensor* k,
                               const larder_tensor* v, const int64_t* slots, size_t num_slots) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const TensorView keys = in.tensor("k", k);
    const TensorView values = in.tensor("v", v);
    const auto places = in.array("slots", slots, num_slots);
    if (!in.ok()) return in.status();
    return pool->state->pool.append(layer, keys, values, places);
  });
}

larder_code larder_pool_attend(larder_pool* pool, int32_t layer, const larder_attend_batch* batch,
                               const larder_attend_options* options) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const larder_attend_batch given = in.complete("batch", batch);
    AttendBatch call;
    call.q = in.tensor("q", &given.q);
    call.out = in.tensor("out", &given.out);
    call.lse = given.lse;
    call.q_lens = in.array("q_lens", given.q_lens, given.num_seqs);
    call.seq_lens = in.array("seq_lens", given.seq_lens, given.num_seqs);
    call.block_table = in.array("block_table", given.block_table,
                                static_cast<int64_t>(call.q_lens.size()), given.block_table_stride);
    call.block_table_stride = given.block_table_stride;
    call.mask = in.array("mask", given.mask, given.mask_bytes);
    if (!call.mask.empty())
      call.mask_offsets = in.array("mask_offsets", given.mask_offsets, given.num_seqs);
    call.out_sf = in.output("out_sf", given.out_sf, given.out_sf_bytes);
    const AttendOptions wanted = in.attend_options(options);
    if (!in.ok()) return in.status();
    return pool->state->pool.attend(layer, call, wanted);
  });
}

larder_code larder_pool_sparse_attend(larder_pool* pool, int32_t layer,
                                      const larder_sparse_batch* batch,
                                      const larder_attend_options* options) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const larder_sparse_batch given = in.complete("batch", batch);
    SparseBatch call;
    call.q = in.tensor("q", &given.q);
    call.out = in.tensor("out", &given.out);
    call.lse = given.lse;
    call.indices = in.array("indices", given.indices, call.q.shape[0], given.top_k);
    call.top_k = given.top_k;
    if (given.topk_lens != nullptr)
      call.topk_lens = in.array("topk_lens", given.topk_lens, call.q.shape[0], 1);
    const AttendOptions wanted = in.attend_options(options);
    if (!in.ok()) return in.status();
    return pool->state->pool.sparse_attend(layer, call, wanted);
  });
}

larder_code larder_pool_gather(larder_pool* pool, int32_t layer, const larder_gather_batch* batch) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const larder_gather_batch given = in.complete("batch", batch);
    GatherBatch call;
    call.k_out = in.tensor("k_out", &given.k_out);
    call.v_out = in.tensor("v_out", &given.v_out);
    call.seq_lens = in.array("seq_lens", given.seq_lens, given.num_seqs);
    call.block_table =
        in.array("block_table", given.block_table, static_cast<int64_t>(call.seq_lens.size()),
                 given.block_table_stride);
    call.block_table_stride = given.block_table_stride;
    call.rows_per_sequence = given.rows_per_sequence;
    if (given.first_tokens != nullptr)
      call.first_tokens = in.array("first_tokens", given.first_tokens, given.num_seqs);
    if (!in.ok()) return in.status();
    return pool->state->pool.gather(layer, call);
  });
}

larder_code larder_pool_read(larder_pool* pool, int32_t layer, const larder_tensor* k_out,
                             const larder_tensor* v_out, const int64_t* slots, size_t num_slots) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("pool", pool);
    const TensorView keys = in.tensor("k_out", k_out);
    const TensorView values = in.tensor("v_out", v_out);
    const auto places = in.array("slots", slots, num_slots);
    if (!in.ok()) return in.status();
    return pool->state->pool.read(layer, keys, values, places);
  });
}

larder_code larder_merge_states(const larder_attention_state* states, size_t num_states,
                                const larder_tensor* out, float* lse,
                                const larder_merge_options* options) {
  return guarded([&]() -> Status {
    Arguments in;
    std::vector<AttentionState> parts;
    for (const larder_attention_state& state : in.array("states", states, num_states)) {
      const std::string field = "states[" + std::to_string(parts.size()) + "]";
      in.required(field + ".lse", state.lse);
      parts.push_back({in.tensor(field + ".out", &state.out), state.lse});
    }
    const TensorView result = in.tensor("out", out);
    const larder_merge_options given = in.complete_or_defaults("options", options);
    MergeOptions wanted;
    wanted.state_form = in.lse_form("state_form", given.state_form);
    wanted.lse_form = in.lse_form("lse_form", given.lse_form);
    wanted.sinks = in.array("sinks", given.sinks, given.num_sinks);
    wanted.out_scale = given.out_scale;
    in.reserved("options", given.reserved);
    if (!in.ok()) return in.status();
    return merge_states(parts, result, lse, wanted);
  });
}

larder_code larder_combine_rank(const larder_tensor* out, const float* lses, int64_t num_ranks,
                                int64_t rank, float* total_lse,
                                const larder_combine_options* options) {
  return guarded([&]() -> Status {
    Arguments in;
    const TensorView part = in.tensor("out", out);
    const auto rows = static_cast<int64_t>(in.product("out", part.shape[0], part.shape[1]));
    const auto all = in.array("lses", lses, num_ranks, rows);
    const larder_combine_options given = in.complete_or_defaults("options", options);
    CombineOptions wanted;
    wanted.sinks = in.array("sinks", given.sinks, given.num_sinks);
    wanted.lse_form = in.lse_form("lse_form", given.lse_form);
    in.reserved("options", given.reserved);
    if (!in.ok()) return in.status();
    return combine_rank(part, all, num_ranks, rank, total_lse, wanted);
  });
}

larder_code larder_local_tokens(const larder_context_shard* shard, int64_t tokens, int64_t* count) {
  return guarded([&]() -> Status {
    Arguments in;
    const ContextShard spread = shard_of(in, shard);
    in.required("count", count);
    check_token(in, "tokens", tokens);
    if (!in.ok()) return in.status();
    *count = local_tokens(spread, tokens);
    return {};
  });
}

larder_code larder_global_token(const larder_context_shard* shard, int64_t local, int64_t* token) {
  return guarded([&]() -> Status {
    Arguments in;
    const ContextShard spread = shard_of(in, shard);
    in.required("token", token);
    check_token(in, "local", local);
    if (!in.ok()) return in.status();
    *token = global_token(spread, local);
    return {};
  });
}

}  // extern "C"
