// The state machine's handlers of pools: how they are created, opened, closed and destroyed.
#include <utility>

#include "allocator/pool_spec.h"
#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {

StateMachine::Answer StateMachine::handle(const OpenPool& event) {
  const Result<Session*> session = find_session(event.session, Role::kRead, "open pools");
  if (!session) return session.status();
  const std::string& tenant = (*session)->tenant;
  if (!ledger_.knows(tenant))
    return Status(ErrorCode::kPermissionDenied, "tenant \"" + tenant + "\" is not configured");
  if (Status status = check_pool_spec(event.spec); !status.ok()) return status;

  if (const auto found = pool_names_.find({tenant, event.spec.name}); found != pool_names_.end())
    return open_existing(pools_.at(found->second), event);
  if (const auto creator = find_session(event.session, Role::kAppend, "create pools"); !creator)
    return creator.status();
  return create_pool(event, tenant);
}

StateMachine::Answer StateMachine::open_existing(Pool& pool, const OpenPool& event) {
  if (Status status = check_same_spec(pool.spec, event.spec); !status.ok()) return status;
  if (!pool.created) {
    pool.waiting.push_back({event.request, event.session, false});
    return std::nullopt;
  }
  return attach(pool, event.session, false);
}

ReplyBody StateMachine::attach(Pool& pool, SessionId session, bool created) {
  pool.sessions.insert(session);
  sessions_.at(session).pools.insert(pool.id);
  return PoolOpened{pool.id, created, pool.layouts};
}

namespace {

// What is done about a pool for which there is not enough memory.
enum class Shortage : int64_t { kNone = 0, kReclaim = 1, kRefuse = 2 };

}  // namespace

StateMachine::Answer StateMachine::create_pool(const OpenPool& event, const std::string& tenant) {
  std::vector<GroupLayout> layouts;
  int64_t requested_bytes = 0;
  for (const GroupSpec& group : event.spec.groups) {
    Result<GroupLayout> layout = lay_out_group(group);
    if (!layout) return layout.status();
    requested_bytes += layout->first_bytes();
    layouts.push_back(std::move(*layout));
  }
  if (pools_.size() >= max_pools_)
    return Status(ErrorCode::kResourceExhausted, "there are " + std::to_string(pools_.size()) +
                                                     " pools, at most " +
                                                     std::to_string(max_pools_) + " can be");
  const int64_t available_bytes = ledger_.available_bytes(tenant);
  const auto shortage = static_cast<Shortage>(choices_.choose([&] {
    if (requested_bytes <= available_bytes) return static_cast<int64_t>(Shortage::kNone);
    return static_cast<int64_t>(
        can_reclaim(tenant, requested_bytes, GroupId{}) ? Shortage::kReclaim : Shortage::kRefuse);
  }));
  if (shortage == Shortage::kRefuse)
    return Status(ErrorCode::kResourceExhausted,
                  "the pool needs " + std::to_string(requested_bytes) + " bytes, available " +
                      std::to_string(available_bytes) + ", evictable too few; " +
                      ledger_.limit_text(tenant));
  if (shortage == Shortage::kReclaim) {
    waiting_.emplace_back(event);
    reclaim(tenant, requested_bytes, GroupId{});
    return std::nullopt;
  }

  const PoolId id{++last_pool_};
  PoolBlocks blocks(event.spec.groups, layouts);
  std::vector<GroupExtents> extents(layouts.begin(), layouts.end());
  Pool& pool = pools_
                   .emplace(id, Pool{id,
                                     tenant,
                                     event.spec,
                                     event.attachment,
                                     std::move(layouts),
                                     std::move(extents),
                                     std::move(blocks),
                                     false,
                                     {},
                                     {}})
                   .first->second;
  for (uint32_t group = 0; group < pool.layouts.size(); ++group)
    for (int64_t index = 0; index < pool.layouts[group].first_extents; ++index)
      create_segment(pool, group, static_cast<uint32_t>(index));
  pool.waiting.push_back({event.request, event.session, true});
  pool_names_.emplace(std::pair(tenant, event.spec.name), id);
  return std::nullopt;
}

