#include "allocator/pool_blocks.h"

#include <algorithm>
#include <string>

#include "larder/check.h"

namespace larder {
namespace {

std::string block_text(int32_t id) { return "block " + std::to_string(id); }

// A block that is listed twice, or kNone.
int32_t find_repeated(std::vector<int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  const auto repeated = std::adjacent_find(ids.begin(), ids.end());
  return repeated == ids.end() ? PoolBlocks::kNone : *repeated;
}

std::vector<int32_t> ids_of(std::span<const BlockRef> blocks) {
  std::vector<int32_t> ids;
  ids.reserve(blocks.size());
  for (const BlockRef& block : blocks) ids.push_back(block.id);
  return ids;
}

Status busy(int32_t id) {
  return {ErrorCode::kBusy, block_text(id) + " is in a copy that has not ended"};
}

std::vector<PrefixIndex::Group> index_groups(const std::vector<GroupSpec>& groups,
                                             const std::vector<GroupLayout>& layouts) {
  std::vector<PrefixIndex::Group> all;
  for (size_t i = 0; i < groups.size(); ++i)
    all.push_back(
        {blocks_in_unit(groups, groups[i]), layouts[i].grows() ? layouts[i].blocks_per_extent : 0});
  return all;
}

}  // namespace

PoolBlocks::PoolBlocks(const std::vector<GroupSpec>& groups,
                       const std::vector<GroupLayout>& layouts)
    : specs_(groups),
      unit_tokens_(larder::unit_tokens(groups)),
      layouts_(layouts),
      index_(index_groups(groups, layouts)) {
  for (size_t i = 0; i < groups.size(); ++i)
    tables_.emplace_back(layouts[i], groups[i].reserve_block_zero);
}

uint32_t PoolBlocks::group_of_slot(int32_t slot) const {
  uint32_t group = 0;
  while (slot >= index_.first_slot(group + 1)) ++group;
  return group;
}

// --------------------------------------------------------------------------------- holds and pins

void PoolBlocks::add_hold(SessionId session, uint32_t group, int32_t id, int64_t now_us) {
  const bool was_in_use = tables_[group].at(id).in_use();
  tables_[group].add_hold(session, id);
  const int32_t unit = tables_[group].at(id).unit;
  index_.touch(unit, now_us);
  if (!was_in_use) index_.add_use(unit);
}

void PoolBlocks::drop_holds(SessionId session, uint32_t group, int32_t id, int64_t holds,
                            int64_t now_us) {
  tables_[group].drop_holds(session, id, holds);
  const BlockTable::Block& block = tables_[group].at(id);
  index_.touch(block.unit, now_us);
  if (!block.in_use()) index_.drop_use(block.unit);
}

void PoolBlocks::pin(SessionId session, uint32_t group, int32_t id, bool is_target) {
  const bool was_in_use = tables_[group].at(id).in_use();
  tables_[group].pin(session, id, is_target);
  if (const int32_t unit = tables_[group].at(id).unit; unit != kNone && !was_in_use)
    index_.add_use(unit);
}

void PoolBlocks::unpin(SessionId session, uint32_t group, int32_t id, bool is_target) {
  tables_[group].unpin(session, id, is_target);
  const BlockTable::Block& block = tables_[group].at(id);
  if (block.copies > 0) return;
  if (block.unit != kNone && !block.in_use()) index_.drop_use(block.unit);
  if (block.state == BlockState::kQuarantined && block.fence == FenceClass::kFenced)
    tables_[group].free(id);
}

void PoolBlocks::hold(SessionId session, std::span<const BlockRef> blocks, int64_t now_us) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto slot = static_cast<int32_t>(i % static_cast<size_t>(index_.slots_per_unit()));
    if (blocks[i].id != kNone) add_hold(session, group_of_slot(slot), blocks[i].id, now_us);
  }
}

// ---------------------------------------------------------------------------- allocate and release

