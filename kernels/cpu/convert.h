// convert on the CPU: pages of a pool's blocks to or from an engine's own memory.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

// Every format, as no byte is looked at.
Status supports_convert(const ConvertParams& params);

// The params have passed validate_convert. The bound is memory: the longest stretches that are
// contiguous on both sides are copied at once, a whole region of a page where the order of heads
// and tokens is the pool's and block sizes are equal.
void convert(const ConvertParams& params);

}  // namespace larder::kernels::cpu
