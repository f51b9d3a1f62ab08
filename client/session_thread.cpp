// The session's own thread: notices, and resuming.
#include <algorithm>
#include <array>
#include <cerrno>
#include <poll.h>

#include "client/session.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder {
namespace {

using std::chrono::milliseconds;

constexpr milliseconds kFirstPause{1};
constexpr milliseconds kLongestPause{50};
// For what needs no more than room in a socket buffer.
constexpr auto kPromptly = std::chrono::seconds(1);

constexpr short kGone = POLLHUP | POLLERR | POLLNVAL;

// Resume bears no id of the session's requests.
constexpr uint64_t kResumeId = 0;

// Another moment may do: larderd has not said that the session is over.
bool is_passing(ErrorCode code) {
  return code == ErrorCode::kShuttingDown || code == ErrorCode::kUnavailable ||
         code == ErrorCode::kDeadlineExceeded || code == ErrorCode::kBusy ||
         code == ErrorCode::kResourceExhausted;
}

template <size_t kCount>
void wait(std::array<pollfd, kCount>& entries, int timeout_ms) {
  if (::poll(entries.data(), entries.size(), timeout_ms) < 0) {
    if (errno != EINTR) throw SystemError("poll(session)");
    for (pollfd& entry : entries) entry.revents = 0;
  }
}

}  // namespace

bool Session::is_stopping(milliseconds wait_for) const {
  std::array<pollfd, 1> entries = {{{stop_.get(), POLLIN, 0}}};
  wait(entries, static_cast<int>(wait_for.count()));
  return entries[0].revents != 0;
}

void Session::run(Connection connection) {
  while (connection != nullptr) {
    try {
      watch(*connection);
    } catch (...) {  // SystemError of poll or recvmsg: the same as a connection that broke
    }
    if (is_stopping(milliseconds(0))) return;
    lose(connection);
    connection = resume();
  }
}

// Returns when larderd has gone or the thread is to end.
void Session::watch(const ControlConnection& connection) {
  while (true) {
    std::array<pollfd, 3> entries = {{{stop_.get(), POLLIN, 0},
                                      {connection.fd(), POLLRDHUP, 0},
                                      {notices_.valid() ? notices_.get() : -1, POLLIN, 0}}};
    wait(entries, -1);
    if (entries[0].revents != 0) return;
    // What larderd had said before it went is read first.
    if (entries[2].revents != 0 && !read_notice()) return;
    if ((entries[1].revents & (POLLRDHUP | kGone)) != 0) return;
  }
}

// False when the notice socket has ended.
bool Session::read_notice() {
  const protocol::Received received = protocol::receive(notices_.get());
  if (received.kind == protocol::Received::Kind::kEnd) return false;
  // What cannot be read is not answered: larderd has a deadline for that.
  if (received.kind != protocol::Received::Kind::kMessage) return true;
  const auto notice = protocol::decode_notice(received.bytes);
  if (!notice) return true;
  const auto* unmap = std::get_if<protocol::Unmap>(&*notice);
  if (unmap == nullptr) return true;  // shutting down: the end of the socket says when
  try {
    on_unmap_(*unmap);
  } catch (...) {  // it is still mapped, and must not be acknowledged
    return true;
  }
  const protocol::Bytes ack =
      protocol::encode(protocol::NoticeAck{unmap->pool, unmap->group, unmap->index});
  (void)protocol::send_before(notices_.get(), ack, {}, Clock::now() + kPromptly);
  return true;
}

// Nothing when the session has ended, or the thread is to.
Session::Connection Session::resume() {
  notices_.reset();
  for (milliseconds pause = kFirstPause;; pause = std::min(2 * pause, kLongestPause)) {
    {
      const std::lock_guard lock(mutex_);
      if (leaving_) return nullptr;
    }
    Status refusal;
    auto resumed = [&]() -> Result<ControlConnection> {
      try {
        return try_resume(refusal);
      } catch (const std::exception& error) {  // no descriptors, say: another moment may do
        return Status(ErrorCode::kUnavailable, error.what());
      }
    }();
    if (resumed) return resumed_over(std::move(*resumed));
    {
      const std::lock_guard lock(mutex_);
      last_attempt_ = resumed.status();
      ended_ = refusal;
      changed_.notify_all();
      if (!ended_.ok()) return nullptr;
    }
    if (is_stopping(pause)) return nullptr;
  }
}

Session::Connection Session::resumed_over(ControlConnection connection) {
  const std::lock_guard lock(mutex_);
  connection_ = std::make_shared<ControlConnection>(std::move(connection));
  boot_id_ = connection_->boot_id();
  ++resumes_;
  longest_outage_ =
      std::max(longest_outage_,
               std::chrono::duration_cast<std::chrono::microseconds>(Clock::now() - lost_at_));
  last_attempt_ = Status();
  changed_.notify_all();
  return connection_;
}

// A connection that larderd has taken the request from is not given up while it stands: larderd
// would see the session's connection end. `refusal` is set where larderd has said the last word.
Result<ControlConnection> Session::try_resume(Status& refusal) {
  auto connection = ControlConnection::open(path_, Clock::now() + kPromptly);
  if (!connection) return connection;
  protocol::Request request{kResumeId, 0,
                            protocol::Resume{connected_.session_token, protocol::kMinVersion,
                                             protocol::kMaxVersion, connected_.cache_id, true}};
  if (Status status = connection->send(request, Clock::now() + kPromptly); !status.ok())
    return status;
  std::array<pollfd, 2> entries = {
      {{stop_.get(), POLLIN, 0}, {connection->fd(), POLLIN | POLLRDHUP, 0}}};
  do {
    wait(entries, -1);
    if (entries[0].revents != 0) return Status(ErrorCode::kUnavailable, "the client is ending");
  } while (entries[1].revents == 0);
  auto answer = connection->receive(kResumeId, Clock::now() + kPromptly);
  const bool answered = answer.ok() || !connection->is_lost();
  Status status = answer.ok() ? take_up(*connection, std::move(*answer)) : answer.status();
  if (status.ok()) return connection;
  if (answered && status.code() == ErrorCode::kStaleSession)
    refusal = status;
  else if (answered && !is_passing(status.code()))
    refusal = Status(ErrorCode::kUnavailable,
                     "larderd at " + path_ + " does not resume the session: " + status.to_string());
  return status;
}

Status Session::take_up(const ControlConnection& connection, Answer answer) {
  const auto* session = std::get_if<protocol::Connected>(&answer.body);
  if (session == nullptr || session->session != connected_.session ||
      session->session_token != connected_.session_token || answer.fds.size() > 1)
    return connection.name_peer(
        Status(ErrorCode::kInternal, "the answer to resume names another session"));
  if (answer.fds.empty()) return {};
  protocol::prepare_socket(answer.fds[0].get());
  notices_ = std::move(answer.fds[0]);
  return {};
}

}  // namespace larder
