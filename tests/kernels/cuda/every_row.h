// Runs a call on every CUDA row of an op's table that supports it.
#pragma once

#include <algorithm>
#include <functional>
#include <span>
#include <string_view>
#include <vector>

#include "tests/kernels/cuda/device_calls.h"

namespace larder::test {

// `prepare` gives the call with fresh device memory, and may change what `on` names; `check` looks
// at that after the launch. The workspace is as large as the row asks for, and poisoned. Returns
// the names of the rows that have taken the call: the portable one at least.
template <typename Params>
std::vector<std::string_view> on_every_row(std::span<const kernels::Kernel<Params>> rows,
                                           const kernels::Target& on,
                                           const std::function<Params()>& prepare,
                                           const std::function<void()>& check) {
  std::vector<std::string_view> names;
  for (const kernels::Kernel<Params>& row : rows) {
    if (row.backend != kernels::Backend::kCuda) continue;
    const Params params = prepare();
    if (!row.supports(params).ok()) continue;
    const std::string_view row_name = row.name;
    names.push_back(row_name);
    CAPTURE(row_name);
    const int64_t bytes = row.workspace_bytes == nullptr ? 0 : row.workspace_bytes(params);
    const DeviceBytes workspace(static_cast<size_t>(bytes));
    kernels::Target target = on;
    target.workspace = workspace.data();
    target.workspace_bytes = bytes;
    check_ok(row.launch(params, target));
    check();
    workspace.check_guards();
  }
  CHECK(!names.empty());
  return names;
}

inline bool has_name(const std::vector<std::string_view>& names, std::string_view name) {
  return std::find(names.begin(), names.end(), name) != names.end();
}

}  // namespace larder::test
