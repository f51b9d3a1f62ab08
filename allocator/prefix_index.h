// The prefix index of one group: which published block serves which key, and which one goes first
// when room is wanted.
//
// Blocks form trees: the parent of a block is the one that serves the prefix before it. A parent
// never leaves before its children, so a lookup that walks from the root meets no gaps. The index
// knows blocks by number only; states and holders are the block pool's.
#pragma once

#include <compare>
#include <cstdint>
#include <cstring>
#include <set>
#include <unordered_map>
#include <vector>

#include "allocator/block_key.h"

namespace larder {

class PrefixIndex {
 public:
  static constexpr int32_t kNoBlock = -1;

  int32_t find(const BlockKey& key) const;  // kNoBlock when nobody serves the key
  bool contains(int32_t block) const;
  bool in_use(int32_t block) const { return node(block).in_use; }
  const BlockKey& key(int32_t block) const;  // the block must be in the index

  // `block` serves `key` from now on, and is in use. The parent is kNoBlock or in the index.
  void insert(int32_t block, const BlockKey& key, int32_t parent, int64_t now_us);
  // A block in use is never evicted, nor are those before it. Costs one step, plus one for each
  // ancestor that thereby becomes evictable or stops being so.
  void set_in_use(int32_t block, bool in_use);
  // The block was used now.
  void touch(int32_t block, int64_t now_us);

  // Blocks that can be evicted one after the other: neither in use nor before one in use.
  int64_t num_evictable() const { return num_evictable_; }
  // Removes the least recently used leaf (of equally old ones the deepest, then the lowest number)
  // and returns it. There must be an evictable block.
  int32_t evict();

  // Recounts everything (LARDER_CHECK).
  void check_consistency() const;

 private:
  struct Node {
    BlockKey key;
    int64_t last_used_us = 0;
    int32_t parent = kNoBlock;
    int32_t depth = 0;
    int32_t num_children = 0;
    int32_t num_pinned_children = 0;
    bool present = false;
    bool in_use = false;
    bool pinned() const { return in_use || num_pinned_children > 0; }
    bool evictable_leaf() const { return present && !in_use && num_children == 0; }
  };
  // In the order in which they go.
  struct Leaf {
    int64_t last_used_us;
    int32_t minus_depth;
    int32_t block;
    auto operator<=>(const Leaf&) const = default;
  };
  // The key is a salted SHA-256: its first bytes are as good as any hash of it.
  struct KeyHash {
    size_t operator()(const BlockKey& key) const {
      size_t hash;
      std::memcpy(&hash, key.data(), sizeof hash);
      return hash;
    }
  };

  Node& node(int32_t block);
  const Node& node(int32_t block) const;
  Leaf leaf(int32_t block) const;
  // The node's pinned() has just changed to `pinned`: counts it and tells the ancestors.
  void pinned_changed(int32_t block, bool pinned);

  std::vector<Node> nodes_;                                // by block, grown on demand
  std::unordered_map<BlockKey, int32_t, KeyHash> by_key_;  // never iterated: no defined order
  std::set<Leaf> leaves_;                                  // every evictable leaf
  int64_t num_evictable_ = 0;
};

}  // namespace larder
