// The state machine's handlers of memory: segments made, mapped, unmapped and dropped.
//
// An extent of a group is absent -> awaited -> present -> leaving -> absent. It leaves when it has
// been emptied, and is gone when the last session has unmapped it; until then its bytes stay
// charged to the tenant and its place in the group's address range stays taken.
#include <algorithm>
#include <utility>

#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {

void StateMachine::create_segment(Pool& pool, uint32_t group, uint32_t index) {
  const SegmentId segment{++last_segment_};
  const int64_t size_bytes = pool.extents[group].size_bytes(index);
  pool.extents[group].set(index, ExtentState::kAwaited, segment);
  ledger_.take(pool.tenant, size_bytes);
  awaited_.emplace(segment, AwaitedSegment{{pool.id, group, index}, pool.tenant, size_bytes});
  effects_.emplace_back(CreateSegment{segment, pool.id, group, index, size_bytes});
}

void StateMachine::handle(const SegmentCreated& event) {
  const auto node = awaited_.extract(event.segment);
  if (node.empty()) {
    changed_ = false;
    return;
  }
  const AwaitedSegment& awaited = node.mapped();
  const Place& place = awaited.place;
  const auto pool = pools_.find(place.pool);
  if (pool == pools_.end()) {  // the creation was undone while this segment was being made
    ledger_.give_back(awaited.tenant, awaited.size_bytes);
    if (event.status.ok()) effects_.emplace_back(DropSegment{event.segment});
    memory_news_ = true;
  } else if (event.status.ok()) {
    extent_is_there(pool->second, place, event.segment);
  } else {
    ledger_.give_back(awaited.tenant, awaited.size_bytes);
    pool->second.extents[place.group].set(place.index, ExtentState::kAbsent, SegmentId{0});
    memory_news_ = true;
    if (pool->second.created) {
      failed_growth_.emplace(GroupId{place.pool, place.group}, event.status);
    } else {
      undo_creation(pool->second, event.status);
    }
  }
}

void StateMachine::extent_is_there(Pool& pool, const Place& place, SegmentId segment) {
  pool.extents[place.group].set(place.index, ExtentState::kPresent, segment);
  pool.blocks.group(place.group).add_extent(place.index);
  memory_news_ = true;
  if (pool.created) {
    effects_.emplace_back(ExtentAdded{pool.id, place.group, place.index, segment,
                                      pool.extents[place.group].size_bytes(place.index)});
    return;
  }
  for (const GroupExtents& extents : pool.extents)
    if (extents.count(ExtentState::kAwaited) > 0) return;
  pool.created = true;
  effects_.emplace_back(PoolCreated{pool.id});
  for (const WaitingOpen& open : std::exchange(pool.waiting, {}))
    reply(open.session, open.request, attach(pool, open.session, open.created), 0);
}

// ---------------------------------------------------------------------------------------- mappings

StateMachine::Answer StateMachine::handle(const MapExtents& event) {
  const auto target =
      find_target(event.session, event.pool, event.group, Role::kAppend, "map memory");
  if (!target) return target.status();
  GroupExtents& extents = target->pool->extents[event.group];
  const int64_t num_extents = extents.size();
  if (event.first < 0 || event.count < 1 || event.first > num_extents ||
      event.count > num_extents - event.first)
    return Status(ErrorCode::kInvalidArgument, "segments " + std::to_string(event.first) +
                                                   " and on, count " + std::to_string(event.count) +
                                                   ": the group has " +
                                                   std::to_string(num_extents));
  ExtentsMapped mapped;
  bool any_new = false;
  for (int64_t i = event.first; i < event.first + event.count; ++i) {
    const bool present = extents.at(i).state == ExtentState::kPresent;
    mapped.segments.push_back(present ? extents.at(i).segment : SegmentId{0});
    if (present && extents.add_mapping(i, event.session)) any_new = true;
  }
  changed_ = any_new;
  return mapped;
}

void StateMachine::start_leaving(Pool& pool, uint32_t group, int64_t number) {
  GroupExtents& extents = pool.extents[group];
  if (number < 0 || number >= extents.size() || extents.at(number).state != ExtentState::kPresent)
    throw ReplayError("extent " + std::to_string(number) + " is not there");
  const auto index = static_cast<uint32_t>(number);
  pool.blocks.empty_extent(group, index, choices_);
  pool.blocks.group(group).remove_extent(index);
  emit_words(pool);
  const SegmentId segment = extents.at(index).segment;
  std::set<SessionId> mapped_by = extents.at(index).mapped_by;
  const Place place{pool.id, group, index};
  const int64_t size_bytes = extents.size_bytes(index);
  extents.set(index, ExtentState::kLeaving, segment);
  effects_.emplace_back(ExtentRemoved{pool.id, group, index, segment});
  if (mapped_by.empty()) {
    drop_segment(segment, place, pool.tenant, size_bytes);
    return;
  }
  for (const SessionId session : mapped_by) {
    const auto found = sessions_.find(session);
    if (found != sessions_.end() && !found->second.absent)
      effects_.emplace_back(UnmapSegment{session, pool.id, group, index, segment});
  }
  leaving_.emplace(segment, LeavingSegment{place, pool.tenant, size_bytes, std::move(mapped_by)});
}

void StateMachine::drop_segment(SegmentId segment, const Place& place, const std::string& tenant,
                                int64_t size_bytes) {
  effects_.emplace_back(DropSegment{segment});
  ledger_.give_back(tenant, size_bytes);
  memory_news_ = true;
  const auto pool = pools_.find(place.pool);
  if (pool == pools_.end()) return;
  GroupExtents& extents = pool->second.extents[place.group];
  if (extents.at(place.index).segment == segment)
    extents.set(place.index, ExtentState::kAbsent, SegmentId{0});
}

void StateMachine::handle(const SegmentUnmapped& event) {
  const auto found = leaving_.find(event.segment);
  if (found == leaving_.end() || !found->second.mapped_by.contains(event.session)) {
    changed_ = false;
    return;
  }
  unmapped(event.segment, event.session);
}

void StateMachine::unmapped(SegmentId segment, SessionId session) {
  const auto found = leaving_.find(segment);
  if (found == leaving_.end()) return;
  found->second.mapped_by.erase(session);
  if (!found->second.mapped_by.empty()) return;
  const LeavingSegment gone = std::move(found->second);
  leaving_.erase(found);
  drop_segment(segment, gone.place, gone.tenant, gone.size_bytes);
}

// The session has nothing of the pool mapped any more.
void StateMachine::unmap_all(SessionId session, Pool& pool) {
  const PoolId id = pool.id;
  for (GroupExtents& extents : pool.extents) extents.forget_mappings(session);
  std::vector<SegmentId> mapped;
  for (const auto& [segment, leaving] : leaving_)
    if (leaving.place.pool == id && leaving.mapped_by.contains(session)) mapped.push_back(segment);
  for (const SegmentId segment : mapped) unmapped(segment, session);
}

}  // namespace larder
