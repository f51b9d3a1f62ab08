// publish and lookup: of blocks where a pool has one group, of units where it has several.
#include <algorithm>

#include "client/ctl/replay/operations.h"
#include "client/ctl/replay/references.h"

namespace larder::replay {
namespace {

using UnitBlocks = std::vector<std::vector<BlockHandle>>;

std::string names_of(const OpenedGroups& groups) {
  std::vector<std::string_view> names;
  for (const OpenedPool& group : groups) names.push_back(group.group_name);
  return one_of(names);
}

// The blocks of each group. One that is not named has none in any unit.
Result<UnitBlocks> resolve_units(const Publish& step, const OpenedGroups& groups,
                                 const Context& context) {
  if (step.group_blocks.empty())
    return Status(ErrorCode::kInvalidArgument,
                  "blocks is a list, but the pool has several groups: expected an object with " +
                      names_of(groups));
  UnitBlocks blocks(groups.size());
  size_t num_found = 0;
  int64_t units = 0;
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto named = step.group_blocks.find(groups[g].group_name);
    if (named == step.group_blocks.end()) continue;
    ++num_found;
    auto list = resolve_blocks(named->second, {context.results, context.generations, named->first});
    if (!list) return list.status();
    blocks[g] = std::move(*list);
    units = std::max(
        units, std::ssize(blocks[g]) / groups[0].pool.blocks_per_unit(static_cast<int32_t>(g)));
  }
  if (num_found != step.group_blocks.size())
    return Status(ErrorCode::kInvalidArgument,
                  "blocks names a group that the pool does not have: expected " + names_of(groups));
  for (size_t g = 0; g < groups.size(); ++g)
    if (!step.group_blocks.contains(groups[g].group_name))
      blocks[g].resize(
          static_cast<size_t>(units * groups[0].pool.blocks_per_unit(static_cast<int32_t>(g))));
  return blocks;
}

std::string hex_of(const PublishedBlock& block) {
  return to_hex({block.key.begin(), block.key.end()});
}

Outcome publish_units(const Publish& step, OpenedGroups& groups, const Context& context) {
  const auto blocks = resolve_units(step, groups, context);
  if (!blocks) return {blocks.status(), {}};
  const auto published =
      groups[0].pool.publish_units(step.tokens, *blocks, step.adapter, step.extra);
  if (!published) return {published.status(), {}};
  Parts parts = {{"key", {Texts()}}};
  // Keys are those of units; blocks past as many as there are units come without one.
  for (const PublishedBlock& block : published->front())
    if (std::ranges::any_of(block.key, [](uint8_t byte) { return byte != 0; }))
      std::get<Texts>(parts[0].value.data).push_back(hex_of(block));
  for (size_t g = 0; g < groups.size(); ++g) {
    Blocks serving;
    for (const PublishedBlock& block : (*published)[g]) serving.push_back(block.block);
    parts.push_back({groups[g].group_name, {std::move(serving)}});
  }
  return {{}, {std::move(parts)}};
}

Value hit(int64_t tokens) { return {static_cast<double>(tokens)}; }

}  // namespace

Outcome apply(const Publish& step, OpenedGroups& groups, const Context& context) {
  if (groups.size() > 1) return publish_units(step, groups, context);
  if (!step.group_blocks.empty())
    return refused(ErrorCode::kInvalidArgument, "blocks is an object, but the pool has one group");
  const auto blocks = resolve_blocks(step.blocks, context);
  if (!blocks) return {blocks.status(), {}};
  const auto published = groups[0].pool.publish(step.tokens, *blocks, step.adapter, step.extra);
  if (!published) return {published.status(), {}};
  Texts keys;
  Blocks holders;
  for (const PublishedBlock& block : *published) {
    keys.push_back(hex_of(block));
    holders.push_back(block.block);
  }
  return {{}, {Parts{{"key", {std::move(keys)}}, {"block", {std::move(holders)}}}}};
}

Outcome apply(const Lookup& step, OpenedGroups& groups, const Context&) {
  Pool& pool = groups[0].pool;
  if (groups.size() == 1) {
    auto prefix = pool.lookup(step.tokens, step.hold, step.adapter, step.extra);
    if (!prefix) return {prefix.status(), {}};
    return {
        {},
        {Parts{{"hit_tokens", hit(prefix->hit_tokens)}, {"blocks", {std::move(prefix->blocks)}}}}};
  }
  auto prefix = pool.lookup_units(step.tokens, step.hold, step.adapter, step.extra);
  if (!prefix) return {prefix.status(), {}};
  Parts parts = {{"hit_tokens", hit(prefix->hit_tokens)}};
  for (size_t g = 0; g < groups.size(); ++g)
    parts.push_back({groups[g].group_name, {std::move(prefix->blocks[g])}});
  return {{}, {std::move(parts)}};
}

}  // namespace larder::replay
