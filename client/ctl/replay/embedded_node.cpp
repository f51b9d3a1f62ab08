#include "client/ctl/replay/embedded_node.h"

#include <chrono>
#include <csignal>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <poll.h>
#include <sstream>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <thread>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "larder/own_fd.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder::replay {
namespace {

using std::chrono::steady_clock;

constexpr auto kReadyLimit = std::chrono::seconds(30);
constexpr auto kAnswerLimit = std::chrono::seconds(2);
constexpr auto kStopLimit = std::chrono::seconds(15);
constexpr size_t kShownLogBytes = 4096;

std::string find_program(const std::string& name) {
  std::vector<std::string> folders = {program_folder()};
  const char* path = std::getenv("PATH");
  std::istringstream list(path == nullptr ? "" : path);
  for (std::string folder; std::getline(list, folder, ':');) folders.push_back(folder);
  for (std::string& file : folders) {
    file.append("/").append(name);
    if (::access(file.c_str(), X_OK) == 0) return file;
  }
  return "";
}

// Names that larderd's configuration cannot hold are left out: their sessions are refused by it.
bool is_usable(const std::string& tenant) {
  if (tenant.empty() || tenant.size() > protocol::kMaxNameBytes) return false;
  for (const char c : tenant)
    if (static_cast<unsigned char>(c) < 0x20 || c == 0x7F) return false;
  return true;
}

void write_configuration(const std::string& path, const std::vector<std::string>& tenants,
                         int64_t memory_bytes, const std::string& device) {
  std::ofstream file(path);
  file << "memory_bytes = " << memory_bytes << "\ndevice = \"" << device
       << "\"\nhttp_port = 0\nshutdown_grace_ms = 2000\n"
       << "tenants = [";
  for (const std::string& tenant : tenants)
    if (is_usable(tenant)) file << "{name = " << nlohmann::json(tenant).dump() << "}, ";
  file << "]\n";
}

}  // namespace

// ------------------------------------------------------------------------------ TemporaryFolder

// The signals are blocked everywhere else, so that this thread alone sees them.
struct TemporaryFolder::Watcher {
  explicit Watcher(std::string folder) : path(std::move(folder)) {
    sigset_t signals;
    ::sigemptyset(&signals);
    for (const int number : {SIGINT, SIGTERM, SIGHUP}) ::sigaddset(&signals, number);
    ::pthread_sigmask(SIG_BLOCK, &signals, &mask_before);
    signal_fd = OwnFd(::signalfd(-1, &signals, SFD_CLOEXEC));
    end_fd = OwnFd(::eventfd(0, EFD_CLOEXEC));
    if (!signal_fd.valid() || !end_fd.valid()) throw SystemError("signalfd or eventfd");
    thread = std::thread([this] { watch(); });
  }
  ~Watcher() {
    ::eventfd_write(end_fd.get(), 1);
    thread.join();
    ::pthread_sigmask(SIG_SETMASK, &mask_before, nullptr);
  }
  void watch() const {
    pollfd entries[2] = {{signal_fd.get(), POLLIN, 0}, {end_fd.get(), POLLIN, 0}};
    while (::poll(entries, 2, -1) < 0 && errno == EINTR) {
    }
    if ((entries[0].revents & POLLIN) == 0) return;
    signalfd_siginfo info{};
    if (::read(signal_fd.get(), &info, sizeof info) != sizeof info) return;
    std::error_code ignored;
    std::filesystem::remove_all(path, ignored);
    ::_exit(128 + static_cast<int>(info.ssi_signo));  // the children die with this process
  }

  std::string path;
  sigset_t mask_before{};
  OwnFd signal_fd;
  OwnFd end_fd;
  std::thread thread;
};

TemporaryFolder::TemporaryFolder() {
  // Socket paths are short: a deep temporary folder is not used.
  constexpr size_t kMaxFolderBytes = 60;
  std::string folder = std::filesystem::temp_directory_path().string();
  if (folder.size() > kMaxFolderBytes) folder = "/tmp";
  std::string name = folder + "/larder-replay-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) throw SystemError("mkdtemp(" + name + ")");
  path_ = name;
  watcher_ = std::make_unique<Watcher>(path_);
}

