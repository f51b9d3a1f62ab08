// The prefix index as bytes, and the recount that proves its running figures.
#include <algorithm>

#include "allocator/byte_codec.h"
#include "allocator/consistency.h"
#include "allocator/prefix_index.h"
#include "larder/check.h"

namespace larder {
namespace {

// What of a unit does not follow from anything else.
struct SavedUnit {
  BlockKey key;
  int64_t last_used_us;
  int32_t parent;
  uint32_t present;
};
static_assert(sizeof(SavedUnit) == 48);

}  // namespace

void PrefixIndex::save(ByteWriter& out) const {
  std::vector<SavedUnit> units;
  units.reserve(nodes_.size());
  std::vector<int32_t> blocks = unit_blocks_;
  // Units that are gone and follow the last one are not there after a load: nothing shows them.
  size_t end = nodes_.size();
  while (end > 0 && !nodes_[end - 1].present) --end;
  for (size_t i = 0; i < end; ++i) {
    const Node& at = nodes_[i];
    units.push_back({at.key, at.last_used_us, at.parent, at.present ? 1u : 0u});
    if (!at.present)
      std::fill_n(blocks.begin() + static_cast<ptrdiff_t>(i) * slots_per_unit_, slots_per_unit_,
                  kNone);
  }
  blocks.resize(end * static_cast<size_t>(slots_per_unit_));
  out.put_list(units);
  out.put_list(blocks);
}

bool PrefixIndex::load(ByteReader& in) {
  LARDER_CHECK(nodes_.empty(), nodes_.size());
  const std::vector<SavedUnit> units = in.get_list<SavedUnit>();
  unit_blocks_ = in.get_list<int32_t>();
  if (in.failed() || unit_blocks_.size() != units.size() * static_cast<size_t>(slots_per_unit_))
    return false;
  nodes_.resize(units.size());
  for (size_t i = 0; i < units.size(); ++i) {
    if (units[i].present > 1) return false;
    if (units[i].present == 0) {
      free_units_.insert(static_cast<int32_t>(i));
      continue;
    }
    nodes_[i].key = units[i].key;
    nodes_[i].last_used_us = units[i].last_used_us;
    nodes_[i].parent = units[i].parent;
    nodes_[i].present = true;
    ++num_units_;
  }
  size_t table_size = 64;
  while (table_size < 2 * static_cast<size_t>(num_units_)) table_size *= 2;
  table_.assign(table_size, kNone);
  for (size_t i = 0; i < nodes_.size(); ++i) {
    if (!nodes_[i].present) continue;
    int32_t& slot = table_[slot_of(nodes_[i].key)];
    if (slot != kNone) return false;  // two units of one key
    slot = static_cast<int32_t>(i);
  }
  return true;
}

bool PrefixIndex::finish_load(std::span<const int32_t> uses) {
  LARDER_CHECK(uses.size() == nodes_.size(), uses.size(), nodes_.size());
  std::vector<int32_t> order;  // parents before children
  order.reserve(static_cast<size_t>(num_units_));
  for (int32_t unit = unit_limit(); unit-- > 0;) {
    Node& at = nodes_[unit];
    if (!at.present) continue;
    at.uses = uses[unit];
    if (at.parent == kNone) {
      order.push_back(unit);
      continue;
    }
    if (!contains(at.parent)) return false;
    Node& above = nodes_[at.parent];
    at.next_sibling = above.first_child;
    if (above.first_child != kNone) nodes_[above.first_child].previous_sibling = unit;
    above.first_child = unit;
    ++above.num_children;
  }
  for (size_t i = 0; i < order.size(); ++i)
    for (int32_t child = nodes_[order[i]].first_child; child != kNone;
         child = nodes_[child].next_sibling) {
      nodes_[child].depth = nodes_[order[i]].depth + 1;
      order.push_back(child);
    }
  if (std::ssize(order) != num_units_) return false;  // a ring of parents
  for (size_t i = order.size(); i-- > 0;) {
    Node& at = nodes_[order[i]];
    if (at.pinned()) {
      if (at.parent != kNone) ++nodes_[at.parent].num_pinned_children;
    } else {
      count_evictable(order[i], 1);
    }
    if (!at.evictable_leaf()) continue;
    heap_.push_back(order[i]);
    at.heap_position = static_cast<int32_t>(heap_.size()) - 1;
  }
  for (size_t i = heap_.size() / 2; i-- > 0;) sift_down(i);
  return true;
}

void PrefixIndex::check_consistency(std::span<const int32_t> uses) const {
  LARDER_ENSURE(uses.size() == nodes_.size(), uses.size(), nodes_.size());
  std::vector<int32_t> children(nodes_.size(), 0);
  std::vector<int32_t> pinned_children(nodes_.size(), 0);
  std::vector<int64_t> evictable(num_evictable_.size(), 0);
  std::vector<std::vector<int64_t>> by_extent(num_evictable_.size());
  int64_t num_present = 0;
  int64_t evictable_units = 0;
  size_t num_leaves = 0;
  for (int32_t unit = 0; unit < unit_limit(); ++unit) {
    const Node& at = nodes_[unit];
    LARDER_ENSURE(at.present != free_units_.contains(unit), unit);
    if (!at.present) continue;
    ++num_present;
    LARDER_ENSURE(find(at.key) == unit, unit);
    LARDER_ENSURE(at.uses == uses[unit], unit, at.uses, uses[unit]);
    LARDER_ENSURE(at.evictable_leaf() == (at.heap_position != kNone), unit, at.heap_position);
    if (at.evictable_leaf()) {
      ++num_leaves;
      LARDER_ENSURE(heap_.at(static_cast<size_t>(at.heap_position)) == unit, unit);
      LARDER_ENSURE(unit == heap_.front() || !goes_before(unit, heap_.front()), unit);
    }
    if (!at.pinned()) {
      ++evictable_units;
      for (size_t group = 0; group < evictable.size(); ++group)
        for (int32_t slot = first_slot_[group]; slot < first_slot_[group + 1]; ++slot) {
          const int32_t block = blocks(unit)[static_cast<size_t>(slot)];
          if (block == kNone) continue;
          ++evictable[group];
          if (blocks_per_extent_[group] == 0) continue;
          const auto extent = static_cast<size_t>(block / blocks_per_extent_[group]);
          if (extent >= by_extent[group].size()) by_extent[group].resize(extent + 1);
          ++by_extent[group][extent];
        }
    }
    if (at.parent == kNone) {
      LARDER_ENSURE(at.depth == 0, unit, at.depth);
      continue;
    }
    LARDER_ENSURE(contains(at.parent), unit, at.parent);
    LARDER_ENSURE(at.depth == nodes_[at.parent].depth + 1, unit, at.depth);
    ++children[at.parent];
    pinned_children[at.parent] += at.pinned() ? 1 : 0;
  }
  for (size_t i = 0; i < nodes_.size(); ++i) {
    LARDER_ENSURE(nodes_[i].num_children == children[i], i, nodes_[i].num_children, children[i]);
    LARDER_ENSURE(nodes_[i].num_pinned_children == pinned_children[i], i, pinned_children[i]);
  }
  LARDER_ENSURE(num_units_ == num_present, num_units_, num_present);
  LARDER_ENSURE(heap_.size() == num_leaves, heap_.size(), num_leaves);
  LARDER_ENSURE(num_evictable_units_ == evictable_units, num_evictable_units_, evictable_units);
  for (uint32_t group = 0; group < evictable.size(); ++group) {
    LARDER_ENSURE(num_evictable_[group] == evictable[group], group, num_evictable_[group],
                  evictable[group]);
    by_extent[group].resize(std::max(by_extent[group].size(), evictable_in_[group].size()));
    for (size_t extent = 0; extent < by_extent[group].size(); ++extent)
      LARDER_ENSURE(num_evictable(group, static_cast<int64_t>(extent)) == by_extent[group][extent],
                    group, extent, by_extent[group][extent]);
  }
}

}  // namespace larder
