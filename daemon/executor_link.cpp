#include "daemon/executor_link.h"

#include <algorithm>
#include <chrono>
#include <cstring>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include <boost/asio/post.hpp>
#include <spdlog/spdlog.h>

#include "larder/system_error.h"
#include "protocol/limits.h"

extern char** environ;

namespace larder::daemon {
namespace {

constexpr int kExecutorSocketFd = 3;
constexpr size_t kMaxQueuedCommands = 65536;
constexpr int kExitMs = 3000;
constexpr auto kShortLife = std::chrono::seconds(5);
// Longer than any one call may take (kMaxAttendProductsPerCall).
constexpr auto kStuckAfter = std::chrono::seconds(60);
constexpr auto kFirstRestartDelay = std::chrono::milliseconds(10);
constexpr auto kLongestRestartDelay = std::chrono::milliseconds(1000);

// Signals, the standard descriptors and the socket at fd 3. Nothing else of ours, close-on-exec or
// not (Boost's sockets are not): an executor that outlives us would keep our port.
pid_t spawn_process(const std::string& executable, const std::string& log_level,
                    const std::string& device, int socket) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  ::posix_spawn_file_actions_adddup2(&actions, socket, kExecutorSocketFd);
  ::posix_spawn_file_actions_addclosefrom_np(&actions, kExecutorSocketFd + 1);
  posix_spawnattr_t attributes;
  ::posix_spawnattr_init(&attributes);
  sigset_t none;
  sigemptyset(&none);
  ::posix_spawnattr_setsigmask(&attributes, &none);
  ::posix_spawnattr_setflags(&attributes, POSIX_SPAWN_SETSIGMASK);
  std::string name = "larder-executor";
  std::string fd_option = "--socket-fd=" + std::to_string(kExecutorSocketFd);
  std::string log_option = "--log-level=" + log_level;
  std::string device_option = "--device=" + device;
  // On the host the option is left out: an empty value is refused.
  char* arguments[] = {name.data(), fd_option.data(), log_option.data(),
                       device.empty() ? nullptr : device_option.data(), nullptr};
  pid_t pid = 0;
  const int error =
      ::posix_spawn(&pid, executable.c_str(), &actions, &attributes, arguments, environ);
  ::posix_spawn_file_actions_destroy(&actions);
  ::posix_spawnattr_destroy(&attributes);
  if (error != 0) throw SystemError("posix_spawn(" + executable + ")", error);
  return pid;
}

}  // namespace

ExecutorLink::ExecutorLink(boost::asio::io_context& loop, std::string executable,
                           std::string log_level, std::string device)
    : loop_(loop),
      executable_(std::move(executable)),
      log_level_(std::move(log_level)),
      device_(std::move(device)),
      restart_timer_(loop) {}

ExecutorLink::~ExecutorLink() {
  stop();
  if (leaving_pid_ != 0) ::waitpid(static_cast<pid_t>(leaving_pid_), nullptr, WNOHANG);
}

void ExecutorLink::set_predecessor(OwnFd pidfd) {
  pollfd entry{pidfd.get(), POLLIN, 0};
  predecessor_lives_ = pidfd.valid() && ::poll(&entry, 1, 0) == 0;
  if (predecessor_lives_) predecessor_ = std::move(pidfd);
}

void ExecutorLink::start(Handlers handlers) {
  handlers_ = std::move(handlers);
  if (!predecessor_lives_) return spawn();
  spdlog::info("event=executor_awaits_predecessor");
  predecessor_watch_.emplace(loop_, duplicate(predecessor_.get()), [this] { after_predecessor(); });
  restart_timer_.expires_after(std::chrono::milliseconds(kExitMs));
  restart_timer_.async_wait([this](const boost::system::error_code& error) {
    if (error) return;
    spdlog::warn("event=predecessor_killed");
    ::syscall(SYS_pidfd_send_signal, predecessor_.get(), SIGKILL, nullptr, 0);
  });
}

void ExecutorLink::after_predecessor() {
  predecessor_lives_ = false;
  predecessor_.reset();
  predecessor_watch_.reset();
  restart_timer_.cancel();
  if (!stopping_) spawn();
}

