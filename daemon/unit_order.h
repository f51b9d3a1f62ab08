// The order of the blocks of several units of a pool with several groups.
//
// On the wire the blocks of one group lie together, unit after unit; the state machine has them
// unit by unit, and inside a unit group by group. In a pool of one group there is no difference.
#pragma once

#include <cstdint>
#include <iterator>
#include <vector>

namespace larder::daemon {

enum class UnitOrder { kToMachine, kToWire };

// blocks_per_unit[g] blocks of group g make a unit. A list that is not made of whole units is left
// as it is: the machine refuses it.
template <typename Block>
std::vector<Block> reorder_units(std::vector<Block> blocks,
                                 const std::vector<int32_t>& blocks_per_unit, UnitOrder order) {
  int64_t slots = 0;
  for (const int32_t count : blocks_per_unit) slots += count;
  if (blocks_per_unit.size() < 2 || std::ssize(blocks) % slots != 0) return blocks;
  const int64_t num_units = std::ssize(blocks) / slots;
  std::vector<Block> reordered(blocks.size());
  int64_t first_slot = 0;
  for (const int32_t count : blocks_per_unit) {
    for (int64_t unit = 0; unit < num_units; ++unit)
      for (int64_t i = 0; i < count; ++i) {
        const auto on_wire = static_cast<size_t>(first_slot * num_units + unit * count + i);
        const auto in_machine = static_cast<size_t>(unit * slots + first_slot + i);
        if (order == UnitOrder::kToMachine) {
          reordered[in_machine] = blocks[on_wire];
        } else {
          reordered[on_wire] = blocks[in_machine];
        }
      }
    first_slot += count;
  }
  return reordered;
}

}  // namespace larder::daemon
