#include "client/ctl/replay/references.h"

#include <algorithm>

namespace larder::replay {
namespace {

Result<const Value*> find_result(const std::string& name, const Context& context) {
  const auto found = context.results.find(name);
  if (found == context.results.end())
    return Status(ErrorCode::kNotFound, "there is no result \"" + name + "\"");
  return &found->second;
}

Result<const Blocks*> find_blocks(const std::string& name, const Context& context) {
  const auto value = find_result(name, context);
  if (!value) return value.status();
  if (const Blocks* blocks = blocks_of(**value, context.group)) return blocks;
  return Status(ErrorCode::kInvalidArgument,
                "the result \"" + name + "\" holds no blocks" +
                    (context.group.empty() ? "" : " of group \"" + context.group + "\""));
}

Result<BlockHandle> find_block(const std::string& name, int64_t index, const Context& context) {
  const auto blocks = find_blocks(name, context);
  if (!blocks) return blocks.status();
  if (index >= static_cast<int64_t>((*blocks)->size()))
    return Status(ErrorCode::kInvalidArgument, "block " + std::to_string(index) + " of \"" + name +
                                                   "\" is wanted, it has " +
                                                   std::to_string((*blocks)->size()));
  return (**blocks)[static_cast<size_t>(index)];
}

Result<std::vector<int64_t>> resolve_range(const SlotRange& range, int64_t block_tokens,
                                           const Context& context) {
  const auto blocks = resolve_ids(range.blocks, context);
  if (!blocks) return blocks.status();
  const int64_t capacity = static_cast<int64_t>(blocks->size()) * block_tokens;
  if (range.from + range.count > capacity)
    return Status(ErrorCode::kInvalidArgument,
                  "slots of tokens " + std::to_string(range.from) + " to " +
                      std::to_string(range.from + range.count - 1) +
                      " are wanted, the blocks have room for " + std::to_string(capacity));
  std::vector<int64_t> slots(static_cast<size_t>(range.count));
  for (size_t i = 0; i < slots.size(); ++i) {
    const int64_t token = range.from + static_cast<int64_t>(i);
    const int64_t block = (*blocks)[static_cast<size_t>(token / block_tokens)];
    slots[i] = block * block_tokens + token % block_tokens;
  }
  return slots;
}

}  // namespace

const Blocks* blocks_of(const Value& value, const std::string& group) {
  for (const std::string& name : {group, std::string("blocks"), std::string("block")})
    if (const Value* part = value.part(name)) return std::get_if<Blocks>(&part->data);
  return std::get_if<Blocks>(&value.data);
}

Result<std::vector<BlockHandle>> resolve_blocks(const BlockList& list, const Context& context) {
  std::vector<BlockHandle> handles;
  for (const BlockItem& item : list) {
    if (item.result.empty()) {
      const auto known = context.generations.find({context.group, item.id});
      handles.push_back({item.id, known == context.generations.end() ? 0 : known->second});
    } else if (item.index < 0) {
      const auto blocks = find_blocks(item.result, context);
      if (!blocks) return blocks.status();
      handles.insert(handles.end(), (*blocks)->begin(), (*blocks)->end());
    } else {
      const auto block = find_block(item.result, item.index, context);
      if (!block) return block.status();
      handles.push_back(*block);
    }
  }
  return handles;
}

Result<std::vector<int32_t>> resolve_ids(const BlockList& list, const Context& context) {
  const auto handles = resolve_blocks(list, context);
  if (!handles) return handles.status();
  std::vector<int32_t> ids;
  ids.reserve(handles->size());
  for (const BlockHandle& handle : *handles) ids.push_back(handle.id);
  return ids;
}

Result<std::vector<int64_t>> resolve_slots(const SlotList& list, int64_t block_tokens,
                                           const Context& context) {
  if (const auto* range = std::get_if<SlotRange>(&list))
    return resolve_range(*range, block_tokens, context);
  std::vector<int64_t> slots;
  for (const SlotItem& item : std::get<std::vector<SlotItem>>(list)) {
    if (item.result.empty()) {
      slots.push_back(item.number);
      continue;
    }
    const auto block = find_block(item.result, item.index, context);
    if (!block) return block.status();
    slots.push_back(int64_t{block->id} * block_tokens + item.number);
  }
  return slots;
}

Result<ByteString> resolve_bytes(const HexSource& source, const Context& context) {
  if (const auto* bytes = std::get_if<ByteString>(&source)) return *bytes;
  const auto& name = std::get<std::string>(source);
  const auto value = find_result(name, context);
  if (!value) return value.status();
  if (const auto* bytes = std::get_if<ByteString>(&(*value)->data)) return *bytes;
  return Status(ErrorCode::kInvalidArgument, "the result \"" + name + "\" holds no bytes");
}

Result<BlockTable> resolve_table(const std::vector<BlockList>& rows, const Context& context) {
  constexpr int64_t kMaxEntries = int64_t{1} << 26;
  std::vector<std::vector<int32_t>> resolved;
  BlockTable table;
  for (const BlockList& row : rows) {
    auto ids = resolve_ids(row, context);
    if (!ids) return ids.status();
    table.stride = std::max(table.stride, static_cast<int64_t>(ids->size()));
    if (table.stride * static_cast<int64_t>(rows.size()) > kMaxEntries)
      return Status(ErrorCode::kInvalidArgument,
                    "block_table has more than " + std::to_string(kMaxEntries) + " entries");
    resolved.push_back(std::move(*ids));
  }
  // The last row ends where the memory ends, so that a read past it is seen by a sanitizer.
  table.ids.reserve(resolved.size() * static_cast<size_t>(table.stride));
  for (const std::vector<int32_t>& row : resolved) {
    table.ids.insert(table.ids.end(), row.begin(), row.end());
    table.ids.insert(table.ids.end(), static_cast<size_t>(table.stride) - row.size(), -1);
  }
  return table;
}

}  // namespace larder::replay
