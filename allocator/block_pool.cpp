#include "allocator/block_pool.h"

#include <algorithm>
#include <string>

#include "larder/check.h"

namespace larder {
namespace {

std::string block_text(int32_t id) { return "block " + std::to_string(id); }

// A block that is listed twice, or kNoBlock.
int32_t find_repeated(std::vector<int32_t> ids) {
  std::sort(ids.begin(), ids.end());
  const auto repeated = std::adjacent_find(ids.begin(), ids.end());
  return repeated == ids.end() ? PrefixIndex::kNoBlock : *repeated;
}

std::vector<int32_t> ids_of(std::span<const BlockRef> blocks) {
  std::vector<int32_t> ids;
  ids.reserve(blocks.size());
  for (const BlockRef& block : blocks) ids.push_back(block.id);
  return ids;
}

Status busy(int32_t id) {
  return {ErrorCode::kBusy, block_text(id) + " is in a copy that has not ended"};
}

}  // namespace

std::string_view block_state_name(BlockState state) {
  constexpr std::string_view kNames[kNumBlockStates] = {"free", "open", "published", "cached",
                                                        "quarantined"};
  return kNames[static_cast<int>(state)];
}

BlockPool::BlockPool(int64_t num_blocks, bool reserve_block_zero)
    : num_blocks_(num_blocks), first_block_(reserve_block_zero ? 1 : 0) {
  LARDER_CHECK(capacity() > 0, num_blocks, reserve_block_zero);
  blocks_.resize(first_block_);
  counts_[static_cast<int>(BlockState::kFree)] = capacity();
}

// ------------------------------------------------------------------------- allocate and release

Result<std::vector<BlockRef>> BlockPool::allocate(SessionId session, int64_t num_blocks,
                                                  int64_t total_blocks) {
  if (num_blocks < 1)
    return Status(ErrorCode::kInvalidArgument,
                  "num_blocks is " + std::to_string(num_blocks) + ", but must be positive");
  const int64_t free = count(BlockState::kFree);
  const int64_t evictable = index_.num_evictable();
  if (total_blocks > free + evictable)
    return Status(ErrorCode::kResourceExhausted,
                  "requested " + std::to_string(total_blocks) + " blocks, available " +
                      std::to_string(free + evictable) + " (" + std::to_string(free) + " free, " +
                      std::to_string(evictable) + " evictable) of " + std::to_string(capacity()));

  while (count(BlockState::kFree) < num_blocks) {
    free_block(index_.evict());
    ++evicted_total_;
  }
  std::vector<BlockRef> allocated;
  allocated.reserve(static_cast<size_t>(num_blocks));
  Holder& holder = holders_[session];
  for (int64_t i = 0; i < num_blocks; ++i) {
    const int32_t id = take_free();
    set_state(id, BlockState::kOpen, session);
    blocks_[id].holds = 1;
    holder.blocks[id].holds = 1;
    allocated.push_back({id, blocks_[id].generation});
  }
  holder.open += num_blocks;
  allocated_total_ += static_cast<uint64_t>(num_blocks);
  return allocated;
}

Status BlockPool::release(SessionId session, std::span<const BlockRef> blocks, int64_t now_us) {
  std::map<int32_t, int64_t> named;
  for (const BlockRef& block : blocks) {
    if (Status status = check_held(session, block); !status.ok()) return status;
    const Holding& held = *holding(session, block.id);
    if (held.copies > 0) return busy(block.id);
    if (++named[block.id] > held.holds)
      return {ErrorCode::kNotFound,
              block_text(block.id) + " is named " + std::to_string(named[block.id]) +
                  " times, but this session has " + std::to_string(held.holds) + " holds on it"};
  }
  for (const auto& [id, holds] : named) {
    Holder& holder = holders_.at(session);
    if (at(id).state == BlockState::kOpen) {
      holder.open -= 1;
      free_block(id);
    } else {
      holder.holds -= holds;
      drop_holds(id, holds, now_us);
    }
    const auto held = holder.blocks.find(id);
    held->second.holds -= holds;
    if (held->second.holds == 0) holder.blocks.erase(held);
  }
  return {};
}

// ----------------------------------------------------------------------------- publish and hold

Status BlockPool::check_publish(SessionId session, BlockKey key, BlockRef block) const {
  if (Status status = check_held(session, block); !status.ok()) return status;
  if (at(block.id).state == BlockState::kOpen)
    return at(block.id).copies > 0 ? busy(block.id) : Status();
  if (index_.key(block.id) == key) return {};
  return {ErrorCode::kInvalidArgument,
          block_text(block.id) + " is published already, under the key of another prefix"};
}

Result<std::vector<BlockRef>> BlockPool::publish(SessionId session, int32_t parent,
                                                 std::span<const BlockKey> keys,
                                                 std::span<const BlockRef> blocks, int64_t now_us) {
  LARDER_CHECK(keys.size() == blocks.size(), keys.size(), blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i)
    if (Status status = check_publish(session, keys[i], blocks[i]); !status.ok()) return status;
  if (const int32_t id = find_repeated(ids_of(blocks)); id != PrefixIndex::kNoBlock)
    return Status(ErrorCode::kInvalidArgument, block_text(id) + " is named twice");

  std::vector<BlockRef> serving;
  serving.reserve(blocks.size());
  for (size_t i = 0; i < blocks.size(); ++i) {
    int32_t id = index_.find(keys[i]);
    if (id == PrefixIndex::kNoBlock) {
      id = blocks[i].id;
      publish_block(session, id, keys[i], parent, now_us);
    } else if (id == blocks[i].id) {
      index_.touch(id, now_us);
    } else {
      add_hold(session, id, now_us);
    }
    serving.push_back({id, at(id).generation});
    parent = id;
  }
  return serving;
}

void BlockPool::publish_block(SessionId session, int32_t id, const BlockKey& key, int32_t parent,
                              int64_t now_us) {
  set_state(id, BlockState::kPublished);
  index_.insert(id, key, parent, now_us);
  // The writer's hold on the open block becomes one on the published block.
  Holder& holder = holders_.at(session);
  holder.open -= 1;
  holder.holds += 1;
  ++published_total_;
}

BlockRef BlockPool::find(const BlockKey& key) const {
  const int32_t id = index_.find(key);
  return id == PrefixIndex::kNoBlock ? BlockRef{} : BlockRef{id, at(id).generation};
}

void BlockPool::hold(SessionId session, std::span<const BlockRef> blocks, int64_t now_us) {
  for (const BlockRef& block : blocks) add_hold(session, block.id, now_us);
}

void BlockPool::touch(std::span<const BlockRef> blocks, int64_t now_us) {
  for (const BlockRef& block : blocks) index_.touch(block.id, now_us);
}

// ---------------------------------------------------------------------------------------- copies

Status BlockPool::check_copy_target(SessionId session, BlockRef block) const {
  if (Status status = check_held(session, block); !status.ok()) return status;
  if (at(block.id).state != BlockState::kOpen)
    return {ErrorCode::kInvalidArgument,
            "to: " + block_text(block.id) + " is published, but only open blocks can be written"};
  return at(block.id).copies > 0 ? busy(block.id) : Status();
}

Status BlockPool::begin_copy(SessionId session, std::span<const BlockRef> from,
                             std::span<const BlockRef> to) {
  if (from.size() != to.size())
    return {ErrorCode::kInvalidArgument, "from names " + std::to_string(from.size()) +
                                             " blocks and to names " + std::to_string(to.size())};
  for (const BlockRef& block : from) {
    if (Status status = check_held(session, block); !status.ok()) return status;
    if (at(block.id).copy_target) return busy(block.id);
  }
  for (const BlockRef& block : to)
    if (Status status = check_copy_target(session, block); !status.ok()) return status;
  std::vector<int32_t> from_ids = ids_of(from);
  std::vector<int32_t> to_ids = ids_of(to);
  if (const int32_t id = find_repeated(to_ids); id != PrefixIndex::kNoBlock)
    return {ErrorCode::kInvalidArgument, "to: " + block_text(id) + " is named twice"};
  std::sort(from_ids.begin(), from_ids.end());
  for (int32_t id : to_ids)
    if (std::binary_search(from_ids.begin(), from_ids.end(), id))
      return {ErrorCode::kInvalidArgument, block_text(id) + " is in both from and to"};

  Holder& holder = holders_[session];
  for (const std::vector<int32_t>& ids : {from_ids, to_ids}) {
    for (int32_t id : ids) {
      ++blocks_[id].copies;
      ++holder.blocks.at(id).copies;
    }
  }
  for (int32_t id : to_ids) blocks_[id].copy_target = true;
  return {};
}

void BlockPool::end_copy(SessionId session, std::span<const int32_t> from,
                         std::span<const int32_t> to) {
  const auto found = holders_.find(session);
  Holder* const holder = found == holders_.end() ? nullptr : &found->second;
  for (int32_t id : from) unpin(id, holder);
  for (int32_t id : to) {
    blocks_[id].copy_target = false;
    unpin(id, holder);
  }
}

void BlockPool::unpin(int32_t id, Holder* holder) {
  Block& block = blocks_[id];
  LARDER_CHECK(block.copies > 0, id);
  --block.copies;
  if (holder != nullptr) --holder->blocks.at(id).copies;
  if (block.copies > 0) return;
  if (block.state == BlockState::kCached) index_.set_in_use(id, false);
  if (block.state == BlockState::kQuarantined && block.fenced) free_block(id);
}

// -------------------------------------------------------------------------------- end of sessions

Status BlockPool::check_can_leave(SessionId session) const {
  const auto found = holders_.find(session);
  if (found == holders_.end()) return {};
  const auto& blocks = found->second.blocks;
  const auto copying = std::count_if(blocks.begin(), blocks.end(),
                                     [](const auto& held) { return held.second.copies > 0; });
  if (copying == 0) return {};
  return {ErrorCode::kBusy,
          std::to_string(copying) + " blocks of this session are in copies that have not ended"};
}

std::vector<int32_t> BlockPool::end_session(SessionId session, bool fenced, int64_t now_us) {
  std::vector<int32_t> waiting;
  const auto found = holders_.find(session);
  if (found == holders_.end()) return waiting;
  for (const auto& [id, held] : found->second.blocks) {
    if (at(id).state != BlockState::kOpen) {
      drop_holds(id, held.holds, now_us);
      continue;
    }
    if (fenced && at(id).copies == 0) {
      free_block(id);
      continue;
    }
    set_state(id, BlockState::kQuarantined);
    blocks_[id].holds = 0;
    blocks_[id].fenced = fenced;
    if (!fenced) waiting.push_back(id);
  }
  holders_.erase(found);
  return waiting;
}

void BlockPool::fenced(std::span<const int32_t> blocks) {
  for (int32_t id : blocks) {
    LARDER_CHECK(at(id).state == BlockState::kQuarantined && !at(id).fenced, id);
    blocks_[id].fenced = true;
    if (at(id).copies == 0) free_block(id);
  }
}

// ---------------------------------------------------------------------------------------- figures

int64_t BlockPool::open_blocks(SessionId session) const {
  const auto found = holders_.find(session);
  return found == holders_.end() ? 0 : found->second.open;
}

int64_t BlockPool::holds(SessionId session) const {
  const auto found = holders_.find(session);
  return found == holders_.end() ? 0 : found->second.holds;
}

uint64_t BlockPool::word(int32_t id) const {
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

std::vector<uint64_t> BlockPool::words() const {
  std::vector<uint64_t> words(static_cast<size_t>(num_blocks_), owner_word(OwnerState::kNone));
  for (size_t i = 0; i < blocks_.size(); ++i) words[i] = word(static_cast<int32_t>(i));
  return words;
}

// ---------------------------------------------------------------------------------- small steps

const BlockPool::Block& BlockPool::at(int32_t id) const {
  static const Block kNeverUsed;
  LARDER_CHECK(id >= 0 && id < num_blocks_, id, num_blocks_);
  return static_cast<size_t>(id) < blocks_.size() ? blocks_[id] : kNeverUsed;
}

const BlockPool::Holding* BlockPool::holding(SessionId session, int32_t id) const {
  const auto holder = holders_.find(session);
  if (holder == holders_.end()) return nullptr;
  const auto held = holder->second.blocks.find(id);
  return held == holder->second.blocks.end() ? nullptr : &held->second;
}

Status BlockPool::check_held(SessionId session, BlockRef block) const {
  if (block.id < 0 || block.id >= num_blocks_)
    return {ErrorCode::kNotFound, block_text(block.id) + " is outside the group, which has " +
                                      std::to_string(num_blocks_) + " blocks"};
  if (block.id < first_block_)
    return {ErrorCode::kNotFound, "block 0 is this group's null block and has no holder"};
  const uint32_t generation = at(block.id).generation;
  if (block.generation != generation)
    return {ErrorCode::kStaleGeneration,
            block_text(block.id) + " is at generation " + std::to_string(generation) +
                ", but the request names generation " + std::to_string(block.generation)};
  if (holding(session, block.id) == nullptr)
    return {ErrorCode::kNotFound, block_text(block.id) + " is not held by this session"};
  return {};
}

int32_t BlockPool::take_free() {
  if (used_before_.empty()) {
    blocks_.emplace_back();
    return static_cast<int32_t>(blocks_.size()) - 1;
  }
  const int32_t id = used_before_.top();
  used_before_.pop();
  return id;
}

void BlockPool::set_state(int32_t id, BlockState state, SessionId owner) {
  const uint64_t word_before = word(id);
  Block& block = blocks_[id];
  --counts_[static_cast<int>(block.state)];
  ++counts_[static_cast<int>(state)];
  block.state = state;
  block.owner = owner;
  if (const uint64_t now = word(id); now != word_before) changed_words_.push_back({id, now});
}

void BlockPool::free_block(int32_t id) {
  set_state(id, BlockState::kFree);
  Block& block = blocks_[id];
  LARDER_CHECK(block.copies == 0, id);
  block.holds = 0;
  block.fenced = false;
  if (++block.generation == 0) block.generation = 1;
  used_before_.push(id);
}

void BlockPool::add_hold(SessionId session, int32_t id, int64_t now_us) {
  Holder& holder = holders_[session];
  ++holder.blocks[id].holds;
  ++holder.holds;
  ++blocks_[id].holds;
  if (at(id).state == BlockState::kCached) set_state(id, BlockState::kPublished);
  index_.set_in_use(id, true);
  index_.touch(id, now_us);
}

void BlockPool::drop_holds(int32_t id, int64_t holds, int64_t now_us) {
  Block& block = blocks_[id];
  LARDER_CHECK(block.state == BlockState::kPublished && block.holds >= holds, id, block.holds);
  block.holds -= holds;
  index_.touch(id, now_us);
  if (block.holds > 0) return;
  set_state(id, BlockState::kCached);
  index_.set_in_use(id, block.copies > 0);
}

}  // namespace larder
