#include "allocator/prefix_index.h"

#include <algorithm>
#include <cstring>

#include "larder/check.h"

namespace larder {

PrefixIndex::PrefixIndex(const std::vector<Group>& groups)
    : num_evictable_(groups.size(), 0), evictable_in_(groups.size()) {
  first_slot_.push_back(0);
  for (const Group& group : groups) {
    first_slot_.push_back(first_slot_.back() + group.blocks_per_unit);
    blocks_per_extent_.push_back(group.blocks_per_extent);
  }
  slots_per_unit_ = first_slot_.back();
  LARDER_CHECK(slots_per_unit_ > 0, groups.size());
}

bool PrefixIndex::contains(int32_t unit) const {
  return unit >= 0 && static_cast<size_t>(unit) < nodes_.size() && nodes_[unit].present;
}

PrefixIndex::Node& PrefixIndex::node(int32_t unit) {
  LARDER_CHECK(contains(unit), unit);
  return nodes_[unit];
}

const PrefixIndex::Node& PrefixIndex::node(int32_t unit) const {
  LARDER_CHECK(contains(unit), unit);
  return nodes_[unit];
}

std::span<const int32_t> PrefixIndex::blocks(int32_t unit) const {
  LARDER_CHECK(contains(unit), unit);
  return std::span(unit_blocks_)
      .subspan(static_cast<size_t>(unit) * slots_per_unit_, slots_per_unit_);
}

// ------------------------------------------------------------------------------ units come and go

int32_t PrefixIndex::insert(const BlockKey& key, int32_t parent, std::span<const int32_t> blocks,
                            int64_t now_us) {
  LARDER_CHECK(std::ssize(blocks) == slots_per_unit_, blocks.size(), slots_per_unit_);
  LARDER_CHECK(find(key) == kNone, "the key is served already");
  int32_t unit = free_units_.lowest();
  if (unit == kNone) {
    unit = static_cast<int32_t>(nodes_.size());
    nodes_.emplace_back();
    unit_blocks_.resize(unit_blocks_.size() + slots_per_unit_);
  } else {
    free_units_.erase(unit);
  }
  std::copy(blocks.begin(), blocks.end(),
            unit_blocks_.begin() + static_cast<ptrdiff_t>(unit) * slots_per_unit_);
  Node fresh;
  fresh.key = key;
  fresh.last_used_us = now_us;
  fresh.present = true;
  nodes_[unit] = fresh;
  link(unit, parent);
  ++num_units_;
  insert_key(unit);
  count_evictable(unit, 1);
  update_heap(unit);
  return unit;
}

void PrefixIndex::link(int32_t unit, int32_t parent) {
  Node& linked = nodes_[unit];
  linked.parent = parent;
  linked.depth = 0;
  if (parent == kNone) return;
  Node& above = node(parent);
  linked.depth = above.depth + 1;
  linked.next_sibling = above.first_child;
  if (above.first_child != kNone) nodes_[above.first_child].previous_sibling = unit;
  above.first_child = unit;
  ++above.num_children;
  update_heap(parent);
}

void PrefixIndex::unlink(int32_t unit) {
  const Node& linked = nodes_[unit];
  if (linked.next_sibling != kNone)
    nodes_[linked.next_sibling].previous_sibling = linked.previous_sibling;
  if (linked.previous_sibling != kNone) {
    nodes_[linked.previous_sibling].next_sibling = linked.next_sibling;
  } else if (linked.parent != kNone) {
    nodes_[linked.parent].first_child = linked.next_sibling;
  }
  if (linked.parent == kNone) return;
  --nodes_[linked.parent].num_children;
  update_heap(linked.parent);
}

void PrefixIndex::remove(int32_t unit) {
  LARDER_CHECK(node(unit).evictable_leaf(), unit, nodes_[unit].uses, nodes_[unit].num_children);
  count_evictable(unit, -1);
  erase_key(unit);
  unlink(unit);
  nodes_[unit].present = false;
  update_heap(unit);
  nodes_[unit] = Node();
  free_units_.insert(unit);
  --num_units_;
}

void PrefixIndex::fill(int32_t unit, int32_t slot, int32_t block) {
  LARDER_CHECK(contains(unit) && slot >= 0 && slot < slots_per_unit_ && block >= 0, unit, slot);
  int32_t& filled = unit_blocks_[static_cast<size_t>(unit) * slots_per_unit_ + slot];
  LARDER_CHECK(filled == kNone, unit, slot, filled);
  const bool pinned = node(unit).pinned();
  if (!pinned) count_evictable(unit, -1);
  filled = block;
  if (!pinned) count_evictable(unit, 1);
}

std::vector<int32_t> PrefixIndex::subtrees(std::span<const int32_t> roots) const {
  std::vector<bool> listed(nodes_.size(), false);
  std::vector<int32_t> units;
  const auto list = [&](int32_t unit) {
    if (!listed[unit]) units.push_back(unit);
    listed[unit] = true;
  };
  for (const int32_t root : roots) list(root);
  for (size_t i = 0; i < units.size(); ++i)
    for (int32_t child = node(units[i]).first_child; child != kNone;
         child = node(child).next_sibling)
      list(child);
  // Siblings are linked in the order in which they came; what leaves first must not depend on it.
  std::sort(units.begin(), units.end(), [this](int32_t a, int32_t b) {
    return std::pair(-node(a).depth, a) < std::pair(-node(b).depth, b);
  });
  return units;
}

// ------------------------------------------------------------------------------------ use and age

void PrefixIndex::add_use(int32_t unit) {
  Node& used = node(unit);
  const bool was_pinned = used.pinned();
  ++used.uses;
  update_heap(unit);
  if (!was_pinned) pinned_changed(unit, true);
}

void PrefixIndex::drop_use(int32_t unit) {
  Node& used = node(unit);
  LARDER_CHECK(used.uses > 0, unit);
  --used.uses;
  update_heap(unit);
  if (!used.pinned()) pinned_changed(unit, false);
}

void PrefixIndex::touch(int32_t unit, int64_t now_us) {
  Node& touched = node(unit);
  if (touched.last_used_us == now_us) return;
  touched.last_used_us = now_us;
  if (touched.heap_position == kNone) return;
  sift_up(static_cast<size_t>(touched.heap_position));
  sift_down(static_cast<size_t>(touched.heap_position));
}

void PrefixIndex::count_evictable(int32_t unit, int64_t step) {
  num_evictable_units_ += step;
  const int32_t* blocks = unit_blocks_.data() + static_cast<size_t>(unit) * slots_per_unit_;
  for (size_t group = 0; group + 1 < first_slot_.size(); ++group)
    for (int32_t slot = first_slot_[group]; slot < first_slot_[group + 1]; ++slot) {
      if (blocks[slot] == kNone) continue;
      num_evictable_[group] += step;
      if (blocks_per_extent_[group] == 0) continue;
      std::vector<int32_t>& counts = evictable_in_[group];
      const auto extent = static_cast<size_t>(blocks[slot] / blocks_per_extent_[group]);
      if (extent >= counts.size()) counts.resize(extent + 1);
      counts[extent] += static_cast<int32_t>(step);
    }
}

void PrefixIndex::pinned_changed(int32_t unit, bool pinned) {
  const int32_t step = pinned ? 1 : -1;
  while (true) {
    count_evictable(unit, -step);
    const int32_t parent = nodes_[unit].parent;
    if (parent == kNone) return;
    Node& above = node(parent);
    const bool was_pinned = above.pinned();
    above.num_pinned_children += step;
    if (above.pinned() == was_pinned) return;
    unit = parent;
  }
}

// ------------------------------------------------------------------------------------- the leaves

bool PrefixIndex::goes_before(int32_t a, int32_t b) const {
  const Node& first = nodes_[a];
  const Node& second = nodes_[b];
  if (first.last_used_us != second.last_used_us) return first.last_used_us < second.last_used_us;
  if (first.depth != second.depth) return first.depth > second.depth;
  return a < b;
}

void PrefixIndex::place(size_t position, int32_t unit) {
  heap_[position] = unit;
  nodes_[unit].heap_position = static_cast<int32_t>(position);
}

void PrefixIndex::sift_up(size_t position) {
  const int32_t unit = heap_[position];
  while (position > 0) {
    const size_t above = (position - 1) / 2;
    if (!goes_before(unit, heap_[above])) break;
    place(position, heap_[above]);
    position = above;
  }
  place(position, unit);
}

void PrefixIndex::sift_down(size_t position) {
  const int32_t unit = heap_[position];
  while (2 * position + 1 < heap_.size()) {
    size_t below = 2 * position + 1;
    if (below + 1 < heap_.size() && goes_before(heap_[below + 1], heap_[below])) ++below;
    if (!goes_before(heap_[below], unit)) break;
    place(position, heap_[below]);
    position = below;
  }
  place(position, unit);
}

void PrefixIndex::update_heap(int32_t unit) {
  Node& changed = nodes_[unit];
  const bool belongs = changed.evictable_leaf();
  if (belongs == (changed.heap_position != kNone)) return;
  if (belongs) {
    heap_.push_back(unit);
    sift_up(heap_.size() - 1);
    return;
  }
  const auto position = static_cast<size_t>(changed.heap_position);
  changed.heap_position = kNone;
  const int32_t last = heap_.back();
  heap_.pop_back();
  if (position == heap_.size()) return;
  place(position, last);
  sift_up(position);
  sift_down(static_cast<size_t>(nodes_[last].heap_position));
}

// --------------------------------------------------------------------------------------- the keys

namespace {

// The key is a salted SHA-256: its first bytes are as good as any hash of it.
size_t hash_of(const BlockKey& key) {
  size_t hash;
  std::memcpy(&hash, key.data(), sizeof hash);
  return hash;
}

constexpr size_t kSmallestTable = 64;

}  // namespace

size_t PrefixIndex::slot_of(const BlockKey& key) const {
  size_t slot = hash_of(key) & (table_.size() - 1);
  while (table_[slot] != kNone && nodes_[table_[slot]].key != key)
    slot = (slot + 1) & (table_.size() - 1);
  return slot;
}

int32_t PrefixIndex::find(const BlockKey& key) const {
  return table_.empty() ? kNone : table_[slot_of(key)];
}

void PrefixIndex::grow_table(size_t size) {
  table_.assign(size, kNone);
  for (size_t unit = 0; unit < nodes_.size(); ++unit)
    if (nodes_[unit].present) table_[slot_of(nodes_[unit].key)] = static_cast<int32_t>(unit);
}

void PrefixIndex::insert_key(int32_t unit) {
  if (static_cast<size_t>(num_units_) * 2 > table_.size())
    return grow_table(std::max(kSmallestTable, table_.size() * 2));  // inserts it, too
  table_[slot_of(nodes_[unit].key)] = unit;
}

// Later members of the same run move up, so that searching needs no tombstones.
void PrefixIndex::erase_key(int32_t unit) {
  const size_t mask = table_.size() - 1;
  size_t hole = slot_of(nodes_[unit].key);
  table_[hole] = kNone;
  for (size_t slot = (hole + 1) & mask; table_[slot] != kNone; slot = (slot + 1) & mask) {
    const size_t home = hash_of(nodes_[table_[slot]].key) & mask;
    if (((slot - home) & mask) < ((slot - hole) & mask)) continue;
    table_[hole] = table_[slot];
    table_[slot] = kNone;
    hole = slot;
  }
}

}  // namespace larder