TemporaryFolder::~TemporaryFolder() {
  watcher_.reset();
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

// --------------------------------------------------------------------------------- EmbeddedNode

Result<std::unique_ptr<EmbeddedNode>> EmbeddedNode::start(const std::vector<std::string>& tenants,
                                                          int64_t memory_bytes,
                                                          const std::string& device) {
  for (const char* name : {"larder-keeper", "larderd"})
    if (find_program(name).empty())
      return Status(ErrorCode::kUnavailable,
                    std::string(name) + " is neither in " + program_folder() + " nor in PATH");
  std::unique_ptr<EmbeddedNode> node(new EmbeddedNode());
  write_configuration(node->folder_.file("larderd.toml"), tenants, memory_bytes, device);
  if (Status status = node->start_keeper(); !status.ok()) return status;
  node->start_larderd();
  const Status status = node->await("be ready", [](const auto& daemon) { return daemon.ready; });
  if (!status.ok()) return status;
  return node;
}

EmbeddedNode::~EmbeddedNode() {
  try {
    (void)stop();
  } catch (const SystemError&) {  // the children are killed by their own destructors
  }
}

Status EmbeddedNode::start_keeper() {
  const std::string socket = folder_.file("keeper.sock");
  std::filesystem::remove(socket);
  keeper_.reset();
  keeper_.emplace(std::vector<std::string>{find_program("larder-keeper"), "--socket", socket},
                  folder_.file("keeper.log"));
  const auto deadline = steady_clock::now() + kReadyLimit;
  while (::access(socket.c_str(), F_OK) != 0) {
    if (steady_clock::now() > deadline || keeper_->wait_exit(std::chrono::milliseconds(0)))
      return {ErrorCode::kUnavailable, "larder-keeper did not start"};
    pause_between_looks();
  }
  return {};
}

void EmbeddedNode::start_larderd() {
  larderd_.reset();
  larderd_.emplace(
      std::vector<std::string>{find_program("larderd"), "--config", folder_.file("larderd.toml"),
                               "--socket", socket_path(), "--keeper", folder_.file("keeper.sock")},
      folder_.file("larderd.log"));
}

Result<protocol::DaemonStatus> EmbeddedNode::ask() const {
  protocol::Connect hello;
  hello.tenant = "default";
  hello.role = "admin";
  hello.client_name = "replay-status";
  auto connection = ControlConnection::connect(socket_path(), hello, kAnswerLimit);
  if (!connection) return connection.status();
  return connection->call_for<protocol::DaemonStatus>(protocol::GetStatus{});
}

Status EmbeddedNode::await(const std::string& what,
                           const std::function<bool(const protocol::DaemonStatus&)>& wanted) {
  const auto deadline = steady_clock::now() + kReadyLimit;
  while (true) {
    const auto status = ask();
    if (status && wanted(*status)) return {};
    const auto exit = larderd_->wait_exit(std::chrono::milliseconds(0));
    if (exit)
      return {ErrorCode::kUnavailable, "larderd ended with status " + std::to_string(*exit) +
                                           "; the end of its log:\n" + log_end()};
    if (steady_clock::now() > deadline)
      return {ErrorCode::kUnavailable,
              "larderd did not " + what + " in time; the end of its log:\n" + log_end()};
    pause_between_looks();
  }
}

Result<double> EmbeddedNode::restart_daemon(bool is_kill) {
  count_deaths();
  num_kills_ = 0;  // the next larderd counts from 0
  larderd_->signal(is_kill ? SIGKILL : SIGTERM);
  if (!larderd_->wait_exit(kStopLimit))
    return Status(ErrorCode::kDeadlineExceeded, "larderd did not end after SIGTERM");
  const auto begin = steady_clock::now();
  start_larderd();
  const Status status = await("be ready", [](const auto& daemon) { return daemon.ready; });
  if (!status.ok()) return status;
  return std::chrono::duration<double, std::milli>(steady_clock::now() - begin).count();
}

Status EmbeddedNode::kill_executor() {
  const auto before = ask();
  if (!before) return before.status();
  if (before->executor_pid <= 0) return {ErrorCode::kUnavailable, "there is no executor to kill"};
  ++num_kills_;
  ::kill(static_cast<pid_t>(before->executor_pid), SIGKILL);
  return await("have a new executor", [&](const protocol::DaemonStatus& now) {
    return now.ready && now.executor_pid > 0 && now.executor_pid != before->executor_pid;
  });
}

Status EmbeddedNode::kill_keeper() {
  keeper_->signal(SIGKILL);
  (void)keeper_->wait_exit(kStopLimit);
  if (Status status = start_keeper(); !status.ok()) return status;
  return await("find the new keeper", [&](const protocol::DaemonStatus& now) {
    return now.ready && now.keeper_pid == keeper_->pid();
  });
}

// A call that killed its executor and went well when it was run again must not pass for good.
void EmbeddedNode::count_deaths() {
  const auto status = ask();
  if (!status) return;  // the end of larderd says more
  const uint64_t deaths = status->executor_restarts + (status->executor_pid == 0 ? 1 : 0);
  if (deaths > num_kills_) num_unasked_deaths_ += deaths - num_kills_;
}

Status EmbeddedNode::stop() {
  Status result;
  if (larderd_) {
    count_deaths();
    if (num_unasked_deaths_ > 0)
      result = {ErrorCode::kInternal, "the executor died " + std::to_string(num_unasked_deaths_) +
                                          " times unasked; the end of the log:\n" + log_end()};
    const bool was_running = !larderd_->wait_exit(std::chrono::milliseconds(0));
    larderd_->signal(SIGTERM);
    const auto exit = larderd_->wait_exit(kStopLimit);
    if (!was_running || exit != 0)
      result = {ErrorCode::kInternal,
                (was_running ? std::string("larderd did not end cleanly") : "larderd had died") +
                    (exit ? ", status " + std::to_string(*exit) : ", it was killed") +
                    "; the end of its log:\n" + log_end()};
  }
  larderd_.reset();
  if (keeper_) {
    keeper_->signal(SIGTERM);
    (void)keeper_->wait_exit(kStopLimit);
  }
  keeper_.reset();
  return result;
}

std::string EmbeddedNode::log_end() const {
  std::ifstream file(folder_.file("larderd.log"), std::ios::binary);
  std::ostringstream all;
  all << file.rdbuf();
  const std::string text = all.str();
  return text.size() <= kShownLogBytes ? text : "..." + text.substr(text.size() - kShownLogBytes);
}

}  // namespace larder::replay
