// What an earlier larderd has left, and what a keeper that comes back empty is given.
#include <algorithm>
#include <cstring>
#include <poll.h>
#include <set>
#include <sys/syscall.h>
#include <unistd.h>

#include <openssl/rand.h>
#include <spdlog/spdlog.h>

#include "allocator/host_memory.h"
#include "daemon/service.h"
#include "larder/check.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

using protocol::keeper_key;
using protocol::KeeperKind;

constexpr int64_t kKeeperRetryUs = 250'000;

// What the keeper stores beside an fd: for people who look; the journal says what counts.
std::array<uint8_t, 64> metadata(const char* what, uint64_t id, int64_t size_bytes) {
  struct {
    char what[8] = {};
    uint64_t id;
    int64_t size_bytes;
    uint8_t reserved[40] = {};
  } record;
  std::memcpy(record.what, what, std::min<size_t>(std::strlen(what), sizeof record.what));
  record.id = id;
  record.size_bytes = size_bytes;
  static_assert(sizeof record == 64);
  std::array<uint8_t, 64> bytes;
  std::memcpy(bytes.data(), &record, sizeof record);
  return bytes;
}

Status put(KeeperClient& keeper, KeeperKind kind, const char* what, uint64_t id, int fd,
           int64_t size_bytes = 0) {
  if (fd < 0) return {};
  return keeper.put(keeper_key(kind, id), fd, metadata(what, id, size_bytes));
}

}  // namespace

// ---------------------------------------------------------------------------------------- recovery

Status Service::recover(Recovery recovery) {
  if (recovery.journal) {
    if (Status status = recorded_.recover(recovery.journal->contents); !status.ok())
      return {status.code(), "the journal: " + status.message()};
    if (Status status = check_segments(machine(), recovery); !status.ok()) return status;
    journal_.emplace(std::move(recovery.journal->file));
  } else {
    // Nothing names what is there.
    if (Status status = keeper_.clear(); !status.ok()) return status;
    auto created = JournalFile::create(keeper_, 0, recorded_.snapshot());
    if (!created) return created.status();
    journal_.emplace(std::move(*created));
    recovery = {};
  }
  if (Status status = restore(recovery); !status.ok()) return status;
  drop_unnamed(recovery);
  executors_.set_predecessors(std::move(recovery.executors));
  apply(Recovered{});
  apply(configuration());
  recovered_sessions_ = std::ssize(sessions_);
  recovered_pools_ = std::ssize(store_.pools());
  spdlog::info("event=cache_{} cache={} sessions={} pools={} segments={} records={}",
               recovered_pools_ + recovered_sessions_ > 0 ? "recovered" : "begins",
               machine().cache_id(), recovered_sessions_, recovered_pools_,
               machine().segments().size(), journal_->num_records());
  // Those whose process has not lived through it are not waited for.
  std::vector<SessionId> gone;
  for (const auto& [id, session] : sessions_) {
    pollfd entry{session->pidfd.get(), POLLIN, 0};
    if (session->pidfd.valid() && ::poll(&entry, 1, 0) > 0) gone.push_back(id);
  }
  for (const SessionId id : gone) end_session(id, End::kProcessGone);
  return {};
}

Configure Service::configuration() const {
  Configure event{config_.memory_bytes, protocol::kMaxPools, {}};
  for (const TenantConfig& tenant : config_.tenants) {
    std::string salt(32, '\0');
    LARDER_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(salt.data()),
                            static_cast<int>(salt.size())) == 1);
    event.tenants.push_back(
        {tenant.name, std::move(salt), tenant.guaranteed_bytes, tenant.maximum_bytes});
  }
  LARDER_CHECK(
      RAND_bytes(reinterpret_cast<unsigned char*>(&event.cache_id), sizeof event.cache_id) == 1);
  event.cache_id |= 1;
  return event;
}

