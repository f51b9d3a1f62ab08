// Publish and lookup in pools with several groups: units of tokens, blocks of every group.
#include <algorithm>

#include "client/client_impl.h"
#include "protocol/limits.h"

namespace larder {
namespace {

using Groups = std::vector<std::unique_ptr<Pool::Impl>>;

size_t sum_of(const std::vector<size_t>& counts) {
  size_t sum = 0;
  for (const size_t count : counts) sum += count;
  return sum;
}

// Units of which one message names all blocks.
Result<size_t> units_in_message(const std::vector<size_t>& per_unit, size_t max_blocks) {
  if (const size_t sum = sum_of(per_unit); sum > max_blocks)
    return Status(ErrorCode::kUnsupported, "a unit of the pool has " + std::to_string(sum) +
                                               " blocks, at most " + std::to_string(max_blocks) +
                                               " go in one message");
  return max_blocks / sum_of(per_unit);
}

// The number of units, if every group has its blocks for as many.
Result<size_t> count_units(const std::vector<std::vector<BlockHandle>>& blocks,
                           const std::vector<size_t>& per_unit) {
  if (blocks.size() != per_unit.size())
    return Status(ErrorCode::kInvalidArgument, "blocks has " + std::to_string(blocks.size()) +
                                                   " groups, the pool has " +
                                                   std::to_string(per_unit.size()));
  const size_t units = blocks[0].size() / per_unit[0];
  for (size_t g = 0; g < blocks.size(); ++g)
    if (blocks[g].size() != units * per_unit[g])
      return Status(ErrorCode::kInvalidArgument,
                    "blocks[" + std::to_string(g) + "] has " + std::to_string(blocks[g].size()) +
                        " entries, expected " + std::to_string(units * per_unit[g]) + ": " +
                        std::to_string(units) + " units of " + std::to_string(per_unit[g]));
  return units;
}

// Maps what a reply names, group after group: `units` units.
Status map_groups(const Groups& groups, const std::vector<size_t>& per_unit, size_t units,
                  std::span<const protocol::Block> blocks, bool held) {
  for (size_t g = 0; g < groups.size(); ++g) {
    const auto part = blocks.first(units * per_unit[g]);
    if (Status status = groups[g]->map_blocks(part, held); !status.ok()) return status;
    blocks = blocks.subspan(part.size());
  }
  return {};
}

void release_all(const Groups& groups, const std::vector<std::vector<BlockHandle>>& blocks) {
  for (size_t g = 0; g < groups.size(); ++g) {
    std::vector<BlockHandle> real;
    std::copy_if(blocks[g].begin(), blocks[g].end(), std::back_inserter(real),
                 [](const BlockHandle& block) { return block.id >= 0; });
    if (!real.empty()) (void)groups[g]->release(real);
  }
}

Status expect_blocks(size_t count, size_t expected) {
  if (count == expected) return {};
  return {ErrorCode::kInternal, "the daemon answered with " + std::to_string(count) +
                                    " blocks, expected " + std::to_string(expected)};
}

}  // namespace

Result<std::vector<std::vector<PublishedBlock>>> Pool::publish_units(
    std::span<const int32_t> tokens, const std::vector<std::vector<BlockHandle>>& blocks,
    const std::string& adapter, std::span<const std::string> extra) {
  const Groups& groups = impl_->opened.groups;
  const std::vector<size_t>& per_unit = impl_->opened.per_unit;
  const auto units = count_units(blocks, per_unit);
  if (!units) return units.status();
  const auto portion = units_in_message(per_unit, protocol::kMaxBlocksPerPublish);
  if (!portion) return portion.status();
  std::vector<std::vector<PublishedBlock>> result(groups.size());
  const auto publish_portion = [&](size_t first, size_t count) -> Status {
    std::vector<protocol::Block> named;
    for (size_t g = 0; g < groups.size(); ++g) {
      const auto part =
          to_wire(std::span(blocks[g]).subspan(first * per_unit[g], count * per_unit[g]));
      named.insert(named.end(), part.begin(), part.end());
    }
    auto list = impl_->client->token_list(tokens);
    if (!list) return list.status();
    const size_t num_named = named.size();
    auto part = impl_->client->session->call_for<protocol::Published>(
        protocol::Publish{impl_->id,
                          adapter,
                          std::move(*list),
                          std::move(named),
                          {extra.begin(), extra.end()},
                          static_cast<int64_t>(first)});
    if (!part) return part.status();
    if (Status s = expect_blocks(part->blocks.size(), num_named); !s.ok()) return s;
    std::vector<protocol::Block> serving;
    for (const protocol::PublishedBlock& block : part->blocks) serving.push_back(block.block);
    size_t next = 0;
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t i = 0; i < count * per_unit[g]; ++i, ++next)
        result[g].push_back({part->blocks[next].key, from_wire(part->blocks[next].block)});
    return map_groups(groups, per_unit, count, serving, true);
  };
  Status status = in_portions(*units, *portion, publish_portion);
  if (status.ok()) return result;
  // Holds on blocks that the caller will not hear of.
  std::vector<std::vector<BlockHandle>> gained(groups.size());
  for (size_t g = 0; g < groups.size(); ++g)
    for (size_t i = 0; i < result[g].size(); ++i)
      if (result[g][i].block != blocks[g][i]) gained[g].push_back(result[g][i].block);
  release_all(groups, gained);
  return status;
}

Result<UnitPrefix> Pool::lookup_units(std::span<const int32_t> tokens, bool hold,
                                      const std::string& adapter,
                                      std::span<const std::string> extra) {
  const Groups& groups = impl_->opened.groups;
  const std::vector<size_t>& per_unit = impl_->opened.per_unit;
  const size_t sum = sum_of(per_unit);
  const auto portion = units_in_message(per_unit, protocol::kMaxBlocksPerMessage);
  if (!portion) return portion.status();
  UnitPrefix prefix;
  prefix.blocks.resize(groups.size());
  size_t units = 0;
  size_t found = 0;
  const auto look_up_portion = [&]() -> Status {
    auto list = impl_->client->token_list(tokens);
    if (!list) return list.status();
    auto part = impl_->client->session->call_for<protocol::Prefix>(
        protocol::Lookup{impl_->id,
                         adapter,
                         std::move(*list),
                         {extra.begin(), extra.end()},
                         hold,
                         static_cast<int64_t>(units)});
    if (!part) return part.status();
    found = part->blocks.size() / sum;
    if (Status s = expect_blocks(part->blocks.size(), found * sum); !s.ok()) return s;
    size_t next = 0;
    for (size_t g = 0; g < groups.size(); ++g)
      for (size_t i = 0; i < found * per_unit[g]; ++i, ++next)
        prefix.blocks[g].push_back(from_wire(part->blocks[next]));
    units += found;
    return map_groups(groups, per_unit, found, part->blocks, hold);
  };
  do {
    if (Status status = look_up_portion(); !status.ok()) {
      if (hold) release_all(groups, prefix.blocks);
      return status;
    }
  } while (found >= *portion);
  prefix.hit_tokens = static_cast<int64_t>(units) * impl_->opened.unit_tokens;
  return prefix;
}

}  // namespace larder
