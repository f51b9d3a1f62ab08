// The state machine's figures.
#include <algorithm>

#include "allocator/state_machine.h"

namespace larder {

std::vector<PoolStats> StateMachine::pool_stats() const {
  std::vector<PoolStats> all;
  for (const auto& [id, pool] : pools_) all.push_back(stats_of(pool));
  return all;
}

PoolStats StateMachine::stats_of(const Pool& pool) const {
  PoolStats stats;
  stats.pool = pool.id;
  stats.tenant = pool.tenant;
  stats.name = pool.spec.name;
  stats.model = pool.spec.model;
  stats.identity = pool.spec.identity;
  stats.creating = !pool.created;
  stats.num_sessions = std::ssize(pool.sessions);
  for (uint32_t i = 0; i < pool.blocks.num_groups(); ++i) {
    const BlockTable& blocks = pool.blocks.group(i);
    GroupStats group;
    group.name = pool.spec.groups[i].name;
    group.capacity = blocks.capacity();
    group.free = blocks.count(BlockState::kFree);
    group.open = blocks.count(BlockState::kOpen);
    group.published = blocks.count(BlockState::kPublished);
    group.cached = blocks.count(BlockState::kCached);
    group.quarantined = blocks.count(BlockState::kQuarantined);
    group.max_blocks = pool.layouts[i].num_blocks;
    group.evictable = pool.blocks.evictable(i);
    for (int fence = 0; fence < kNumFenceClasses; ++fence)
      group.by_fence[fence] = blocks.quarantined(static_cast<FenceClass>(fence));
    for (const auto& [segment, leaving] : leaving_)
      if (leaving.place.pool == pool.id && leaving.place.group == i)
        group.leaving_bytes += leaving.size_bytes;
    group.physical_bytes = pool.extents[i].physical_bytes();
    group.used_bytes = (group.capacity - group.free) * pool.layouts[i].block_bytes;
    group.slack_bytes = group.physical_bytes - group.used_bytes;
    stats.groups.push_back(std::move(group));
  }
  stats.allocated_blocks_total = pool.blocks.allocated_total();
  stats.evicted_blocks_total = pool.blocks.evicted_total();
  stats.published_blocks_total = pool.blocks.published_total();
  stats.lookup_tokens_total = pool.lookup_tokens_total;
  stats.lookup_hit_tokens_total = pool.lookup_hit_tokens_total;
  return stats;
}

std::vector<SessionStats> StateMachine::session_stats() const {
  std::vector<SessionStats> all;
  for (const auto& [id, session] : sessions_) {
    SessionStats stats{id, session.tenant, session.role, std::ssize(session.pools)};
    stats.absent = session.absent;
    for (const PoolId id_of_pool : session.pools) {
      const PoolBlocks& blocks = pools_.at(id_of_pool).blocks;
      for (uint32_t group = 0; group < blocks.num_groups(); ++group) {
        stats.open_blocks += blocks.group(group).open_blocks(id);
        stats.holds += blocks.group(group).holds(id);
      }
    }
    for (const auto& [segment, leaving] : leaving_)
      if (leaving.mapped_by.contains(id)) stats.unmapping_bytes += leaving.size_bytes;
    all.push_back(std::move(stats));
  }
  return all;
}

std::vector<TenantStats> StateMachine::tenant_stats() const {
  std::vector<TenantStats> all;
  for (const auto& [name, tenant] : ledger_.tenants()) {
    TenantStats stats{name, tenant.guaranteed_bytes, tenant.maximum_bytes, tenant.used_bytes};
    for (const auto& [id, pool] : pools_)
      for (uint32_t group = 0; pool.tenant == name && group < pool.layouts.size(); ++group)
        stats.evictable_bytes += pool.blocks.evictable(group) * pool.layouts[group].block_bytes;
    for (const auto& [segment, leaving] : leaving_)
      if (leaving.tenant == name) stats.leaving_bytes += leaving.size_bytes;
    all.push_back(std::move(stats));
  }
  return all;
}

std::vector<SessionAttachment> StateMachine::session_attachments() const {
  std::vector<SessionAttachment> all;
  for (const auto& [id, session] : sessions_)
    all.push_back({id, session.tenant, session.role, session.attachment});
  return all;
}

std::vector<PoolRecord> StateMachine::pool_records() const {
  std::vector<PoolRecord> all;
  for (const auto& [id, pool] : pools_) all.push_back(*pool_record(id));
  return all;
}

std::optional<PoolRecord> StateMachine::pool_record(PoolId id) const {
  const auto found = pools_.find(id);
  if (found == pools_.end()) return std::nullopt;
  const Pool& pool = found->second;
  return PoolRecord{id,           pool.tenant,
                    pool.created, pool.attachment,
                    pool.layouts, {pool.sessions.begin(), pool.sessions.end()}};
}

std::vector<SegmentRecord> StateMachine::segments() const {
  std::vector<SegmentRecord> all;
  for (const auto& [id, pool] : pools_)
    for (uint32_t group = 0; group < pool.extents.size(); ++group)
      for (uint32_t index = 0; index < pool.extents[group].size(); ++index)
        if (const GroupExtents::Extent& extent = pool.extents[group].at(index);
            extent.state == ExtentState::kPresent)
          all.push_back(
              {extent.segment, id, group, index, pool.extents[group].size_bytes(index), false});
  for (const auto& [segment, leaving] : leaving_)
    all.push_back({segment, leaving.place.pool, leaving.place.group, leaving.place.index,
                   leaving.size_bytes, true});
  return all;
}

std::vector<uint64_t> StateMachine::owner_words(PoolId pool, uint32_t group) const {
  const auto found = pools_.find(pool);
  if (found == pools_.end() || group >= found->second.blocks.num_groups()) return {};
  return found->second.blocks.group(group).words();
}

bool StateMachine::maps_memory(SessionId session) const {
  const auto leaves = [&](const auto& entry) { return entry.second.mapped_by.contains(session); };
  if (std::any_of(leaving_.begin(), leaving_.end(), leaves)) return true;
  const auto found = sessions_.find(session);
  if (found == sessions_.end()) return false;
  for (const PoolId pool : found->second.pools)
    for (const GroupExtents& extents : pools_.at(pool).extents)
      if (extents.is_mapped_by(session)) return true;
  return false;
}

std::vector<UnfencedSession> StateMachine::unfenced_sessions() const {
  std::vector<UnfencedSession> all;
  for (const auto& [id, closing] : closing_)
    all.push_back({id, closing.fence, closing.tenant, closing.attachment});
  return all;
}

}  // namespace larder
