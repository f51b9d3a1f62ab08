// The prefix index of one pool: which unit of published blocks serves which key, and which unit
// goes first when room is wanted.
//
// A unit is what one key names: for every group of the pool the blocks of the same tokens. Units
// form trees: the parent of a unit serves the prefix before it. A parent never leaves before its
// children, so a lookup that walks from the root meets no gaps. The index knows units and block
// numbers only; states and holders are in the groups' block tables.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "allocator/block_key.h"
#include "allocator/free_set.h"

namespace larder {

class ByteReader;
class ByteWriter;

class PrefixIndex {
 public:
  static constexpr int32_t kNone = -1;  // no unit, no block

  struct Group {
    int32_t blocks_per_unit;
    // Evictable blocks are counted by extents of so many; 0: they are not.
    int64_t blocks_per_extent = 0;
  };
  explicit PrefixIndex(const std::vector<Group>& groups);

  int32_t find(const BlockKey& key) const;  // kNone when nobody serves the key
  bool contains(int32_t unit) const;
  const BlockKey& key(int32_t unit) const { return node(unit).key; }
  int32_t parent(int32_t unit) const { return node(unit).parent; }
  bool evictable(int32_t unit) const { return !node(unit).pinned(); }
  bool is_evictable_leaf(int32_t unit) const {
    return contains(unit) && nodes_[unit].evictable_leaf();
  }
  int64_t num_units() const { return num_units_; }

  int32_t slots_per_unit() const { return slots_per_unit_; }
  // Of group g: slots [first_slot(g), first_slot(g + 1)).
  int32_t first_slot(uint32_t group) const { return first_slot_[group]; }
  // The blocks of a unit, slot by slot; kNone where a group has none.
  std::span<const int32_t> blocks(int32_t unit) const;

  // A new unit with these blocks (one per slot). The parent is kNone or in the index.
  int32_t insert(const BlockKey& key, int32_t parent, std::span<const int32_t> blocks,
                 int64_t now_us);
  // Gives an empty slot its block.
  void fill(int32_t unit, int32_t slot, int32_t block);
  // Somebody uses one block of the unit more, or one less. A unit in use is never evicted, nor are
  // those before it. Costs one step, plus one for each ancestor that thereby changes.
  void add_use(int32_t unit);
  void drop_use(int32_t unit);
  // The unit was used now.
  void touch(int32_t unit, int64_t now_us);

  // Blocks of a group that evicting one unit after the other would free.
  int64_t num_evictable(uint32_t group) const { return num_evictable_[group]; }
  int64_t num_evictable_units() const { return num_evictable_units_; }
  // Of one extent of a group whose extents are counted.
  int64_t num_evictable(uint32_t group, int64_t extent) const {
    const std::vector<int32_t>& counts = evictable_in_[group];
    const auto at = static_cast<size_t>(extent);
    return at < counts.size() ? counts[at] : 0;
  }
  // The least recently used leaf that is not in use (of equally old ones the deepest, then the
  // lowest number); kNone when there is none.
  int32_t next_to_evict() const { return heap_.empty() ? kNone : heap_.front(); }
  // These units and all those after them, leaves first, each once.
  std::vector<int32_t> subtrees(std::span<const int32_t> units) const;
  // An evictable leaf leaves the index.
  void remove(int32_t unit);

  // Unit numbers are below it.
  int32_t unit_limit() const { return static_cast<int32_t>(nodes_.size()); }
  void save(ByteWriter& out) const;
  // Into an empty index of the same shape: the units and their blocks first, then, from how often
  // each unit is used, everything that follows. False when the bytes make no sense.
  bool load(ByteReader& in);
  bool finish_load(std::span<const int32_t> uses);
  // Recounts everything (LARDER_ENSURE). uses[u]: how often unit u is used.
  void check_consistency(std::span<const int32_t> uses) const;

 private:
  struct Node {
    BlockKey key;
    int64_t last_used_us = 0;
    int32_t parent = kNone;
    int32_t depth = 0;
    int32_t uses = 0;  // blocks of it that are held or pinned by a copy
    int32_t num_children = 0;
    int32_t num_pinned_children = 0;
    int32_t first_child = kNone;
    int32_t next_sibling = kNone;
    int32_t previous_sibling = kNone;
    int32_t heap_position = kNone;  // kNone: not an evictable leaf
    bool present = false;
    bool pinned() const { return uses > 0 || num_pinned_children > 0; }
    bool evictable_leaf() const { return present && uses == 0 && num_children == 0; }
  };

  Node& node(int32_t unit);
  const Node& node(int32_t unit) const;
  // The node's pinned() has just changed to `pinned`: counts it and tells the ancestors.
  void pinned_changed(int32_t unit, bool pinned);
  void count_evictable(int32_t unit, int64_t step);
  void link(int32_t unit, int32_t parent);
  void unlink(int32_t unit);

  // The evictable leaves, the next one to go first: a binary heap whose members know their place.
  bool goes_before(int32_t a, int32_t b) const;
  void update_heap(int32_t unit);  // after any change of what decides whether and where it is in it
  void place(size_t position, int32_t unit);
  void sift_up(size_t position);
  void sift_down(size_t position);

  // Key -> unit: open addressing over unit numbers, at most half full.
  size_t slot_of(const BlockKey& key) const;
  void insert_key(int32_t unit);
  void erase_key(int32_t unit);
  void grow_table(size_t size);

  std::vector<int32_t> first_slot_;         // [num_groups + 1]
  std::vector<int64_t> blocks_per_extent_;  // [group]
  int32_t slots_per_unit_ = 0;
  std::vector<Node> nodes_;
  std::vector<int32_t> unit_blocks_;  // [unit][slot]
  FreeSet free_units_;                // below nodes_.size()
  std::vector<int32_t> table_;
  std::vector<int32_t> heap_;
  std::vector<int64_t> num_evictable_;              // [group]
  std::vector<std::vector<int32_t>> evictable_in_;  // [group][extent], as far as it was needed
  int64_t num_evictable_units_ = 0;
  int64_t num_units_ = 0;
};

}  // namespace larder
