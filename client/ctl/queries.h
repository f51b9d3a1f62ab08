// What larderctl asks the daemon. Every call has the connection's deadline.
#pragma once

#include <chrono>
#include <string>
#include <vector>

#include "client/control_connection.h"
#include "larder/status.h"
#include "protocol/messages.h"

namespace larder::ctl {

struct Target {
  std::string socket_path;
  std::string tenant = "default";
  std::string token;
  std::chrono::milliseconds deadline = std::chrono::milliseconds(2000);
};

// As admin where the daemon lets this user, so that all tenants are seen; else as reader.
Result<ControlConnection> connect(const Target& target);

// All pages of a list.
Result<std::vector<protocol::PoolInfo>> list_pools(ControlConnection& connection);
Result<std::vector<protocol::SessionInfo>> list_sessions(ControlConnection& connection);

// Frees a pool's memory, by name, in the connection's tenant.
Status destroy_pool(ControlConnection& connection, const Target& target, const std::string& name);

}  // namespace larder::ctl
