#include "tests/support/pool_model.h"

#include <algorithm>
#include <tuple>

namespace larder::test {
namespace {
using enum ErrorCode;
using enum BlockState;
}  // namespace

PoolModel::PoolModel(int32_t num_blocks, bool reserve_block_zero, int32_t block_tokens)
    : first_(reserve_block_zero ? 1 : 0), block_tokens_(block_tokens), blocks_(num_blocks) {}

bool PoolModel::indexed(int32_t id) const {
  return blocks_[id].state == kPublished || blocks_[id].state == kCached;
}

bool PoolModel::extends(int32_t id, const Tokens& prefix) const {
  const Tokens& own = blocks_[id].prefix;
  return indexed(id) && own.size() >= prefix.size() &&
         std::equal(prefix.begin(), prefix.end(), own.begin());
}

bool PoolModel::evictable(int32_t id) const {
  if (blocks_[id].state != kCached) return false;
  for (int32_t other = first_; other < std::ssize(blocks_); ++other)
    if (extends(other, blocks_[id].prefix) &&
        (!blocks_[other].holds.empty() || copies(other, SessionId{0}) > 0))
      return false;
  return true;
}

int32_t PoolModel::find(const Tokens& prefix) const {
  for (int32_t id = first_; id < std::ssize(blocks_); ++id)
    if (indexed(id) && blocks_[id].prefix == prefix) return id;
  return -1;
}

int32_t PoolModel::next_to_evict() const {
  int32_t best = -1;
  const auto order = [this](int32_t id) {
    return std::tuple(blocks_[id].last_used_us, -std::ssize(blocks_[id].prefix), blocks_[id].unit);
  };
  for (int32_t id = first_; id < std::ssize(blocks_); ++id) {
    if (!evictable(id)) continue;
    int children = -1;  // a block extends itself
    for (int32_t other = first_; other < std::ssize(blocks_); ++other)
      children += extends(other, blocks_[id].prefix) ? 1 : 0;
    if (children == 0 && (best < 0 || order(id) < order(best))) best = id;
  }
  return best;
}

int64_t PoolModel::copies(int32_t id, SessionId session) const {
  int64_t sum = 0;
  for (const auto& [number, copy] : copies_) {
    if (session != SessionId{0} && copy.session != session) continue;
    sum += std::count(copy.from.begin(), copy.from.end(), id);
    sum += std::count(copy.to.begin(), copy.to.end(), id);
  }
  return sum;
}

bool PoolModel::copy_target(int32_t id) const {
  return std::any_of(copies_.begin(), copies_.end(), [id](const auto& copy) {
    return std::count(copy.second.to.begin(), copy.second.to.end(), id) > 0;
  });
}

int32_t PoolModel::unused_unit() const {
  for (int32_t unit = 0;; ++unit) {
    bool used = false;
    for (int32_t id = first_; id < std::ssize(blocks_); ++id)
      used = used || (indexed(id) && blocks_[id].unit == unit);
    if (!used) return unit;
  }
}

ErrorCode PoolModel::check_held(SessionId session, BlockRef block) const {
  if (block.id < first_ || block.id >= std::ssize(blocks_)) return kNotFound;
  if (block.generation != blocks_[block.id].generation) return kStaleGeneration;
  return blocks_[block.id].holds.contains(session) ? kOk : kNotFound;
}

void PoolModel::make_free(int32_t id) {
  const uint32_t generation = blocks_[id].generation + 1;
  blocks_[id] = Block();
  blocks_[id].generation = generation;
}

void PoolModel::use(int32_t id, SessionId session, int64_t now_us) {
  ++blocks_[id].holds[session];
  blocks_[id].state = kPublished;
  blocks_[id].last_used_us = now_us;
}

PoolModel::Answer PoolModel::allocate(SessionId session, int64_t num_blocks) {
  if (num_blocks < 1) return {kInvalidArgument, {}};
  int64_t available = count(kFree);
  for (int32_t id = first_; id < std::ssize(blocks_); ++id) available += evictable(id) ? 1 : 0;
  if (num_blocks > available) return {kResourceExhausted, {}};
  while (count(kFree) < num_blocks) make_free(next_to_evict());
  Answer answer;
  for (int32_t id = first_; std::ssize(answer.blocks) < num_blocks; ++id) {
    if (blocks_[id].state != kFree) continue;
    blocks_[id].state = kOpen;
    blocks_[id].writer = session;
    blocks_[id].holds[session] = 1;
    answer.blocks.push_back(ref(id));
  }
  return answer;
}

PoolModel::Answer PoolModel::release(SessionId session, const Blocks& blocks, int64_t now_us) {
  std::map<int32_t, int64_t> named;
  for (const BlockRef& block : blocks) {
    if (const ErrorCode code = check_held(session, block); code != kOk) return {code, {}};
    if (copies(block.id, session) > 0) return {kBusy, {}};
    if (++named[block.id] > blocks_[block.id].holds[session]) return {kNotFound, {}};
  }
  for (const BlockRef& named_block : blocks) {
    Block& block = blocks_[named_block.id];
    if (block.state == kOpen) {
      make_free(named_block.id);
      continue;
    }
    block.last_used_us = now_us;
    if (--block.holds[session] == 0) block.holds.erase(session);
    if (block.holds.empty()) block.state = kCached;
  }
  return {};
}

PoolModel::Answer PoolModel::publish(SessionId session, const Tokens& tokens, int64_t first_block,
                                     const Blocks& blocks, int64_t now_us) {
  const auto prefix_of = [&](size_t i) {
    const auto num_blocks = first_block + static_cast<int64_t>(i) + 1;
    return Tokens(tokens.begin(), tokens.begin() + num_blocks * block_tokens_);
  };
  if ((first_block + std::ssize(blocks)) * block_tokens_ > std::ssize(tokens))
    return {kInvalidArgument, {}};
  const Tokens before(tokens.begin(), tokens.begin() + first_block * block_tokens_);
  if (first_block > 0 && find(before) < 0) return {kNotFound, {}};
  for (size_t i = 0; i < blocks.size(); ++i) {
    if (const ErrorCode code = check_held(session, blocks[i]); code != kOk) return {code, {}};
    const Block& block = blocks_[blocks[i].id];
    if (block.state == kOpen && copies(blocks[i].id, SessionId{0}) > 0) return {kBusy, {}};
    if (block.state != kOpen && block.prefix != prefix_of(i)) return {kInvalidArgument, {}};
  }
  for (size_t i = 0; i < blocks.size(); ++i)
    for (size_t j = 0; j < i; ++j)
      if (blocks[i].id == blocks[j].id) return {kInvalidArgument, {}};

  Answer answer;
  for (size_t i = 0; i < blocks.size(); ++i) {
    const int32_t serving = find(prefix_of(i));
    if (serving < 0) {
      Block& block = blocks_[blocks[i].id];
      block.unit = unused_unit();
      block.state = kPublished;
      block.prefix = prefix_of(i);
      block.last_used_us = now_us;
    } else if (serving == blocks[i].id) {
      blocks_[serving].last_used_us = now_us;
    } else {
      use(serving, session, now_us);
    }
    answer.blocks.push_back(serving < 0 ? blocks[i] : ref(serving));
  }
  return answer;
}

PoolModel::Answer PoolModel::lookup(SessionId session, const Tokens& tokens, int64_t first_block,
                                    int64_t max_blocks, bool hold, int64_t now_us) {
  if (first_block * block_tokens_ > std::ssize(tokens)) return {kInvalidArgument, {}};
  Answer answer;
  for (int64_t i = first_block; i < first_block + max_blocks; ++i) {
    const auto end = (i + 1) * block_tokens_;
    if (end > std::ssize(tokens)) break;
    const int32_t id = find(Tokens(tokens.begin(), tokens.begin() + end));
    if (id < 0) break;
    answer.blocks.push_back(ref(id));
    if (hold) use(id, session, now_us);
  }
  return answer;
}

PoolModel::Answer PoolModel::begin_copy(uint64_t copy, SessionId session, const Blocks& from,
                                        const Blocks& to) {
  if (from.size() != to.size()) return {kInvalidArgument, {}};
  RunningCopy started{session, {}, {}};
  for (const BlockRef& block : from) {
    if (const ErrorCode code = check_held(session, block); code != kOk) return {code, {}};
    if (copy_target(block.id)) return {kBusy, {}};
    started.from.push_back(block.id);
  }
  for (const BlockRef& block : to) {
    if (const ErrorCode code = check_held(session, block); code != kOk) return {code, {}};
    if (blocks_[block.id].state != kOpen) return {kInvalidArgument, {}};
    if (copies(block.id, SessionId{0}) > 0) return {kBusy, {}};
    started.to.push_back(block.id);
  }
  for (int32_t id : started.to) {
    if (std::count(started.to.begin(), started.to.end(), id) > 1) return {kInvalidArgument, {}};
    if (std::count(started.from.begin(), started.from.end(), id) > 0) return {kInvalidArgument, {}};
  }
  if (!from.empty()) copies_.emplace(copy, started);
  return {};
}

void PoolModel::end_copy(uint64_t copy) {
  copies_.erase(copy);
  for (int32_t id = first_; id < std::ssize(blocks_); ++id)
    if (blocks_[id].state == kQuarantined && blocks_[id].fenced && copies(id, SessionId{0}) == 0)
      make_free(id);
}

PoolModel::Answer PoolModel::leave(SessionId session, int64_t now_us) {
  for (const auto& [number, copy] : copies_)
    if (copy.session == session) return {kBusy, {}};
  end_session(session, true, now_us);
  return {};
}

void PoolModel::end_session(SessionId session, bool fenced, int64_t now_us) {
  for (int32_t id = first_; id < std::ssize(blocks_); ++id) {
    Block& block = blocks_[id];
    if (block.holds.erase(session) == 0) continue;
    if (block.state != kOpen) {
      block.last_used_us = now_us;
      if (block.holds.empty()) block.state = kCached;
    } else if (fenced && copies(id, SessionId{0}) == 0) {
      make_free(id);
    } else {
      block.state = kQuarantined;
      block.fenced = fenced;
    }
  }
}

void PoolModel::fenced(SessionId session) {
  for (int32_t id = first_; id < std::ssize(blocks_); ++id) {
    if (blocks_[id].state != kQuarantined || blocks_[id].writer != session) continue;
    blocks_[id].fenced = true;
    if (copies(id, SessionId{0}) == 0) make_free(id);
  }
}

int64_t PoolModel::count(BlockState state) const {
  return std::count_if(blocks_.begin() + first_, blocks_.end(),
                       [state](const Block& block) { return block.state == state; });
}

std::vector<uint64_t> PoolModel::words() const {
  std::vector<uint64_t> words;
  for (const Block& block : blocks_) {
    if (block.state == kOpen) {
      words.push_back(owner_word(OwnerState::kOpen, block.writer));
    } else if (block.state == kPublished || block.state == kCached) {
      words.push_back(owner_word(OwnerState::kPublished));
    } else {
      words.push_back(0);
    }
  }
  return words;
}

int64_t PoolModel::open_blocks(SessionId session) const {
  return std::count_if(blocks_.begin(), blocks_.end(), [session](const Block& block) {
    return block.state == kOpen && block.writer == session;
  });
}

int64_t PoolModel::holds(SessionId session) const {
  int64_t sum = 0;
  for (const Block& block : blocks_) {
    const auto held = block.holds.find(session);
    if (block.state == kPublished && held != block.holds.end()) sum += held->second;
  }
  return sum;
}

PoolModel::Blocks PoolModel::held_by(SessionId session) const {
  Blocks held;
  for (int32_t id = first_; id < std::ssize(blocks_); ++id)
    if (blocks_[id].holds.contains(session)) held.push_back(ref(id));
  return held;
}

}  // namespace larder::test
