#include <limits>

#include "client/ctl/replay/operations.h"

namespace larder::replay {
namespace {

Value number(int64_t value) { return {static_cast<double>(value)}; }

Outcome state_of(const Sequence& sequence) {
  const auto blocks = sequence.blocks();
  return {{},
          {Parts{{"num_tokens", number(sequence.num_tokens())},
                 {"blocks", {Blocks(blocks.begin(), blocks.end())}}}}};
}

Outcome begin(const SequenceStep& step, OpenedPool& pool, Sequences& sequences) {
  Sequence sequence = pool.pool.begin_sequence();
  int64_t hit_tokens = 0;
  if (!step.tokens.empty()) {
    const auto hit = sequence.adopt_prefix(step.tokens, step.adapter);
    if (!hit) return {hit.status(), {}};
    hit_tokens = *hit;
  }
  Outcome outcome = state_of(sequence);
  auto& parts = std::get<Parts>(outcome.value.data);
  parts.insert(parts.begin(), {"hit_tokens", number(hit_tokens)});
  sequences.insert_or_assign(step.name, std::move(sequence));
  return outcome;
}

// Room is made once: by layer 0, or for all layers at once where the step names none.
Outcome append(const SequenceStep& step, OpenedPool& pool, Sequence& sequence) {
  const Tensor k = make_tensor(*step.k);
  const Tensor v = make_tensor(*step.v);
  if (step.layer.value_or(0) == 0)
    if (Status status = sequence.extend(step.k->shape[0]); !status.ok()) return {status, {}};
  const int32_t first = step.layer.value_or(0);
  const int32_t end = step.layer ? first + 1 : pool.options.geometry.num_layers;
  for (int32_t layer = first; layer < end; ++layer)
    if (Status status = sequence.append(layer, k.view, v.view); !status.ok()) return {status, {}};
  return state_of(sequence);
}

Outcome attend(const SequenceStep& step, OpenedPool& pool, Sequence& sequence) {
  const Tensor q = make_tensor(step.attend.q);
  const auto out = make_output("out", step.attend.out_dtype, q.view.shape[0], q.view.shape[1],
                               pool.options.geometry.v_dim, step.attend.out_fill);
  if (!out) return {out.status(), {}};
  std::vector<float> lse(static_cast<size_t>(q.view.shape[0] * q.view.shape[1]),
                         std::numeric_limits<float>::quiet_NaN());
  const Status status =
      sequence.attend(*step.layer, q.view, out->view, lse.data(), attend_options(step.attend));
  if (!status.ok()) return {status, {}};
  return attention_result(out->view, std::move(lse));
}

}  // namespace

Outcome apply(const SequenceStep& step, OpenedPool& pool, Sequences& sequences) {
  if (pool.options.opaque_block_bytes > 0)
    return refused(ErrorCode::kInvalidArgument, "an opaque pool has no sequences");
  if (step.op == SequenceOp::kBegin) return begin(step, pool, sequences);
  const auto found = sequences.find(step.name);
  if (found == sequences.end())
    return refused(ErrorCode::kNotFound, "there is no sequence \"" + step.name + "\" in pool \"" +
                                             pool.whole->name + "\"");
  Sequence& sequence = found->second;
  switch (step.op) {
    case SequenceOp::kAppend:
      return append(step, pool, sequence);
    case SequenceOp::kAttend:
      return attend(step, pool, sequence);
    case SequenceOp::kFork: {
      Sequence fork = sequence.fork();
      Outcome outcome = state_of(fork);
      sequences.insert_or_assign(step.to, std::move(fork));
      return outcome;
    }
    case SequenceOp::kTruncate:
      if (Status status = sequence.truncate(step.length); !status.ok()) return {status, {}};
      return state_of(sequence);
    case SequenceOp::kPublish:
      if (Status status = sequence.publish(step.tokens, step.adapter); !status.ok())
        return {status, {}};
      return state_of(sequence);
    case SequenceOp::kEnd: {
      const Status status = sequence.end();
      sequences.erase(found);
      return {status, {}};
    }
    case SequenceOp::kBegin:
      break;
  }
  return refused(ErrorCode::kInternal, "a sequence step has an op that is none");
}

}  // namespace larder::replay
