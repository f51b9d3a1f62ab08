// A naive model of one group's blocks and prefix index: what allocator/pool_blocks.h promises, with
// no data structure that could be wrong. Every question is answered by looking at all blocks, and a
// prefix is the list of its tokens.
#pragma once

#include <cstdint>
#include <map>
#include <vector>

#include "allocator/pool_blocks.h"

namespace larder::test {

class PoolModel {
 public:
  struct Answer {
    ErrorCode code = ErrorCode::kOk;
    std::vector<BlockRef> blocks;
  };
  using Tokens = std::vector<int32_t>;
  using Blocks = std::vector<BlockRef>;

  PoolModel(int32_t num_blocks, bool reserve_block_zero, int32_t block_tokens);

  Answer allocate(SessionId session, int64_t num_blocks);
  Answer release(SessionId session, const Blocks& blocks, int64_t now_us);
  Answer publish(SessionId session, const Tokens& tokens, int64_t first_block, const Blocks& blocks,
                 int64_t now_us);
  Answer lookup(SessionId session, const Tokens& tokens, int64_t first_block, int64_t max_blocks,
                bool hold, int64_t now_us);
  Answer begin_copy(uint64_t copy, SessionId session, const Blocks& from, const Blocks& to);
  void end_copy(uint64_t copy);
  Answer leave(SessionId session, int64_t now_us);
  void end_session(SessionId session, bool fenced, int64_t now_us);
  void fenced(SessionId session);

  int64_t count(BlockState state) const;
  std::vector<uint64_t> words() const;
  int64_t open_blocks(SessionId session) const;
  int64_t holds(SessionId session) const;
  Blocks held_by(SessionId session) const;
  // The tokens of a published or cached block, from the root.
  const Tokens& prefix(int32_t id) const { return blocks_[id].prefix; }
  BlockState state(int32_t id) const { return blocks_[id].state; }

 private:
  struct Block {
    BlockState state = BlockState::kFree;
    uint32_t generation = 1;
    SessionId writer{0};  // of an open or quarantined block
    bool fenced = false;
    std::map<SessionId, int64_t> holds;
    Tokens prefix;
    int32_t unit = -1;  // numbers the published ones: the lowest that is not in use
    int64_t last_used_us = 0;
  };
  struct RunningCopy {
    SessionId session;
    std::vector<int32_t> from, to;
  };

  bool indexed(int32_t id) const;
  bool extends(int32_t id, const Tokens& prefix) const;
  bool evictable(int32_t id) const;
  int32_t find(const Tokens& prefix) const;
  int32_t next_to_evict() const;
  int64_t copies(int32_t id, SessionId session) const;  // of session 0: of all sessions
  bool copy_target(int32_t id) const;
  int32_t unused_unit() const;
  ErrorCode check_held(SessionId session, BlockRef block) const;
  BlockRef ref(int32_t id) const { return {id, blocks_[id].generation}; }
  void make_free(int32_t id);
  void use(int32_t id, SessionId session, int64_t now_us);

  int32_t first_;
  int32_t block_tokens_;
  std::vector<Block> blocks_;
  std::map<uint64_t, RunningCopy> copies_;
};

}  // namespace larder::test
