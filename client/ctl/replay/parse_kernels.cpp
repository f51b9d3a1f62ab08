#include <array>

#include "client/ctl/replay/step_parser.h"

namespace larder::replay {
namespace {

constexpr int64_t kMaxMaskBits = int64_t{1} << 24;

// One sequence's mask: q_len lists of seq_len numbers, or all of them in one list.
void parse_mask_rows(const Cursor& cursor, int64_t q_len, int64_t seq_len,
                     std::vector<uint8_t>& bits) {
  std::vector<const json*> flat;
  const size_t count = cursor.list_size(static_cast<size_t>(kMaxMaskBits));
  for (size_t i = 0; i < count; ++i) {
    const json& row = cursor.value()[i];
    if (!row.is_array()) {
      flat.push_back(&row);
      continue;
    }
    if (static_cast<int64_t>(row.size()) != seq_len)
      return cursor.at(i).refuse("has " + std::to_string(row.size()) +
                                 " numbers, the sequence has " + std::to_string(seq_len) +
                                 " tokens");
    for (const json& element : row) flat.push_back(&element);
  }
  if (static_cast<int64_t>(flat.size()) != q_len * seq_len)
    return cursor.refuse("has " + std::to_string(flat.size()) + " numbers, expected " +
                         std::to_string(q_len) + " rows of " + std::to_string(seq_len));
  bits.assign((flat.size() + 7) / 8, 0);
  for (size_t i = 0; i < flat.size(); ++i) {
    const bool is_set = *flat[i] == 1;
    if (!is_set && *flat[i] != 0)
      return cursor.refuse("holds " + shown(*flat[i]) + ", expected 0 or 1");
    if (is_set) bits[i / 8] = static_cast<uint8_t>(bits[i / 8] | 1 << (i % 8));
  }
}

void parse_mask(const Cursor& cursor, Attend& attend) {
  const std::vector<int32_t>& seq_lens = attend.table.seq_lens;
  const size_t count = cursor.list_size(kMaxSequencesPerStep);
  if (cursor.problem().found()) return;
  if (count != seq_lens.size() || count != attend.q_lens.size())
    return cursor.refuse("has " + std::to_string(count) + " masks, there are " +
                         std::to_string(seq_lens.size()) + " sequences with " +
                         std::to_string(attend.q_lens.size()) + " q_lens");
  int64_t num_bits = 0;
  for (size_t i = 0; i < count; ++i) {
    if (seq_lens[i] < 0 || attend.q_lens[i] < 0)
      return cursor.at(i).refuse("belongs to a sequence of a negative length");
    const int64_t area = int64_t{seq_lens[i]} * attend.q_lens[i];
    if (area > kMaxMaskBits || (num_bits += area) > kMaxMaskBits)
      return cursor.refuse("has more than " + std::to_string(kMaxMaskBits) + " numbers");
    std::vector<uint8_t> bits;
    parse_mask_rows(cursor.at(i), attend.q_lens[i], seq_lens[i], bits);
    attend.mask_offsets.push_back(static_cast<int64_t>(attend.mask.size()));
    attend.mask.insert(attend.mask.end(), bits.begin(), bits.end());
  }
  // A mask of no bits at all must not read as "no mask".
  if (attend.mask.empty()) attend.mask.push_back(0);
}

void parse_indices(const Cursor& cursor, SparseMla& sparse) {
  const size_t rows = cursor.list_size(kMaxSlotsPerStep);
  for (size_t i = 0; i < rows; ++i) {
    const std::vector<int32_t> row = cursor.at(i).int32s(kMaxSlotsPerStep);
    if (cursor.problem().found()) return;
    if (i == 0) sparse.top_k = static_cast<int64_t>(row.size());
    if (static_cast<int64_t>(row.size()) != sparse.top_k)
      return cursor.at(i).refuse("has " + std::to_string(row.size()) +
                                 " indices, the first row has " + std::to_string(sparse.top_k));
    sparse.indices.insert(sparse.indices.end(), row.begin(), row.end());
  }
  if (static_cast<int64_t>(rows) != sparse.q.shape[0])
    cursor.refuse("has " + std::to_string(rows) + " rows, q has " +
                  std::to_string(sparse.q.shape[0]));
}

std::vector<float> parse_lse(const Cursor& cursor, const TensorSpec& out) {
  std::vector<float> lse;
  if (cursor.value().is_object()) {
    lse = elements_of(parse_tensor(cursor, 2, Dtype::kFp32));
  } else {
    lse = cursor.floats(static_cast<size_t>(kMaxTensorElements));
  }
  const int64_t wanted = out.shape[0] * out.shape[1];
  if (static_cast<int64_t>(lse.size()) != wanted)
    cursor.refuse("has " + std::to_string(lse.size()) + " numbers, \"out\" has " +
                  std::to_string(wanted) + " rows and heads");
  return lse;
}

}  // namespace

Append parse_append(StepParser& parser) {
  Append append;
  append.layer = parser.fields.int32("layer", 0);
  const bool is_mla =
      parser.fields.find("latent").has_value() || parser.fields.find("rope").has_value();
  append.k = parse_tensor(parser.fields.need(is_mla ? "latent" : "k"));
  append.v = parse_tensor(parser.fields.need(is_mla ? "rope" : "v"));
  append.slots = parser.slots(parser.fields.need("slots"));
  return append;
}

Read parse_read(StepParser& parser) {
  Read read;
  read.layer = parser.fields.int32("layer", 0);
  const size_t what = parser.fields.need("what").choice({"k", "v", "latent", "rope"});
  read.wants_first = what % 2 == 0;
  read.is_mla_word = what >= 2;
  read.slots = parser.slots(parser.fields.need("slots"));
  return read;
}

Gather parse_gather(StepParser& parser) {
  Gather gather;
  gather.layer = parser.fields.int32("layer", 0);
  gather.table = parser.table();
  const size_t dtype = parser.fields.choice("dtype", {"bf16", "fp16", "fp32", "fp8_mla"});
  gather.dtype = std::array{Dtype::kBf16, Dtype::kFp16, Dtype::kFp32, Dtype::kFp8E4m3}[dtype];
  return gather;
}

Attend parse_attend(StepParser& parser) {
  Attend attend;
  attend.layer = parser.fields.int32("layer", 0);
  parser.attend_fields(attend.fields);
  attend.table = parser.table();
  if (const auto lens = parser.fields.find("q_lens")) {
    attend.q_lens = lens->int32s(kMaxSequencesPerStep);
  } else {
    attend.q_lens.assign(attend.table.seq_lens.size(), 1);
  }
  if (const auto mask = parser.fields.find("mask")) parse_mask(*mask, attend);
  return attend;
}

SparseMla parse_sparse_mla(StepParser& parser) {
  SparseMla sparse;
  sparse.layer = parser.fields.int32("layer", 0);
  sparse.q = parse_tensor(parser.fields.need("q"));
  parse_indices(parser.fields.need("indices"), sparse);
  if (const auto lens = parser.fields.find("topk_lens"))
    sparse.topk_lens = lens->int32s(kMaxSlotsPerStep);
  constexpr double kDefaultScale = 1.0 / 24.0;  // 1 / sqrt(576)
  sparse.scale = static_cast<float>(parser.fields.number("scale", kDefaultScale));
  sparse.sinks = parser.floats("sinks");
  sparse.out_fill = parser.fields.number("out_fill", sparse.out_fill);
  return sparse;
}

Merge parse_merge(StepParser& parser) {
  Merge merge;
  const Cursor states = parser.fields.need("states");
  merge.states.resize(states.list_size(kMaxSequencesPerStep));
  for (size_t i = 0; i < merge.states.size(); ++i) {
    const Cursor state = states.at(i);
    if (state.value().is_string()) {
      merge.states[i].result =
          parser.result_name(state, &Scope::state_results, "the parts \"out\" and \"lse\"");
      continue;
    }
    Fields inner(state);
    merge.states[i].out = parse_tensor(inner.need("out"), 3, Dtype::kFp32);
    merge.states[i].lse = parse_lse(inner.need("lse"), merge.states[i].out);
    inner.finish();
  }
  merge.sinks = parser.floats("sinks");
  return merge;
}

SequenceStep parse_sequence(StepParser& parser) {
  Fields& fields = parser.fields;
  SequenceStep sequence;
  const Cursor op = fields.need("op");
  sequence.op = static_cast<SequenceOp>(
      op.choice({"begin", "append", "fork", "truncate", "attend", "publish", "end"}));
  const Cursor name = fields.need("name");
  sequence.name = name.text();
  const auto key = std::pair(parser.step.session, sequence.name);
  const bool begins = sequence.op == SequenceOp::kBegin;
  if (parser.scope != nullptr && !begins && !parser.scope->sequences.contains(key))
    name.refuse("is " + shown(name.value()) + ", which no earlier step begins in session \"" +
                parser.step.session + "\"");
  std::string made = begins ? sequence.name : "";
  switch (sequence.op) {
    case SequenceOp::kBegin:
      if (const auto tokens = fields.find("tokens")) sequence.tokens = parser.tokens(*tokens);
      sequence.adapter = fields.text("adapter", "");
      break;
    case SequenceOp::kAppend:
      if (const auto layer = fields.find("layer")) sequence.layer = layer->int32();
      sequence.k = parse_tensor(fields.need("k"));
      sequence.v = parse_tensor(fields.need("v"));
      break;
    case SequenceOp::kFork:
      made = sequence.to = fields.need("to").text();
      break;
    case SequenceOp::kTruncate:
      sequence.length = fields.need("length").integer(std::numeric_limits<int64_t>::min(),
                                                      std::numeric_limits<int64_t>::max());
      break;
    case SequenceOp::kAttend:
      sequence.layer = fields.int32("layer", 0);
      parser.attend_fields(sequence.attend);
      break;
    case SequenceOp::kPublish:
      sequence.tokens = parser.tokens(fields.need("tokens"));
      sequence.adapter = fields.text("adapter", "");
      break;
    case SequenceOp::kEnd:
      break;
  }
  if (parser.scope != nullptr && !made.empty())
    parser.scope->sequences.emplace(parser.step.session, made);
  return sequence;
}

}  // namespace larder::replay
