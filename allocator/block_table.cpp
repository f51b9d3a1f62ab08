#include "allocator/block_table.h"

#include <algorithm>
#include <string>

#include "larder/check.h"

namespace larder {
namespace {

std::string block_text(int32_t id) { return "block " + std::to_string(id); }

}  // namespace

std::string_view block_state_name(BlockState state) {
  constexpr std::string_view kNames[kNumBlockStates] = {"free", "open", "published", "cached",
                                                        "quarantined"};
  return kNames[static_cast<int>(state)];
}

BlockTable::BlockTable(const GroupLayout& layout, bool reserve_block_zero)
    : layout_(layout),
      first_block_(reserve_block_zero ? 1 : 0),
      present_(layout.segment_bytes.size(), 0),
      ever_used_(layout.segment_bytes.size(), 0),
      num_used_(layout.segment_bytes.size(), 0) {}

// ---------------------------------------------------------------------------------------- extents

int64_t BlockTable::begin_of(int64_t extent) const {
  return std::max<int64_t>(layout_.first_block(extent), first_block_);
}

void BlockTable::add_extent(int64_t extent) {
  LARDER_CHECK(!has_extent(extent), extent);
  present_[static_cast<size_t>(extent)] = 1;
  const int64_t begin = begin_of(extent);
  const int64_t num_blocks = layout_.first_block(extent + 1) - begin;
  capacity_ += num_blocks;
  counts_[static_cast<size_t>(BlockState::kFree)] += num_blocks;
  const int32_t used = ever_used_[static_cast<size_t>(extent)];
  for (int32_t i = 0; i < used; ++i) freed_.insert(static_cast<int32_t>(begin) + i);
  if (used < num_blocks) fresh_extents_.insert(static_cast<int32_t>(extent));
}

void BlockTable::remove_extent(int64_t extent) {
  LARDER_CHECK(has_extent(extent) && num_used(extent) == 0, extent, num_used(extent));
  present_[static_cast<size_t>(extent)] = 0;
  const int64_t begin = begin_of(extent);
  const int64_t num_blocks = layout_.first_block(extent + 1) - begin;
  capacity_ -= num_blocks;
  counts_[static_cast<size_t>(BlockState::kFree)] -= num_blocks;
  const int32_t used = ever_used_[static_cast<size_t>(extent)];
  for (int32_t i = 0; i < used; ++i) freed_.erase(static_cast<int32_t>(begin) + i);
  fresh_extents_.erase(static_cast<int32_t>(extent));
}

std::vector<int32_t> BlockTable::used_blocks(int64_t extent) const {
  std::vector<int32_t> used;
  const auto begin = static_cast<int32_t>(begin_of(extent));
  for (int32_t id = begin; id < begin + ever_used_[static_cast<size_t>(extent)]; ++id)
    if (at(id).state != BlockState::kFree) used.push_back(id);
  return used;
}

int32_t BlockTable::lowest_free() const {
  const int32_t freed = freed_.lowest();
  const int32_t extent = fresh_extents_.lowest();
  if (extent == FreeSet::kNone) return freed;
  const auto fresh =
      static_cast<int32_t>(begin_of(extent)) + ever_used_[static_cast<size_t>(extent)];
  return freed == FreeSet::kNone ? fresh : std::min(freed, fresh);
}

// ----------------------------------------------------------------------------------- what is asked

const BlockTable::Block& BlockTable::at(int32_t id) const {
  static const Block kNeverUsed;
  LARDER_CHECK(id >= 0 && id < layout_.num_blocks, id, layout_.num_blocks);
  return static_cast<size_t>(id) < blocks_.size() ? blocks_[id] : kNeverUsed;
}

BlockTable::Block& BlockTable::block(int32_t id) {
  LARDER_CHECK(id >= 0 && static_cast<size_t>(id) < blocks_.size(), id, blocks_.size());
  return blocks_[id];
}

const BlockTable::Holding* BlockTable::holding(SessionId session, int32_t id) const {
  const auto holder = holders_.find(session);
  if (holder == holders_.end()) return nullptr;
  const auto held = holder->second.blocks.find(id);
  return held == holder->second.blocks.end() ? nullptr : &held->second;
}

Status BlockTable::check_held(SessionId session, BlockRef ref) const {
  if (ref.id < 0 || ref.id >= layout_.num_blocks)
    return {ErrorCode::kNotFound, block_text(ref.id) + " is outside the group, which has " +
                                      std::to_string(layout_.num_blocks) + " blocks"};
  if (ref.id < first_block_)
    return {ErrorCode::kNotFound, "block 0 is this group's null block and has no holder"};
  const uint32_t generation = at(ref.id).generation;
  if (ref.generation != generation)
    return {ErrorCode::kStaleGeneration,
            block_text(ref.id) + " is at generation " + std::to_string(generation) +
                ", but the request names generation " + std::to_string(ref.generation)};
  if (holding(session, ref.id) == nullptr)
    return {ErrorCode::kNotFound, block_text(ref.id) + " is not held by this session"};
  return {};
}

Status BlockTable::check_can_leave(SessionId session) const {
  const auto found = holders_.find(session);
  if (found == holders_.end()) return {};
  const auto& blocks = found->second.blocks;
  const auto copying = std::count_if(blocks.begin(), blocks.end(),
                                     [](const auto& held) { return held.second.copies > 0; });
  if (copying == 0) return {};
  return {ErrorCode::kBusy,
          std::to_string(copying) + " blocks of this session are in copies that have not ended"};
}

std::vector<int32_t> BlockTable::held_by(SessionId session) const {
  std::vector<int32_t> ids;
  const auto found = holders_.find(session);
  if (found == holders_.end()) return ids;
  for (const auto& [id, held] : found->second.blocks) ids.push_back(id);
  std::sort(ids.begin(), ids.end());  // the order of a hash table must not be seen
  return ids;
}

std::vector<SessionId> BlockTable::holders() const {
  std::vector<SessionId> sessions;
  for (const auto& [session, holder] : holders_)
    if (!holder.blocks.empty()) sessions.push_back(session);
  return sessions;
}

// ----------------------------------------------------------------------------------------- changes

void BlockTable::set_state(int32_t id, BlockState state, SessionId owner) {
  const uint64_t word_before = word(id);
  Block& changed = block(id);
  if (changed.state == BlockState::kQuarantined) --fences_[static_cast<size_t>(changed.fence)];
  --counts_[static_cast<size_t>(changed.state)];
  ++counts_[static_cast<size_t>(state)];
  changed.state = state;
  changed.owner = owner;
  changed.fence = FenceClass::kFenced;
  if (const uint64_t now = word(id); now != word_before) changed_words_.push_back({id, now});
}

void BlockTable::open(SessionId session, int32_t id) {
  const int64_t extent = layout_.extent_of(id);
  LARDER_CHECK(at(id).state == BlockState::kFree && has_extent(extent), id, extent);
  int32_t& used = ever_used_[static_cast<size_t>(extent)];
  const auto begin = static_cast<int32_t>(begin_of(extent));
  if (id - begin >= used) {
    // A journal of another build may take blocks in another order: those between are free.
    if (static_cast<size_t>(id) >= blocks_.size()) blocks_.resize(static_cast<size_t>(id) + 1);
    for (; begin + used < id; ++used) freed_.insert(begin + used);
    ++used;
    if (begin + used == layout_.first_block(extent + 1))
      fresh_extents_.erase(static_cast<int32_t>(extent));
  } else {
    freed_.erase(id);
  }
  ++num_used_[static_cast<size_t>(extent)];
  set_state(id, BlockState::kOpen, session);
  block(id).holds = 1;
  Holder& holder = holders_[session];
  holder.blocks[id].holds = 1;
  ++holder.open;
}

void BlockTable::free(int32_t id) {
  Block& freed = block(id);
  LARDER_CHECK(freed.copies == 0, id, freed.copies);
  if (freed.state == BlockState::kOpen) {
    Holder& holder = holders_.at(freed.owner);
    --holder.open;
    holder.blocks.erase(id);
    freed.holds = 0;
  }
  LARDER_CHECK(freed.holds == 0, id, freed.holds);
  set_state(id, BlockState::kFree, SessionId{0});
  --num_used_[static_cast<size_t>(layout_.extent_of(id))];
  freed.unit = kNone;
  if (++freed.generation == 0) freed.generation = 1;
  freed_.insert(id);
}

void BlockTable::publish(int32_t id, int32_t unit) {
  LARDER_CHECK(at(id).state == BlockState::kOpen && at(id).copies == 0, id);
  Holder& holder = holders_.at(at(id).owner);
  --holder.open;
  ++holder.holds;
  set_state(id, BlockState::kPublished, SessionId{0});
  block(id).unit = unit;
}

void BlockTable::add_hold(SessionId session, int32_t id) {
  Holder& holder = holders_[session];
  ++holder.blocks[id].holds;
  ++holder.holds;
  ++block(id).holds;
  if (at(id).state == BlockState::kCached) set_state(id, BlockState::kPublished, SessionId{0});
  LARDER_CHECK(at(id).state == BlockState::kPublished, id, block_state_name(at(id).state));
}

void BlockTable::erase_if_unheld(Holder& holder, int32_t id) {
  const auto held = holder.blocks.find(id);
  if (held->second.holds == 0 && held->second.copies == 0) holder.blocks.erase(held);
}

void BlockTable::drop_holds(SessionId session, int32_t id, int64_t holds) {
  Block& dropped = block(id);
  Holder& holder = holders_.at(session);
  Holding& held = holder.blocks.at(id);
  LARDER_CHECK(dropped.state == BlockState::kPublished && held.holds >= holds, id, held.holds);
  held.holds -= holds;
  holder.holds -= holds;
  dropped.holds -= holds;
  erase_if_unheld(holder, id);
  if (dropped.holds == 0) set_state(id, BlockState::kCached, SessionId{0});
}

void BlockTable::quarantine(int32_t id, FenceClass fence) {
  Block& kept = block(id);
  LARDER_CHECK(kept.state == BlockState::kOpen, id, block_state_name(kept.state));
  Holder& holder = holders_.at(kept.owner);
  --holder.open;
  holder.blocks.erase(id);
  kept.holds = 0;
  set_state(id, BlockState::kQuarantined, kept.owner);
  kept.fence = fence;
  ++fences_[static_cast<size_t>(fence)];
}

void BlockTable::set_fence(int32_t id, FenceClass fence) {
  Block& kept = block(id);
  LARDER_CHECK(kept.state == BlockState::kQuarantined, id, block_state_name(kept.state));
  --fences_[static_cast<size_t>(kept.fence)];
  kept.fence = fence;
  ++fences_[static_cast<size_t>(fence)];
}

void BlockTable::pin(SessionId session, int32_t id, bool is_target) {
  ++block(id).copies;
  if (is_target) block(id).copy_target = true;
  // A copy that is taken up again after a restart may be of a session that has ended.
  const auto holder = holders_.find(session);
  if (holder == holders_.end()) return;
  const auto held = holder->second.blocks.find(id);
  if (held != holder->second.blocks.end()) ++held->second.copies;
}

void BlockTable::unpin(SessionId session, int32_t id, bool is_target) {
  Block& pinned = block(id);
  LARDER_CHECK(pinned.copies > 0, id);
  --pinned.copies;
  if (is_target) pinned.copy_target = false;
  // A session that has ended holds nothing any more.
  const auto holder = holders_.find(session);
  if (holder == holders_.end()) return;
  const auto held = holder->second.blocks.find(id);
  if (held == holder->second.blocks.end()) return;
  --held->second.copies;
  erase_if_unheld(holder->second, id);
}

// ----------------------------------------------------------------------------------------- figures

int64_t BlockTable::open_blocks(SessionId session) const {
  const auto found = holders_.find(session);
  return found == holders_.end() ? 0 : found->second.open;
}

int64_t BlockTable::holds(SessionId session) const {
  const auto found = holders_.find(session);
  return found == holders_.end() ? 0 : found->second.holds;
}

uint64_t BlockTable::word(int32_t id) const {
  switch (at(id).state) {
    case BlockState::kOpen:
      return owner_word(OwnerState::kOpen, at(id).owner);
    case BlockState::kPublished:
    case BlockState::kCached:
      return owner_word(OwnerState::kPublished);
    case BlockState::kFree:
    case BlockState::kQuarantined:
      break;
  }
  return owner_word(OwnerState::kNone);
}

std::vector<uint64_t> BlockTable::words() const {
  std::vector<uint64_t> words(static_cast<size_t>(layout_.num_blocks),
                              owner_word(OwnerState::kNone));
  for (int32_t id = 0; id < used_limit(); ++id) words[id] = word(id);
  return words;
}

}  // namespace larder
