// The service as a whole: start, time, shutdown.
#include "daemon/service.h"

#include <chrono>
#include <poll.h>

#include <openssl/rand.h>
#include <spdlog/spdlog.h>

#include "larder/check.h"
#include "protocol/limits.h"
#include "protocol/notices.h"

namespace larder::daemon {
namespace {

constexpr auto kTick = std::chrono::milliseconds(50);
constexpr int64_t kHandshakeUs = 10'000'000;
// The driver takes back the memory of a process that was killed some time after its end. Nobody is
// served meanwhile, so it is short.
constexpr auto kReclaimWait = std::chrono::milliseconds(200);

bool is_readable(int fd) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, 0) > 0;
}

uint64_t random_boot_id() {
  uint64_t id = 0;
  LARDER_CHECK(RAND_bytes(reinterpret_cast<unsigned char*>(&id), sizeof id) == 1);
  return id | 1;  // never 0, which means "unknown"
}

}  // namespace

Service::Service(boost::asio::io_context& loop, const Config& config, KeeperClient keeper,
                 std::string executor_path)
    : loop_(loop),
      config_(config),
      keeper_(std::move(keeper)),
      executors_(loop, std::move(executor_path), config.log_level),
      devices_({kReclaimWait}),
      recorded_(*this),
      boot_id_(random_boot_id()),
      started_at_us_(now_us()),
      tick_timer_(loop) {}

Service::~Service() {
  for (auto& [number, guest] : guests_) guest.connection->close();
  for (auto& [id, session] : sessions_) {
    if (session->connection) session->connection->close();
    if (session->notices) session->notices->close();
  }
}

void Service::start() {
  executors_.start({
      [this](const std::string& device) {
        if (const Status status = deposit_executor(keeper_, device);
            !status.ok() && status.code() != ErrorCode::kUnavailable)
          spdlog::error("event=executor_not_deposited error=\"{}\"", status.to_string());
        tell_executor_all(device);
      },
      [this](const std::string& device) { on_executor_died(device); },
      [this](const protocol::Copied& copied) {
        copies_.erase(copied.copy);
        apply(CopyDone{copied.copy, copied.status});
      },
      [this](const protocol::BrokenRing& broken) {
        spdlog::warn("event=ring_broken session={} error=\"{}\"", broken.session, broken.message);
        end_session(SessionId{broken.session}, End::kEnded);
      },
      [this](const protocol::ImportDone& done) { on_imported(done); },
  });
  tick();
}

int64_t Service::now() {
  return std::chrono::duration_cast<std::chrono::microseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

void Service::drain(std::function<void()> then) {
  draining_ = true;
  drained_ = std::move(then);
  for (const auto& [id, session] : sessions_)
    if (session->notices) session->notices->send(protocol::encode(protocol::ShuttingDown{}));
  if (sessions_.empty()) drained_();
}

// -------------------------------------------------------------------------------------------- time

void Service::tick() {
  expire_requests();
  end_silent_guests();
  end_absent_sessions();
  end_overdue_sessions();
  forget_settled_sessions();
  reconnect_keeper();
  for (const auto& [id, closing] : closing_)
    if (!closing.drained) executors_.end_if_stuck(value(id));
  executors_.reap();
  tick_timer_.expires_after(kTick);
  tick_timer_.async_wait([this](const boost::system::error_code& error) {
    if (!error) tick();
  });
}

// One that waits for memory is cancelled. The entries of others stay until the machine answers:
// what the answer does to the session must not be lost.
void Service::expire_requests() {
  const int64_t now = now_us();
  std::vector<RequestName> expired;
  for (auto& [request, pending] : pending_) {
    if (pending.answered || pending.deadline_us == 0 || now < pending.deadline_us) continue;
    pending.answered = true;
    expired.push_back(request);
  }
  for (const RequestName& request : expired) {
    const auto& [id, number] = request;
    if (Session* session = find(id))
      reply(*session, number,
            Status(ErrorCode::kDeadlineExceeded, "the request's deadline has passed"));
    if (!pending_.at(request).applied) continue;
    apply(CancelRequest{id, number});
    if (machine().is_waiting(id, number) || pending_.erase(request) == 0) continue;
    if (Session* session = find(id)) --session->num_pending;
  }
}

void Service::end_silent_guests() {
  const int64_t now = now_us();
  std::erase_if(guests_, [&](const auto& entry) {
    if (now - entry.second.connected_at_us <= kHandshakeUs) return false;
    entry.second.connection->close();
    return true;
  });
}

void Service::end_absent_sessions() {
  const int64_t now = now_us();
  std::vector<std::pair<SessionId, End>> ended;
  for (const auto& [id, session] : sessions_) {
    if (session->absent_until_us == 0) continue;
    // Nobody who could resume it has its end of the lifeline any more.
    if (session->lifeline.valid() && is_readable(session->lifeline.get()))
      ended.emplace_back(id, End::kPeerClosed);
    else if (now >= session->absent_until_us)
      ended.emplace_back(id, End::kNotBack);
  }
  for (const auto& [id, how] : ended) end_session(id, how);
}

// What they have mapped stays charged to their tenant until their process is gone.
void Service::end_overdue_sessions() {
  const int64_t now = now_us();
  std::vector<SessionId> overdue;
  for (const auto& [id, session] : sessions_)
    for (const auto& [place, unmapping] : session->unmapping)
      if (session->is_connected() && now >= unmapping.deadline_us &&
          (overdue.empty() || overdue.back() != id))
        overdue.push_back(id);
  for (const SessionId id : overdue) {
    const Session& session = *find(id);
    spdlog::warn("event=unmap_overdue session={} client=\"{}\" pid={} extents={} deadline_ms={}",
                 value(id), session.record.client_name, session.record.pid,
                 session.unmapping.size(), config_.unmap_deadline_ms);
    end_session(id, End::kEnded);
  }
}

std::optional<std::string> Service::not_ready() const {
  if (draining_) return "shutting down";
  if (!keeper_.connected()) return "the keeper is gone: nothing new is safe until it is back";
  if (journal_lag_) return "the keeper does not have the journal: " + journal_lag_->to_string();
  return executors_.not_ready();
}

std::optional<std::string> Service::not_live() const { return executors_.not_live(); }

}  // namespace larder::daemon
