// Figures of pools and tenants, and what an admin sets.
#include <algorithm>

#include "client/ctl/queries.h"
#include "client/ctl/replay/operations.h"

namespace larder::replay {
namespace {

Value number(int64_t value) { return {static_cast<double>(value)}; }

// As admin, where the daemon lets this user.
Result<ControlConnection> connect(const SessionSettings& settings) {
  ctl::Target target;
  target.socket_path = settings.socket_path;
  target.tenant = settings.tenant;
  target.token = settings.token;
  target.deadline = settings.deadline;
  return ctl::connect(target);
}

void add_figures(const PoolGroupStats& group, Parts& parts) {
  for (const auto& [name, value] : std::initializer_list<std::pair<const char*, int64_t>>{
           {"capacity", group.capacity},
           {"free", group.free},
           {"open", group.open},
           {"published", group.published},
           {"cached", group.cached},
           {"quarantined", group.quarantined},
           // Published blocks that nobody holds are counted as cached.
           {"pinned", group.published},
           {"evictable", group.evictable},
           {"max_blocks", group.max_blocks},
           {"physical_bytes", group.physical_bytes},
           {"used_bytes", group.used_bytes},
           {"slack_bytes", group.slack_bytes},
           {"leaving_bytes", group.leaving_bytes},
           {"quarantined_pidfd", group.quarantined_pidfd},
           {"quarantined_mps", group.quarantined_mps},
           {"quarantined_unprovable", group.quarantined_unprovable},
           {"quarantined_executor_only", group.quarantined_executor_only}})
    parts.push_back({name, number(value)});
}

Status add_tenant(const std::string& name, const SessionSettings& settings, Parts& parts) {
  auto connection = connect(settings);
  if (!connection) return connection.status();
  const auto all = connection->call_for<protocol::Tenants>(protocol::ListTenants{});
  if (!all) return all.status();
  const auto found = std::find_if(all->tenants.begin(), all->tenants.end(),
                                  [&](const auto& tenant) { return tenant.name == name; });
  if (found == all->tenants.end())
    return {ErrorCode::kNotFound, "there is no tenant \"" + name + "\" to be seen"};
  parts.push_back({"tenant_guaranteed_bytes", number(found->guaranteed_bytes)});
  parts.push_back({"tenant_maximum_bytes", number(found->maximum_bytes)});
  parts.push_back({"tenant_used_bytes", number(found->used_bytes)});
  parts.push_back({"tenant_evictable_bytes", number(found->evictable_bytes)});
  parts.push_back({"tenant_leaving_bytes", number(found->leaving_bytes)});
  return {};
}

}  // namespace

Outcome stats_of(const Stats& step, OpenedPool* pool, const SessionSettings& settings) {
  Parts parts;
  if (pool != nullptr) {
    const auto stats = pool->pool.stats();
    if (!stats) return {stats.status(), {}};
    if (pool->group_index >= stats->size())
      return refused(ErrorCode::kInternal, "the daemon shows " + std::to_string(stats->size()) +
                                               " groups, more were opened");
    add_figures((*stats)[pool->group_index], parts);
  }
  if (!step.tenant.empty())
    if (Status status = add_tenant(step.tenant, settings, parts); !status.ok()) return {status, {}};
  return {{}, {std::move(parts)}};
}

Outcome set_quota(const Quota& step, const SessionSettings& settings) {
  auto connection = connect(settings);
  if (!connection) return {connection.status(), {}};
  const auto done = connection->call_for<protocol::Done>(
      protocol::SetQuota{step.tenant, step.guaranteed_bytes, step.maximum_bytes});
  return {done.status(), {}};
}

}  // namespace larder::replay
