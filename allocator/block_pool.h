// The blocks of one group: their states, generations and holders, and the prefix index over them.
//
// This is one group's part of the state machine and follows its rules: deterministic, and a refusal
// leaves everything as it was. Keys are made elsewhere, sessions are ids, and whether a session may
// ask at all has been decided before.
//
// A session "holds" a block that it has open or has a hold on; the writer of an open block has
// exactly one hold. The blocks of a running copy are pinned: no state change until it has ended.
#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <queue>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator/block_key.h"
#include "allocator/owner_word.h"
#include "allocator/prefix_index.h"
#include "allocator/types.h"
#include "larder/status.h"

namespace larder {

enum class BlockState : uint8_t { kFree, kOpen, kPublished, kCached, kQuarantined };
inline constexpr int kNumBlockStates = 5;

std::string_view block_state_name(BlockState state);  // "free" and so on

struct WordChange {
  int32_t block;
  uint64_t word;
};

class BlockPool {
 public:
  // num_blocks has passed lay_out_group. Costs nothing per block before a block is first used.
  BlockPool(int64_t num_blocks, bool reserve_block_zero);

  // The refusals of these five are those of the events of the same names (allocator/events.h).
  // Only if total_blocks (>= num_blocks) could be given.
  Result<std::vector<BlockRef>> allocate(SessionId session, int64_t num_blocks,
                                         int64_t total_blocks);
  Status release(SessionId session, std::span<const BlockRef> blocks, int64_t now_us);
  // keys[i] is the key of blocks[i]. Each block is the parent of the next; that of the first one is
  // `parent`, which is kNoBlock or published.
  Result<std::vector<BlockRef>> publish(SessionId session, int32_t parent,
                                        std::span<const BlockKey> keys,
                                        std::span<const BlockRef> blocks, int64_t now_us);
  Status begin_copy(SessionId session, std::span<const BlockRef> from,
                    std::span<const BlockRef> to);
  void end_copy(SessionId session, std::span<const int32_t> from, std::span<const int32_t> to);

  // The published block that serves the key; id is kNoBlock when there is none.
  BlockRef find(const BlockKey& key) const;
  // These take what find() has returned and count as a use of the blocks.
  void hold(SessionId session, std::span<const BlockRef> blocks, int64_t now_us);
  void touch(std::span<const BlockRef> blocks, int64_t now_us);

  // BUSY when a copy of the session runs on one of its blocks.
  Status check_can_leave(SessionId session) const;
  // Drops all holds of the session; its open blocks become free if `fenced` and no copy runs on
  // them, and quarantined otherwise. Returns those that wait for fenced().
  std::vector<int32_t> end_session(SessionId session, bool fenced, int64_t now_us);
  // The former writer of these quarantined blocks cannot write any more.
  void fenced(std::span<const int32_t> blocks);

  int64_t count(BlockState state) const { return counts_[static_cast<int>(state)]; }
  int64_t capacity() const { return num_blocks_ - first_block_; }
  int64_t open_blocks(SessionId session) const;
  int64_t holds(SessionId session) const;  // on published blocks, with multiplicity
  uint64_t word(int32_t block) const;
  std::vector<uint64_t> words() const;  // of all blocks
  uint64_t allocated_total() const { return allocated_total_; }
  uint64_t evicted_total() const { return evicted_total_; }
  uint64_t published_total() const { return published_total_; }

  // The words that have changed since the last call, in order.
  std::vector<WordChange> take_changed_words() { return std::exchange(changed_words_, {}); }

  // Recounts everything (LARDER_CHECK). `copies` are the block lists of all running copies, each
  // block as often as it is named.
  void check_consistency(std::span<const int32_t> copies) const;

 private:
  struct Block {
    uint32_t generation = 1;  // 0 names no block ever handed out
    BlockState state = BlockState::kFree;
    bool copy_target = false;
    bool fenced = false;  // quarantined, and free as soon as no copy runs on it
    int64_t copies = 0;   // how often running copies name it
    int64_t holds = 0;    // of all sessions
    SessionId owner{0};   // the writer of an open block
  };
  struct Holding {
    int64_t holds = 0;
    int64_t copies = 0;  // of this session alone
  };
  struct Holder {
    std::map<int32_t, Holding> blocks;
    int64_t open = 0;
    int64_t holds = 0;
  };

  const Block& at(int32_t id) const;
  // The block must be one the session holds: NOT_FOUND or STALE_GENERATION otherwise.
  Status check_held(SessionId session, BlockRef block) const;
  const Holding* holding(SessionId session, int32_t id) const;
  Status check_publish(SessionId session, BlockKey key, BlockRef block) const;
  Status check_copy_target(SessionId session, BlockRef block) const;

  int32_t take_free();
  void set_state(int32_t id, BlockState state, SessionId owner = SessionId{0});
  void free_block(int32_t id);
  void publish_block(SessionId session, int32_t id, const BlockKey& key, int32_t parent,
                     int64_t now_us);
  void add_hold(SessionId session, int32_t id, int64_t now_us);
  // Takes `holds` holds off a published block.
  void drop_holds(int32_t id, int64_t holds, int64_t now_us);
  void unpin(int32_t id, Holder* holder);

  const int64_t num_blocks_;
  const int32_t first_block_;  // 1 where block 0 is reserved
  // Blocks from blocks_.size() on have never been used.
  std::vector<Block> blocks_;
  // Free blocks that have been used, lowest first: it keeps the used ones together.
  std::priority_queue<int32_t, std::vector<int32_t>, std::greater<>> used_before_;
  std::map<SessionId, Holder> holders_;
  PrefixIndex index_;
  int64_t counts_[kNumBlockStates] = {};
  uint64_t allocated_total_ = 0;
  uint64_t evicted_total_ = 0;
  uint64_t published_total_ = 0;
  std::vector<WordChange> changed_words_;
};

}  // namespace larder
