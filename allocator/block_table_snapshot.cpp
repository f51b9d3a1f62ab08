// A block table as bytes, and the recount that proves its running figures.
#include <algorithm>

#include "allocator/block_table.h"
#include "allocator/byte_codec.h"
#include "allocator/consistency.h"
#include "larder/check.h"

namespace larder {
namespace {

// What of a block does not follow from anything else.
struct SavedBlock {
  uint64_t owner;
  uint32_t generation;
  uint16_t state;
  uint16_t fence;
};
static_assert(sizeof(SavedBlock) == 16);

struct SavedHold {
  int64_t holds;
  int64_t block;
};
// So many that no sum of them overflows.
constexpr int64_t kMaxSavedHolds = int64_t{1} << 32;

}  // namespace

void BlockTable::save(ByteWriter& out) const {
  out.put_list(present_);
  out.put_list(ever_used_);
  std::vector<SavedBlock> blocks;
  blocks.reserve(blocks_.size());
  for (const Block& at : blocks_)
    blocks.push_back({value(at.owner), at.generation, static_cast<uint16_t>(at.state),
                      static_cast<uint16_t>(at.fence)});
  out.put_list(blocks);
  const std::vector<SessionId> sessions = holders();
  out.put_list(sessions);
  for (const SessionId session : sessions) {
    std::vector<SavedHold> holds;
    for (const int32_t id : held_by(session)) holds.push_back({holding(session, id)->holds, id});
    out.put_list(holds);
  }
}

bool BlockTable::load(ByteReader& in) {
  const std::vector<char> present = in.get_list<char>();
  const std::vector<int32_t> ever_used = in.get_list<int32_t>();
  const std::vector<SavedBlock> blocks = in.get_list<SavedBlock>();
  if (in.failed() || present.size() != present_.size() || ever_used.size() != present.size() ||
      std::ssize(blocks) > layout_.num_blocks)
    return false;
  for (const SavedBlock& saved : blocks) {
    if (saved.state >= kNumBlockStates || saved.fence >= kNumFenceClasses) return false;
    Block& at = blocks_.emplace_back();
    at.owner = SessionId{saved.owner};
    at.generation = saved.generation;
    at.state = static_cast<BlockState>(saved.state);
    at.fence = static_cast<FenceClass>(saved.fence);
    if (at.state == BlockState::kFree) continue;
    ++counts_[saved.state];
    if (at.state == BlockState::kQuarantined) ++fences_[saved.fence];
  }
  for (int64_t extent = 0; extent < std::ssize(present); ++extent) {
    const int32_t used = ever_used[static_cast<size_t>(extent)];
    if (used < 0 || used > layout_.first_block(extent + 1) - begin_of(extent)) return false;
    if (used > 0 && begin_of(extent) + used > std::ssize(blocks)) return false;
    ever_used_[static_cast<size_t>(extent)] = used;
    if (present[static_cast<size_t>(extent)] == 0) continue;
    add_extent(extent);
    for (const int32_t id : used_blocks(extent)) {
      freed_.erase(id);
      --counts_[static_cast<size_t>(BlockState::kFree)];
      ++num_used_[static_cast<size_t>(extent)];
    }
  }
  for (const SessionId session : in.get_list<SessionId>()) {
    Holder& holder = holders_[session];
    for (const SavedHold& saved : in.get_list<SavedHold>()) {
      if (saved.block < 0 || saved.block >= std::ssize(blocks) || saved.holds < 1 ||
          saved.holds > kMaxSavedHolds)
        return false;
      Block& at = blocks_[static_cast<size_t>(saved.block)];
      holder.blocks[static_cast<int32_t>(saved.block)].holds = saved.holds;
      at.holds += saved.holds;
      (at.state == BlockState::kOpen ? holder.open : holder.holds) += saved.holds;
    }
  }
  return !in.failed();
}

void BlockTable::check_consistency(std::span<const int32_t> copies) const {
  std::vector<int64_t> holds(blocks_.size(), 0);
  std::vector<int64_t> pins(blocks_.size(), 0);
  for (const int32_t id : copies) ++pins.at(static_cast<size_t>(id));
  for (const auto& [session, holder] : holders_) {
    int64_t open = 0;
    int64_t published = 0;
    for (const auto& [id, held] : holder.blocks) {
      LARDER_ENSURE(held.holds > 0 || held.copies > 0, id, value(session));
      holds.at(static_cast<size_t>(id)) += held.holds;
      (at(id).state == BlockState::kOpen ? open : published) += held.holds;
      if (at(id).state == BlockState::kOpen) LARDER_ENSURE(at(id).owner == session, id);
    }
    LARDER_ENSURE(open == holder.open, value(session), open, holder.open);
    LARDER_ENSURE(published == holder.holds, value(session), published, holder.holds);
  }

  int64_t capacity = 0;
  std::array<int64_t, kNumBlockStates> counts = {};
  std::array<int64_t, kNumFenceClasses> fences = {};
  for (int64_t extent = 0; extent < std::ssize(present_); ++extent) {
    const auto begin = static_cast<int32_t>(begin_of(extent));
    const auto end = static_cast<int32_t>(layout_.first_block(extent + 1));
    const int32_t used = ever_used_[static_cast<size_t>(extent)];
    LARDER_ENSURE(used <= end - begin, extent, used);
    LARDER_ENSURE(std::ssize(used_blocks(extent)) == num_used(extent), extent, num_used(extent));
    if (has_extent(extent)) {
      capacity += end - begin;
      counts[static_cast<size_t>(BlockState::kFree)] += end - begin - used;
    }
    for (int32_t id = begin; id < begin + used; ++id) {
      const Block& block = at(id);
      const bool is_free = block.state == BlockState::kFree;
      const bool keyed =
          block.state == BlockState::kPublished || block.state == BlockState::kCached;
      const bool held = block.state == BlockState::kPublished || block.state == BlockState::kOpen;
      LARDER_ENSURE(has_extent(extent) || is_free, id, extent);
      LARDER_ENSURE(freed_.contains(id) == (is_free && has_extent(extent)), id, extent);
      if (has_extent(extent)) ++counts[static_cast<size_t>(block.state)];
      if (block.state == BlockState::kQuarantined) ++fences[static_cast<size_t>(block.fence)];
      const auto index = static_cast<size_t>(id);
      LARDER_ENSURE(block.holds == holds[index], id, block.holds, holds[index]);
      LARDER_ENSURE(block.copies == pins[index], id, block.copies, pins[index]);
      LARDER_ENSURE(held == (block.holds > 0), id, block_state_name(block.state), block.holds);
      LARDER_ENSURE(keyed == (block.unit != kNone), id, block_state_name(block.state), block.unit);
      LARDER_ENSURE(block.state != BlockState::kOpen || block.holds == 1, id, block.holds);
      LARDER_ENSURE(!is_free || block.copies == 0, id, block.copies);
      LARDER_ENSURE(block.state != BlockState::kQuarantined || block.fence != FenceClass::kFenced ||
                        block.copies > 0,
                    id);
    }
  }
  for (int32_t id = 0; id < used_limit(); ++id) {
    const int64_t extent = layout_.extent_of(id);
    const int64_t used = ever_used_[static_cast<size_t>(extent)];
    if (id >= begin_of(extent) && id < begin_of(extent) + used) continue;
    const auto index = static_cast<size_t>(id);
    LARDER_ENSURE(at(id).state == BlockState::kFree && at(id).unit == kNone, id, extent);
    LARDER_ENSURE(holds[index] == 0 && pins[index] == 0, id, extent);
  }
  LARDER_ENSURE(capacity == capacity_, capacity, capacity_);
  for (size_t i = 0; i < counts.size(); ++i)
    LARDER_ENSURE(counts[i] == counts_[i], i, counts[i], counts_[i]);
  for (size_t i = 0; i < fences.size(); ++i)
    LARDER_ENSURE(fences[i] == fences_[i], i, fences[i], fences_[i]);
}

}  // namespace larder
