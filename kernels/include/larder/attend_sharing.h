// What calls of attention can share: prefixes of sequences, and the plans of a step's layers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace larder {

// Of shared_prefix_tokens: find neighbouring sequences whose block-table rows begin alike.
inline constexpr int32_t kFindSharedPrefix = -1;

// How the work of a call is dealt out follows from its lengths and shapes alone, and every layer of
// a step has the same: the first layer's call can leave that in memory, and calls after it in the
// stream, in one graph or not, begin with it, some microseconds sooner. Where a shared prefix is
// used, who shares what is left there too, and the others look for it no more. For calls in process
// whose tables are in device memory; the memory is of one stream at a time.
//
// From the call that makes a plan to the last one that takes it, lengths must not change; nor, with
// a prefix that is found, may the places where rows of the block table begin alike: neighbouring
// rows that do in the table of the first call do as far in those of the others, which may be other
// tables. A plan that was made for others gives wrong results, of nothing that the call could not
// read anyway, and may count faults: make it anew whenever lengths or heads of rows change. What is
// wrong in lengths is counted by the call that makes the plan.
//
// A call that takes a plan looks at it, at lengths and at its block table while kernels before it
// may still run: these must be as they are before the call that makes the plan, in their stream.
// Keys, values and queries may be written up to the call itself.
//
// A call that is told to take a plan and finds another one, of other rows, heads, windows, prefixes
// or table strides, or none, plans for itself, and reads a prefix for each sequence. So layers of
// different shapes need a memory each. Some calls share no plan: those that the tuned row does not
// serve (the README's support table says which it does), and those with a mask, num_splits,
// deterministic, or a prefix that is used by more sequences than the memory has room for, 19,000
// at least. Told to make one, they leave none, so that those after them plan for themselves; told
// to take one, they leave the memory as it was. A call that fails may leave an earlier plan.
struct AttendPlan {
  std::byte* memory = nullptr;  // [kAttendPlanBytes] of the device, 16-byte aligned; nullptr: none
  bool is_made = false;         // by this call, for those after it; else it is taken
};
inline constexpr int64_t kAttendPlanBytes = int64_t{1} << 20;

}  // namespace larder