Status Service::restore(Recovery& recovery) {
  for (const SegmentRecord& segment : machine().segments())
    store_.add_segment(segment.segment, {std::move(recovery.segments.at(value(segment.segment))),
                                         segment.size_bytes});
  for (const PoolRecord& record : machine().pool_records())
    if (record.created)
      if (Status status = restore_pool(record, recovery); !status.ok()) return status;
  for (const SegmentRecord& segment : machine().segments()) {
    StoredPool* pool = store_.find(segment.pool);
    if (pool != nullptr && !segment.leaving)
      pool->groups[segment.group].segment_ids[segment.index] = segment.segment;
  }
  for (const SessionAttachment& saved : machine().session_attachments())
    if (Status status = restore_session(saved, std::move(recovery.sessions[value(saved.session)]));
        !status.ok())
      return status;
  for (const PoolRecord& record : machine().pool_records())
    for (const SessionId id : record.sessions)
      if (Session* session = find(id)) {
        session->pools.insert(record.pool);
        const StoredPool* pool = store_.find(record.pool);
        if (pool != nullptr && session->ring_device == kHostDevice)
          session->ring_device = pool->device;
      }
  for (const UnfencedSession& session : machine().unfenced_sessions())
    if (Status status =
            restore_closing(session, std::move(recovery.sessions[value(session.session)]));
        !status.ok())
      return status;
  return {};
}

Status Service::restore_pool(const PoolRecord& record, Recovery& recovery) {
  std::optional<SharedCounters> counters;
  if (const auto found = recovery.counters.find(value(record.pool));
      found != recovery.counters.end() &&
      check_host_segment(found->second.get(), SharedCounters::kBytes).ok())
    counters.emplace(SharedCounters::adopt(std::move(found->second)));
  Result<StoredPool> pool = make_pool(record, std::move(counters));
  if (!pool) return pool.status();
  pool->created = true;
  for (uint32_t group = 0; group < pool->groups.size(); ++group)
    pool->groups[group].owners.set_all(machine().owner_words(record.pool, group));
  (void)executors_.of(pool->device);
  store_.add_pool(record.pool, std::move(*pool));
  return {};
}

Status Service::restore_session(const SessionAttachment& saved, SessionFds fds) {
  Result<SessionRecord> record = session_record(saved.attachment);
  if (!record) return record.status();
  const SessionId id = saved.session;
  auto session = std::make_unique<Session>();
  session->id = id;
  session->record = std::move(*record);
  session->tenant = saved.tenant;
  session->role = saved.role;
  session->mapped = machine().maps_memory(id);
  session->pidfd = std::move(fds.process);
  session->lifeline = std::move(fds.lifeline);
  session->ring_device = kHostDevice;
  session->absent_until_us = now_us() + int64_t{config_.resume_grace_ms} * 1000 + 1;
  const uint64_t arena_bytes = session->record.arena_bytes;
  if (arena_bytes != 0) {
    if (Status status = check_host_segment(fds.arena.get(), static_cast<int64_t>(arena_bytes));
        !status.ok() || !fds.wake_up.valid())
      return {ErrorCode::kInternal, "the arena of session " + std::to_string(value(id)) +
                                        " is not with the keeper: " + status.message()};
    session->arena.emplace(std::move(fds.arena), std::move(fds.wake_up), arena_bytes);
  }
  watch_process(*session);
  sessions_.emplace(id, std::move(session));
  return {};
}

Status Service::restore_closing(const UnfencedSession& unfenced, SessionFds fds) {
  Result<SessionRecord> record = session_record(unfenced.attachment);
  if (!record) return record.status();
  ClosingSession& closing = closing_[unfenced.session];
  closing.id = unfenced.session;
  closing.fence = unfenced.fence;
  closing.record = std::move(*record);
  closing.tenant = unfenced.tenant;
  closing.since_us = now_us();
  // Without a lifeline it is of this class only because the end of its socket was seen.
  closing.let_go = true;
  closing_fds_.emplace(unfenced.session,
                       std::pair(std::move(fds.process), std::move(fds.lifeline)));
  return {};
}

