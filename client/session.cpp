#include "client/session.h"

#include <algorithm>
#include <csignal>
#include <pthread.h>
#include <sys/eventfd.h>
#include <system_error>
#include <unistd.h>

#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder {
namespace {

constexpr auto kGoodbyeDeadline = std::chrono::seconds(1);

// A signal that the engine handles must not land in a thread that it does not know of.
std::thread start_without_signals(std::function<void()> run) {
  sigset_t all;
  sigset_t before;
  ::sigfillset(&all);
  if (const int error = ::pthread_sigmask(SIG_SETMASK, &all, &before); error != 0)
    throw SystemError("pthread_sigmask", error);
  try {
    std::thread thread(std::move(run));
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    return thread;
  } catch (const std::system_error& error) {
    ::pthread_sigmask(SIG_SETMASK, &before, nullptr);
    throw SystemError("start a thread", error.code().value());
  }
}

}  // namespace

Session::Session(ControlConnection connection, std::chrono::microseconds deadline)
    : deadline_(deadline),
      path_(connection.path()),
      connected_(connection.session()),
      fds_(connection.take_fds()),
      stop_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)),
      boot_id_(connection.boot_id()) {
  if (!stop_.valid()) throw SystemError("eventfd");
  connection_ = std::make_shared<ControlConnection>(std::move(connection));
}

Result<std::unique_ptr<Session>> Session::open(const std::string& path, protocol::Connect hello,
                                               std::chrono::microseconds deadline) {
  hello.notices = true;
  const size_t arena_fds = hello.arena_bytes > 0 ? 2 : 0;
  auto connection = ControlConnection::connect(path, std::move(hello), deadline);
  if (!connection) return connection.status();
  std::unique_ptr<Session> session(new Session(std::move(*connection), deadline));
  std::vector<OwnFd>& fds = session->fds_;
  if (fds.size() > arena_fds + 2)
    return Status(ErrorCode::kInternal, "the handshake brought " + std::to_string(fds.size()) +
                                            " fds, not " + std::to_string(arena_fds + 2));
  if (fds.size() == arena_fds + 2) {
    session->lifeline_ = std::move(fds.back());
    fds.pop_back();
  }
  if (fds.size() == arena_fds + 1) {
    session->notices_ = std::move(fds.back());
    fds.pop_back();
    protocol::prepare_socket(session->notices_.get());
  }
  return session;
}

void Session::start(std::function<void(const protocol::Unmap&)> on_unmap) {
  on_unmap_ = std::move(on_unmap);
  thread_ = start_without_signals([this, connection = connection_] { run(connection); });
}

Session::~Session() {
  try {
    say_goodbye();
  } catch (...) {  // a destructor does not throw; the closed socket says the same, later
  }
  const uint64_t one = 1;
  (void)!::write(stop_.get(), &one, sizeof one);
  if (thread_.joinable()) thread_.join();
}

// Without it the daemon waits for the process to end before it trusts the blocks.
void Session::say_goodbye() {
  if (!thread_.joinable()) return;  // the client has not come to be; EOF says it
  const auto deadline = Clock::now() + std::min<Clock::duration>(kGoodbyeDeadline, deadline_);
  if (!await_connection(deadline)) return;
  {
    const std::lock_guard lock(mutex_);
    leaving_ = true;
  }
  (void)call_before(protocol::Goodbye{}, deadline);
}

Session::Clock::time_point Session::deadline_of(Patience patience) const {
  const auto now = Clock::now();
  const std::lock_guard lock(mutex_);
  if (patience == Patience::kCall || connection_ != nullptr) return now + deadline_;
  return std::max(now, lost_at_ + deadline_);
}

Result<Session::Connection> Session::await_connection(Clock::time_point deadline) {
  std::unique_lock lock(mutex_);
  changed_.wait_until(lock, deadline, [&] { return connection_ || !ended_.ok() || leaving_; });
  if (!ended_.ok()) return ended_;
  if (connection_) return connection_;
  std::string sentence = "larderd at " + path_ +
                         ": the connection is lost, and the session could "
                         "not be resumed in time";
  if (!last_attempt_.ok()) sentence += ": " + last_attempt_.to_string();
  return Status(ErrorCode::kUnavailable, std::move(sentence));
}

Result<Session::Answer> Session::call(protocol::RequestBody body, Patience patience,
                                      std::span<const int> fds) {
  return call_before(std::move(body), deadline_of(patience), fds);
}

Result<Session::Answer> Session::call_before(protocol::RequestBody body, Clock::time_point deadline,
                                             std::span<const int> fds) {
  // What came before was answered, or given up.
  const uint64_t id = next_id_++;
  protocol::Request request{id, 0, std::move(body), id};
  while (true) {
    auto connection = await_connection(deadline);
    if (!connection) return connection.status();
    auto answer = (*connection)->exchange(request, deadline, fds);
    if (!(*connection)->is_lost()) {
      const std::lock_guard lock(mutex_);
      if (connection_ == *connection) boot_id_ = (*connection)->boot_id();
      return answer;
    }
    lose(*connection);
  }
}

void Session::lose(const Connection& connection) {
  const std::lock_guard lock(mutex_);
  if (connection_ != connection) return;  // the other thread was first
  connection_->shut_down();
  connection_.reset();
  lost_at_ = Clock::now();
  changed_.notify_all();
}

Status Session::ended() const {
  const std::lock_guard lock(mutex_);
  return ended_;
}
uint64_t Session::boot_id() const {
  const std::lock_guard lock(mutex_);
  return boot_id_;
}
uint64_t Session::resumes() const {
  const std::lock_guard lock(mutex_);
  return resumes_;
}
std::chrono::microseconds Session::longest_outage() const {
  const std::lock_guard lock(mutex_);
  return longest_outage_;
}

}  // namespace larder
