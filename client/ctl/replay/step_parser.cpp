#include "client/ctl/replay/step_parser.h"

#include <algorithm>

namespace larder::replay {
namespace {

constexpr int64_t kMaxIndex = std::numeric_limits<int32_t>::max();
constexpr size_t kMaxHeads = size_t{1} << 16;

bool is_block_of_result(const json& value) {
  return value.is_array() && value.size() == 2 && value[0].is_string() && value[1].is_number();
}

}  // namespace

std::string StepParser::result_name(const Cursor& cursor, const std::set<std::string> Scope::*kind,
                                    const std::string& what) {
  std::string name = cursor.text();
  if (!cursor.value().is_string()) return name;
  step.references.push_back(name);
  if (scope == nullptr) return name;
  if (!scope->results.contains(name)) {
    cursor.refuse("is " + shown(cursor.value()) + ", which no earlier step names with \"as\"");
  } else if (!(scope->*kind).contains(name)) {
    cursor.refuse("is " + shown(cursor.value()) + ", a result without " + what);
  }
  return name;
}

BlockItem StepParser::block_of_result(const Cursor& cursor) {
  BlockItem item;
  item.result = result_name(cursor.at(0), &Scope::block_results, "blocks");
  item.index = cursor.at(1).integer(0, kMaxIndex);
  if (scope == nullptr) return item;
  const auto known = scope->num_blocks.find(item.result);
  if (known != scope->num_blocks.end() && item.index >= known->second)
    cursor.at(1).refuse("is " + std::to_string(item.index) + ", \"" + item.result + "\" has " +
                        std::to_string(known->second) + " blocks");
  return item;
}

BlockList StepParser::blocks(const Cursor& cursor) {
  const json& value = cursor.value();
  if (value.is_string()) return {{result_name(cursor, &Scope::block_results, "blocks"), -1, -1}};
  if (is_block_of_result(value)) return {block_of_result(cursor)};
  if (!value.is_array()) {
    cursor.expected("the name of a result, [\"NAME\", INDEX] or a list of block ids");
    return {};
  }
  BlockList list(cursor.list_size(kMaxBlocksPerStep));
  for (size_t i = 0; i < list.size(); ++i) {
    const Cursor element = cursor.at(i);
    if (is_block_of_result(element.value())) {
      list[i] = block_of_result(element);
    } else if (element.value().is_number()) {
      list[i].id = element.int32();
    } else {
      element.expected("a block id or [\"NAME\", INDEX]");
    }
  }
  return list;
}

SlotList StepParser::slots(const Cursor& cursor) {
  const json& value = cursor.value();
  if (value.is_object()) {
    Fields range(cursor);
    SlotRange result{blocks(range.need("blocks")), 0, 0};
    result.from = range.integer("from", 0, 0, kMaxIndex);
    result.count = range.need("count").integer(0, kMaxSlotsPerStep);
    range.finish();
    return result;
  }
  std::vector<SlotItem> items(cursor.list_size(kMaxSlotsPerStep));
  for (size_t i = 0; i < items.size(); ++i) {
    const Cursor element = cursor.at(i);
    if (element.value().is_number()) {
      items[i].number =
          element.integer(std::numeric_limits<int64_t>::min(), std::numeric_limits<int64_t>::max());
    } else if (element.value().is_array() && element.value().size() == 3) {
      const BlockItem block = block_of_result(element);
      items[i] = {block.result, block.index, element.at(2).integer(0, kMaxIndex)};
    } else {
      element.expected("a slot or [\"NAME\", INDEX, OFFSET]");
    }
  }
  return items;
}

SequenceTable StepParser::table() {
  SequenceTable table;
  const Cursor rows = fields.need("block_table");
  table.block_table.resize(rows.list_size(kMaxSequencesPerStep));
  for (size_t i = 0; i < table.block_table.size(); ++i) table.block_table[i] = blocks(rows.at(i));
  table.seq_lens = fields.need("seq_lens").int32s(kMaxSequencesPerStep);
  return table;
}

HexSource StepParser::hex(const Cursor& cursor) {
  if (!cursor.value().is_object()) return cursor.hex();
  Fields inner(cursor);
  std::string name = result_name(inner.need("of"), &Scope::byte_results, "bytes");
  inner.finish();
  return name;
}

std::vector<int32_t> StepParser::tokens(const Cursor& cursor) {
  if (!cursor.value().is_object()) return cursor.int32s(kMaxTokensPerStep);
  Fields range(cursor);
  const int64_t first = range.need("from").int32();
  const auto count = range.need("count").integer(0, kMaxTokensPerStep);
  range.finish();
  if (first + count - 1 > std::numeric_limits<int32_t>::max()) {
    cursor.refuse("ends past the largest token id");
    return {};
  }
  std::vector<int32_t> ids(static_cast<size_t>(count));
  for (size_t i = 0; i < ids.size(); ++i)
    ids[i] = static_cast<int32_t>(first + static_cast<int64_t>(i));
  return ids;
}

std::vector<std::string> StepParser::extra() {
  const auto found = fields.find("extra");
  if (!found) return {};
  std::vector<std::string> extra(found->list_size(kMaxBlocksPerStep));
  for (size_t i = 0; i < extra.size(); ++i) {
    const std::vector<uint8_t> bytes = found->at(i).hex();
    extra[i].assign(bytes.begin(), bytes.end());
  }
  return extra;
}

void StepParser::check_group(const Cursor& at, const std::string& name) const {
  const auto groups = scope->groups.find({step.session, step.pool});
  if (groups == scope->groups.end() || groups->second.empty())
    return at.refuse("names a group, but the pool has one: expected its blocks alone");
  const std::vector<std::string>& names = groups->second;
  if (std::find(names.begin(), names.end(), name) == names.end())
    at.refuse("is no group of the pool, expected " + one_of({names.begin(), names.end()}));
}

std::vector<float> StepParser::floats(const std::string& key) {
  const auto found = fields.find(key);
  return found ? found->floats(kMaxHeads) : std::vector<float>();
}

void StepParser::attend_fields(AttendFields& to) {
  to.q = parse_tensor(fields.need("q"));
  to.scale = static_cast<float>(fields.number("scale", 0));
  to.causal = fields.boolean("causal", true);
  to.window_left = fields.int32("window_left", -1);
  to.soft_cap = static_cast<float>(fields.number("soft_cap", 0));
  to.sinks = floats("sinks");
  to.alibi_slopes = floats("alibi_slopes");
  to.partial = fields.boolean("partial", false);
  to.splits = fields.int32("splits", 0);
  to.deterministic = fields.boolean("deterministic", false);
  to.shared_prefix_tokens = fields.int32("shared_prefix_tokens", 0);
  if (const auto shard = fields.find("shard")) {
    Fields inner(*shard);
    to.shard.num_ranks = inner.need("ranks").int32();
    to.shard.rank = inner.need("rank").int32();
    to.shard.interleave = inner.int32("interleave", 1);
    inner.finish();
  }
  to.out_fill = fields.number("out_fill", to.out_fill);
  if (const auto dtype = fields.find("out_dtype"))
    to.out_dtype = std::array{Dtype::kFp32, Dtype::kBf16, Dtype::kFp16,
                              Dtype::kFp8E4m3}[dtype->choice({"fp32", "bf16", "fp16", "fp8_e4m3"})];
}

}  // namespace larder::replay
