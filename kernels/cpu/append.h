// append on the CPU: K and V rows into the slots of one layer.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

// Any dtype and strides into bf16 or nvfp4, K and V on their own; nvfp4 with the reference encoder.
Status supports_append(const AppendParams& params);

// The params have passed validate_append and supports_append. Rows are written in order, so of two
// rows with one slot the later stays.
void append(const AppendParams& params);

}  // namespace larder::kernels::cpu
