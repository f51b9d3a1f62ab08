// Random calls of tuned decode attention, of every kind that the host lays out.
#pragma once

#include <cstdint>

#include "tests/kernels/cuda/attend_plan_model.h"

namespace larder::test {

// Case number `number` of the program's seed. Its units are below 2^31 and its slots few enough to
// keep books over, whatever the lengths say.
PlanCase random_plan_case(uint64_t number);

}  // namespace larder::test
