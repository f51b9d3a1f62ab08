// What the state machine does when there is not enough: grow, evict, take back, wait, or refuse.
//
// The order is: what is free; growth, while the group may grow and its tenant may take the memory;
// eviction in the group itself; memory taken back (state_machine_reclaim.cpp), for which the
// request waits; refusal. Before anything is taken or evicted it is known that it will suffice.
#include <algorithm>
#include <string>

#include "allocator/state_machine.h"

namespace larder {

struct StateMachine::Plan {
  enum Kind : int64_t { kTake = 0, kWait = 1, kReclaim = 2, kRefuse = 3, kGrow = 4 };
  int64_t kind;               // kGrow + n: by n extents
  int64_t reclaim_bytes = 0;  // of kReclaim
};

// What growing a group could bring for a request.
struct StateMachine::Growth {
  int64_t coming = 0;           // blocks of extents that are being made
  int64_t affordable = 0;       // extents that are needed and that the tenant may take now,
  int64_t affordable_gain = 0;  // and their blocks
  int64_t enough_bytes = 0;     // of so many as suffice together with eviction; 0: none do
};

StateMachine::Growth StateMachine::growth_for(const Pool& pool, uint32_t group,
                                              int64_t total) const {
  const GroupLayout& layout = pool.layouts[group];
  const GroupExtents& extents = pool.extents[group];
  Growth growth;
  if (extents.count(ExtentState::kAwaited) > 0)
    for (int64_t i = 0; i < extents.size(); ++i)
      if (extents.at(i).state == ExtentState::kAwaited) growth.coming += layout.blocks_in(i);
  if (growth_has_failed(pool.id, group)) return growth;
  const int64_t available_bytes = ledger_.available_bytes(pool.tenant);
  const int64_t have = pool.blocks.group(group).count(BlockState::kFree) + growth.coming;
  const int64_t evictable = pool.blocks.evictable(group);
  int64_t gain = 0;
  int64_t bytes = 0;
  for (int64_t i = extents.lowest_absent(); i >= 0 && have + gain < total;
       i = extents.lowest_absent(i + 1)) {
    gain += layout.blocks_in(i);
    bytes += extents.size_bytes(i);
    if (bytes <= available_bytes) {
      ++growth.affordable;
      growth.affordable_gain = gain;
    }
    if (growth.enough_bytes == 0 && have + gain + evictable >= total) growth.enough_bytes = bytes;
    if (bytes > available_bytes && growth.enough_bytes > 0) break;
  }
  return growth;
}

StateMachine::Plan StateMachine::plan_allocation(const Pool& pool, const Allocate& event) const {
  const uint32_t group = event.group;
  const int64_t total = std::max(event.num_blocks, event.total_blocks);
  const int64_t free = pool.blocks.group(group).count(BlockState::kFree);
  if (free >= total) return {Plan::kTake};
  if (total > pool.layouts[group].num_blocks) return {Plan::kRefuse};
  const int64_t evictable = pool.blocks.evictable(group);
  const Growth growth = growth_for(pool, group, total);
  if (growth.coming > 0 && free + growth.coming >= total) return {Plan::kWait};
  if (growth.affordable > 0 && free + growth.coming + growth.affordable_gain + evictable >= total)
    return {Plan::kGrow + growth.affordable};
  if (free + evictable >= total) return {Plan::kTake};
  if (growth.coming > 0 && free + growth.coming + evictable >= total) return {Plan::kWait};
  if (growth.enough_bytes > 0 &&
      can_reclaim(pool.tenant, growth.enough_bytes, GroupId{pool.id, group}))
    return {Plan::kReclaim, growth.enough_bytes};
  return {Plan::kRefuse};
}

Status StateMachine::refuse_allocation(const Pool& pool, const Allocate& event) const {
  const GroupLayout& layout = pool.layouts[event.group];
  const BlockTable& table = pool.blocks.group(event.group);
  const int64_t free = table.count(BlockState::kFree);
  const int64_t evictable = pool.blocks.evictable(event.group);
  std::string text = "requested " + std::to_string(std::max(event.num_blocks, event.total_blocks)) +
                     " blocks, available " + std::to_string(free + evictable) + " (" +
                     std::to_string(free) + " free, " + std::to_string(evictable) +
                     " evictable) of " + std::to_string(table.capacity());
  if (layout.grows())
    text += ", which can grow to " + std::to_string(layout.num_blocks) + " by " +
            std::to_string(layout.extent_bytes) + " bytes at a time, available " +
            std::to_string(ledger_.available_bytes(pool.tenant)) + "; " +
            ledger_.limit_text(pool.tenant);
  if (growth_has_failed(pool.id, event.group))
    text += "; growing failed: " + failed_growth_->second.message();
  return {ErrorCode::kResourceExhausted, text};
}

StateMachine::Answer StateMachine::handle(const Allocate& event) {
  const auto target =
      find_target(event.session, event.pool, event.group, Role::kAppend, "allocate blocks");
  if (!target) return target.status();
  Pool& pool = *target->pool;
  if (event.num_blocks < 1)
    return Status(ErrorCode::kInvalidArgument,
                  "num_blocks is " + std::to_string(event.num_blocks) + ", but must be positive");
  Plan plan{};
  plan.kind = choices_.choose([&] {
    plan = plan_allocation(pool, event);
    return plan.kind;
  });
  if (plan.kind == Plan::kRefuse) return refuse_allocation(pool, event);
  if (plan.kind == Plan::kTake) {
    auto blocks = pool.blocks.take(event.session, event.group, event.num_blocks, choices_);
    emit_words(pool);
    return BlocksAllocated{std::move(blocks)};
  }
  waiting_.emplace_back(event);
  if (plan.kind == Plan::kReclaim) {
    reclaim(pool.tenant, plan.reclaim_bytes, GroupId{pool.id, event.group});
  } else if (plan.kind > Plan::kGrow) {
    grow(pool, event.group, plan.kind - Plan::kGrow);
  }
  return std::nullopt;
}

void StateMachine::grow(Pool& pool, uint32_t group, int64_t extents) {
  for (int64_t i = 0; i < extents; ++i) {
    const int64_t index = choices_.choose([&] { return pool.extents[group].lowest_absent(); });
    if (index < 0 || index >= pool.extents[group].size() ||
        pool.extents[group].at(index).state != ExtentState::kAbsent)
      throw ReplayError("extent " + std::to_string(index) + " is not absent");
    create_segment(pool, group, static_cast<uint32_t>(index));
  }
}

bool StateMachine::growth_has_failed(PoolId pool, uint32_t group) const {
  return failed_growth_ && failed_growth_->first == GroupId{pool, group};
}

}  // namespace larder
