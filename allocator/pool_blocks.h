// The blocks of a pool: its groups' block tables and the prefix index over them.
//
// This is a pool's part of the state machine and follows its rules: deterministic, and a refusal
// leaves everything as it was. Keys are made elsewhere, sessions are ids, and whether a session may
// ask at all has been decided before.
#pragma once

#include <cstdint>
#include <map>
#include <span>
#include <vector>

#include "allocator/block_table.h"
#include "allocator/choices.h"
#include "allocator/pool_spec.h"
#include "allocator/prefix_index.h"

namespace larder {

class PoolBlocks {
 public:
  static constexpr int32_t kNone = -1;

  // The specs have passed check_pool_spec and lay_out_group. No extent is there yet.
  PoolBlocks(const std::vector<GroupSpec>& groups, const std::vector<GroupLayout>& layouts);

  BlockTable& group(uint32_t index) { return tables_[index]; }
  const BlockTable& group(uint32_t index) const { return tables_[index]; }
  uint32_t num_groups() const { return static_cast<uint32_t>(tables_.size()); }
  const PrefixIndex& index() const { return index_; }
  int64_t unit_tokens() const { return unit_tokens_; }
  int64_t evictable(uint32_t group) const { return index_.num_evictable(group); }
  int64_t available(uint32_t group) const {
    return tables_[group].count(BlockState::kFree) + evictable(group);
  }

  // num_blocks blocks, open, by eviction where the free ones do not suffice: so many are available.
  std::vector<BlockRef> take(SessionId session, uint32_t group, int64_t num_blocks,
                             Choices& choices);
  // The refusals of these are those of the events of the same names (allocator/events.h).
  Status release(SessionId session, uint32_t group, std::span<const BlockRef> blocks,
                 int64_t now_us);
  // Units keys[i] with blocks [i * slots_per_unit, ...); each is the parent of the next, that of
  // the first one is `parent`.
  Result<std::vector<BlockRef>> publish(SessionId session, int32_t parent,
                                        std::span<const BlockKey> keys,
                                        std::span<const BlockRef> blocks, int64_t now_us);
  Status begin_copy(SessionId session, uint32_t group, std::span<const BlockRef> from,
                    std::span<const BlockRef> to);
  void end_copy(SessionId session, uint32_t group, std::span<const int32_t> from,
                std::span<const int32_t> to);
  // Pins again what a saved copy had pinned.
  void restore_copy(SessionId session, uint32_t group, std::span<const int32_t> from,
                    std::span<const int32_t> to);

  // Of a chain of units from the root, how many can serve a prefix: every group has what it needs.
  int64_t longest_prefix(std::span<const int32_t> units) const;
  // How many of the group's last blocks serving the first `num_units` needs.
  int64_t blocks_needed(int64_t num_units, uint32_t group) const;
  // The blocks that serve a chain of units, slot by slot; id -1 where none is needed.
  std::vector<BlockRef> prefix_blocks(std::span<const int32_t> units) const;
  void hold(SessionId session, std::span<const BlockRef> blocks, int64_t now_us);

  // Drops all holds of the session; its open blocks become free if `fence` is kFenced and no copy
  // runs on them, and quarantined otherwise.
  void end_session(SessionId session, FenceClass fence, int64_t now_us);
  // The former writer of its quarantined blocks cannot write any more.
  void fenced(SessionId session);
  // Sessions that have ended and whose blocks wait for fenced().
  std::vector<SessionId> unfenced_sessions() const;
  bool is_unfenced(SessionId session) const { return unfenced_.contains(session); }

  // Evicts up to so many units, the least recently used leaf first. Returns how many went.
  int64_t evict_units(int64_t num_units, Choices& choices);
  void evict_unit(int32_t unit);
  // Whether evicting would empty the extent, and how many cached blocks that would cost; -1: not.
  int64_t cost_of_emptying(uint32_t group, int64_t extent) const;
  // Evicts what is in the extent, and the prefixes that go on from it.
  void empty_extent(uint32_t group, int64_t extent, Choices& choices);

  uint64_t allocated_total() const { return allocated_total_; }
  uint64_t evicted_total() const { return evicted_total_; }
  uint64_t published_total() const { return published_total_; }

  void save(ByteWriter& out) const;
  bool load(ByteReader& in);
  struct GroupCopies {
    uint32_t group;
    std::vector<int32_t> blocks;  // each as often as running copies name it
  };
  void check_consistency(std::span<const GroupCopies> copies) const;

 private:
  Status check_publish(SessionId session, uint32_t group, BlockRef block, const BlockKey& key,
                       int32_t slot) const;
  Status check_units(SessionId session, std::span<const BlockKey> keys,
                     std::span<const BlockRef> blocks) const;
  int32_t publish_unit(SessionId session, const BlockKey& key, int32_t parent,
                       std::span<const BlockRef> blocks, int64_t now_us,
                       std::vector<BlockRef>& serving);
  Status check_copy_target(SessionId session, uint32_t group, BlockRef block) const;
  uint32_t group_of_slot(int32_t slot) const;
  void add_hold(SessionId session, uint32_t group, int32_t id, int64_t now_us);
  void drop_holds(SessionId session, uint32_t group, int32_t id, int64_t holds, int64_t now_us);
  void pin(SessionId session, uint32_t group, int32_t id, bool is_target);
  void unpin(SessionId session, uint32_t group, int32_t id, bool is_target);
  std::vector<int32_t> uses_of_units() const;
  bool link_units();  // of a loaded index with loaded tables

  std::vector<GroupSpec> specs_;
  int64_t unit_tokens_;
  std::vector<GroupLayout> layouts_;
  std::vector<BlockTable> tables_;
  PrefixIndex index_;
  struct GroupBlock {
    uint32_t group;
    int32_t id;
  };
  std::map<SessionId, std::vector<GroupBlock>> unfenced_;  // quarantined, by who wrote them
  uint64_t allocated_total_ = 0;
  uint64_t evicted_total_ = 0;
  uint64_t published_total_ = 0;
};

}  // namespace larder
