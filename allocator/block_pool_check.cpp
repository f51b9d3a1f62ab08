// BlockPool::check_consistency: every running figure against a recount.
#include <cstdint>
#include <iterator>
#include <span>
#include <vector>

#include "allocator/block_pool.h"
#include "larder/check.h"

namespace larder {

void BlockPool::check_consistency(std::span<const int32_t> copies) const {
  index_.check_consistency();
  std::vector<int64_t> holds(blocks_.size(), 0);
  std::vector<int64_t> pins(blocks_.size(), 0);
  for (int32_t id : copies) ++pins.at(id);
  for (const auto& [session, holder] : holders_) {
    int64_t open = 0;
    int64_t published = 0;
    for (const auto& [id, held] : holder.blocks) {
      LARDER_CHECK(held.holds > 0, id, value(session));
      holds.at(id) += held.holds;
      (at(id).state == BlockState::kOpen ? open : published) += held.holds;
      if (at(id).state == BlockState::kOpen) LARDER_CHECK(at(id).owner == session, id);
    }
    LARDER_CHECK(open == holder.open, value(session), open, holder.open);
    LARDER_CHECK(published == holder.holds, value(session), published, holder.holds);
  }

  int64_t counts[kNumBlockStates] = {};
  counts[static_cast<int>(BlockState::kFree)] = num_blocks_ - std::ssize(blocks_);
  for (int32_t id = first_block_; id < std::ssize(blocks_); ++id) {
    const Block& block = at(id);
    const bool keyed = block.state == BlockState::kPublished || block.state == BlockState::kCached;
    const bool held = block.state == BlockState::kPublished || block.state == BlockState::kOpen;
    ++counts[static_cast<int>(block.state)];
    LARDER_CHECK(block.holds == holds[id], id, block.holds, holds[id]);
    LARDER_CHECK(block.copies == pins[id], id, block.copies, pins[id]);
    LARDER_CHECK(held == (block.holds > 0), id, block_state_name(block.state), block.holds);
    LARDER_CHECK(keyed == index_.contains(id), id, block_state_name(block.state));
    LARDER_CHECK(!keyed || index_.in_use(id) == (block.holds + block.copies > 0), id);
    LARDER_CHECK(block.state != BlockState::kOpen || block.holds == 1, id, block.holds);
    LARDER_CHECK(block.state != BlockState::kFree || block.copies == 0, id, block.copies);
  }
  for (int i = 0; i < kNumBlockStates; ++i)
    LARDER_CHECK(counts[i] == counts_[i], i, counts[i], counts_[i]);
  LARDER_CHECK(std::ssize(used_before_) <= counts[static_cast<int>(BlockState::kFree)]);
}

}  // namespace larder
