#include "client/ctl/replay/child_process.h"

#include <algorithm>
#include <csignal>
#include <fcntl.h>
#include <filesystem>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

#include <climits>

#include "larder/own_fd.h"
#include "larder/system_error.h"

namespace larder::replay {
namespace {

constexpr int kPassedDescriptor = 3;
constexpr int kExecFailed = 127;

// Between fork and exec: async-signal-safe calls only.
[[noreturn]] void become(char* const* argv, int log, int descriptor, pid_t parent) {
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != parent) ::_exit(kExecFailed);  // it ended before the line above
  sigset_t none;
  ::sigemptyset(&none);
  ::sigprocmask(SIG_SETMASK, &none, nullptr);
  if (log >= 0 && (::dup2(log, 1) < 0 || ::dup2(log, 2) < 0)) ::_exit(kExecFailed);
  if (descriptor == kPassedDescriptor) {
    ::fcntl(descriptor, F_SETFD, 0);
  } else if (descriptor >= 0 && ::dup2(descriptor, kPassedDescriptor) < 0) {
    ::_exit(kExecFailed);
  }
  ::execv(argv[0], argv);
  ::_exit(kExecFailed);
}

}  // namespace

ChildProcess::ChildProcess(const std::vector<std::string>& argv, const std::string& log_path,
                           int descriptor) {
  OwnFd log;
  if (!log_path.empty()) {
    log = OwnFd(::open(log_path.c_str(), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600));
    if (!log.valid()) throw SystemError("open(" + log_path + ")");
  }
  std::vector<std::string> copies = argv;
  std::vector<char*> pointers;
  pointers.reserve(copies.size() + 1);
  for (std::string& copy : copies) pointers.push_back(copy.data());
  pointers.push_back(nullptr);
  const pid_t parent = ::getpid();
  pid_ = ::fork();
  if (pid_ < 0) throw SystemError("fork for " + argv[0]);
  if (pid_ == 0) become(pointers.data(), log.get(), descriptor, parent);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, 0)), exit_(other.exit_) {}

ChildProcess::~ChildProcess() {
  if (pid_ <= 0 || exit_) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void ChildProcess::signal(int number) const {
  if (pid_ > 0 && !exit_) ::kill(pid_, number);
}

std::optional<int> ChildProcess::wait_exit(std::chrono::milliseconds limit) {
  if (exit_) return exit_;
  const OwnFd pidfd(static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0)));
  if (!pidfd.valid()) throw SystemError("pidfd_open(" + std::to_string(pid_) + ")");
  pollfd entry{pidfd.get(), POLLIN, 0};
  const auto timeout =
      static_cast<int>(std::clamp<int64_t>(limit.count(), 0, std::numeric_limits<int>::max()));
  if (::poll(&entry, 1, timeout) != 1) return std::nullopt;
  int status = 0;
  ::waitpid(pid_, &status, 0);
  exit_ = WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
  return exit_;
}

void pause_between_looks() {
  constexpr int kPauseMs = 3;
  ::poll(nullptr, 0, kPauseMs);
}

std::string program_folder() {
  return std::filesystem::read_symlink("/proc/self/exe").parent_path().string();
}

}  // namespace larder::replay
