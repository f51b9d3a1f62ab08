#include "client/ctl/render.h"

#include <algorithm>
#include <cstdio>

namespace larder::ctl {
namespace {

using nlohmann::json;

std::string show_bytes(int64_t bytes) {
  static constexpr const char* kUnits[] = {"B", "KiB", "MiB", "GiB", "TiB"};
  double scaled = static_cast<double>(bytes);
  size_t unit = 0;
  while (scaled >= 1024 && unit + 1 < std::size(kUnits)) {
    scaled /= 1024;
    ++unit;
  }
  char text[32];
  std::snprintf(text, sizeof text, unit == 0 ? "%.0f %s" : "%.1f %s", scaled, kUnits[unit]);
  return text;
}

std::string show_seconds(uint64_t microseconds) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f s", static_cast<double>(microseconds) / 1e6);
  return text;
}

// Columns as wide as their widest cell.
std::string table(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths(rows[0].size(), 0);
  for (const auto& row : rows)
    for (size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  std::string text;
  for (const auto& row : rows) {
    for (size_t i = 0; i < row.size(); ++i) {
      text += row[i];
      if (i + 1 < row.size()) text.append(widths[i] - row[i].size() + 2, ' ');
    }
    text += '\n';
  }
  return text;
}

// The identity's fields bear the group's name where a pool has several.
std::string show_format(const protocol::PoolInfo& pool, const protocol::GroupInfo& group) {
  const std::string prefix = pool.groups.size() > 1 ? group.name + "." : "";
  std::string k;
  std::string v;
  for (const auto& [name, value] : pool.identity) {
    if (name == prefix + "k_format" || name == prefix + "row_format") k = value;
    if (name == prefix + "v_format") v = value;
  }
  return v.empty() || k == v ? k : k + "/" + v;
}

json to_json(const protocol::GroupInfo& group) {
  return {{"name", group.name},
          {"capacity", group.capacity},
          {"free", group.free},
          {"open", group.open},
          {"published", group.published},
          {"cached", group.cached},
          {"quarantined", group.quarantined},
          {"quarantined_pidfd", group.quarantined_pidfd},
          {"quarantined_mps", group.quarantined_mps},
          {"quarantined_unprovable", group.quarantined_unprovable},
          {"quarantined_executor_only", group.quarantined_executor_only},
          {"evictable", group.evictable},
          {"max_blocks", group.max_blocks},
          {"physical_bytes", group.physical_bytes},
          {"used_bytes", group.used_bytes},
          {"slack_bytes", group.slack_bytes},
          {"leaving_bytes", group.leaving_bytes}};
}

// "3 (2 pidfd, 1 unprovable)": by what must be waited for.
std::string show_quarantined(const protocol::GroupInfo& group) {
  std::string classes;
  for (const auto& [name, count] :
       {std::pair("pidfd", group.quarantined_pidfd), std::pair("mps", group.quarantined_mps),
        std::pair("unprovable", group.quarantined_unprovable),
        std::pair("executor_only", group.quarantined_executor_only)})
    if (count > 0) classes += (classes.empty() ? "" : ", ") + std::to_string(count) + " " + name;
  return std::to_string(group.quarantined) + (classes.empty() ? "" : " (" + classes + ")");
}

std::string show_state(const protocol::SessionInfo& session) {
  return session.closing ? "closing" : session.absent ? "absent" : "open";
}

}  // namespace

json to_json(const protocol::DaemonStatus& status) {
  json executors = json::array();
  for (const protocol::ExecutorInfo& executor : status.executors)
    executors.push_back({{"device", executor.device},
                         {"pid", executor.pid},
                         {"restarts", executor.restarts},
                         {"ready", executor.ready}});
  return {{"version", status.version},
          {"ready", status.ready},
          {"not_ready", status.not_ready},
          {"boot_id", status.boot_id},
          {"cache_id", status.cache_id},
          {"pid", status.pid},
          {"executor_pid", status.executor_pid},
          {"executor_restarts", status.executor_restarts},
          {"executors", executors},
          {"keeper_pid", status.keeper_pid},
          {"keeper_segments", status.keeper_segments},
          {"uptime_us", status.uptime_us},
          {"backend", status.backend},
          {"memory_bytes", status.memory_bytes},
          {"physical_bytes", status.physical_bytes},
          {"num_pools", status.num_pools},
          {"num_sessions", status.num_sessions},
          {"recovered_pools", status.recovered_pools},
          {"recovered_sessions", status.recovered_sessions},
          {"journal_bytes", status.journal_bytes},
          {"journal_records", status.journal_records},
          {"checkpoints", status.checkpoints}};
}

json to_json(const std::vector<protocol::PoolInfo>& pools) {
  json list = json::array();
  for (const protocol::PoolInfo& pool : pools) {
    json identity = json::object();
    for (const auto& [name, value] : pool.identity) identity[name] = value;
    json groups = json::array();
    for (const protocol::GroupInfo& group : pool.groups) groups.push_back(to_json(group));
    list.push_back({{"pool", pool.pool},
                    {"tenant", pool.tenant},
                    {"name", pool.name},
                    {"model", pool.model},
                    {"identity", identity},
                    {"num_sessions", pool.num_sessions},
                    {"groups", groups},
                    {"allocated_blocks_total", pool.allocated_blocks_total},
                    {"evicted_blocks_total", pool.evicted_blocks_total},
                    {"published_blocks_total", pool.published_blocks_total},
                    {"lookup_tokens_total", pool.lookup_tokens_total},
                    {"lookup_hit_tokens_total", pool.lookup_hit_tokens_total},
                    {"appended_tokens_total", pool.appended_tokens_total},
                    {"attended_rows_total", pool.attended_rows_total}});
  }
  return list;
}

json to_json(const std::vector<protocol::SessionInfo>& sessions) {
  json list = json::array();
  for (const protocol::SessionInfo& session : sessions)
    list.push_back({{"session", session.session},
                    {"tenant", session.tenant},
                    {"role", session.role},
                    {"client_name", session.client_name},
                    {"pid", session.pid},
                    {"uid", session.uid},
                    {"num_pools", session.num_pools},
                    {"open_blocks", session.open_blocks},
                    {"holds", session.holds},
                    {"mapped", session.mapped},
                    {"connected_us", session.connected_us},
                    {"closing", session.closing},
                    {"absent", session.absent},
                    {"fence", session.fence},
                    {"pending_unmap_bytes", session.pending_unmap_bytes}});
  return list;
}

json to_json(const protocol::Capabilities& capabilities) {
  json list = json::array();
  for (const protocol::Capability& row : capabilities.rows)
    list.push_back({{"op", row.op},
                    {"backend", row.backend},
                    {"k_format", row.k_format},
                    {"v_format", row.v_format},
                    {"dim_multiple", row.dim_multiple},
                    {"dim_max", row.dim_max}});
  return list;
}

json to_json(const std::vector<protocol::TenantInfo>& tenants) {
  json list = json::array();
  for (const protocol::TenantInfo& tenant : tenants)
    list.push_back({{"name", tenant.name},
                    {"guaranteed_bytes", tenant.guaranteed_bytes},
                    {"maximum_bytes", tenant.maximum_bytes},
                    {"used_bytes", tenant.used_bytes},
                    {"evictable_bytes", tenant.evictable_bytes},
                    {"leaving_bytes", tenant.leaving_bytes}});
  return list;
}

json to_json(const protocol::Resized& resized) {
  return {{"blocks_before", resized.blocks_before},
          {"blocks_after", resized.blocks_after},
          {"bytes_before", resized.bytes_before},
          {"bytes_after", resized.bytes_after}};
}

json to_json(const Status& refusal) {
  return {{"error", {{"code", error_code_name(refusal.code())}, {"message", refusal.message()}}}};
}

std::string show_executors(const std::vector<protocol::ExecutorInfo>& executors) {
  std::string text;
  for (const protocol::ExecutorInfo& executor : executors)
    text += (text.empty() ? "" : ", ") + std::to_string(executor.pid) + " for " + executor.device +
            " (" + std::to_string(executor.restarts) + " restarts" +
            (executor.ready ? ")" : ", NOT READY)");
  return text;
}

std::string to_text(const protocol::DaemonStatus& status) {
  return table({
      {"larderd",
       status.version + (status.ready ? ", ready" : ", NOT READY (" + status.not_ready + ")") +
           ", up " + show_seconds(status.uptime_us) + ", boot " + std::to_string(status.boot_id)},
      {"processes", "larderd " + std::to_string(status.pid) + ", keeper " +
                        std::to_string(status.keeper_pid) + " (" +
                        std::to_string(status.keeper_segments) + " segments)"},
      {"executors", show_executors(status.executors)},
      {"memory", show_bytes(status.physical_bytes) + " of " + show_bytes(status.memory_bytes) +
                     ", of device " + status.backend + " where a pool names none"},
      {"cache", std::to_string(status.cache_id) + ", " + std::to_string(status.recovered_pools) +
                    " pools and " + std::to_string(status.recovered_sessions) +
                    " sessions recovered at this start"},
      {"journal", show_bytes(static_cast<int64_t>(status.journal_bytes)) + " in " +
                      std::to_string(status.journal_records) + " records, " +
                      std::to_string(status.checkpoints) + " checkpoints"},
      {"pools", std::to_string(status.num_pools)},
      {"sessions", std::to_string(status.num_sessions) + " (this one included)"},
  });
}

std::string to_text(const std::vector<protocol::PoolInfo>& pools) {
  std::vector<std::vector<std::string>> rows = {
      {"TENANT", "POOL", "GROUP", "MODEL", "FORMAT", "SESSIONS", "BLOCKS", "MAX", "FREE", "OPEN",
       "PUBLISHED", "CACHED", "QUARANTINED", "PHYSICAL", "USED", "SLACK", "LEAVING",
       "APPENDED ON REQUEST"}};
  for (const protocol::PoolInfo& pool : pools)
    for (const protocol::GroupInfo& group : pool.groups)
      rows.push_back({pool.tenant, pool.name, group.name, pool.model, show_format(pool, group),
                      std::to_string(pool.num_sessions), std::to_string(group.capacity),
                      std::to_string(group.max_blocks), std::to_string(group.free),
                      std::to_string(group.open), std::to_string(group.published),
                      std::to_string(group.cached), show_quarantined(group),
                      show_bytes(group.physical_bytes), show_bytes(group.used_bytes),
                      show_bytes(group.slack_bytes), show_bytes(group.leaving_bytes),
                      std::to_string(pool.appended_tokens_total)});
  return table(rows);
}

std::string to_text(const std::vector<protocol::SessionInfo>& sessions) {
  std::vector<std::vector<std::string>> rows = {{"SESSION", "TENANT", "ROLE", "CLIENT", "PID",
                                                 "UID", "POOLS", "OPEN", "HOLDS", "EXECUTION",
                                                 "CONNECTED", "STATE", "FENCE", "TO UNMAP"}};
  for (const protocol::SessionInfo& session : sessions)
    rows.push_back({std::to_string(session.session), session.tenant, session.role,
                    session.client_name, std::to_string(session.pid), std::to_string(session.uid),
                    std::to_string(session.num_pools), std::to_string(session.open_blocks),
                    std::to_string(session.holds), session.mapped ? "mapped" : "on request",
                    show_seconds(session.connected_us), show_state(session), session.fence,
                    show_bytes(session.pending_unmap_bytes)});
  return table(rows);
}

std::string to_text(const protocol::Capabilities& capabilities) {
  std::vector<std::vector<std::string>> rows = {{"OP", "BACKEND", "K", "V", "DIMS"}};
  for (const protocol::Capability& row : capabilities.rows)
    rows.push_back({row.op, row.backend, row.k_format, row.v_format,
                    "multiples of " + std::to_string(row.dim_multiple) + " up to " +
                        std::to_string(row.dim_max)});
  return table(rows);
}

std::string to_text(const std::vector<protocol::TenantInfo>& tenants) {
  std::vector<std::vector<std::string>> rows = {
      {"TENANT", "GUARANTEED", "MAXIMUM", "USED", "EVICTABLE", "LEAVING"}};
  for (const protocol::TenantInfo& tenant : tenants)
    rows.push_back({tenant.name, show_bytes(tenant.guaranteed_bytes),
                    tenant.maximum_bytes == 0 ? "none" : show_bytes(tenant.maximum_bytes),
                    show_bytes(tenant.used_bytes), show_bytes(tenant.evictable_bytes),
                    show_bytes(tenant.leaving_bytes)});
  return table(rows);
}

std::string to_text(const protocol::Resized& resized) {
  return std::to_string(resized.blocks_before) + " blocks before, " +
         std::to_string(resized.blocks_after) + " after; " + show_bytes(resized.bytes_before) +
         " before, " + show_bytes(resized.bytes_after) + " after\n";
}

}  // namespace larder::ctl