std::vector<BlockRef> PoolBlocks::take(SessionId session, uint32_t group, int64_t num_blocks,
                                       Choices& choices) {
  BlockTable& table = tables_[group];
  while (table.count(BlockState::kFree) < num_blocks)
    if (evict_units(1, choices) == 0) throw ReplayError("nothing can be evicted");
  std::vector<BlockRef> blocks;
  blocks.reserve(static_cast<size_t>(num_blocks));
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int64_t id = choices.choose([&] { return table.lowest_free(); });
    if (id < 0 || id >= layouts_[group].num_blocks ||
        table.at(static_cast<int32_t>(id)).state != BlockState::kFree ||
        !table.has_extent(layouts_[group].extent_of(id)))
      throw ReplayError("block " + std::to_string(id) + " is not free");
    table.open(session, static_cast<int32_t>(id));
    blocks.push_back({static_cast<int32_t>(id), table.at(static_cast<int32_t>(id)).generation});
  }
  allocated_total_ += static_cast<uint64_t>(num_blocks);
  return blocks;
}

Status PoolBlocks::release(SessionId session, uint32_t group, std::span<const BlockRef> blocks,
                           int64_t now_us) {
  BlockTable& table = tables_[group];
  std::vector<int32_t> ids = ids_of(blocks);
  std::sort(ids.begin(), ids.end());
  for (const BlockRef& block : blocks) {
    if (Status status = table.check_held(session, block); !status.ok()) return status;
    if (table.holding(session, block.id)->copies > 0) return busy(block.id);
  }
  const auto for_each_run = [&](auto body) {
    for (size_t begin = 0, end = 0; begin < ids.size(); begin = end) {
      while (end < ids.size() && ids[end] == ids[begin]) ++end;
      if (Status status = body(ids[begin], static_cast<int64_t>(end - begin)); !status.ok())
        return status;
    }
    return Status();
  };
  Status status = for_each_run([&](int32_t id, int64_t named) -> Status {
    const int64_t holds = table.holding(session, id)->holds;
    if (named <= holds) return {};
    return {ErrorCode::kNotFound, block_text(id) + " is named " + std::to_string(named) +
                                      " times, but this session has " + std::to_string(holds) +
                                      " holds on it"};
  });
  if (!status.ok()) return status;
  return for_each_run([&](int32_t id, int64_t named) -> Status {
    if (table.at(id).state == BlockState::kOpen) {
      table.free(id);
    } else {
      drop_holds(session, group, id, named, now_us);
    }
    return {};
  });
}

// ----------------------------------------------------------------------------------------- publish

Status PoolBlocks::check_publish(SessionId session, uint32_t group, BlockRef block,
                                 const BlockKey& key, int32_t slot) const {
  const BlockTable& table = tables_[group];
  if (Status status = table.check_held(session, block); !status.ok()) return status;
  const BlockTable::Block& named = table.at(block.id);
  if (named.state == BlockState::kOpen) return named.copies > 0 ? busy(block.id) : Status();
  if (index_.key(named.unit) == key &&
      index_.blocks(named.unit)[static_cast<size_t>(slot)] == block.id)
    return {};
  return {ErrorCode::kInvalidArgument,
          block_text(block.id) + " is published already, under the key of another prefix"};
}

Status PoolBlocks::check_units(SessionId session, std::span<const BlockKey> keys,
                               std::span<const BlockRef> blocks) const {
  const auto slots = static_cast<size_t>(index_.slots_per_unit());
  std::vector<std::vector<int32_t>> named(tables_.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    const auto slot = static_cast<int32_t>(i % slots);
    const uint32_t group = group_of_slot(slot);
    if (blocks[i].id == kNone && specs_[group].kind != GroupKind::kFull) continue;
    if (Status status = check_publish(session, group, blocks[i], keys[i / slots], slot);
        !status.ok())
      return status;
    named[group].push_back(blocks[i].id);
  }
  for (size_t i = 0; i < keys.size(); ++i)
    if (std::ranges::all_of(blocks.subspan(i * slots, slots),
                            [](const BlockRef& block) { return block.id == kNone; }))
      return {ErrorCode::kInvalidArgument,
              "unit " + std::to_string(i) + " names no block of any group"};
  for (std::vector<int32_t>& ids : named)
    if (const int32_t id = find_repeated(std::move(ids)); id != kNone)
      return {ErrorCode::kInvalidArgument, block_text(id) + " is named twice"};
  return {};
}

