// What the simulated node is about: its tenants, their quotas, the pools and the texts. Small, so
// that memory is short, prefixes are shared and everything that can collide does.
#pragma once

#include "allocator/events.h"
#include "tests/simulation/books.h"
#include "tests/simulation/chance.h"

namespace larder::sim {

inline constexpr const char* kTenants[] = {"a", "b", "c"};

Configure configuration();
// One of a few pools; some of them are refused, and some are the same by name but not by size.
PoolSpec random_pool(Chance& chance);
// The pool of this name; what its groups are is the same in all sizes of it.
PoolSpec pool_of_name(const std::string& name);
Path random_path(Chance& chance, int max_units);
std::vector<int32_t> tokens_of(const Path& path, int64_t unit_tokens);
Path path_of(const std::vector<int32_t>& tokens, int64_t unit_tokens);

}  // namespace larder::sim
