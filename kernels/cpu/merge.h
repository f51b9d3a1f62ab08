// merge and combine on the CPU: joining results over disjoint keys. Sums are in float64.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

Status supports_merge(const MergeParams& params);
Status supports_combine(const CombineParams& params);

// The params have passed validate_merge, or validate_combine.
void merge(const MergeParams& params);
void combine(const CombineParams& params);

}  // namespace larder::kernels::cpu
