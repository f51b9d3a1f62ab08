#include "allocator/prefix_index.h"

#include "larder/check.h"

namespace larder {

int32_t PrefixIndex::find(const BlockKey& key) const {
  const auto found = by_key_.find(key);
  return found == by_key_.end() ? kNoBlock : found->second;
}

bool PrefixIndex::contains(int32_t block) const {
  return block >= 0 && static_cast<size_t>(block) < nodes_.size() && nodes_[block].present;
}

const BlockKey& PrefixIndex::key(int32_t block) const { return node(block).key; }

void PrefixIndex::insert(int32_t block, const BlockKey& key, int32_t parent, int64_t now_us) {
  LARDER_CHECK(block >= 0 && !contains(block), block);
  const bool inserted = by_key_.emplace(key, block).second;
  LARDER_CHECK(inserted, "the key is served already", block);
  if (static_cast<size_t>(block) >= nodes_.size()) nodes_.resize(static_cast<size_t>(block) + 1);

  Node fresh;
  fresh.key = key;
  fresh.last_used_us = now_us;
  fresh.parent = parent;
  fresh.present = true;
  fresh.in_use = true;
  if (parent != kNoBlock) {
    Node& above = node(parent);
    if (above.evictable_leaf()) leaves_.erase(leaf(parent));
    ++above.num_children;
    fresh.depth = above.depth + 1;
  }
  nodes_[block] = fresh;
  ++num_evictable_;  // pinned_changed takes it off again
  pinned_changed(block, true);
}

void PrefixIndex::set_in_use(int32_t block, bool in_use) {
  Node& changed = node(block);
  if (changed.in_use == in_use) return;
  const bool was_pinned = changed.pinned();
  if (changed.evictable_leaf()) leaves_.erase(leaf(block));
  changed.in_use = in_use;
  if (changed.evictable_leaf()) leaves_.insert(leaf(block));
  if (changed.pinned() != was_pinned) pinned_changed(block, changed.pinned());
}

void PrefixIndex::touch(int32_t block, int64_t now_us) {
  Node& touched = node(block);
  if (touched.evictable_leaf()) leaves_.erase(leaf(block));
  touched.last_used_us = now_us;
  if (touched.evictable_leaf()) leaves_.insert(leaf(block));
}

int32_t PrefixIndex::evict() {
  LARDER_CHECK(!leaves_.empty(), num_evictable_);
  const int32_t block = leaves_.begin()->block;
  leaves_.erase(leaves_.begin());
  by_key_.erase(node(block).key);
  const int32_t parent = node(block).parent;
  nodes_[block] = Node();
  --num_evictable_;
  if (parent != kNoBlock) {
    Node& above = node(parent);
    --above.num_children;
    if (above.evictable_leaf()) leaves_.insert(leaf(parent));
  }
  return block;
}

void PrefixIndex::check_consistency() const {
  std::vector<int32_t> children(nodes_.size(), 0);
  std::vector<int32_t> pinned_children(nodes_.size(), 0);
  size_t num_present = 0;
  size_t num_leaves = 0;
  int64_t evictable = 0;
  for (size_t i = 0; i < nodes_.size(); ++i) {
    const Node& at = nodes_[i];
    if (!at.present) continue;
    const auto block = static_cast<int32_t>(i);
    ++num_present;
    LARDER_CHECK(find(at.key) == block, block);
    evictable += at.pinned() ? 0 : 1;
    if (at.evictable_leaf()) {
      ++num_leaves;
      LARDER_CHECK(leaves_.contains(leaf(block)), block);
    }
    if (at.parent == kNoBlock) {
      LARDER_CHECK(at.depth == 0, block, at.depth);
      continue;
    }
    LARDER_CHECK(contains(at.parent), block, at.parent);
    LARDER_CHECK(at.depth == node(at.parent).depth + 1, block, at.depth);
    ++children[at.parent];
    pinned_children[at.parent] += at.pinned() ? 1 : 0;
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    LARDER_CHECK(nodes_[i].num_children == children[i], i, nodes_[i].num_children, children[i]);
    LARDER_CHECK(nodes_[i].num_pinned_children == pinned_children[i], i, pinned_children[i]);
  }
  LARDER_CHECK(by_key_.size() == num_present, by_key_.size(), num_present);
  LARDER_CHECK(leaves_.size() == num_leaves, leaves_.size(), num_leaves);
  LARDER_CHECK(num_evictable_ == evictable, num_evictable_, evictable);
}

PrefixIndex::Node& PrefixIndex::node(int32_t block) {
  LARDER_CHECK(contains(block), block);
  return nodes_[block];
}

const PrefixIndex::Node& PrefixIndex::node(int32_t block) const {
  LARDER_CHECK(contains(block), block);
  return nodes_[block];
}

PrefixIndex::Leaf PrefixIndex::leaf(int32_t block) const {
  const Node& at = node(block);
  return Leaf{at.last_used_us, -at.depth, block};
}

void PrefixIndex::pinned_changed(int32_t block, bool pinned) {
  const int32_t step = pinned ? 1 : -1;
  while (true) {
    num_evictable_ -= step;
    const int32_t parent = node(block).parent;
    if (parent == kNoBlock) return;
    Node& above = node(parent);
    const bool was_pinned = above.pinned();
    above.num_pinned_children += step;
    if (above.pinned() == was_pinned) return;
    block = parent;
  }
}

}  // namespace larder