void ExecutorLink::stop() {
  stopping_ = true;
  restart_timer_.cancel();
  if (!running()) return;
  connection_->close();
  connection_.reset();
  // It finishes its operation and exits by itself; one that takes too long is not waited for.
  const OwnFd process(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  pollfd entry{process.get(), POLLIN, 0};
  if (::poll(&entry, 1, kExitMs) != 1) ::kill(static_cast<pid_t>(pid_), SIGKILL);
  ::waitpid(static_cast<pid_t>(pid_), nullptr, 0);
}

void ExecutorLink::abandon() {
  stopping_ = true;
  restart_timer_.cancel();
  predecessor_watch_.reset();
  if (running()) {
    connection_->close();
    connection_.reset();
    leaving_pid_ = std::exchange(pid_, 0);
    left_at_ = std::chrono::steady_clock::now();
  }
  for (auto& [ticket, waiting] : std::exchange(drains_, {})) waiting.then();
}

bool ExecutorLink::has_left() {
  if (leaving_pid_ == 0) return true;
  const auto pid = static_cast<pid_t>(leaving_pid_);
  if (std::chrono::steady_clock::now() - left_at_ > std::chrono::milliseconds(kExitMs))
    ::kill(pid, SIGKILL);
  if (::waitpid(pid, nullptr, WNOHANG) == 0) return false;
  leaving_pid_ = 0;
  return true;
}

void ExecutorLink::restart() {
  if (!running()) return;
  connection_->close();
  // Not from inside the caller, who is in the middle of telling the executor something.
  boost::asio::post(loop_, [this] {
    if (running() && !connection_->is_open()) died();
  });
}

void ExecutorLink::spawn() {
  int sockets[2] = {-1, -1};
  if (::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, sockets) != 0)
    throw SystemError("socketpair(executor)");
  OwnFd ours(sockets[0]);
  // Not at fd 3 already: dup2 onto itself would leave it close-on-exec.
  OwnFd theirs(sockets[1]);
  if (theirs.get() == kExecutorSocketFd) theirs = duplicate(theirs.get());
  protocol::prepare_socket(ours.get());
  protocol::prepare_socket(theirs.get());
  pid_ = spawn_process(executable_, log_level_, device_, theirs.get());
  connection_ = std::make_shared<Connection>(loop_, std::move(ours), kMaxQueuedCommands);
  connection_->start(
      {[this](protocol::Received received) { handle(std::move(received)); }, [this] { died(); }});
  spdlog::info("event=executor_started pid={} device={}", pid_, device_.empty() ? "host" : device_);
  started_at_ = std::chrono::steady_clock::now();
  try {
    handlers_.on_started();
    for (const auto& [ticket, waiting] : drains_) send(protocol::Drain{waiting.session, ticket});
  } catch (const SystemError& error) {
    spdlog::error("event=executor_not_told error=\"{}\"", error.what());
    restart();
  }
}

void ExecutorLink::send(const protocol::ExecutorCommand& command, std::vector<OwnFd> fds) {
  if (running()) connection_->send(protocol::encode(command), std::move(fds));
}

void ExecutorLink::when_idle(uint64_t session, std::function<void()> then) {
  if (cannot_start()) return then();
  const uint64_t ticket = next_ticket_++;
  drains_.emplace(ticket, Waiting{session, std::move(then), std::chrono::steady_clock::now()});
  send(protocol::Drain{session, ticket});  // spawn() repeats it for an executor that comes later
}

void ExecutorLink::handle(protocol::Received received) {
  auto report = received.kind == protocol::Received::Kind::kMessage
                    ? protocol::decode_report(received.bytes)
                    : Result<protocol::ExecutorReport>(received.status);
  if (!report) {
    spdlog::error("event=executor_report_refused error=\"{}\"", report.status().to_string());
    return;
  }
  if (std::holds_alternative<protocol::Ready>(*report)) {
    ready_ = true;
    failed_starts_ = 0;
    handlers_.on_ready();
  } else if (const auto* drained = std::get_if<protocol::Drained>(&*report)) {
    auto node = drains_.extract(drained->ticket);
    if (!node.empty()) node.mapped().then();
  } else if (const auto* copied = std::get_if<protocol::Copied>(&*report)) {
    handlers_.on_copied(*copied);
  } else if (const auto* broken = std::get_if<protocol::BrokenRing>(&*report)) {
    handlers_.on_broken_ring(*broken);
  } else if (const auto* imported = std::get_if<protocol::ImportDone>(&*report)) {
    handlers_.on_imported(*imported);
  }
}

void ExecutorLink::died() {
  int wait_status = 0;
  // The socket is closed by exit; kill covers an executor that closed it and lives on.
  ::kill(static_cast<pid_t>(pid_), SIGKILL);
  ::waitpid(static_cast<pid_t>(pid_), &wait_status, 0);
  spdlog::warn("event=executor_died pid={} signal={} exit_status={}", pid_,
               WIFSIGNALED(wait_status) ? WTERMSIG(wait_status) : 0,
               WIFEXITED(wait_status) ? WEXITSTATUS(wait_status) : 0);
  connection_.reset();
  if (!std::exchange(ready_, false)) ++failed_starts_;
  ++restarts_;
  const bool lived_shortly = std::chrono::steady_clock::now() - started_at_ < kShortLife;
  deaths_in_a_row_ = lived_shortly ? deaths_in_a_row_ + 1 : 1;
  handlers_.on_died();
  // Nothing runs, and nobody can say when something will: what waits for that must not wait.
  if (cannot_start())
    for (auto& [ticket, waiting] : std::exchange(drains_, {})) waiting.then();
  if (!stopping_) start_later();
}

void ExecutorLink::start_later() {
  const auto delay = std::min<std::chrono::milliseconds>(
      kFirstRestartDelay * (1 << std::min(deaths_in_a_row_ - 1, 10)), kLongestRestartDelay);
  restart_timer_.expires_after(delay);
  restart_timer_.async_wait([this](const boost::system::error_code& error) {
    if (error || stopping_) return;
    try {
      spawn();
    } catch (const SystemError& failure) {  // no processes or descriptors: they may come back
      spdlog::error("event=executor_not_started error=\"{}\"", failure.what());
      ++deaths_in_a_row_;
      start_later();
    }
  });
}

void ExecutorLink::end_if_stuck(uint64_t session) {
  const auto now = std::chrono::steady_clock::now();
  for (const auto& [ticket, waiting] : drains_) {
    if (waiting.session != session || now - waiting.since < kStuckAfter || !running()) continue;
    if (now - started_at_ < kStuckAfter) continue;
    spdlog::error("event=executor_stuck pid={} session={}", pid_, session);
    ::kill(static_cast<pid_t>(pid_), SIGKILL);
    return;
  }
}

}  // namespace larder::daemon
