// What calls of attention can share: prefixes of sequences, and the plans of a step's layers.
#pragma once

#include <cstddef>
#include <cstdint>

namespace larder {

// Of shared_prefix_tokens: find neighbouring sequences whose block-table rows begin alike.
inline constexpr int32_t kFindSharedPrefix = -1;

// How the work of a call is dealt out follows from its lengths and shapes alone, and every layer of
// a step has the same: the first layer's call can leave that in memory, and calls after it in the
// stream, in one graph or not, begin with it, some microseconds sooner. For calls in process whose
// tables are in device memory; the memory is of one stream at a time.
//
// Some calls plan for themselves and leave the memory as it was, told to make a plan or not: where
// the plan is of other rows, heads, windows or table strides; where a call is not served by the
// tuned row (the README's support table says which are); with a mask, num_splits, deterministic or
// a shared prefix that is used. So layers of different shapes need a memory each, and where the
// layer that makes the plan is such a call, the others must not be told to take one.
//
// A plan that was made for other lengths gives wrong results, of nothing that the call could not
// read anyway, and may count faults: make it anew whenever lengths change. What is wrong in lengths
// is counted by the call that makes the plan.
struct AttendPlan {
  std::byte* memory = nullptr;  // [kAttendPlanBytes] of the device, 16-byte aligned; nullptr: none
  bool is_made = false;         // by this call, for those after it; else it is taken
};
inline constexpr int64_t kAttendPlanBytes = int64_t{1} << 20;

}  // namespace larder
