// How sessions come and come back: connections, the handshake, resuming, notices.
#include <algorithm>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <spdlog/spdlog.h>

#include "daemon/role_names.h"
#include "daemon/service.h"
#include "larder/check.h"
#include "larder/system_error.h"
#include "protocol/limits.h"
#include "protocol/notices.h"

namespace larder::daemon {
namespace {

// Room for connections that have not said hello, and for those about to be refused.
constexpr size_t kMaxConnections = 2 * protocol::kMaxSessions;
constexpr size_t kMaxQueuedNotices = 4096;

// Without a hint about how much of it was right.
template <typename Bytes>
bool same_secret(const Bytes& a, const Bytes& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

Status check_versions(uint32_t min_version, uint32_t max_version) {
  if (min_version <= max_version && min_version <= protocol::kMaxVersion &&
      max_version >= protocol::kMinVersion)
    return {};
  return {ErrorCode::kUnsupported, "the client speaks versions " + std::to_string(min_version) +
                                       " to " + std::to_string(max_version) + ", this daemon " +
                                       std::to_string(protocol::kMinVersion) + " to " +
                                       std::to_string(protocol::kMaxVersion)};
}

// A failure of the system is a request's failure, not the daemon's.
Status status_of(const SystemError& error) {
  const int number = error.code().value();
  const bool exhausted =
      number == EMFILE || number == ENFILE || number == ENOMEM || number == ENOSPC;
  return {exhausted ? ErrorCode::kResourceExhausted : ErrorCode::kInternal, error.what()};
}

// A process that exits closes its sockets first, but both can be seen at once.
bool is_hung_up(const Session& session) {
  if (!session.is_connected()) return false;
  pollfd entry{session.connection->fd(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) > 0;
}

bool has_exited(const OwnFd& pidfd) {
  pollfd entry{pidfd.get(), POLLIN, 0};
  return pidfd.valid() && ::poll(&entry, 1, 0) > 0;
}

}  // namespace

Session* Service::find(SessionId id) {
  const auto found = sessions_.find(id);
  return found == sessions_.end() ? nullptr : found->second.get();
}

// ------------------------------------------------------------------------------------- connections

void Service::accept(OwnFd socket) {
  if (sessions_.size() + guests_.size() >= kMaxConnections) {
    spdlog::warn("event=connection_refused connections={}", sessions_.size() + guests_.size());
    return;
  }
  Guest guest;
  guest.peer = peer_identity(socket.get());
  guest.pidfd = open_peer_pidfd(socket.get(), guest.peer);
  guest.connected_at_us = now_us();
  guest.connection =
      std::make_shared<Connection>(loop_, std::move(socket), protocol::kMaxQueuedRepliesPerSession);
  const uint64_t number = next_connection_++;
  const std::shared_ptr<Connection> connection = guest.connection;
  guests_.emplace(number, std::move(guest));
  connection->start(
      {[this, number](protocol::Received received) { on_message(number, std::move(received)); },
       [this, number] { on_closed(number); }});
}

void Service::on_message(uint64_t number, protocol::Received received) {
  const auto bound = connections_.find(number);
  Session* session = bound == connections_.end() ? nullptr : find(bound->second);
  const auto guest = guests_.find(number);
  if (session == nullptr && guest == guests_.end()) return;  // of a session that has ended
  const auto refuse = [&](uint64_t id, const Status& status) {
    session == nullptr ? refuse_guest(guest->second, id, status) : reply(*session, id, status);
  };
  if (received.kind == protocol::Received::Kind::kRefused) return refuse(0, received.status);
  protocol::DecodedRequest decoded = protocol::decode_request(received.bytes);
  if (!decoded.request) return refuse(decoded.id, decoded.request.status());
  const bool takes_fds =
      session != nullptr && std::holds_alternative<protocol::RegisterImport>(decoded.request->body);
  if (!received.fds.empty() && !takes_fds)
    return refuse(decoded.id, Status(ErrorCode::kInvalidArgument,
                                     "the request carries " + std::to_string(received.fds.size()) +
                                         " fds, none is expected"));
  try {
    if (session == nullptr) return handle_guest(number, *decoded.request);
    handle(*session, std::move(*decoded.request), std::move(received.fds));
  } catch (const SystemError& error) {
    spdlog::error("event=request_failed connection={} error=\"{}\"", number, error.what());
    if (const auto still_guest = guests_.find(number); still_guest != guests_.end())
      return refuse_guest(still_guest->second, decoded.id, status_of(error));
    if (bound == connections_.end()) return;
    if (Session* still_there = find(bound->second))
      reply(*still_there, decoded.id, status_of(error));
  }
}

void Service::on_closed(uint64_t number) {
  guests_.erase(number);
  const auto bound = connections_.find(number);
  if (bound == connections_.end()) return;
  const SessionId id = bound->second;
  connections_.erase(bound);
  if (find(id) != nullptr) end_session(id, End::kPeerClosed);
}

void Service::refuse_guest(const Guest& guest, uint64_t id, const Status& status) {
  metrics_.count_refusal(status.code());
  guest.connection->send(protocol::encode(protocol::Reply{id, boot_id_, status}));
}

void Service::handle_guest(uint64_t number, const protocol::Request& request) {
  metrics_.count_request(request.body);
  if (const auto* body = std::get_if<protocol::Connect>(&request.body))
    return connect(number, request.id, *body);
  if (const auto* body = std::get_if<protocol::Resume>(&request.body))
    return resume(number, request.id, *body);
  refuse_guest(guests_.at(number), request.id,
               Status(ErrorCode::kInvalidArgument, "the first request must be connect or resume"));
}

// --------------------------------------------------------------------------------------- handshake

Status Service::check_access(const Guest& guest, const protocol::Connect& body) const {
  if (draining_) return {ErrorCode::kShuttingDown, "the daemon is shutting down"};
  if (Status status = check_versions(body.min_version, body.max_version); !status.ok())
    return status;
  const auto tenant =
      std::find_if(config_.tenants.begin(), config_.tenants.end(),
                   [&](const TenantConfig& entry) { return entry.name == body.tenant; });
  if (tenant == config_.tenants.end())
    return {ErrorCode::kPermissionDenied, "tenant \"" + body.tenant + "\" is not configured"};
  if (!tenant->token.empty() && !same_secret(tenant->token, body.token))
    return {ErrorCode::kPermissionDenied, "the token is not tenant \"" + body.tenant + "\"'s"};
  if (!role_of(body.role))
    return {ErrorCode::kInvalidArgument,
            "role \"" + body.role + "\" is unknown; known are read, append, admin"};
  if (body.role == "admin" && guest.peer.uid != 0 && guest.peer.uid != ::geteuid())
    return {ErrorCode::kPermissionDenied, "role admin is for uid 0 and " +
                                              std::to_string(::geteuid()) + ", the client is uid " +
                                              std::to_string(guest.peer.uid)};
  uint64_t arena_bytes = 0;
  for (const auto& [id, other] : sessions_)
    if (other->arena) arena_bytes += other->arena->size_bytes();
  const auto arena_limit = static_cast<uint64_t>(config_.arena_memory_bytes);
  if (body.arena_bytes != 0 && arena_bytes + body.arena_bytes > arena_limit)
    return {ErrorCode::kResourceExhausted,
            "arena_bytes is " + std::to_string(body.arena_bytes) + ", available " +
                std::to_string(arena_limit - std::min(arena_limit, arena_bytes)) + " of " +
                std::to_string(arena_limit)};
  if (sessions_.size() >= protocol::kMaxSessions)
    return {ErrorCode::kResourceExhausted, std::to_string(sessions_.size()) +
                                               " sessions are connected, at most " +
                                               std::to_string(protocol::kMaxSessions) + " can be"};
  return {};
}

void Service::connect(uint64_t number, uint64_t id, const protocol::Connect& body) {
  Guest& guest = guests_.at(number);
  if (Status status = check_access(guest, body); !status.ok())
    return refuse_guest(guest, id, status);
  auto session = std::make_unique<Session>();
  session->id = SessionId{machine().last_session() + 1};
  session->tenant = body.tenant;
  session->role = *role_of(body.role);
  session->ring_device = kHostDevice;
  session->record = {{},
                     guest.peer.pid,
                     guest.peer.uid,
                     guest.peer.gid,
                     body.client_name,
                     body.arena_bytes,
                     body.notices};
  LARDER_CHECK(RAND_bytes(session->record.token.data(),
                          static_cast<int>(session->record.token.size())) == 1);
  std::vector<OwnFd> fds;
  if (body.arena_bytes != 0) {
    constexpr uint64_t kPageBytes = 4096;
    session->arena.emplace((body.arena_bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
    session->record.arena_bytes = session->arena->size_bytes();
    fds.push_back(duplicate(session->arena->fd()));
    fds.push_back(duplicate(session->arena->eventfd()));
  }
  if (guest.pidfd.valid()) session->pidfd = duplicate(guest.pidfd.get());
  open_notices(*session, fds);
  // Everything that can fail comes before the session exists for the state machine. A keeper that
  // is gone is given everything when it is back.
  const Status deposited = deposit_session(keeper_, *session);
  if (!deposited.ok() && deposited.code() != ErrorCode::kUnavailable) {
    forget_deposits(session->id);
    return refuse_guest(guest, id, deposited);
  }
  if (session->arena) tell_executor_session(*session);
  watch_process(*session);
  session->connection = guest.connection;
  session->connection_number = number;
  session->connected_at_us = now_us();
  Session& connected = *session;
  guests_.erase(number);
  connections_.emplace(number, connected.id);
  sessions_.emplace(connected.id, std::move(session));
  apply(
      OpenSession{connected.id, connected.tenant, connected.role, to_attachment(connected.record)});
  spdlog::info("event=session_opened session={} tenant=\"{}\" client=\"{}\" pid={} role={}",
               value(connected.id), connected.tenant, connected.record.client_name,
               connected.record.pid, body.role);
  greet(connected, id, body.max_version, std::move(fds));
}

void Service::greet(Session& session, uint64_t id, uint32_t max_version, std::vector<OwnFd> fds) {
  const protocol::Connected connected{
      std::min(protocol::kMaxVersion, max_version), value(session.id), session.record.token,
      session.arena ? session.arena->size_bytes() : 0, machine().cache_id()};
  reply(session, id, connected, std::move(fds));
}

// The notice socket, and in a first handshake the lifeline: a pipe whose writing end the client's
// process has, and every child that it forks. When none of them lives any more, we read its end.
void Service::open_notices(Session& session, std::vector<OwnFd>& fds) {
  if (!session.record.notices) return;
  int sockets[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets) != 0)
    throw SystemError("socketpair(notices)");
  OwnFd ours(sockets[0]);
  OwnFd theirs(sockets[1]);
  protocol::prepare_socket(ours.get());
  protocol::prepare_socket(theirs.get());
  session.notices = std::make_shared<Connection>(loop_, std::move(ours), kMaxQueuedNotices);
  session.notices->start({[this, id = session.id](protocol::Received received) {
                            on_notice_ack(id, std::move(received));
                          },
                          [] {}});
  fds.push_back(std::move(theirs));
  if (session.lifeline.valid()) return;
  int ends[2] = {-1, -1};
  if (::pipe2(ends, O_CLOEXEC | O_NONBLOCK) != 0) throw SystemError("pipe2(lifeline)");
  session.lifeline = OwnFd(ends[0]);
  fds.emplace_back(ends[1]);
}

void Service::on_notice_ack(SessionId id, protocol::Received received) {
  Session* session = find(id);
  if (session == nullptr || received.kind != protocol::Received::Kind::kMessage) return;
  const auto ack = protocol::decode_notice_ack(received.bytes);
  if (!ack) return;
  const auto node = session->unmapping.extract({ack->pool, ack->group, ack->index});
  if (!node.empty()) apply(SegmentUnmapped{node.mapped().segment, id});
}

void Service::watch_process(Session& session) {
  if (!session.pidfd.valid()) return;
  session.process.emplace(loop_, duplicate(session.pidfd.get()), [this, id = session.id] {
    const Session* ended = find(id);
    if (ended == nullptr) return;
    end_session(id, is_hung_up(*ended) ? End::kPeerClosed : End::kProcessGone);
  });
}

// ------------------------------------------------------------------------------------------ resume

Result<Session*> Service::find_resumable(const Guest& guest, const protocol::Resume& body) {
  if (draining_) return Status(ErrorCode::kShuttingDown, "the daemon is shutting down");
  if (Status status = check_versions(body.min_version, body.max_version); !status.ok())
    return status;
  if (body.cache_id != machine().cache_id())
    return Status(ErrorCode::kStaleSession, "the session's cache " + std::to_string(body.cache_id) +
                                                " is gone, this is cache " +
                                                std::to_string(machine().cache_id()) +
                                                ": larderd and larder-keeper have ended together");
  const auto found = std::find_if(sessions_.begin(), sessions_.end(), [&](const auto& entry) {
    return same_secret(entry.second->record.token, body.session_token);
  });
  if (found == sessions_.end() || found->second->connection != nullptr)
    return Status(ErrorCode::kStaleSession,
                  "no session waits under this token: it has ended, or was not back within " +
                      std::to_string(config_.resume_grace_ms) + " ms after a restart");
  Session& session = *found->second;
  if (guest.peer.uid != session.record.uid || guest.peer.pid != session.record.pid ||
      !session.pidfd.valid() || has_exited(session.pidfd))
    return Status(ErrorCode::kPermissionDenied,
                  "the session is of pid " + std::to_string(session.record.pid) + ", uid " +
                      std::to_string(session.record.uid) + ", the client is pid " +
                      std::to_string(guest.peer.pid) + ", uid " + std::to_string(guest.peer.uid));
  return &session;
}

void Service::resume(uint64_t number, uint64_t id, const protocol::Resume& body) {
  const Result<Session*> found = find_resumable(guests_.at(number), body);
  if (!found) return refuse_guest(guests_.at(number), id, found.status());
  Session& session = **found;
  std::vector<OwnFd> fds;
  if (body.notices && session.record.notices) open_notices(session, fds);
  Guest guest = std::move(guests_.extract(number).mapped());
  session.connection = std::move(guest.connection);
  session.connection_number = number;
  session.connected_at_us = now_us();
  session.absent_until_us = 0;
  session.last_request = 0;
  connections_.emplace(number, session.id);
  spdlog::info("event=session_resumed session={} pid={}", value(session.id), session.record.pid);
  apply(ResumeSession{session.id});
  greet(session, id, body.max_version, std::move(fds));
}

}  // namespace larder::daemon