void Service::drop_unnamed(const Recovery& recovery) {
  std::vector<uint64_t> keys = recovery.unknown;
  for (const auto& [id, fd] : recovery.segments)
    if (store_.find_segment(SegmentId{id}) == nullptr)
      keys.push_back(keeper_key(KeeperKind::kSegment, id));
  for (const auto& [id, fd] : recovery.counters)
    if (store_.find(PoolId{id}) == nullptr) keys.push_back(keeper_key(KeeperKind::kCounters, id));
  for (const uint64_t key : keys)
    if (Status status = keeper_.drop(key); !status.ok())
      spdlog::error("event=keeper_drop_failed error=\"{}\"", status.to_string());
  for (const auto& [id, fds] : recovery.sessions)
    if (find(SessionId{id}) == nullptr && !closing_.contains(SessionId{id}))
      forget_deposits(SessionId{id});
  if (!keys.empty()) spdlog::info("event=unnamed_dropped entries={}", keys.size());
}

// ---------------------------------------------------------------------------------------- deposits

Status Service::deposit_session(KeeperClient& keeper, const Session& session) {
  const uint64_t id = value(session.id);
  if (session.arena) {
    const auto bytes = static_cast<int64_t>(session.arena->size_bytes());
    if (Status status = put(keeper, KeeperKind::kArena, "arena", id, session.arena->fd(), bytes);
        !status.ok())
      return status;
    if (Status status = put(keeper, KeeperKind::kWakeUp, "wake-up", id, session.arena->eventfd());
        !status.ok())
      return status;
  }
  if (Status status = put(keeper, KeeperKind::kProcess, "process", id, session.pidfd.get());
      !status.ok())
    return status;
  return put(keeper, KeeperKind::kLifeline, "lifeline", id, session.lifeline.get());
}

// What will tell that nothing of it can write any more.
Status Service::deposit_closing(KeeperClient& keeper, ClosingSession& closing) {
  const uint64_t id = value(closing.id);
  if (closing.process)
    if (Status status = put(keeper, KeeperKind::kProcess, "process", id, closing.process->fd());
        !status.ok())
      return status;
  if (!closing.lifeline) return {};
  return put(keeper, KeeperKind::kLifeline, "lifeline", id, closing.lifeline->fd());
}

Status Service::deposit_executor(KeeperClient& keeper, const std::string& device) {
  const auto pid = executors_.of(device).pid();
  const OwnFd pidfd(pid == 0 ? -1 : static_cast<int>(::syscall(SYS_pidfd_open, pid, 0)));
  return put(keeper, KeeperKind::kExecutor, "executor", Executors::id_of(device), pidfd.get());
}

// A keeper that was restarted holds nothing. It is given everything again, the journal last: one
// that has a journal has all that it names.
void Service::reconnect_keeper() {
  if ((keeper_.connected() && !journal_lag_) || now_us() < keeper_retry_us_) return;
  keeper_retry_us_ = now_us() + kKeeperRetryUs;
  if (!keeper_.connected()) {
    auto keeper = KeeperClient::connect(config_.keeper_socket_path);
    if (!keeper) return;
    keeper_ = std::move(*keeper);
  }
  const Status status = deposit_everything(keeper_);
  if (!status.ok()) {
    journal_lag_ = status;
    spdlog::error("event=deposit_failed error=\"{}\"", status.to_string());
    return;
  }
  journal_lag_.reset();
  spdlog::info("event=keeper_reconnected pid={} entries={}", keeper_.pid(), keeper_.num_entries());
}

