// The recount that proves the state machine's figures, and that a loaded state makes sense:
// whatever passes it, no event can bring to a LARDER_CHECK.
#include <algorithm>
#include <map>

#include "allocator/consistency.h"
#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {

void StateMachine::check_consistency() const {
  try {
    recount();
  } catch (const Inconsistent& contradiction) {
    LARDER_CHECK(false, contradiction.what());
  }
}

void StateMachine::recount() const {
  for (const auto& [id, pool] : pools_) {
    LARDER_ENSURE(pool.id == id && value(id) <= last_pool_, value(id), value(pool.id));
    recount_pool(pool);
    recount_extents(pool);
  }
  LARDER_ENSURE(pool_names_.size() == pools_.size(), pool_names_.size(), pools_.size());
  recount_sessions();
  recount_memory();
  recount_copies();
}

void StateMachine::recount_sessions() const {
  for (const auto& [id, session] : sessions_) {
    LARDER_ENSURE(value(id) != 0 && value(id) >> 62 == 0, value(id));
    LARDER_ENSURE(value(id) <= last_session_ && !closing_.contains(id), value(id));
    for (const PoolId attached : session.pools) {
      const auto pool = pools_.find(attached);
      LARDER_ENSURE(pool != pools_.end() && pool->second.sessions.contains(id), value(id),
                    value(attached));
      LARDER_ENSURE(pool->second.tenant == session.tenant, value(id), value(attached));
    }
  }
  for (const auto& [id, count] : count_unanswered()) {
    const auto session = sessions_.find(id);
    LARDER_ENSURE(session != sessions_.end() && session->second.unanswered == count, value(id));
  }
  for (const auto& [id, closing] : closing_) {
    LARDER_ENSURE(value(id) <= last_session_, value(id));
    LARDER_ENSURE(closing.fence != FenceClass::kFenced, value(id));
  }
  for (const Event& event : waiting_) {
    const bool known = std::visit(
        [this](const auto& waiting) {
          using Waiting = std::decay_t<decltype(waiting)>;
          if constexpr (std::is_same_v<Waiting, OpenPool> || std::is_same_v<Waiting, Allocate> ||
                        std::is_same_v<Waiting, ResizePool>)
            return sessions_.contains(waiting.session);
          return false;
        },
        event);
    LARDER_ENSURE(known, event.index());
  }
}

// Of every session there is; of sessions that are gone, only what is wrong.
std::map<SessionId, int64_t> StateMachine::count_unanswered() const {
  std::map<SessionId, int64_t> unanswered;
  for (const auto& [id, session] : sessions_) unanswered[id] = 0;
  for (const Event& event : waiting_)
    std::visit(
        [&](const auto& waiting) {
          if constexpr (requires { waiting.request; }) ++unanswered[waiting.session];
        },
        event);
  for (const auto& [id, pool] : pools_)
    for (const WaitingOpen& open : pool.waiting) ++unanswered[open.session];
  for (const auto& [id, copy] : copies_)
    if (sessions_.contains(copy.session)) ++unanswered[copy.session];
  return unanswered;
}

void StateMachine::recount_memory() const {
  std::map<std::string, int64_t> used;
  for (const auto& [id, pool] : pools_)
    for (const GroupExtents& extents : pool.extents) used[pool.tenant] += extents.physical_bytes();
  const auto check_place = [this](SegmentId segment, const auto& entry, ExtentState state) {
    LARDER_ENSURE(ledger_.knows(entry.tenant) && value(segment) <= last_segment_, value(segment));
    LARDER_ENSURE(entry.size_bytes > 0 && entry.size_bytes <= kMaxGroupBytes, entry.size_bytes);
    const auto pool = pools_.find(entry.place.pool);
    if (pool == pools_.end()) return false;
    LARDER_ENSURE(entry.place.group < pool->second.extents.size(), value(segment));
    const GroupExtents& extents = pool->second.extents[entry.place.group];
    LARDER_ENSURE(entry.place.index < extents.size(), value(segment), entry.place.index);
    const GroupExtents::Extent& extent = extents.at(entry.place.index);
    LARDER_ENSURE(extent.state == state && extent.segment == segment, value(segment));
    LARDER_ENSURE(extents.size_bytes(entry.place.index) == entry.size_bytes, value(segment));
    LARDER_ENSURE(pool->second.tenant == entry.tenant, value(segment));
    return true;
  };
  for (const auto& [segment, awaited] : awaited_)
    if (!check_place(segment, awaited, ExtentState::kAwaited))
      used[awaited.tenant] += awaited.size_bytes;
  for (const auto& [segment, leaving] : leaving_) {
    const bool pool_is_there = check_place(segment, leaving, ExtentState::kLeaving);
    used[leaving.tenant] += leaving.size_bytes;
    LARDER_ENSURE(!leaving.mapped_by.empty(), value(segment));
    for (const SessionId session : leaving.mapped_by) {
      const auto live = sessions_.find(session);
      LARDER_ENSURE(live == sessions_.end()
                        ? closing_.contains(session)
                        : pool_is_there && live->second.pools.contains(leaving.place.pool),
                    value(session), value(segment));
    }
  }
  int64_t physical_bytes = 0;
  for (const auto& [name, tenant] : ledger_.tenants()) {
    LARDER_ENSURE(tenant.used_bytes == used[name], name, tenant.used_bytes, used[name]);
    physical_bytes += tenant.used_bytes;
  }
  LARDER_ENSURE(physical_bytes == ledger_.used_bytes(), physical_bytes, ledger_.used_bytes());
  ledger_.check_consistency();
}

