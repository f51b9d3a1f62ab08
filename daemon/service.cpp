// Connections: how a session comes, goes, and what of it outlives its connection.
#include "daemon/service.h"

#include <chrono>

#include <openssl/rand.h>
#include <spdlog/spdlog.h>

#include "larder/check.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);
constexpr int64_t kHandshakeUs = 10'000'000;
constexpr int64_t kKeeperRetryUs = 1'000'000;
// Room for connections that have not said hello, and for those about to be refused.
constexpr size_t kMaxConnections = 2 * protocol::kMaxSessions;

void fill_random(void* data, size_t size) {
  LARDER_CHECK(RAND_bytes(static_cast<unsigned char*>(data), static_cast<int>(size)) == 1);
}

MachineConfig machine_config(const Config& config) {
  MachineConfig machine;
  machine.memory_bytes = config.memory_bytes;
  machine.max_pools = protocol::kMaxPools;
  for (const TenantConfig& tenant : config.tenants) {
    std::string salt(32, '\0');
    fill_random(salt.data(), salt.size());
    machine.salts.emplace(tenant.name, salt);
  }
  return machine;
}

uint64_t random_boot_id() {
  uint64_t id = 0;
  fill_random(&id, sizeof id);
  return id | 1;  // never 0, which means "unknown"
}

}  // namespace

Service::Service(boost::asio::io_context& loop, const Config& config, KeeperClient keeper,
                 std::string executor_path)
    : loop_(loop),
      config_(config),
      keeper_(std::move(keeper)),
      executor_(loop, std::move(executor_path), config.log_level),
      machine_(machine_config(config)),
      boot_id_(random_boot_id()),
      started_at_us_(now_us()),
      tick_timer_(loop) {}

Service::~Service() {
  for (auto& [id, session] : sessions_) session->connection->close();
}

void Service::start() {
  executor_.start({
      [this] { tell_executor_all(); },
      [] { spdlog::info("event=executor_ready"); },
      [this] { on_executor_died(); },
      [this](const protocol::Copied& copied) {
        copies_.erase(copied.copy);
        apply(CopyDone{copied.copy, copied.status});
      },
      [this](const protocol::Counters& counters) { metrics_.set_executor_counters(counters); },
      [this](const protocol::BrokenRing& broken) {
        spdlog::warn("event=ring_broken session={} error=\"{}\"", broken.session, broken.message);
        Session* session = find(SessionId{broken.session});
        if (session == nullptr || !session->connection->is_open()) return;
        session->connection->close();
        on_closed(session->id);
      },
  });
  tick();
}

int64_t Service::now_us() const {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

Session* Service::find(SessionId id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

void Service::accept(OwnFd socket) {
  if (sessions_.size() >= kMaxConnections) {
    spdlog::warn("event=connection_refused connections={}", sessions_.size());
    return;
  }
  auto session = std::make_unique<Session>();
  session->id = SessionId{next_session_++};
  session->peer = peer_identity(socket.get());
  session->pidfd = open_peer_pidfd(socket.get(), session->peer);
  session->connected_at_us = now_us();
  session->connection =
      std::make_shared<Connection>(loop_, std::move(socket), protocol::kMaxQueuedRepliesPerSession);
  const SessionId id = session->id;
  const std::shared_ptr<Connection> connection = session->connection;
  sessions_.emplace(id, std::move(session));
  connection->start(
      {[this, id](protocol::Received received) { on_message(id, std::move(received)); },
       [this, id] { on_closed(id); }});
}

void Service::on_message(SessionId id, protocol::Received received) {
  Session* session = find(id);
  if (session == nullptr) return;
  if (received.kind == protocol::Received::Kind::kRefused)
    return reply(*session, 0, received.status);
  protocol::DecodedRequest decoded = protocol::decode_request(received.bytes);
  if (!decoded.request) return reply(*session, decoded.id, decoded.request.status());
  if (!received.fds.empty())
    return reply(*session, decoded.id,
                 Status(ErrorCode::kInvalidArgument, "the request carries " +
                                                         std::to_string(received.fds.size()) +
                                                         " fds, none is expected"));
  // A failure of the system is this request's failure, not the daemon's.
  try {
    handle(*session, std::move(*decoded.request));
  } catch (const SystemError& error) {
    spdlog::error("event=request_failed session={} error=\"{}\"", value(id), error.what());
    const int number = error.code().value();
    const bool exhausted =
        number == EMFILE || number == ENFILE || number == ENOMEM || number == ENOSPC;
    if (Session* still_there = find(id))
      reply(*still_there, decoded.id,
            Status(exhausted ? ErrorCode::kResourceExhausted : ErrorCode::kInternal, error.what()));
  }
}

void Service::on_closed(SessionId id) {
  Session* session = find(id);
  if (session == nullptr) return;
  spdlog::info("event=session_closed session={} client=\"{}\" goodbye={}", value(id),
               session->client_name, session->goodbye);
  std::erase_if(pending_, [id](const auto& entry) { return entry.second.session == id; });
  if (!session->connected) {
    executor_.send(protocol::DropSession{value(id)});
    sessions_.erase(id);
    if (draining_ && sessions_.empty() && drained_) drained_();
    return;
  }
  // The executor lets go of the session's ring first: after that, nothing that the session has
  // submitted can run into a block that somebody else has got. One that starts later is not told.
  if (executor_.pid() == 0) return forget(id);
  executor_.send(protocol::DropSession{value(id)});
  executor_.when_idle(value(id), [this, id] { forget(id); });
}

void Service::forget(SessionId id) {
  auto node = sessions_.extract(id);
  if (node.empty()) return;
  const bool fenced = node.mapped()->goodbye || !node.mapped()->mapped;
  leaving_.insert(std::move(node));
  apply(CloseSession{id, fenced});
  leaving_.erase(id);
  if (draining_ && sessions_.empty() && drained_) drained_();
}

// An open block that an engine itself could write is free again when its process is gone and its
// socket is at EOF; this is called after the latter, for sessions that have such blocks.
void Service::watch_writer(SessionId id) {
  auto node = leaving_.extract(id);
  LARDER_CHECK(!node.empty(), value(id));
  std::unique_ptr<Session> session = std::move(node.mapped());
  session->arena.reset();
  const int pidfd = session->pidfd.release();
  if (pidfd < 0)
    spdlog::warn("event=writer_unprovable session={} pid={}", value(id), session->peer.pid);
  auto& writer =
      writers_.emplace(id, Writer{std::move(session), boost::asio::posix::stream_descriptor(loop_)})
          .first->second;
  if (pidfd < 0) return;
  writer.process.assign(pidfd);
  writer.process.async_wait(boost::asio::posix::stream_descriptor::wait_read,
                            [this, id](const boost::system::error_code& error) {
                              if (error) return;
                              spdlog::info("event=session_fenced session={}", value(id));
                              writers_.erase(id);
                              apply(SessionFenced{id});
                            });
}

void Service::drain(std::function<void()> then) {
  draining_ = true;
  drained_ = std::move(then);
  if (sessions_.empty()) drained_();
}

void Service::tick() {
  expire_requests();
  end_silent_connections();
  reconnect_keeper();
  for (const auto& [id, session] : sessions_)
    if (!session->connection->is_open()) executor_.end_if_stuck(value(id));
  tick_timer_.expires_after(kTick);
  tick_timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) tick();
  });
}