Result<std::vector<BlockRef>> PoolBlocks::publish(SessionId session, int32_t parent,
                                                  std::span<const BlockKey> keys,
                                                  std::span<const BlockRef> blocks,
                                                  int64_t now_us) {
  const auto slots = static_cast<size_t>(index_.slots_per_unit());
  LARDER_CHECK(keys.size() * slots == blocks.size(), keys.size(), slots, blocks.size());
  if (Status status = check_units(session, keys, blocks); !status.ok()) return status;
  std::vector<BlockRef> serving;
  serving.reserve(blocks.size());
  for (size_t i = 0; i < keys.size(); ++i)
    parent =
        publish_unit(session, keys[i], parent, blocks.subspan(i * slots, slots), now_us, serving);
  return serving;
}

int32_t PoolBlocks::publish_unit(SessionId session, const BlockKey& key, int32_t parent,
                                 std::span<const BlockRef> blocks, int64_t now_us,
                                 std::vector<BlockRef>& serving) {
  int32_t unit = index_.find(key);
  if (unit == kNone) {
    const std::vector<int32_t> empty(blocks.size(), kNone);
    unit = index_.insert(key, parent, empty, now_us);
  }
  index_.touch(unit, now_us);
  for (int32_t slot = 0; slot < index_.slots_per_unit(); ++slot) {
    const BlockRef mine = blocks[static_cast<size_t>(slot)];
    const uint32_t group = group_of_slot(slot);
    const int32_t there = index_.blocks(unit)[static_cast<size_t>(slot)];
    if (mine.id == kNone) {
      serving.push_back({});
      continue;
    }
    const int32_t serves = there == kNone ? mine.id : there;
    if (there == kNone) {
      index_.fill(unit, slot, mine.id);
      tables_[group].publish(mine.id, unit);
      index_.add_use(unit);
      ++published_total_;
    } else if (there != mine.id) {
      add_hold(session, group, there, now_us);
    }
    serving.push_back({serves, tables_[group].at(serves).generation});
  }
  return unit;
}

// ------------------------------------------------------------------------------------------ copies

Status PoolBlocks::check_copy_target(SessionId session, uint32_t group, BlockRef block) const {
  if (Status status = tables_[group].check_held(session, block); !status.ok()) return status;
  if (tables_[group].at(block.id).state != BlockState::kOpen)
    return {ErrorCode::kInvalidArgument,
            "to: " + block_text(block.id) + " is published, but only open blocks can be written"};
  return tables_[group].at(block.id).copies > 0 ? busy(block.id) : Status();
}

Status PoolBlocks::begin_copy(SessionId session, uint32_t group, std::span<const BlockRef> from,
                              std::span<const BlockRef> to) {
  if (from.size() != to.size())
    return {ErrorCode::kInvalidArgument, "from names " + std::to_string(from.size()) +
                                             " blocks and to names " + std::to_string(to.size())};
  for (const BlockRef& block : from) {
    if (Status status = tables_[group].check_held(session, block); !status.ok()) return status;
    if (tables_[group].at(block.id).copy_target) return busy(block.id);
  }
  for (const BlockRef& block : to)
    if (Status status = check_copy_target(session, group, block); !status.ok()) return status;
  std::vector<int32_t> from_ids = ids_of(from);
  const std::vector<int32_t> to_ids = ids_of(to);
  if (const int32_t id = find_repeated(to_ids); id != kNone)
    return {ErrorCode::kInvalidArgument, "to: " + block_text(id) + " is named twice"};
  std::sort(from_ids.begin(), from_ids.end());
  for (const int32_t id : to_ids)
    if (std::binary_search(from_ids.begin(), from_ids.end(), id))
      return {ErrorCode::kInvalidArgument, block_text(id) + " is in both from and to"};
  restore_copy(session, group, from_ids, to_ids);
  return {};
}

void PoolBlocks::restore_copy(SessionId session, uint32_t group, std::span<const int32_t> from,
                              std::span<const int32_t> to) {
  for (const int32_t id : from) pin(session, group, id, false);
  for (const int32_t id : to) pin(session, group, id, true);
}

void PoolBlocks::end_copy(SessionId session, uint32_t group, std::span<const int32_t> from,
                          std::span<const int32_t> to) {
  for (const int32_t id : from) unpin(session, group, id, false);
  for (const int32_t id : to) unpin(session, group, id, true);
}

}  // namespace larder
