// The blocks of one group: their states, generations and holders, and which of its extents there
// are.
//
// A session "holds" a block that it has open or has a hold on; the writer of an open block has
// exactly one hold. The blocks of a running copy are pinned: no state change until it has ended.
// What a block's key is, and whether it may be evicted, is the prefix index's (pool_blocks.h joins
// the two). Deterministic; bugs of the caller are LARDER_CHECKs.
#pragma once

#include <array>
#include <cstdint>
#include <map>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <boost/unordered/unordered_flat_map.hpp>

#include "allocator/extent.h"
#include "allocator/free_set.h"
#include "allocator/owner_word.h"
#include "allocator/types.h"
#include "larder/status.h"

namespace larder {

class ByteReader;
class ByteWriter;

enum class BlockState : uint8_t { kFree, kOpen, kPublished, kCached, kQuarantined };
inline constexpr int kNumBlockStates = 5;

std::string_view block_state_name(BlockState state);  // "free" and so on

struct WordChange {
  int32_t block;
  uint64_t word;
};

class BlockTable {
 public:
  static constexpr int32_t kNone = -1;

  struct Block {
    SessionId owner{0};       // the writer of an open block; of a quarantined one, who was it
    int64_t holds = 0;        // of all sessions
    int32_t unit = kNone;     // of the prefix index, for published and cached blocks
    uint32_t generation = 1;  // 0 names no block ever handed out
    int32_t copies = 0;       // how often running copies name it
    BlockState state = BlockState::kFree;
    FenceClass fence = FenceClass::kFenced;  // of a quarantined block; kFenced: waits for a copy
    bool copy_target = false;
    bool in_use() const { return holds > 0 || copies > 0; }
  };
  struct Holding {
    int64_t holds = 0;
    int32_t copies = 0;  // of this session alone
  };

  // No extent is there yet. Costs nothing per block before a block is first used.
  BlockTable(const GroupLayout& layout, bool reserve_block_zero);

  // ------------------------------------------------------------------------------------ extents
  bool has_extent(int64_t extent) const { return present_[static_cast<size_t>(extent)]; }
  void add_extent(int64_t extent);     // its blocks are free
  void remove_extent(int64_t extent);  // all of its blocks are free
  // The blocks of an extent that are not free, ascending, and how many they are.
  std::vector<int32_t> used_blocks(int64_t extent) const;
  int32_t num_used(int64_t extent) const { return num_used_[static_cast<size_t>(extent)]; }

  // ------------------------------------------------------------------------------- what is asked
  const Block& at(int32_t id) const;  // id is within the group
  const Holding* holding(SessionId session, int32_t id) const;
  // NOT_FOUND or STALE_GENERATION unless the session holds the block.
  Status check_held(SessionId session, BlockRef block) const;
  // BUSY when a copy of the session runs on one of its blocks.
  Status check_can_leave(SessionId session) const;
  std::vector<int32_t> held_by(SessionId session) const;  // ascending
  std::vector<SessionId> holders() const;                 // ascending, with a block each
  int32_t lowest_free() const;                            // kNone when none is

  // ------------------------------------------------------------------------------------- changes
  void open(SessionId session, int32_t id);      // free -> open
  void free(int32_t id);                         // -> free, the next generation; nobody uses it
  void publish(int32_t id, int32_t unit);        // open -> published; the writer's hold stays
  void add_hold(SessionId session, int32_t id);  // of a published or cached block
  void drop_holds(SessionId session, int32_t id, int64_t holds);
  void quarantine(int32_t id, FenceClass fence);  // open -> quarantined; its writer is forgotten
  void set_fence(int32_t id, FenceClass fence);   // of a quarantined block
  void pin(SessionId session, int32_t id, bool is_target);
  void unpin(SessionId session, int32_t id, bool is_target);
  void forget_holder(SessionId session) { holders_.erase(session); }

  // ------------------------------------------------------------------------------------- figures
  int64_t count(BlockState state) const { return counts_[static_cast<size_t>(state)]; }
  int64_t quarantined(FenceClass fence) const { return fences_[static_cast<size_t>(fence)]; }
  int64_t capacity() const { return capacity_; }  // blocks in the extents that are there
  int64_t open_blocks(SessionId session) const;
  int64_t holds(SessionId session) const;  // on published blocks, with multiplicity
  uint64_t word(int32_t id) const;
  std::vector<uint64_t> words() const;  // of all ids
  // The words that have changed since the last call, in order.
  std::vector<WordChange> take_changed_words() { return std::exchange(changed_words_, {}); }
  bool has_changed_words() const { return !changed_words_.empty(); }

  void save(ByteWriter& out) const;
  // Into a table without extents; false when the bytes make no sense. Pins and units come after it.
  bool load(ByteReader& in);
  void set_unit(int32_t id, int32_t unit) { blocks_[static_cast<size_t>(id)].unit = unit; }
  // Recounts everything (LARDER_ENSURE). `copies` are the block lists of all running copies.
  void check_consistency(std::span<const int32_t> copies) const;
  int32_t used_limit() const { return static_cast<int32_t>(blocks_.size()); }

 private:
  struct Holder {
    boost::unordered_flat_map<int32_t, Holding> blocks;
    int64_t open = 0;
    int64_t holds = 0;
  };

  Block& block(int32_t id);
  void set_state(int32_t id, BlockState state, SessionId owner);
  void erase_if_unheld(Holder& holder, int32_t id);
  int64_t begin_of(int64_t extent) const;  // the first block of it that may be handed out

  const GroupLayout layout_;
  const int32_t first_block_;  // 1 where block 0 is reserved
  std::vector<char> present_;  // by extent
  // Per extent, how many of its blocks have ever been used: the lowest ones.
  std::vector<int32_t> ever_used_;
  std::vector<int32_t> num_used_;  // by extent, blocks that are not free
  std::vector<Block> blocks_;      // ids from blocks_.size() on have never been used
  FreeSet freed_;                  // free blocks that have been used
  FreeSet fresh_extents_;          // present, with blocks that have never been used
  std::map<SessionId, Holder> holders_;
  std::array<int64_t, kNumBlockStates> counts_ = {};
  std::array<int64_t, kNumFenceClasses> fences_ = {};
  int64_t capacity_ = 0;
  std::vector<WordChange> changed_words_;
};

}  // namespace larder
