#include "daemon/config.h"

#include <filesystem>
#include <limits>
#include <set>
#include <sstream>

#define TOML_EXCEPTIONS 1
#include <toml++/toml.h>

#include "protocol/limits.h"

namespace larder::daemon {
namespace {

Status bad(const std::string& key, const std::string& why) {
  return {ErrorCode::kInvalidArgument, "configuration: " + key + " " + why};
}

std::string shown(const toml::node& node) {
  std::ostringstream text;
  node.visit([&](const auto& value) { text << value; });
  return text.str();
}

Status read_text(const toml::node& node, const std::string& key, std::string& to) {
  const auto value = node.value_exact<std::string>();
  if (!value) return bad(key, "is " + shown(node) + ", not a string");
  to = *value;
  return {};
}

Status read_flag(const toml::node& node, const std::string& key, bool& to) {
  const auto value = node.value_exact<bool>();
  if (!value) return bad(key, "is " + shown(node) + ", not true or false");
  to = *value;
  return {};
}

template <typename Integer>
Status read_integer(const toml::node& node, const std::string& key, Integer& to) {
  const auto value = node.value_exact<int64_t>();
  if (!value || *value < std::numeric_limits<Integer>::min() ||
      *value > std::numeric_limits<Integer>::max())
    return bad(key, "is " + shown(node) + ", not an integer in range");
  to = static_cast<Integer>(*value);
  return {};
}

Status read_tenant(const toml::node& node, TenantConfig& tenant) {
  const toml::table* table = node.as_table();
  if (table == nullptr) return bad("tenants", "has an entry that is not a table");
  for (const auto& [key, value] : *table) {
    Status status;
    if (key == "name") {
      status = read_text(value, "tenants.name", tenant.name);
    } else if (key == "token") {
      status = read_text(value, "tenants.token", tenant.token);
    } else if (key == "guaranteed_bytes") {
      status = read_integer(value, "tenants.guaranteed_bytes", tenant.guaranteed_bytes);
    } else if (key == "maximum_bytes") {
      status = read_integer(value, "tenants.maximum_bytes", tenant.maximum_bytes);
    } else {
      status = bad("tenants." + std::string(key.str()),
                   "is not a key; known are name, token, guaranteed_bytes, maximum_bytes");
    }
    if (!status.ok()) return status;
  }
  return {};
}

Status read_tenants(const toml::node& node, std::vector<TenantConfig>& tenants) {
  const toml::array* list = node.as_array();
  if (list == nullptr) return bad("tenants", "is not a list of tables");
  tenants.clear();
  for (const toml::node& entry : *list)
    if (Status status = read_tenant(entry, tenants.emplace_back()); !status.ok()) return status;
  return {};
}

Status read_key(const std::string& key, const toml::node& value, Config& config) {
  if (key == "socket_path") return read_text(value, key, config.socket_path);
  if (key == "socket_group") return read_text(value, key, config.socket_group);
  if (key == "keeper_socket_path") return read_text(value, key, config.keeper_socket_path);
  if (key == "executor_path") return read_text(value, key, config.executor_path);
  if (key == "http_address") return read_text(value, key, config.http_address);
  if (key == "http_port") return read_integer(value, key, config.http_port);
  if (key == "device") return read_text(value, key, config.device);
  if (key == "trust_ipc_handles") return read_flag(value, key, config.trust_ipc_handles);
  if (key == "memory_bytes") return read_integer(value, key, config.memory_bytes);
  if (key == "arena_memory_bytes") return read_integer(value, key, config.arena_memory_bytes);
  if (key == "shutdown_grace_ms") return read_integer(value, key, config.shutdown_grace_ms);
  if (key == "resume_grace_ms") return read_integer(value, key, config.resume_grace_ms);
  if (key == "unmap_deadline_ms") return read_integer(value, key, config.unmap_deadline_ms);
  if (key == "log_level") return read_text(value, key, config.log_level);
  if (key == "tenants") return read_tenants(value, config.tenants);
  return bad(key, "is not a key");
}

Status check_quota(const TenantConfig& tenant) {
  if (tenant.guaranteed_bytes < 0)
    return bad("tenants.guaranteed_bytes",
               "is " + std::to_string(tenant.guaranteed_bytes) + ", negative");
  if (tenant.maximum_bytes < 0 ||
      (tenant.maximum_bytes > 0 && tenant.maximum_bytes < tenant.guaranteed_bytes))
    return bad("tenants.maximum_bytes", "is " + std::to_string(tenant.maximum_bytes) +
                                            ", but must be 0 (none) or at least " +
                                            std::to_string(tenant.guaranteed_bytes) +
                                            ", the guarantee");
  return {};
}

Status check_tenants(const Config& config) {
  if (config.tenants.empty()) return bad("tenants", "is empty");
  if (config.tenants.size() > protocol::kMaxTenants)
    return bad("tenants", "has " + std::to_string(config.tenants.size()) + " entries, at most " +
                              std::to_string(protocol::kMaxTenants) + " are allowed");
  std::set<std::string> names;
  int64_t guaranteed_bytes = 0;
  for (const TenantConfig& tenant : config.tenants) {
    if (tenant.name.empty() || tenant.name.size() > protocol::kMaxNameBytes)
      return bad("tenants.name", "has " + std::to_string(tenant.name.size()) + " bytes, 1 to " +
                                     std::to_string(protocol::kMaxNameBytes) + " are allowed");
    if (tenant.token.size() > protocol::kMaxNameBytes)
      return bad("tenants.token", "has " + std::to_string(tenant.token.size()) +
                                      " bytes, at most " + std::to_string(protocol::kMaxNameBytes) +
                                      " are allowed");
    if (!names.insert(tenant.name).second)
      return bad("tenants.name", "\"" + tenant.name + "\" appears twice");
    if (Status status = check_quota(tenant); !status.ok()) return status;
    if (tenant.guaranteed_bytes > config.memory_bytes - guaranteed_bytes)
      return bad("tenants.guaranteed_bytes", "of \"" + tenant.name + "\" is " +
                                                 std::to_string(tenant.guaranteed_bytes) +
                                                 ": with those before it more than memory_bytes, " +
                                                 std::to_string(config.memory_bytes));
    guaranteed_bytes += tenant.guaranteed_bytes;
  }
  return {};
}

}  // namespace

Result<Config> read_config(const std::string& path) {
  std::error_code error;
  if (!std::filesystem::is_regular_file(path, error))
    return Status(ErrorCode::kNotFound, "configuration: there is no file " + path);
  Config config;
  try {
    const toml::table table = toml::parse_file(path);
    for (const auto& [key, value] : table)
      if (Status status = read_key(std::string(key.str()), value, config); !status.ok())
        return status;
  } catch (const toml::parse_error& parse_error) {
    std::ostringstream where;
    where << parse_error.source().begin;
    return Status(ErrorCode::kInvalidArgument, "configuration: " + path + ", " + where.str() +
                                                   ": " + std::string(parse_error.description()));
  }
  return config;
}

Status check_config(const Config& config) {
  if (config.socket_path.empty()) return bad("socket_path", "is empty");
  if (config.device.empty())
    return bad("device", "is empty; known are auto, host, and the UUIDs of GPUs");
  if (config.keeper_socket_path.empty()) return bad("keeper_socket_path", "is empty");
  if (config.http_port < -1 || config.http_port > 65535)
    return bad("http_port", "is " + std::to_string(config.http_port) + ", not in -1 .. 65535");
  if (config.http_address != "127.0.0.1" && config.http_address != "::1")
    return bad("http_address", "is " + config.http_address +
                                   "; the pages are for this host alone: 127.0.0.1 or ::1");
  if (config.memory_bytes <= 0)
    return bad("memory_bytes", "is " + std::to_string(config.memory_bytes) + ", not positive");
  if (config.arena_memory_bytes < 0)
    return bad("arena_memory_bytes",
               "is " + std::to_string(config.arena_memory_bytes) + ", negative");
  if (config.shutdown_grace_ms < 0 || config.shutdown_grace_ms > 3'600'000)
    return bad("shutdown_grace_ms",
               "is " + std::to_string(config.shutdown_grace_ms) + ", not in 0 .. 3600000");
  for (const auto& [key, milliseconds] : {std::pair("resume_grace_ms", config.resume_grace_ms),
                                          std::pair("unmap_deadline_ms", config.unmap_deadline_ms)})
    if (milliseconds < 0 || milliseconds > 3'600'000)
      return bad(key, "is " + std::to_string(milliseconds) + ", not in 0 .. 3600000");
  const std::set<std::string> levels = {"trace", "debug", "info", "warning", "error", "off"};
  if (!levels.contains(config.log_level))
    return bad("log_level",
               "is " + config.log_level + "; known are trace, debug, info, warning, error, off");
  return check_tenants(config);
}

}  // namespace larder::daemon
