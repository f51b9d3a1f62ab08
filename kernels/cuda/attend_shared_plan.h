// The memory of a plan that calls share (AttendPlan), as the host sees it. It begins with a key of
// all that the plan follows from, beside the lengths; what comes after it is in
// attend_decode_shared.cuh and, for shared prefixes, in attend_prefix_plan.cuh.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

#include "kernels/cuda/launch.h"
#include "kernels/params.h"
#include "kernels/target.h"

namespace larder::kernels::cuda {

struct SharedPlan {
  uint8_t* memory = nullptr;  // nullptr: none
  uint64_t key = 0;           // of calls like this one; never 0, which is the key of no plan
  int32_t prefix_at = 0;      // in bytes: what is kept of shared prefixes, where one is used
  bool is_made = false;       // by this call, for others; else it is taken, if it has the key
};

// Of a call that was to make a plan and cannot: a plan from before would be taken by those after
// it, with what lengths were then.
inline Status leave_no_plan(const AttendParams& params, const Target& target) {
  const bool is_told = params.plan.memory != nullptr && params.plan.is_made;
  // Memory that the caller of a request names is not looked at.
  if (!is_told || target.rights != nullptr) return {};
  return to_status("cudaMemsetAsync", cudaMemsetAsync(params.plan.memory, 0,
                                                      sizeof(SharedPlan::key), stream_of(target)));
}

}  // namespace larder::kernels::cuda
