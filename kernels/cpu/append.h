// append on the CPU: K and V rows, or rows of MLA, into the slots of one layer.
#pragma once

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels::cpu {

// Any dtype and strides into any format, K and V on their own, by any encoder and key transform.
Status supports_append(const AppendParams& params);

// The params have passed validate_append and supports_append. Rows are written in order, so of two
// rows with one slot the later stays.
void append(const AppendParams& params);

}  // namespace larder::kernels::cpu
