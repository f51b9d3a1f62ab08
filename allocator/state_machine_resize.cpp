// The state machine's handlers of sizes: groups that are grown, shrunk or emptied on request.
#include <algorithm>
#include <string>

#include "allocator/state_machine.h"

namespace larder {

Result<StateMachine::Pool*> StateMachine::find_managed_pool(SessionId session_id, PoolId pool_id,
                                                            std::string_view action) {
  const Result<Session*> session = find_session(session_id, Role::kAppend, action);
  if (!session) return session.status();
  if ((*session)->role == Role::kAdmin) return find_pool(**session, pool_id);
  const Result<Target> target = find_target(session_id, pool_id, 0, Role::kAppend, action);
  if (!target) return target.status();
  return target->pool;
}

StateMachine::Answer StateMachine::handle(const ResizePool& first) {
  const Result<Pool*> found = find_managed_pool(first.session, first.pool, "resize pools");
  if (!found) return found.status();
  Pool& pool = **found;
  if (Status status = check_resize(pool, first); !status.ok()) return status;
  const GroupExtents& extents = pool.extents[first.group];
  const int64_t reserved = pool.spec.groups[first.group].reserve_block_zero ? 1 : 0;
  const int64_t have = pool.blocks.group(first.group).capacity() + reserved;
  ResizePool event = first;
  if (event.blocks_before < 0) {
    event.blocks_before = have - reserved;
    event.bytes_before = extents.physical_bytes();
  }
  // What has begun as growth never shrinks what others have grown meanwhile, nor the reverse.
  const bool growing = event.num_blocks > event.blocks_before + reserved;
  if (growing && have < event.num_blocks && growth_has_failed(pool.id, event.group))
    return failed_growth_->second;
  if (extents.count(ExtentState::kAwaited) > 0) {  // one thing after the other
    waiting_.emplace_back(event);
    return std::nullopt;
  }
  if (growing && have < event.num_blocks) return grow_to(pool, event, event.num_blocks - have);
  if (!growing && have > event.num_blocks) return shrink_to(pool, event);
  return resized(pool, event);
}

Status StateMachine::check_resize(const Pool& pool, const ResizePool& event) const {
  if (event.group >= pool.blocks.num_groups()) return no_such_group(pool, event.group);
  const GroupLayout& layout = pool.layouts[event.group];
  if (!pool.created)
    return {ErrorCode::kBusy, "pool \"" + pool.spec.name + "\" is still being created"};
  if (!layout.grows())
    return {ErrorCode::kUnsupported,
            "pool \"" + pool.spec.name + "\" has a fixed size of " +
                std::to_string(layout.num_blocks) +
                " blocks: one grows whose max_blocks, stated when it is created, takes more "
                "segments than its num_blocks"};
  if (event.num_blocks < 0 || event.num_blocks > layout.num_blocks)
    return {ErrorCode::kInvalidArgument, "num_blocks is " + std::to_string(event.num_blocks) +
                                             ", but must be 0 to " +
                                             std::to_string(layout.num_blocks)};
  if (event.blocks_before < -1 || event.blocks_before > layout.num_blocks)
    return {ErrorCode::kInvalidArgument, "blocks_before is " + std::to_string(event.blocks_before)};
  return {};
}

ReplyBody StateMachine::resized(const Pool& pool, const ResizePool& event) const {
  return Resized{event.blocks_before, pool.blocks.group(event.group).capacity(), event.bytes_before,
                 pool.extents[event.group].physical_bytes()};
}

StateMachine::Answer StateMachine::grow_to(Pool& pool, const ResizePool& event, int64_t missing) {
  enum Kind : int64_t { kWait, kReclaim, kRefuse, kGrow };  // kGrow + n: by n extents
  const GroupExtents& extents = pool.extents[event.group];
  int64_t bytes = 0;
  int64_t count = 0;
  for (int64_t i = extents.lowest_absent(); i >= 0 && missing > 0;
       i = extents.lowest_absent(i + 1)) {
    missing -= pool.layouts[event.group].blocks_in(i);
    bytes += extents.size_bytes(i);
    ++count;
  }
  const int64_t kind = choices_.choose([&]() -> int64_t {
    if (missing > 0) return kWait;  // for places that others have still to unmap
    if (bytes <= ledger_.available_bytes(pool.tenant)) return kGrow + count;
    return can_reclaim(pool.tenant, bytes, GroupId{pool.id, event.group}) ? kReclaim : kRefuse;
  });
  if (kind == kRefuse)
    return Status(ErrorCode::kResourceExhausted,
                  "requested " + std::to_string(bytes) + " bytes for " +
                      std::to_string(event.num_blocks) + " blocks, available " +
                      std::to_string(ledger_.available_bytes(pool.tenant)) +
                      ", evictable too few; " + ledger_.limit_text(pool.tenant));
  waiting_.emplace_back(event);
  if (kind > kGrow) grow(pool, event.group, kind - kGrow);
  if (kind == kReclaim) reclaim(pool.tenant, bytes, GroupId{pool.id, event.group});
  return std::nullopt;
}

// Which extents go: as many whole ones as are too many, the cheapest first, and the shorter last
// one where it is too many as well. `needed` is how many would have to go.
std::vector<int64_t> StateMachine::extents_to_shrink(const Pool& pool, const ResizePool& event,
                                                     int64_t& needed) const {
  const GroupLayout& layout = pool.layouts[event.group];
  const bool reserved = pool.spec.groups[event.group].reserve_block_zero;
  const int64_t last = layout.num_extents() - 1;
  const bool has_short = layout.blocks_in(last) < layout.blocks_per_extent &&
                         pool.extents[event.group].at(last).state == ExtentState::kPresent;
  // The extent of a reserved block stays.
  const int64_t target = std::max(event.num_blocks, reserved ? layout.blocks_in(0) : 0);
  const int64_t have = pool.blocks.group(event.group).capacity() + (reserved ? 1 : 0);
  const int64_t excess = std::max<int64_t>(have - target, 0);
  const int64_t whole = pool.extents[event.group].count(ExtentState::kPresent) -
                        (has_short ? 1 : 0) - (reserved ? 1 : 0);
  const int64_t num_whole = std::min(excess / layout.blocks_per_extent, whole);
  const bool with_short =
      has_short && layout.blocks_in(last) <= excess - num_whole * layout.blocks_per_extent;
  needed = num_whole + (with_short ? 1 : 0);

  auto emptyable = emptyable_extents(pool, event.group);
  // The cheapest first; of equal ones the last, because blocks are handed out from the front.
  std::sort(emptyable.begin(), emptyable.end(), [](const auto& a, const auto& b) {
    return a.first != b.first ? a.first < b.first : a.second > b.second;
  });
  std::vector<int64_t> going;
  int64_t num_going = 0;
  for (const auto& [cost, index] : emptyable) {
    const bool is_short = has_short && index == last;
    if (is_short ? !with_short : num_going == num_whole) continue;
    if (!is_short) ++num_going;
    going.push_back(index);
  }
  return going;
}

StateMachine::Answer StateMachine::shrink_to(Pool& pool, const ResizePool& event) {
  int64_t needed = 0;
  std::vector<int64_t> going;
  if (!choices_.replaying()) {
    going = extents_to_shrink(pool, event, needed);
    if (std::ssize(going) < needed) {
      const BlockTable& table = pool.blocks.group(event.group);
      return Status(ErrorCode::kBusy,
                    "num_blocks is " + std::to_string(event.num_blocks) + ": " +
                        std::to_string(needed) + " extents would have to go, but only " +
                        std::to_string(going.size()) + " of them can be emptied; of " +
                        std::to_string(table.capacity()) + " blocks " +
                        std::to_string(table.count(BlockState::kOpen)) + " are open, " +
                        std::to_string(table.count(BlockState::kPublished)) + " held and " +
                        std::to_string(table.count(BlockState::kQuarantined)) + " quarantined");
    }
  }
  const int64_t count = choices_.choose([&] { return std::ssize(going); });
  for (int64_t i = 0; i < count; ++i)
    start_leaving(pool, event.group,
                  choices_.choose([&] { return going[static_cast<size_t>(i)]; }));
  return resized(pool, event);
}

StateMachine::Answer StateMachine::handle(const EvictBlocks& event) {
  const Result<Pool*> found = find_managed_pool(event.session, event.pool, "evict prefixes");
  if (!found) return found.status();
  if (event.num_blocks < 0)
    return Status(ErrorCode::kInvalidArgument, "num_blocks is " + std::to_string(event.num_blocks) +
                                                   ", but must not be negative");
  Pool& pool = **found;
  const auto cached = [&] {
    int64_t sum = 0;
    for (uint32_t group = 0; group < pool.blocks.num_groups(); ++group)
      sum += pool.blocks.group(group).count(BlockState::kCached);
    return sum;
  };
  int64_t bytes = 0;
  for (const GroupExtents& extents : pool.extents) bytes += extents.physical_bytes();
  const int64_t before = cached();
  while (before - cached() < event.num_blocks)
    if (pool.blocks.evict_units(1, choices_) == 0) break;
  emit_words(pool);
  changed_ = cached() < before;
  memory_news_ = changed_;
  return Resized{before, cached(), bytes, bytes};
}

}  // namespace larder