void StateMachine::undo_creation(Pool& pool, const Status& status) {
  // Segments that are still being made stay charged until their SegmentCreated, which drops them.
  for (const GroupExtents& extents : pool.extents)
    for (int64_t index = 0; index < extents.size(); ++index) {
      if (extents.at(index).state != ExtentState::kPresent) continue;
      ledger_.give_back(pool.tenant, extents.size_bytes(index));
      effects_.emplace_back(DropSegment{extents.at(index).segment});
    }
  for (const WaitingOpen& open : pool.waiting) reply(open.session, open.request, status, 0);
  pool_names_.erase({pool.tenant, pool.spec.name});
  memory_news_ = true;
  pools_.erase(pool.id);
}

StateMachine::Answer StateMachine::handle(const ClosePool& event) {
  const auto target = find_target(event.session, event.pool, 0, Role::kRead, "close pools");
  if (!target) return target.status();
  Pool& pool = *target->pool;
  for (uint32_t group = 0; group < pool.blocks.num_groups(); ++group)
    if (Status status = pool.blocks.group(group).check_can_leave(event.session); !status.ok())
      return status;
  pool.blocks.end_session(event.session, FenceClass::kFenced, now_us_);
  emit_words(pool);
  pool.sessions.erase(event.session);
  sessions_.at(event.session).pools.erase(pool.id);
  unmap_all(event.session, pool);
  settle_unprovable();
  memory_news_ = true;
  return Done{};
}

StateMachine::Answer StateMachine::handle(const DestroyPool& event) {
  const Result<Session*> session = find_session(event.session, Role::kAdmin, "destroy pools");
  if (!session) return session.status();
  const Result<Pool*> found = find_pool(**session, event.pool);
  if (!found) return found.status();
  Pool& pool = **found;
  if (!pool.created)
    return Status(ErrorCode::kBusy, "pool \"" + pool.spec.name + "\" is still being created");
  int64_t quarantined = 0;
  int64_t awaited = 0;
  for (uint32_t group = 0; group < pool.blocks.num_groups(); ++group) {
    quarantined += pool.blocks.group(group).count(BlockState::kQuarantined);
    awaited += pool.extents[group].count(ExtentState::kAwaited);
  }
  if (!pool.sessions.empty() || quarantined > 0 || awaited > 0)
    return Status(ErrorCode::kBusy,
                  "pool \"" + pool.spec.name + "\" has " + std::to_string(pool.sessions.size()) +
                      " attached sessions, " + std::to_string(quarantined) +
                      " quarantined blocks and " + std::to_string(awaited) + " segments to come");

  // Whoever maps the segments lets go of them first.
  effects_.emplace_back(PoolDestroyed{pool.id});
  for (uint32_t group = 0; group < pool.extents.size(); ++group)
    for (uint32_t index = 0; index < pool.extents[group].size(); ++index) {
      const GroupExtents::Extent& extent = pool.extents[group].at(index);
      if (extent.state != ExtentState::kPresent) continue;
      const Place place{pool.id, group, index};
      const int64_t size_bytes = pool.extents[group].size_bytes(index);
      if (extent.mapped_by.empty()) {
        drop_segment(extent.segment, place, pool.tenant, size_bytes);
      } else {  // by sessions that have ended and may still write: charged until they cannot
        leaving_.emplace(extent.segment,
                         LeavingSegment{place, pool.tenant, size_bytes, extent.mapped_by});
      }
    }
  pool_names_.erase({pool.tenant, pool.spec.name});
  pools_.erase(event.pool);
  memory_news_ = true;  // a resize that waits is told that the pool is gone
  return Done{};
}

}  // namespace larder