void StateMachine::recount_copies() const {
  for (const auto& [id, copy] : copies_) {
    LARDER_ENSURE(id <= last_copy_ && !copy.from.empty(), id);
    LARDER_ENSURE(copy.from.size() == copy.to.size(), id, copy.from.size(), copy.to.size());
    const BlockTable& table = pools_.at(copy.pool).blocks.group(copy.group);
    const bool live = sessions_.contains(copy.session);
    for (const int32_t block : copy.from) {
      const BlockTable::Block& at = table.at(block);
      const bool writable = at.state == BlockState::kOpen || at.state == BlockState::kQuarantined;
      LARDER_ENSURE(!writable || at.owner == copy.session, id, block);
      LARDER_ENSURE(!live || table.holding(copy.session, block) != nullptr, id, block);
    }
    for (const int32_t block : copy.to) {
      const BlockTable::Block& at = table.at(block);
      LARDER_ENSURE(at.state == (live ? BlockState::kOpen : BlockState::kQuarantined), id, block);
      LARDER_ENSURE(at.owner == copy.session && at.copies == 1 && at.copy_target, id, block);
    }
  }
}

void StateMachine::recount_pool(const Pool& pool) const {
  const auto name = pool_names_.find({pool.tenant, pool.spec.name});
  LARDER_ENSURE(name != pool_names_.end() && name->second == pool.id, pool.spec.name);
  LARDER_ENSURE(pool.waiting.empty() || !pool.created, pool.spec.name, pool.waiting.size());
  for (const SessionId session : pool.sessions) {
    const auto found = sessions_.find(session);
    LARDER_ENSURE(found != sessions_.end() && found->second.pools.contains(pool.id), value(session),
                  pool.spec.name);
  }
  for (const WaitingOpen& open : pool.waiting)
    LARDER_ENSURE(sessions_.contains(open.session), value(open.session), pool.spec.name);
  std::vector<PoolBlocks::GroupCopies> copies;
  for (const auto& [id, copy] : copies_) {
    if (copy.pool != pool.id) continue;
    copies.push_back({copy.group, copy.from});
    copies.push_back({copy.group, copy.to});
  }
  pool.blocks.check_consistency(copies);
  for (const SessionId session : pool.blocks.unfenced_sessions())
    LARDER_ENSURE(is_closing_in(session, pool.id), value(session), pool.spec.name);
  int64_t awaited = 0;
  for (uint32_t group = 0; group < pool.blocks.num_groups(); ++group) {
    const BlockTable& table = pool.blocks.group(group);
    awaited += pool.extents[group].count(ExtentState::kAwaited);
    for (const SessionId session : table.holders())
      LARDER_ENSURE(pool.sessions.contains(session), value(session), pool.spec.name);
    LARDER_ENSURE(pool.created || table.count(BlockState::kFree) == table.capacity(), group);
  }
  LARDER_ENSURE(pool.created || (awaited > 0 && pool.sessions.empty()), pool.spec.name);
}

void StateMachine::recount_extents(const Pool& pool) const {
  for (uint32_t group = 0; group < pool.extents.size(); ++group) {
    const GroupExtents& extents = pool.extents[group];
    for (int64_t i = 0; i < extents.size(); ++i) {
      const GroupExtents::Extent& extent = extents.at(i);
      const bool present = extent.state == ExtentState::kPresent;
      LARDER_ENSURE(value(extent.segment) <= last_segment_, value(extent.segment));
      LARDER_ENSURE((extent.state == ExtentState::kAbsent) == (value(extent.segment) == 0), i);
      LARDER_ENSURE(pool.blocks.group(group).has_extent(i) == present, i);
      LARDER_ENSURE(present || extent.mapped_by.empty(), i);
      LARDER_ENSURE((extent.state == ExtentState::kAwaited) == awaited_.contains(extent.segment),
                    i);
      LARDER_ENSURE((extent.state == ExtentState::kLeaving) == leaving_.contains(extent.segment),
                    i);
      for (const SessionId session : extent.mapped_by)
        LARDER_ENSURE(pool.sessions.contains(session) || is_closing_in(session, pool.id),
                      value(session));
    }
  }
}

bool StateMachine::is_closing_in(SessionId session, PoolId pool) const {
  const auto closing = closing_.find(session);
  return closing != closing_.end() && closing->second.pools.contains(pool);
}

}  // namespace larder
