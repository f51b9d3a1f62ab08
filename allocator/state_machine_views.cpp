// The state machine's figures, and the recount that proves them.
#include <algorithm>

#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {
namespace {

GroupStats group_stats(const GroupSpec& spec, const GroupLayout& layout, const BlockPool& blocks) {
  GroupStats stats;
  stats.name = spec.name;
  stats.capacity = blocks.capacity();
  stats.free = blocks.count(BlockState::kFree);
  stats.open = blocks.count(BlockState::kOpen);
  stats.published = blocks.count(BlockState::kPublished);
  stats.cached = blocks.count(BlockState::kCached);
  stats.quarantined = blocks.count(BlockState::kQuarantined);
  stats.physical_bytes = layout.physical_bytes();
  stats.used_bytes = (stats.capacity - stats.free) * layout.block_bytes;
  stats.slack_bytes = stats.physical_bytes - stats.used_bytes;
  return stats;
}

}  // namespace

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
  stats.creating = pool.creating();
  stats.num_sessions = std::ssize(pool.sessions);
  for (size_t i = 0; i < pool.block_pools.size(); ++i) {
    const BlockPool& blocks = pool.block_pools[i];
    stats.groups.push_back(group_stats(pool.spec.groups[i], pool.layouts[i], blocks));
    stats.allocated_blocks_total += blocks.allocated_total();
    stats.evicted_blocks_total += blocks.evicted_total();
    stats.published_blocks_total += blocks.published_total();
  }
  stats.lookup_tokens_total = pool.lookup_tokens_total;
  stats.lookup_hit_tokens_total = pool.lookup_hit_tokens_total;
  return stats;
}

std::vector<SessionStats> StateMachine::session_stats() const {
  std::vector<SessionStats> all;
  for (const auto& [id, session] : sessions_) {
    SessionStats stats{id, session.tenant, session.role, std::ssize(session.pools)};
    for (PoolId pool : session.pools) {
      for (const BlockPool& blocks : pools_.at(pool).block_pools) {
        stats.open_blocks += blocks.open_blocks(id);
        stats.holds += blocks.holds(id);
      }
    }
    all.push_back(std::move(stats));
  }
  return all;
}

std::vector<uint64_t> StateMachine::owner_words(PoolId pool, uint32_t group) const {
  const auto found = pools_.find(pool);
  if (found == pools_.end() || group >= found->second.block_pools.size()) return {};
  return found->second.block_pools[group].words();
}

// ------------------------------------------------------------------------------------- recounting

void StateMachine::check_consistency() const {
  int64_t physical_bytes = 0;
  for (const auto& [id, pool] : pools_) {
    LARDER_CHECK(pool.id == id, value(id), value(pool.id));
    check_pool(pool);
    physical_bytes += pool.physical_bytes();
  }
  for (const auto& [segment, awaited] : awaited_) {
    const auto pool = pools_.find(awaited.pool);
    if (pool == pools_.end()) physical_bytes += awaited.size_bytes;
    LARDER_CHECK(pool == pools_.end() || pool->second.awaited.contains(segment), value(segment));
  }
  LARDER_CHECK(physical_bytes == physical_bytes_, physical_bytes, physical_bytes_);
  LARDER_CHECK(physical_bytes_ <= config_.memory_bytes, physical_bytes_, config_.memory_bytes);
  LARDER_CHECK(pool_names_.size() == pools_.size(), pool_names_.size(), pools_.size());
  for (const auto& [id, session] : sessions_) {
    LARDER_CHECK(!fencing_.contains(id), value(id));
    for (PoolId pool : session.pools)
      LARDER_CHECK(pools_.at(pool).sessions.contains(id), value(id), value(pool));
  }
}

void StateMachine::check_pool(const Pool& pool) const {
  const auto name = pool_names_.find({pool.tenant, pool.spec.name});
  LARDER_CHECK(name != pool_names_.end() && name->second == pool.id, pool.spec.name);
  LARDER_CHECK(pool.waiting.empty() || pool.creating(), pool.spec.name, pool.waiting.size());
  for (SegmentId segment : pool.awaited)
    LARDER_CHECK(awaited_.at(segment).pool == pool.id, value(segment), value(pool.id));
  for (SessionId session : pool.sessions)
    LARDER_CHECK(sessions_.at(session).pools.contains(pool.id), value(session), pool.spec.name);
  for (const WaitingOpen& open : pool.waiting)
    LARDER_CHECK(sessions_.contains(open.session), value(open.session), pool.spec.name);

  for (uint32_t group = 0; group < pool.block_pools.size(); ++group) {
    std::vector<int32_t> copied;
    for (const auto& [id, copy] : copies_) {
      if (copy.pool != pool.id || copy.group != group) continue;
      copied.insert(copied.end(), copy.from.begin(), copy.from.end());
      copied.insert(copied.end(), copy.to.begin(), copy.to.end());
    }
    pool.block_pools[group].check_consistency(copied);
    int64_t to_fence = 0;
    for (const auto& [session, quarantined] : fencing_)
      for (const QuarantinedBlocks& part : quarantined)
        if (part.pool == pool.id && part.group == group) to_fence += std::ssize(part.blocks);
    // Quarantined blocks that nobody has to fence wait for a copy.
    const int64_t at_most = to_fence + std::ssize(copied);
    const int64_t quarantined = pool.block_pools[group].count(BlockState::kQuarantined);
    LARDER_CHECK(to_fence <= quarantined && quarantined <= at_most, to_fence, quarantined, at_most);
  }
}

}  // namespace larder
