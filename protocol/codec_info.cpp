// Codec of what replies list: pools, sessions, tenants, and the state of larderd.
#include "protocol/codec.h"

namespace larder::protocol {
namespace {

uint32_t size32(size_t size) { return static_cast<uint32_t>(size); }

void write(wire::GroupInfo::Builder to, const GroupInfo& group) {
  to.setName(group.name);
  to.setCapacity(group.capacity);
  to.setFree(group.free);
  to.setOpen(group.open);
  to.setPublished(group.published);
  to.setCached(group.cached);
  to.setQuarantined(group.quarantined);
  to.setPhysicalBytes(group.physical_bytes);
  to.setUsedBytes(group.used_bytes);
  to.setSlackBytes(group.slack_bytes);
  to.setMaxBlocks(group.max_blocks);
  to.setEvictable(group.evictable);
  to.setLeavingBytes(group.leaving_bytes);
  to.setQuarantinedPidfd(group.quarantined_pidfd);
  to.setQuarantinedMps(group.quarantined_mps);
  to.setQuarantinedUnprovable(group.quarantined_unprovable);
  to.setQuarantinedExecutorOnly(group.quarantined_executor_only);
}

GroupInfo read_group_info(Reading& reading, wire::GroupInfo::Reader from) {
  reading.known_fields_only<wire::GroupInfo>("group", from);
  GroupInfo group;
  group.name = reading.text("group.name", from.getName());
  group.capacity = from.getCapacity();
  group.free = from.getFree();
  group.open = from.getOpen();
  group.published = from.getPublished();
  group.cached = from.getCached();
  group.quarantined = from.getQuarantined();
  group.physical_bytes = from.getPhysicalBytes();
  group.used_bytes = from.getUsedBytes();
  group.slack_bytes = from.getSlackBytes();
  group.max_blocks = from.getMaxBlocks();
  group.evictable = from.getEvictable();
  group.leaving_bytes = from.getLeavingBytes();
  group.quarantined_pidfd = from.getQuarantinedPidfd();
  group.quarantined_mps = from.getQuarantinedMps();
  group.quarantined_unprovable = from.getQuarantinedUnprovable();
  group.quarantined_executor_only = from.getQuarantinedExecutorOnly();
  return group;
}

}  // namespace

void write(wire::PoolInfo::Builder to, const PoolInfo& pool) {
  to.setPool(pool.pool);
  to.setTenant(pool.tenant);
  to.setName(pool.name);
  to.setModel(pool.model);
  auto identity = to.initIdentity(size32(pool.identity.size()));
  for (uint32_t i = 0; i < pool.identity.size(); ++i) {
    identity[i].setName(pool.identity[i].first);
    identity[i].setValue(pool.identity[i].second);
  }
  to.setNumSessions(pool.num_sessions);
  auto groups = to.initGroups(size32(pool.groups.size()));
  for (uint32_t i = 0; i < pool.groups.size(); ++i) write(groups[i], pool.groups[i]);
  to.setAllocatedBlocksTotal(pool.allocated_blocks_total);
  to.setEvictedBlocksTotal(pool.evicted_blocks_total);
  to.setPublishedBlocksTotal(pool.published_blocks_total);
  to.setLookupTokensTotal(pool.lookup_tokens_total);
  to.setLookupHitTokensTotal(pool.lookup_hit_tokens_total);
  to.setAppendedTokensTotal(pool.appended_tokens_total);
  to.setAttendedRowsTotal(pool.attended_rows_total);
  to.setDevice(pool.device);
}

PoolInfo read_pool_info(Reading& reading, wire::PoolInfo::Reader from) {
  reading.known_fields_only<wire::PoolInfo>("pool", from);
  PoolInfo pool;
  pool.pool = from.getPool();
  pool.tenant = reading.text("tenant", from.getTenant());
  pool.name = reading.text("pool.name", from.getName());
  pool.model = reading.text("model", from.getModel());
  const auto identity = from.getIdentity();
  pool.identity.resize(reading.count("identity", identity.size(), kMaxIdentityFields));
  for (uint32_t i = 0; i < pool.identity.size(); ++i) {
    reading.known_fields_only<wire::Pair>("identity", identity[i]);
    pool.identity[i] = {
        reading.text("identity.name", identity[i].getName()),
        reading.text("identity.value", identity[i].getValue(), kMaxIdentityValueBytes)};
  }
  pool.num_sessions = from.getNumSessions();
  const auto groups = from.getGroups();
  pool.groups.resize(reading.count("groups", groups.size(), kMaxGroups));
  for (uint32_t i = 0; i < pool.groups.size(); ++i)
    pool.groups[i] = read_group_info(reading, groups[i]);
  pool.allocated_blocks_total = from.getAllocatedBlocksTotal();
  pool.evicted_blocks_total = from.getEvictedBlocksTotal();
  pool.published_blocks_total = from.getPublishedBlocksTotal();
  pool.lookup_tokens_total = from.getLookupTokensTotal();
  pool.lookup_hit_tokens_total = from.getLookupHitTokensTotal();
  pool.appended_tokens_total = from.getAppendedTokensTotal();
  pool.attended_rows_total = from.getAttendedRowsTotal();
  pool.device = reading.text("device", from.getDevice());
  return pool;
}

void write(wire::SessionInfo::Builder to, const SessionInfo& session) {
  to.setSession(session.session);
  to.setTenant(session.tenant);
  to.setRole(session.role);
  to.setClientName(session.client_name);
  to.setPid(session.pid);
  to.setUid(session.uid);
  to.setNumPools(session.num_pools);
  to.setOpenBlocks(session.open_blocks);
  to.setHolds(session.holds);
  to.setMapped(session.mapped);
  to.setConnectedUs(session.connected_us);
  to.setClosing(session.closing);
  to.setFence(session.fence);
  to.setAbsent(session.absent);
  to.setPendingUnmapBytes(session.pending_unmap_bytes);
}

SessionInfo read_session_info(Reading& reading, wire::SessionInfo::Reader from) {
  reading.known_fields_only<wire::SessionInfo>("session", from);
  SessionInfo session;
  session.session = from.getSession();
  session.tenant = reading.text("tenant", from.getTenant());
  session.role = reading.text("role", from.getRole());
  session.client_name = reading.text("client_name", from.getClientName());
  session.pid = from.getPid();
  session.uid = from.getUid();
  session.num_pools = from.getNumPools();
  session.open_blocks = from.getOpenBlocks();
  session.holds = from.getHolds();
  session.mapped = from.getMapped();
  session.connected_us = from.getConnectedUs();
  session.closing = from.getClosing();
  session.fence = reading.text("fence", from.getFence(), kMaxFenceBytes);
  session.absent = from.getAbsent();
  session.pending_unmap_bytes = from.getPendingUnmapBytes();
  return session;
}

void write(wire::DaemonStatus::Builder to, const DaemonStatus& status) {
  to.setVersion(status.version);
  to.setPid(status.pid);
  to.setUptimeUs(status.uptime_us);
  to.setMemoryBytes(status.memory_bytes);
  to.setPhysicalBytes(status.physical_bytes);
  to.setNumPools(status.num_pools);
  to.setNumSessions(status.num_sessions);
  to.setExecutorPid(status.executor_pid);
  to.setExecutorRestarts(status.executor_restarts);
  to.setKeeperPid(status.keeper_pid);
  to.setKeeperSegments(status.keeper_segments);
  to.setBackend(status.backend);
  to.setReady(status.ready);
  to.setBootId(status.boot_id);
  to.setCacheId(status.cache_id);
  to.setJournalBytes(status.journal_bytes);
  to.setJournalRecords(status.journal_records);
  to.setCheckpoints(status.checkpoints);
  to.setRecoveredSessions(status.recovered_sessions);
  to.setRecoveredPools(status.recovered_pools);
  to.setNotReady(status.not_ready);
  auto executors = to.initExecutors(size32(status.executors.size()));
  for (uint32_t i = 0; i < status.executors.size(); ++i) {
    executors[i].setDevice(status.executors[i].device);
    executors[i].setPid(status.executors[i].pid);
    executors[i].setRestarts(status.executors[i].restarts);
    executors[i].setReady(status.executors[i].ready);
  }
}

DaemonStatus read_status(Reading& reading, wire::DaemonStatus::Reader from) {
  reading.known_fields_only<wire::DaemonStatus>("status", from);
  DaemonStatus status;
  status.version = reading.text("version", from.getVersion());
  status.pid = from.getPid();
  status.uptime_us = from.getUptimeUs();
  status.memory_bytes = from.getMemoryBytes();
  status.physical_bytes = from.getPhysicalBytes();
  status.num_pools = from.getNumPools();
  status.num_sessions = from.getNumSessions();
  status.executor_pid = from.getExecutorPid();
  status.executor_restarts = from.getExecutorRestarts();
  status.keeper_pid = from.getKeeperPid();
  status.keeper_segments = from.getKeeperSegments();
  status.backend = reading.text("backend", from.getBackend());
  status.ready = from.getReady();
  status.boot_id = from.getBootId();
  status.cache_id = from.getCacheId();
  status.journal_bytes = from.getJournalBytes();
  status.journal_records = from.getJournalRecords();
  status.checkpoints = from.getCheckpoints();
  status.recovered_sessions = from.getRecoveredSessions();
  status.recovered_pools = from.getRecoveredPools();
  status.not_ready = reading.text("not_ready", from.getNotReady(), kMaxErrorBytes);
  const auto executors = from.getExecutors();
  status.executors.resize(reading.count("executors", executors.size(), kMaxDevices));
  for (uint32_t i = 0; i < status.executors.size(); ++i) {
    reading.known_fields_only<wire::ExecutorInfo>("executors", executors[i]);
    status.executors[i] = {reading.text("device", executors[i].getDevice()), executors[i].getPid(),
                           executors[i].getRestarts(), executors[i].getReady()};
  }
  return status;
}

void write(wire::TenantInfo::Builder to, const TenantInfo& tenant) {
  to.setName(tenant.name);
  to.setGuaranteedBytes(tenant.guaranteed_bytes);
  to.setMaximumBytes(tenant.maximum_bytes);
  to.setUsedBytes(tenant.used_bytes);
  to.setEvictableBytes(tenant.evictable_bytes);
  to.setLeavingBytes(tenant.leaving_bytes);
}

TenantInfo read_tenant_info(Reading& reading, wire::TenantInfo::Reader from) {
  reading.known_fields_only<wire::TenantInfo>("tenant", from);
  return {reading.text("tenant.name", from.getName()),
          from.getGuaranteedBytes(),
          from.getMaximumBytes(),
          from.getUsedBytes(),
          from.getEvictableBytes(),
          from.getLeavingBytes()};
}

size_t page_bytes(const PoolInfo& pool) {
  const auto words = [](const std::string& text) { return text.size() / sizeof(capnp::word) + 1; };
  const auto words_of = [](auto size) {
    return size.data / capnp::WORDS + size.pointers / capnp::POINTERS;
  };
  size_t sum = words_of(capnp::_::structSize<wire::PoolInfo>()) + words(pool.tenant) +
               words(pool.name) + words(pool.model) + words(pool.device) +
               2;  // one word of header per list
  for (const auto& [name, value] : pool.identity)
    sum += words_of(capnp::_::structSize<wire::Pair>()) + words(name) + words(value);
  for (const GroupInfo& group : pool.groups)
    sum += words_of(capnp::_::structSize<wire::GroupInfo>()) + words(group.name);
  return sum * sizeof(capnp::word);
}

}  // namespace larder::protocol
