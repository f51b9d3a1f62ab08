// A pool's blocks: prefixes, the end of sessions, and eviction.
#include <algorithm>

#include "allocator/byte_codec.h"
#include "allocator/consistency.h"
#include "allocator/pool_blocks.h"
#include "larder/check.h"

namespace larder {

// ---------------------------------------------------------------------------------------- prefixes

int64_t PoolBlocks::blocks_needed(int64_t num_units, uint32_t group) const {
  const int64_t per_unit = index_.first_slot(group + 1) - index_.first_slot(group);
  if (specs_[group].kind == GroupKind::kState) return 1;
  if (specs_[group].kind == GroupKind::kFull) return num_units * per_unit;
  const int64_t block_tokens = specs_[group].block_tokens;
  const int64_t window = (specs_[group].window_tokens + block_tokens - 1) / block_tokens;
  return std::min(window, num_units * per_unit);
}

int64_t PoolBlocks::longest_prefix(std::span<const int32_t> units) const {
  // present[g]: how many blocks of the group there are up to here without a gap.
  std::vector<int64_t> present(tables_.size(), 0);
  int64_t longest = 0;
  for (int64_t i = 0; i < std::ssize(units); ++i) {
    const std::span<const int32_t> blocks = index_.blocks(units[static_cast<size_t>(i)]);
    bool whole = true;
    for (uint32_t group = 0; group < tables_.size(); ++group) {
      for (int32_t slot = index_.first_slot(group); slot < index_.first_slot(group + 1); ++slot)
        present[group] = blocks[static_cast<size_t>(slot)] == kNone ? 0 : present[group] + 1;
      whole = whole && present[group] >= blocks_needed(i + 1, group);
    }
    if (whole) longest = i + 1;
  }
  return longest;
}

std::vector<BlockRef> PoolBlocks::prefix_blocks(std::span<const int32_t> units) const {
  std::vector<BlockRef> blocks;
  const int64_t num_units = std::ssize(units);
  blocks.reserve(static_cast<size_t>(num_units * index_.slots_per_unit()));
  for (int64_t i = 0; i < num_units; ++i) {
    const std::span<const int32_t> ids = index_.blocks(units[static_cast<size_t>(i)]);
    for (uint32_t group = 0; group < tables_.size(); ++group) {
      const int64_t per_unit = index_.first_slot(group + 1) - index_.first_slot(group);
      const int64_t unneeded = num_units * per_unit - blocks_needed(num_units, group);
      for (int64_t at = 0; at < per_unit; ++at) {
        const int32_t id = ids[static_cast<size_t>(index_.first_slot(group) + at)];
        const bool needed = id != kNone && i * per_unit + at >= unneeded;
        blocks.push_back(needed ? BlockRef{id, tables_[group].at(id).generation} : BlockRef{});
      }
    }
  }
  return blocks;
}

// -------------------------------------------------------------------------------- end of sessions

void PoolBlocks::end_session(SessionId session, FenceClass fence, int64_t now_us) {
  for (uint32_t group = 0; group < tables_.size(); ++group) {
    BlockTable& table = tables_[group];
    for (const int32_t id : table.held_by(session)) {
      if (table.at(id).state != BlockState::kOpen) {
        const int64_t holds = table.holding(session, id)->holds;
        if (holds > 0) drop_holds(session, group, id, holds, now_us);
        continue;
      }
      if (fence == FenceClass::kFenced && table.at(id).copies == 0) {
        table.free(id);
        continue;
      }
      table.quarantine(id, fence);
      if (fence != FenceClass::kFenced) unfenced_[session].push_back({group, id});
    }
    table.forget_holder(session);
  }
}

void PoolBlocks::fenced(SessionId session) {
  const auto node = unfenced_.extract(session);
  if (node.empty()) return;
  for (const GroupBlock& block : node.mapped()) {
    BlockTable& table = tables_[block.group];
    if (table.at(block.id).copies > 0) {
      table.set_fence(block.id, FenceClass::kFenced);  // free when the copy has ended
    } else {
      table.free(block.id);
    }
  }
}

std::vector<SessionId> PoolBlocks::unfenced_sessions() const {
  std::vector<SessionId> sessions;
  for (const auto& [session, blocks] : unfenced_) sessions.push_back(session);
  return sessions;
}

// ---------------------------------------------------------------------------------------- eviction

void PoolBlocks::evict_unit(int32_t unit) {
  if (!index_.is_evictable_leaf(unit))
    throw ReplayError("unit " + std::to_string(unit) + " cannot be evicted");
  const std::span<const int32_t> named = index_.blocks(unit);
  const std::vector<int32_t> blocks(named.begin(), named.end());
  index_.remove(unit);
  for (int32_t slot = 0; slot < index_.slots_per_unit(); ++slot) {
    if (blocks[static_cast<size_t>(slot)] == kNone) continue;
    tables_[group_of_slot(slot)].free(blocks[static_cast<size_t>(slot)]);
    ++evicted_total_;
  }
}

int64_t PoolBlocks::evict_units(int64_t num_units, Choices& choices) {
  int64_t evicted = 0;
  while (evicted < num_units) {
    const int64_t unit = choices.choose([&] { return index_.next_to_evict(); });
    if (unit == kNone) break;
    evict_unit(static_cast<int32_t>(unit));
    ++evicted;
  }
  return evicted;
}

int64_t PoolBlocks::cost_of_emptying(uint32_t group, int64_t extent) const {
  const int64_t used = tables_[group].num_used(extent);
  return index_.num_evictable(group, extent) == used ? used : -1;
}

void PoolBlocks::empty_extent(uint32_t group, int64_t extent, Choices& choices) {
  std::vector<int32_t> units;
  if (!choices.replaying()) {
    for (const int32_t id : tables_[group].used_blocks(extent))
      units.push_back(tables_[group].at(id).unit);
    units = index_.subtrees(units);
  }
  const int64_t count = choices.choose([&] { return std::ssize(units); });
  for (int64_t i = 0; i < count; ++i)
    evict_unit(static_cast<int32_t>(choices.choose([&] { return units[static_cast<size_t>(i)]; })));
  if (tables_[group].num_used(extent) > 0)
    throw ReplayError("extent " + std::to_string(extent) + " is still in use");
}

// ---------------------------------------------------------------------------- snapshot and recount

std::vector<int32_t> PoolBlocks::uses_of_units() const {
  std::vector<int32_t> uses(static_cast<size_t>(index_.unit_limit()), 0);
  for (const BlockTable& table : tables_)
    for (int32_t id = 0; id < table.used_limit(); ++id)
      if (table.at(id).unit != kNone && table.at(id).in_use())
        ++uses[static_cast<size_t>(table.at(id).unit)];
  return uses;
}

void PoolBlocks::save(ByteWriter& out) const {
  for (const BlockTable& table : tables_) table.save(out);
  index_.save(out);
  out.put(allocated_total_);
  out.put(evicted_total_);
  out.put(published_total_);
}

bool PoolBlocks::load(ByteReader& in) {
  for (BlockTable& table : tables_)
    if (!table.load(in)) return false;
  if (!index_.load(in) || !link_units()) return false;
  allocated_total_ = in.get<uint64_t>();
  evicted_total_ = in.get<uint64_t>();
  published_total_ = in.get<uint64_t>();
  for (uint32_t group = 0; group < tables_.size(); ++group)
    for (int32_t id = 0; id < tables_[group].used_limit(); ++id) {
      const BlockTable::Block& block = tables_[group].at(id);
      if (block.state == BlockState::kQuarantined && block.fence != FenceClass::kFenced)
        unfenced_[block.owner].push_back({group, id});
    }
  return !in.failed();
}

bool PoolBlocks::link_units() {
  for (int32_t unit = 0; unit < index_.unit_limit(); ++unit) {
    if (!index_.contains(unit)) continue;
    for (int32_t slot = 0; slot < index_.slots_per_unit(); ++slot) {
      const int32_t id = index_.blocks(unit)[static_cast<size_t>(slot)];
      if (id == kNone) continue;
      BlockTable& table = tables_[group_of_slot(slot)];
      if (id < 0 || id >= table.used_limit() || table.at(id).unit != kNone) return false;
      table.set_unit(id, unit);
    }
  }
  return index_.finish_load(uses_of_units());
}

void PoolBlocks::check_consistency(std::span<const GroupCopies> copies) const {
  index_.check_consistency(uses_of_units());
  for (uint32_t group = 0; group < tables_.size(); ++group) {
    std::vector<int32_t> pinned;
    for (const GroupCopies& copy : copies)
      if (copy.group == group) pinned.insert(pinned.end(), copy.blocks.begin(), copy.blocks.end());
    tables_[group].check_consistency(pinned);
    int64_t waiting = 0;
    for (const auto& [session, blocks] : unfenced_)
      waiting += std::count_if(blocks.begin(), blocks.end(),
                               [&](const GroupBlock& block) { return block.group == group; });
    const int64_t quarantined = tables_[group].count(BlockState::kQuarantined);
    LARDER_ENSURE(waiting == quarantined - tables_[group].quarantined(FenceClass::kFenced), waiting,
                  quarantined);
    for (int32_t id = 0; id < tables_[group].used_limit(); ++id) {
      const int32_t unit = tables_[group].at(id).unit;
      if (unit == kNone) continue;
      const auto blocks = index_.blocks(unit);
      LARDER_ENSURE(std::count(blocks.begin() + index_.first_slot(group),
                               blocks.begin() + index_.first_slot(group + 1), id) == 1,
                    id, unit);
    }
  }
  // A key points only at a complete unit.
  for (int32_t unit = 0; unit < index_.unit_limit(); ++unit) {
    if (!index_.contains(unit)) continue;
    const std::span<const int32_t> blocks = index_.blocks(unit);
    LARDER_ENSURE(std::count(blocks.begin(), blocks.end(), kNone) < std::ssize(blocks), unit);
    for (int32_t slot = 0; slot < index_.slots_per_unit(); ++slot)
      LARDER_ENSURE(specs_[group_of_slot(slot)].kind != GroupKind::kFull ||
                        blocks[static_cast<size_t>(slot)] != kNone,
                    unit, slot);
  }
}

}  // namespace larder
