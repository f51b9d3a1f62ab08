// The state machine's handlers of pools and their segments.
#include <utility>

#include "allocator/pool_spec.h"
#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {

StateMachine::Answer StateMachine::handle(const OpenPool& event) {
  const Result<Session*> session = find_session(event.session, Role::kRead, "open pools");
  if (!session) return session.status();
  const std::string& tenant = (*session)->tenant;
  if (!config_.salts.contains(tenant))
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
  if (pool.creating()) {
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

StateMachine::Answer StateMachine::create_pool(const OpenPool& event, const std::string& tenant) {
  Pool pool{PoolId{last_pool_ + 1}, tenant, event.spec, {}, {}, {}, {}, {}, {}};
  for (const GroupSpec& group : event.spec.groups) {
    Result<GroupLayout> layout =
        lay_out_group(group.block_bytes, group.num_blocks, group.one_segment);
    if (!layout) return layout.status();
    pool.layouts.push_back(std::move(*layout));
    pool.block_pools.emplace_back(group.num_blocks, group.reserve_block_zero);
  }
  if (pools_.size() >= config_.max_pools)
    return Status(ErrorCode::kResourceExhausted, "there are " + std::to_string(pools_.size()) +
                                                     " pools, at most " +
                                                     std::to_string(config_.max_pools) + " can be");
  const int64_t requested_bytes = pool.physical_bytes();
  const int64_t available_bytes = config_.memory_bytes - physical_bytes_;
  if (requested_bytes > available_bytes)
    return Status(ErrorCode::kResourceExhausted,
                  "the pool needs " + std::to_string(requested_bytes) + " bytes, available " +
                      std::to_string(available_bytes) + " of " +
                      std::to_string(config_.memory_bytes));

  ++last_pool_;
  physical_bytes_ += requested_bytes;
  for (uint32_t group = 0; group < pool.layouts.size(); ++group) {
    const std::vector<int64_t>& sizes = pool.layouts[group].segment_bytes;
    for (uint32_t index = 0; index < sizes.size(); ++index) {
      const SegmentId segment{++last_segment_};
      pool.segments.push_back(segment);
      pool.awaited.insert(segment);
      awaited_.emplace(segment, AwaitedSegment{pool.id, sizes[index]});
      effects_.emplace_back(CreateSegment{segment, pool.id, group, index, sizes[index]});
    }
  }
  pool.waiting.push_back({event.request, event.session, true});
  pool_names_.emplace(std::pair(tenant, event.spec.name), pool.id);
  pools_.emplace(pool.id, std::move(pool));
  return std::nullopt;
}

void StateMachine::handle(const SegmentCreated& event) {
  const auto awaited = awaited_.find(event.segment);
  if (awaited == awaited_.end()) return;
  const AwaitedSegment segment = awaited->second;
  awaited_.erase(awaited);
  const auto pool = pools_.find(segment.pool);
  if (pool == pools_.end()) {  // the creation was undone while this segment was being made
    physical_bytes_ -= segment.size_bytes;
    if (event.status.ok()) effects_.emplace_back(DropSegment{event.segment});
    return;
  }
  pool->second.awaited.erase(event.segment);
  if (!event.status.ok()) {
    undo_creation(pool->second, event.segment, event.status);
  } else if (!pool->second.creating()) {
    finish_creation(pool->second);
  }
}

void StateMachine::finish_creation(Pool& pool) {
  effects_.emplace_back(PoolCreated{pool.id});
  for (const WaitingOpen& open : std::exchange(pool.waiting, {}))
    effects_.emplace_back(Reply{open.request, attach(pool, open.session, open.created)});
}

void StateMachine::undo_creation(Pool& pool, SegmentId failed, const Status& status) {
  // Segments that are still being made stay charged until their SegmentCreated, which drops them.
  int64_t awaited_bytes = 0;
  for (SegmentId segment : pool.awaited) awaited_bytes += awaited_.at(segment).size_bytes;
  physical_bytes_ -= pool.physical_bytes() - awaited_bytes;
  for (SegmentId segment : pool.segments)
    if (segment != failed && !pool.awaited.contains(segment))
      effects_.emplace_back(DropSegment{segment});
  for (const WaitingOpen& open : pool.waiting) effects_.emplace_back(Reply{open.request, status});
  pool_names_.erase({pool.tenant, pool.spec.name});
  pools_.erase(pool.id);
}

StateMachine::Answer StateMachine::handle(const ClosePool& event) {
  const auto target = find_target(event.session, event.pool, 0, Role::kRead, "close pools");
  if (!target) return target.status();
  Pool& pool = *target->pool;
  for (const BlockPool& blocks : pool.block_pools)
    if (Status status = blocks.check_can_leave(event.session); !status.ok()) return status;
  for (BlockPool& blocks : pool.block_pools) {
    const auto waiting = blocks.end_session(event.session, true, now_us_);
    LARDER_CHECK(waiting.empty(), waiting.size());
  }
  emit_words(pool);
  pool.sessions.erase(event.session);
  sessions_.at(event.session).pools.erase(pool.id);
  return Done{};
}

StateMachine::Answer StateMachine::handle(const DestroyPool& event) {
  const Result<Session*> session = find_session(event.session, Role::kAdmin, "destroy pools");
  if (!session) return session.status();
  const Result<Pool*> found = find_pool(**session, event.pool);
  if (!found) return found.status();
  const Pool& pool = **found;
  if (pool.creating())
    return Status(ErrorCode::kBusy, "pool \"" + pool.spec.name + "\" is still being created: " +
                                        std::to_string(pool.awaited.size()) +
                                        " segments are to come");
  int64_t quarantined = 0;
  for (const BlockPool& blocks : pool.block_pools)
    quarantined += blocks.count(BlockState::kQuarantined);
  if (!pool.sessions.empty() || quarantined > 0)
    return Status(ErrorCode::kBusy, "pool \"" + pool.spec.name + "\" has " +
                                        std::to_string(pool.sessions.size()) +
                                        " attached sessions and " + std::to_string(quarantined) +
                                        " quarantined blocks");

  // Whoever maps the segments lets go of them first.
  effects_.emplace_back(PoolDestroyed{pool.id});
  for (SegmentId segment : pool.segments) effects_.emplace_back(DropSegment{segment});
  physical_bytes_ -= pool.physical_bytes();
  pool_names_.erase({pool.tenant, pool.spec.name});
  pools_.erase(event.pool);
  return Done{};
}

}  // namespace larder
