// What larderd shows of itself: lists, status, metrics.
#include <map>
#include <unistd.h>

#include "daemon/role_names.h"
#include "daemon/service.h"

namespace larder::daemon {
namespace {

// A page of a list stays well below the size of a message.
constexpr size_t kPoolsPerPage = 32;
constexpr size_t kSessionsPerPage = 128;
constexpr size_t kShownIdentityBytes = 64;

protocol::GroupInfo show(const GroupStats& stats) {
  const auto quarantined = [&](FenceClass fence) {
    return stats.by_fence[static_cast<size_t>(fence)];
  };
  protocol::GroupInfo info;
  info.name = stats.name;
  info.capacity = stats.capacity;
  info.free = stats.free;
  info.open = stats.open;
  info.published = stats.published;
  info.cached = stats.cached;
  info.quarantined = stats.quarantined;
  info.physical_bytes = stats.physical_bytes;
  info.used_bytes = stats.used_bytes;
  info.slack_bytes = stats.slack_bytes;
  info.max_blocks = stats.max_blocks;
  info.evictable = stats.evictable;
  info.leaving_bytes = stats.leaving_bytes;
  info.quarantined_pidfd = quarantined(FenceClass::kPidfd);
  info.quarantined_mps = quarantined(FenceClass::kMps);
  info.quarantined_unprovable = quarantined(FenceClass::kUnprovable);
  info.quarantined_executor_only = quarantined(FenceClass::kExecutorOnly);
  return info;
}

protocol::PoolInfo show(const PoolStats& stats, const StoredPool* stored) {
  protocol::PoolInfo info;
  info.pool = value(stats.pool);
  info.tenant = stats.tenant;
  info.name = stats.name;
  info.model = stats.model;
  for (const auto& [name, text] : stats.identity)
    info.identity.emplace_back(name, text.substr(0, kShownIdentityBytes));
  info.num_sessions = stats.num_sessions;
  for (const GroupStats& group : stats.groups) info.groups.push_back(show(group));
  info.allocated_blocks_total = stats.allocated_blocks_total;
  info.evicted_blocks_total = stats.evicted_blocks_total;
  info.published_blocks_total = stats.published_blocks_total;
  info.lookup_tokens_total = stats.lookup_tokens_total;
  info.lookup_hit_tokens_total = stats.lookup_hit_tokens_total;
  if (stored == nullptr) return info;
  info.appended_tokens_total = stored->counters->appended_tokens.load(std::memory_order_relaxed);
  info.attended_rows_total = stored->counters->attended_rows.load(std::memory_order_relaxed);
  return info;
}

}  // namespace

bool Service::may_see(const Session& session, const std::string& tenant) const {
  return session.role == Role::kAdmin || session.tenant == tenant;
}

protocol::Pools Service::list_pools(const Session& session, uint64_t after) const {
  protocol::Pools page;
  for (const PoolStats& stats : machine().pool_stats()) {
    if (value(stats.pool) <= after || !may_see(session, stats.tenant)) continue;
    if (page.pools.size() == kPoolsPerPage) {
      page.more = true;
      break;
    }
    page.pools.push_back(show(stats, store_.find(stats.pool)));
  }
  return page;
}

protocol::Sessions Service::list_sessions(const Session& session, uint64_t after) const {
  std::map<SessionId, protocol::SessionInfo> all;
  for (const SessionStats& stats : machine().session_stats()) {
    const auto found = sessions_.find(stats.session);
    if (found == sessions_.end() || !may_see(session, stats.tenant)) continue;
    const Session& shown = *found->second;
    protocol::SessionInfo& info = all[stats.session];
    info.client_name = shown.record.client_name;
    info.pid = shown.record.pid;
    info.uid = shown.record.uid;
    info.tenant = stats.tenant;
    info.role = std::string(kRoleNames[static_cast<size_t>(stats.role)]);
    info.num_pools = stats.num_pools;
    info.open_blocks = stats.open_blocks;
    info.holds = stats.holds;
    info.mapped = shown.mapped;
    info.connected_us = static_cast<uint64_t>(now() - shown.connected_at_us);
    info.fence = fence_class_name(fence_class(shown, End::kPeerClosed));
    info.absent = stats.absent;
    info.pending_unmap_bytes = stats.unmapping_bytes;
  }
  for (const auto& [id, closing] : closing_) {
    if (!may_see(session, closing.tenant)) continue;
    protocol::SessionInfo& info = all[id];
    info.client_name = closing.record.client_name;
    info.pid = closing.record.pid;
    info.uid = closing.record.uid;
    info.tenant = closing.tenant;
    info.mapped = closing.fence != FenceClass::kExecutorOnly;
    info.connected_us = static_cast<uint64_t>(now() - closing.since_us);
    info.closing = true;
    info.fence = fence_class_name(closing.fence);
  }
  protocol::Sessions page;
  for (auto& [id, info] : all) {
    if (value(id) <= after) continue;
    if (page.sessions.size() == kSessionsPerPage) {
      page.more = true;
      break;
    }
    info.session = value(id);
    page.sessions.push_back(std::move(info));
  }
  return page;
}

protocol::Tenants Service::list_tenants(const Session& session) const {
  protocol::Tenants reply;
  for (const TenantStats& stats : machine().tenant_stats())
    if (may_see(session, stats.name))
      reply.tenants.push_back({stats.name, stats.guaranteed_bytes, stats.maximum_bytes,
                               stats.used_bytes, stats.evictable_bytes, stats.leaving_bytes});
  return reply;
}

std::string Service::metrics_text() {
  Metrics::Scrape scrape;
  scrape.pools = machine().pool_stats();
  scrape.tenants = machine().tenant_stats();
  scrape.status = status();
  scrape.num_closing = std::ssize(closing_);
  for (const auto& [id, session] : sessions_) scrape.num_absent += session->connection ? 0 : 1;
  for (const PoolStats& pool : scrape.pools) {
    const StoredPool* stored = store_.find(pool.pool);
    if (stored == nullptr) continue;
    const PoolCounters& counters = *stored->counters;
    scrape.executed[pool.pool] = {counters.appended_tokens.load(std::memory_order_relaxed),
                                  counters.attended_rows.load(std::memory_order_relaxed),
                                  counters.refusals.load(std::memory_order_relaxed)};
  }
  return metrics_.render(scrape);
}

protocol::DaemonStatus Service::status() const {
  protocol::DaemonStatus status;
  status.version = LARDER_VERSION;
  status.pid = ::getpid();
  status.uptime_us = static_cast<uint64_t>(now() - started_at_us_);
  status.memory_bytes = machine().memory_bytes();
  status.physical_bytes = machine().physical_bytes();
  status.num_pools = static_cast<int64_t>(store_.pools().size());
  status.num_sessions = static_cast<int64_t>(sessions_.size());
  status.executors = executors_.list();
  for (const protocol::ExecutorInfo& executor : status.executors)
    if (executor.device != kHostDevice || status.executors.size() == 1)
      status.executor_pid = executor.pid;
  status.executor_restarts = executors_.restarts();
  status.keeper_pid = keeper_.pid();
  status.keeper_segments = keeper_.connected() && !journal_lag_ ? store_.num_segments() : 0;
  status.backend = config_.device;
  status.not_ready = not_ready().value_or("");
  status.ready = status.not_ready.empty();
  status.boot_id = boot_id_;
  status.cache_id = machine().cache_id();
  if (journal_) {
    status.journal_bytes = journal_->used_bytes();
    status.journal_records = journal_->num_records();
    status.checkpoints = journal_->num_checkpoints();
  }
  status.recovered_sessions = recovered_sessions_;
  status.recovered_pools = recovered_pools_;
  return status;
}

}  // namespace larder::daemon
