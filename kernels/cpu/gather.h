// gather on the CPU: tokens of one layer, dequantised, into dense or strided tensors.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

// Every format and MLA row into bf16, fp16 or fp32; MLA rows also into the FP8 staging.
Status supports_gather(const GatherParams& params);

// The params have passed validate_gather and supports_gather.
void gather(const GatherParams& params);

}  // namespace larder::kernels::cpu
