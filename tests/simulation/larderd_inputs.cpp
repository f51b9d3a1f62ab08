// What larderd takes up: messages, ends of connections and processes, news of the executor, timers.
#include <algorithm>
#include <cstring>

#include "tests/simulation/larderd.h"
#include "tests/simulation/violation.h"

namespace larder::sim {
namespace {

constexpr int64_t kRequestDeadlineUs = 2'000'000;

}  // namespace

struct Larderd::Input {
  enum class Kind { kMessage, kHangUp, kExit, kNews, kExecutor, kTimers, kFences } kind;
  std::shared_ptr<Connection> connection = nullptr;
  SessionId session{0};
};

SessionId Larderd::session_of(const Connection& connection) const {
  for (const auto& [id, session] : sessions_)
    if (session.connection.get() == &connection) return id;
  return SessionId{0};
}

Client* Larderd::client_of(uint64_t pid) const {
  for (const auto& client : scene_.clients)
    if (client->process().pid() == pid) return client.get();
  return nullptr;
}

bool Larderd::knows(const Client& client) const {
  return std::ranges::any_of(connections_,
                             [&](const auto& connection) { return connection->client == &client; });
}

std::shared_ptr<Connection> Larderd::accept(Client& client) {
  if (!serving_) return nullptr;
  connections_.push_back(std::make_shared<Connection>());
  connections_.back()->client = &client;
  return connections_.back();
}

std::vector<Larderd::Input> Larderd::inputs() {
  std::vector<Input> all;
  for (const auto& connection : connections_) {
    if (!connection->to_daemon.empty()) {
      all.push_back({Input::Kind::kMessage, connection});
    } else if (!connection->client_end) {
      all.push_back({Input::Kind::kHangUp, connection});
    }
  }
  for (const auto& [id, session] : sessions_) {
    const Client* client = client_of(session.pid);
    if (client == nullptr || client->process().exited())
      all.push_back({Input::Kind::kExit, nullptr, id});
  }
  if (executor_ != nullptr && executor_->has_news()) all.push_back({Input::Kind::kNews});
  if (executor_ == nullptr || executor_->process().exited())
    all.push_back({Input::Kind::kExecutor});
  if (!fencing_.empty()) all.push_back({Input::Kind::kFences});
  if (scene_.chance.one_in(8)) all.push_back({Input::Kind::kTimers});
  return all;
}

bool Larderd::act() {
  if (!scene_.keeper.is_up(*link_) && scene_.chance.one_in(4)) {
    if (deposit_again()) return true;
  }
  if (!to_end_.empty()) {
    const SessionId id = *to_end_.begin();
    to_end_.erase(to_end_.begin());
    end_session(id, false);
    return true;
  }
  const std::vector<Input> waiting = inputs();
  if (waiting.empty()) return false;
  const Input& input = *scene_.chance.pick(waiting);
  switch (input.kind) {
    case Input::Kind::kMessage:
      read(input.connection);
      break;
    case Input::Kind::kHangUp:
      if (const SessionId id = session_of(*input.connection); id != SessionId{0})
        end_session(id, false);
      close(input.connection);
      break;
    case Input::Kind::kExit:
      end_session(input.session, false);
      break;
    case Input::Kind::kNews:
      take_executor_news();
      break;
    case Input::Kind::kExecutor:
      if (executor_ != nullptr) {
        executor_has_exited();
      } else {
        start_executor();
      }
      break;
    case Input::Kind::kTimers:
      look_at_timers();
      break;
    case Input::Kind::kFences:
      look_at_fences();
      break;
  }
  return true;
}

// --------------------------------------------------------------------------------------- messages

void Larderd::read(const std::shared_ptr<Connection>& connection) {
  const ToDaemon message = std::move(connection->to_daemon.front());
  connection->to_daemon.pop_front();
  std::visit([&](const auto& specific) { take(specific, connection); }, message);
}

void Larderd::take(const Hello& hello, const std::shared_ptr<Connection>& connection) {
  if (hello.session == SessionId{0}) return welcome_new(connection);
  const auto session = sessions_.find(hello.session);
  if (hello.cache != cache_ || session == sessions_.end() || session->second.connection) {
    connection->to_client.push_back(Stale{});
    close(connection);
    return;
  }
  SIM_CHECK(session->second.pid == connection->client->process().pid(), "another process",
            value(hello.session));
  session->second.connection = connection;
  apply(ResumeSession{hello.session});
  ++scene_.coverage.resumed_sessions;
  send(session->second, hello.session, Welcome{cache_, hello.session, true});
}

// What tells the end of its process is deposited before the session is named.
void Larderd::welcome_new(const std::shared_ptr<Connection>& connection) {
  const Client& client = *connection->client;
  const SessionId id{machine().last_session() + 1};
  OwnFd evidence =
      duplicate(scene_.options.pidfd_only ? client.process().pidfd() : client.process().gone_fd());
  if (!scene_.keeper.put(*link_, process_key(id), evidence.get(), {}).ok()) {
    close(connection);  // UNAVAILABLE: it will try again
    return;
  }
  std::string attachment(sizeof(uint64_t) + 1, static_cast<char>(client.kind()));
  const uint64_t pid = client.process().pid();
  std::memcpy(attachment.data(), &pid, sizeof pid);
  evidence_[id] = std::move(evidence);
  apply(OpenSession{id, client.tenant(), client.role(), attachment});
  Session& session = sessions_[id];
  session.pid = pid;
  session.kind = client.kind();
  session.connection = connection;
  send(session, id, Welcome{cache_, id, false});
}

void Larderd::take(const Request& request, const std::shared_ptr<Connection>& connection) {
  const SessionId id = session_of(*connection);
  if (id != SessionId{0}) {
    scene_.log("session " + std::to_string(value(id)) + " asks " + std::to_string(request.number) +
               " " + std::string(activity_name(request.event.index())));
    scene_.books.request_taken(id, request.number);
    asked_[{id, request.number}] = {request.event, scene_.now_us + kRequestDeadlineUs};
  }
  apply(request.event);
}

void Larderd::take(const Unmapped& unmapped, const std::shared_ptr<Connection>& connection) {
  const SessionId id = session_of(*connection);
  unmapping_.erase({unmapped.segment, id});
  apply(SegmentUnmapped{unmapped.segment, id});
}

void Larderd::take(const Goodbye&, const std::shared_ptr<Connection>& connection) {
  if (const SessionId id = session_of(*connection); id != SessionId{0}) end_session(id, true);
  close(connection);
}

void Larderd::close(const std::shared_ptr<Connection>& connection) {
  connection->daemon_end = false;
  std::erase(connections_, connection);
}

// ------------------------------------------------------------------------------- ends of sessions

void Larderd::end_session(SessionId id, bool said_goodbye) {
  const auto session = sessions_.find(id);
  if (session == sessions_.end()) return;
  FenceClass fence = FenceClass::kPidfd;
  const ClientKind kind = session->second.kind;
  if (kind == ClientKind::kMps) fence = FenceClass::kMps;
  if (kind == ClientKind::kUnprovable) fence = FenceClass::kUnprovable;
  if (kind == ClientKind::kOnRequest) fence = FenceClass::kExecutorOnly;
  const bool is_gone = is_signalled(evidence_.at(id).get());
  if (fence == FenceClass::kPidfd && is_gone && scene_.chance.one_in(2))
    fence = FenceClass::kFenced;
  if (said_goodbye) fence = FenceClass::kFenced;
  if (Client* client = client_of(session->second.pid); client != nullptr && client->session() == id)
    client->session_ends();
  const std::shared_ptr<Connection> connection = session->second.connection;
  sessions_.erase(session);
  std::erase_if(asked_, [&](const auto& entry) { return entry.first.first == id; });
  std::erase_if(unmapping_, [&](const auto& entry) { return entry.first.second == id; });
  to_end_.erase(id);
  apply(CloseSession{id, fence});
  scene_.books.forget_session(id);
  if (connection) {
    // What it had sent may still be taken up: its session is not known any more.
    for (const ToDaemon& message : connection->to_daemon)
      if (const auto* late = std::get_if<Request>(&message)) {
        apply(late->event);
        break;
      }
    close(connection);
  }
  if (fence != FenceClass::kFenced) return;
  (void)scene_.keeper.drop(*link_, process_key(id)).ok();
  evidence_.erase(id);
}

void Larderd::look_at_fences() {
  const auto [id, fence] = *scene_.chance.pick(fencing_);
  if (fence == FenceClass::kUnprovable) {
    // The machine settles these by itself.
    if (machine().is_unfenced(id)) return;
  } else if (fence == FenceClass::kExecutorOnly) {
    for (const auto& executor : scene_.executors)
      if (executor->is_in_the_way(id)) return;
    if (old_executor_.valid() && !is_signalled(old_executor_.get())) return;
    apply(SessionFenced{id});
  } else {
    if (!is_signalled(evidence_.at(id).get())) return;
    apply(SessionFenced{id});
  }
  fencing_.erase(id);
  (void)scene_.keeper.drop(*link_, process_key(id)).ok();
  evidence_.erase(id);
}

// ------------------------------------------------------------------------------------------ timers

void Larderd::look_at_timers() {
  for (const auto& [name, deadline_us] : unmapping_)
    if (deadline_us < scene_.now_us) {
      to_end_.insert(name.second);
      return;
    }
  for (const auto& [id, session] : sessions_)
    if (!session.connection && session.deadline_us < scene_.now_us) {
      to_end_.insert(id);
      return;
    }
  for (auto& [name, asked] : asked_) {
    if (asked.deadline_us >= scene_.now_us) continue;
    const auto [id, number] = name;
    asked.deadline_us = scene_.now_us + kRequestDeadlineUs;
    apply(CancelRequest{id, number});
    // What waits for something else than memory goes on.
    if (machine().record().empty()) return;
    asked_.erase({id, number});
    const Status late(ErrorCode::kDeadlineExceeded, "the deadline has passed");
    ++scene_.coverage.refusals[static_cast<size_t>(late.code())];
    scene_.books.request_answered(id, number, late, true);
    send(sessions_.at(id), id, Answer{number, late, {}, false});
    return;
  }
}

// ---------------------------------------------------------------------------------------- executor

void Larderd::start_executor() {
  // The one of the larderd before is waited for: it may still be writing.
  if (old_executor_.valid() && !is_signalled(old_executor_.get())) return;
  old_executor_.reset();
  scene_.executors.push_back(std::make_unique<Executor>(scene_));
  Executor& fresh = *scene_.executors.back();
  if (!scene_.keeper.put(*link_, executor_key(), fresh.process().pidfd(), {}).ok()) {
    fresh.larderd_is_gone();  // not without a keeper
    return;
  }
  executor_ = &fresh;
  for (const auto& [id, copy] : copies_) executor_->add_copy(copy);
}

void Larderd::take_executor_news() {
  const CopyDone done = executor_->take_news();
  copies_.erase(done.copy);
  apply(done);
}

// What it had not answered is run again by the next one, or is answered with a failure.
void Larderd::executor_has_exited() {
  executor_->larderd_is_gone();
  executor_ = nullptr;
  if (copies_.empty() || scene_.chance.one_in(2)) return;
  const uint64_t copy = copies_.begin()->first;
  copies_.erase(copy);
  apply(CopyDone{copy, Status(ErrorCode::kUnavailable, "the executor is gone")});
}

void Larderd::destroy_pools() {
  for (const TenantStats& tenant : machine().tenant_stats()) {
    const SessionId admin{machine().last_session() + 1};
    apply(OpenSession{admin, tenant.name, Role::kAdmin});
    uint64_t number = 0;
    for (const PoolStats& pool : machine().pool_stats())
      if (pool.tenant == tenant.name) apply(DestroyPool{++number, admin, pool.pool});
    apply(CloseSession{admin, FenceClass::kFenced});
  }
  if (executor_ != nullptr) executor_->larderd_is_gone();
  executor_ = nullptr;
  (void)scene_.keeper.drop(*link_, executor_key()).ok();
}

}  // namespace larder::sim