Status Service::deposit_everything(KeeperClient& keeper) {
  Result<std::vector<KeeperClient::Entry>> there = keeper.list();
  if (!there) return there.status();
  std::set<uint64_t> named = {JournalFile::kKey};
  for (const SegmentRecord& record : machine().segments()) {
    const Segment* segment = store_.find_segment(record.segment);
    LARDER_CHECK(segment != nullptr, value(record.segment));
    named.insert(keeper_key(KeeperKind::kSegment, value(record.segment)));
    if (Status status = put(keeper, KeeperKind::kSegment, "segment", value(record.segment),
                            segment->fd.get(), segment->size_bytes);
        !status.ok())
      return status;
  }
  for (const auto& [id, pool] : store_.pools()) {
    named.insert(keeper_key(KeeperKind::kCounters, value(id)));
    if (Status status = put(keeper, KeeperKind::kCounters, "counters", value(id),
                            pool.counters.fd(), SharedCounters::kBytes);
        !status.ok())
      return status;
  }
  for (const auto& [id, session] : sessions_) {
    for (const KeeperKind kind :
         {KeeperKind::kArena, KeeperKind::kWakeUp, KeeperKind::kProcess, KeeperKind::kLifeline})
      named.insert(keeper_key(kind, value(id)));
    if (Status status = deposit_session(keeper, *session); !status.ok()) return status;
  }
  for (auto& [id, closing] : closing_) {
    for (const KeeperKind kind : {KeeperKind::kProcess, KeeperKind::kLifeline})
      named.insert(keeper_key(kind, value(id)));
    if (Status status = deposit_closing(keeper, closing); !status.ok()) return status;
  }
  for (const protocol::ExecutorInfo& executor : executors_.list()) {
    named.insert(keeper_key(KeeperKind::kExecutor, Executors::id_of(executor.device)));
    if (Status status = deposit_executor(keeper, executor.device); !status.ok()) return status;
  }
  if (Status status = journal_->deposit(keeper); !status.ok()) return status;
  // A connection that was merely lost leaves a keeper with what has been dropped since.
  for (const KeeperClient::Entry& entry : *there)
    if (!named.contains(entry.key))
      if (Status status = keeper.drop(entry.key); !status.ok()) return status;
  return {};
}

Status Service::create_segment(const CreateSegment& effect) {
  try {
    if (store_.find(effect.pool) == nullptr) {
      const std::optional<PoolRecord> record = machine().pool_record(effect.pool);
      LARDER_CHECK(record.has_value(), value(effect.pool));
      Result<StoredPool> pool = make_pool(*record, std::nullopt);
      if (!pool) return pool.status();
      if (Status status = put(keeper_, KeeperKind::kCounters, "counters", value(effect.pool),
                              pool->counters.fd(), SharedCounters::kBytes);
          !status.ok())
        return status;
      store_.add_pool(effect.pool, std::move(*pool));
    }
    const auto provider = devices_.provider(store_.find(effect.pool)->device);
    if (!provider) return provider.status();
    Segment segment = (*provider)->create("larder-pool", effect.size_bytes);
    if (Status status = put(keeper_, KeeperKind::kSegment, "segment", value(effect.segment),
                            segment.fd.get(), effect.size_bytes);
        !status.ok())
      return status;
    store_.find(effect.pool)->groups[effect.group].segment_ids[effect.index] = effect.segment;
    store_.add_segment(effect.segment, std::move(segment));
    return {};
  } catch (const std::runtime_error& error) {  // SystemError, CudaError
    return {ErrorCode::kResourceExhausted, error.what()};
  }
}

void Service::drop_segment(SegmentId segment) {
  store_.remove_segment(segment);
  if (Status status = keeper_.drop(keeper_key(KeeperKind::kSegment, value(segment)));
      !status.ok() && status.code() != ErrorCode::kUnavailable)
    spdlog::error("event=keeper_drop_failed error=\"{}\"", status.to_string());
}

bool Service::append(std::span<const std::byte> record) { return journal_->append(record); }

void Service::checkpoint(std::span<const std::byte> snapshot) {
  const Status status = journal_->checkpoint(keeper_, snapshot);
  if (status.ok()) return;
  // An event that is not kept must not be acted on. Without a keeper this process keeps it, and a
  // new keeper gets it; one that refuses leaves no way to keep it.
  LARDER_CHECK(status.code() == ErrorCode::kUnavailable, status.to_string());
  journal_lag_ = status;
}

}  // namespace larder::daemon
