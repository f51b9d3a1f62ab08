// Roles as requests and lists write them.
#pragma once

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

#include "allocator/types.h"

namespace larder::daemon {

inline constexpr std::array<std::string_view, 3> kRoleNames = {"read", "append", "admin"};

inline std::optional<Role> role_of(std::string_view name) {
  const auto found = std::find(kRoleNames.begin(), kRoleNames.end(), name);
  if (found == kRoleNames.end()) return std::nullopt;
  return static_cast<Role>(found - kRoleNames.begin());
}

}  // namespace larder::daemon
