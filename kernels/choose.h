// Private to kernels: which row of a table serves a call.
#pragma once

#include <span>

#include "kernels/kernel_table.h"

namespace larder::kernels {

// The first row that supports the call, or the refusal of the last row that was asked.
template <typename Params>
Result<const Kernel<Params>*> choose(std::span<const Kernel<Params>> kernels,
                                     const Params& params) {
  Status refusal(ErrorCode::kUnsupported, "this build has no kernel for the operation");
  for (const Kernel<Params>& kernel : kernels) {
    refusal = kernel.supports(params);
    if (refusal.ok()) return &kernel;
  }
  return refusal;
}

}  // namespace larder::kernels