// The entries stay until the machine answers: what the answer does to the session must not be lost.
void Service::expire_requests() {
  const int64_t now = now_us();
  for (auto& [ticket, pending] : pending_) {
    if (pending.answered || pending.deadline_us == 0 || now < pending.deadline_us) continue;
    pending.answered = true;
    if (Session* session = find(pending.session))
      reply(*session, pending.id,
            Status(ErrorCode::kDeadlineExceeded, "the request's deadline has passed"));
  }
}

void Service::end_silent_connections() {
  const int64_t now = now_us();
  std::vector<SessionId> silent;
  for (const auto& [id, session] : sessions_)
    if (!session->connected && now - session->connected_at_us > kHandshakeUs) silent.push_back(id);
  for (const SessionId id : silent) {
    find(id)->connection->close();
    on_closed(id);
  }
}

// A keeper that was restarted holds nothing: it is given everything again.
void Service::reconnect_keeper() {
  if (keeper_.connected() || now_us() < keeper_retry_us_) return;
  keeper_retry_us_ = now_us() + kKeeperRetryUs;
  auto keeper = KeeperClient::connect(config_.keeper_socket_path);
  if (!keeper) return;
  if (Status status = keeper->clear(); !status.ok()) return;
  keeper_ = std::move(*keeper);
  for (const auto& [id, pool] : store_.pools())
    for (uint32_t group = 0; group < pool.groups.size(); ++group)
      for (const auto& [index, segment_id] : pool.groups[group].segment_ids) {
        const Segment& segment = *store_.find_segment(segment_id);
        if (!deposit({segment_id, id, group, index, segment.size_bytes}, segment).ok()) return;
      }
  spdlog::info("event=keeper_reconnected pid={} segments={}", keeper_.pid(), keeper_.num_entries());
}

std::optional<std::string> Service::not_ready() const {
  if (draining_) return "shutting down";
  if (!keeper_.connected()) return "the keeper is gone";
  if (!executor_.ready()) return "the executor is not ready";
  return std::nullopt;
}

std::string Service::metrics_text() {
  return metrics_.render(machine_.pool_stats(), status(), static_cast<int64_t>(writers_.size()));
}

protocol::DaemonStatus Service::status() const {
  protocol::DaemonStatus status;
  status.version = LARDER_VERSION;
  status.pid = ::getpid();
  status.uptime_us = static_cast<uint64_t>(now_us() - started_at_us_);
  status.memory_bytes = machine_.memory_bytes();
  status.physical_bytes = machine_.physical_bytes();
  status.num_pools = static_cast<int64_t>(store_.pools().size());
  status.num_sessions = static_cast<int64_t>(sessions_.size());
  status.executor_pid = executor_.pid();
  status.executor_restarts = executor_.restarts();
  status.keeper_pid = keeper_.pid();
  status.keeper_segments = static_cast<int64_t>(keeper_.num_entries());
  status.backend = "host";
  status.ready = !not_ready().has_value();
  return status;
}

}  // namespace larder::daemon
