// The C API: sequences.
#include "client/c_api_support.h"

using namespace larder;
using namespace larder::c_api;

extern "C" {

larder_code larder_sequence_begin(larder_pool* pool, larder_sequence** sequence) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("sequence", sequence)) return in.status();
    *sequence = nullptr;
    if (!in.required("pool", pool)) return in.status();
    *sequence = new larder_sequence{pool->state, pool->state->pool.begin_sequence()};
    return {};
  });
}

void larder_sequence_destroy(larder_sequence* sequence) { delete sequence; }

larder_code larder_sequence_num_tokens(const larder_sequence* sequence, int64_t* num_tokens) {
  return guarded([&]() -> Status {
    Arguments in;
    if (in.required("sequence", sequence) && in.required("num_tokens", num_tokens))
      *num_tokens = sequence->sequence.num_tokens();
    return in.status();
  });
}

larder_code larder_sequence_blocks(const larder_sequence* sequence, larder_block* blocks,
                                   size_t capacity, size_t* count) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("sequence", sequence) || !in.required("count", count)) return in.status();
    return write_array("blocks", sequence->sequence.blocks(), blocks, capacity, count,
                       [](const BlockHandle& block) { return to_c(block); });
  });
}

larder_code larder_sequence_block_ids(const larder_sequence* sequence, int32_t* block_ids,
                                      size_t capacity, size_t* count) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("sequence", sequence) || !in.required("count", count)) return in.status();
    return write_array("block_ids", sequence->sequence.block_ids(), block_ids, capacity, count,
                       [](int32_t id) { return id; });
  });
}

larder_code larder_sequence_last_slots(const larder_sequence* sequence, int64_t* slots,
                                       size_t capacity, size_t* count) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("sequence", sequence) || !in.required("count", count)) return in.status();
    return write_array("slots", sequence->sequence.last_slots(), slots, capacity, count,
                       [](int64_t slot) { return slot; });
  });
}

larder_code larder_sequence_adopt_prefix(larder_sequence* sequence, const int32_t* tokens,
                                         size_t num_tokens, const char* adapter,
                                         int64_t* adopted_tokens) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("sequence", sequence);
    const auto token_ids = in.array("tokens", tokens, num_tokens);
    in.required("adopted_tokens", adopted_tokens);
    if (!in.ok()) return in.status();
    const auto adopted = sequence->sequence.adopt_prefix(token_ids, text_or(adapter, ""));
    if (adopted) *adopted_tokens = *adopted;
    return adopted.status();
  });
}

larder_code larder_sequence_extend(larder_sequence* sequence, int64_t num_tokens) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("sequence", sequence)) return in.status();
    return sequence->sequence.extend(num_tokens);
  });
}

larder_code larder_sequence_append(larder_sequence* sequence, int32_t layer, const larder_tensor* k,
                                   const larder_tensor* v) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("sequence", sequence);
    const TensorView keys = in.tensor("k", k);
    const TensorView values = in.tensor("v", v);
    if (!in.ok()) return in.status();
    return sequence->sequence.append(layer, keys, values);
  });
}

larder_code larder_sequence_attend(larder_sequence* sequence, int32_t layer, const larder_tensor* q,
                                   const larder_tensor* out, float* lse,
                                   const larder_attend_options* options) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("sequence", sequence);
    const TensorView queries = in.tensor("q", q);
    const TensorView result = in.tensor("out", out);
    const AttendOptions wanted = in.attend_options(options);
    if (!in.ok()) return in.status();
    return sequence->sequence.attend(layer, queries, result, lse, wanted);
  });
}

larder_code larder_sequence_publish(larder_sequence* sequence, const int32_t* tokens,
                                    size_t num_tokens, const char* adapter) {
  return guarded([&]() -> Status {
    Arguments in;
    in.required("sequence", sequence);
    const auto token_ids = in.array("tokens", tokens, num_tokens);
    if (!in.ok()) return in.status();
    return sequence->sequence.publish(token_ids, text_or(adapter, ""));
  });
}

larder_code larder_sequence_fork(const larder_sequence* sequence, larder_sequence** fork) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("fork", fork)) return in.status();
    *fork = nullptr;
    if (!in.required("sequence", sequence)) return in.status();
    *fork = new larder_sequence{sequence->state, sequence->sequence.fork()};
    return {};
  });
}

larder_code larder_sequence_truncate(larder_sequence* sequence, int64_t num_tokens) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("sequence", sequence)) return in.status();
    return sequence->sequence.truncate(num_tokens);
  });
}

larder_code larder_sequence_end(larder_sequence* sequence) {
  return guarded([&]() -> Status {
    Arguments in;
    if (!in.required("sequence", sequence)) return in.status();
    return sequence->sequence.end();
  });
}

}  // extern "C"
