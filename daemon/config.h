// larderd's configuration: a TOML file, overridden by command-line options.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "larder/status.h"

namespace larder::daemon {

struct TenantConfig {
  std::string name;
  std::string token;             // empty: no token is asked for
  int64_t guaranteed_bytes = 0;  // kept for it, never lent
  int64_t maximum_bytes = 0;     // 0: none
};

struct Config {
  std::string socket_path = "/run/larder/larderd.sock";
  std::string socket_group;  // empty: the process's own
  std::string keeper_socket_path = "/run/larder/keeper.sock";
  std::string executor_path;  // empty: larder-executor beside larderd
  // Of pools that name no device: "auto" (the first GPU that can be used, else the host), "host",
  // or a GPU's UUID.
  std::string device = "auto";
  // Accept CUDA IPC handles of engines, whose owners could free the memory under the executor.
  bool trust_ipc_handles = false;
  std::string http_address = "127.0.0.1";
  int http_port = 9464;                     // 0: any free port, which the log names; -1: no HTTP
  int64_t memory_bytes = int64_t{1} << 30;  // for all pools
  int64_t arena_memory_bytes = int64_t{16} << 30;  // for the arenas of all sessions
  int shutdown_grace_ms = 5000;
  int resume_grace_ms = 30000;   // after a restart sessions have so long to come back
  int unmap_deadline_ms = 5000;  // a session that has not unmapped by then is ended
  std::string log_level = "info";
  std::vector<TenantConfig> tenants = {{"default", ""}};
};

// Reads `path` on top of the defaults. INVALID_ARGUMENT names the key and the value: unknown keys
// and wrong types are refused. NOT_FOUND when there is no such file.
Result<Config> read_config(const std::string& path);

// Ranges and names of a finished configuration. INVALID_ARGUMENT names the key and the value.
Status check_config(const Config& config);

}  // namespace larder::daemon
