// Private to kernels: which row of a table serves a call.
#pragma once

#include <span>

#include "kernels/kernel_table.h"
#include "kernels/refuse.h"

namespace larder::kernels {

// The first row of the backend that supports the call, or the refusal of the last row that was
// asked.
template <typename Params>
Result<const Kernel<Params>*> choose(std::span<const Kernel<Params>> kernels, const Params& params,
                                     Backend backend) {
  Status refusal = refuse(ErrorCode::kUnsupported, "this build has no ", name(backend),
                          " kernel for the operation");
  for (const Kernel<Params>& kernel : kernels) {
    if (kernel.backend != backend) continue;
    refusal = kernel.supports(params);
    if (refusal.ok()) return &kernel;
  }
  return refusal;
}

}  // namespace larder::kernels
