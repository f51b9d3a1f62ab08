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

// Admins see all, others their own.
Result<std::vector<protocol::TenantInfo>> list_tenants(ControlConnection& connection);

// The pools of a name are those of the connection's tenant; NOT_FOUND where it has none.

// `group`: its name or number, empty for the first one.
Result<protocol::Resized> resize_pool(ControlConnection& connection, const Target& target,
                                      const std::string& name, const std::string& group,
                                      int64_t num_blocks);
// At most `num_blocks` cached blocks.
Result<protocol::Resized> evict(ControlConnection& connection, const Target& target,
                                const std::string& name, int64_t num_blocks);
// Frees a pool's memory.
Status destroy_pool(ControlConnection& connection, const Target& target, const std::string& name);

}  // namespace larder::ctl
