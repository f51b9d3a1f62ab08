// What a pool may be, and whether two descriptions of a pool agree.
#pragma once

#include <cstddef>
#include <string>

#include "allocator/events.h"
#include "larder/status.h"

namespace larder {

inline constexpr size_t kMaxPoolNameBytes = 128;
inline constexpr size_t kGroupsPerPool = 1;

// INVALID_ARGUMENT or UNSUPPORTED, naming the field. Sizes are checked by lay_out_group.
Status check_pool_spec(const PoolSpec& spec);

// INVALID_ARGUMENT naming the first field, in the order of the structs, in which a request differs
// from the pool that bears the name, with both values.
Status check_same_spec(const PoolSpec& pool, const PoolSpec& request);

}  // namespace larder
