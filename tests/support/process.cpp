#include "tests/support/process.h"

#include <fcntl.h>
#include <filesystem>
#include <fstream>
#include <poll.h>
#include <signal.h>
#include <spawn.h>
#include <sstream>
#include <stdexcept>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>

extern char** environ;

namespace larder::test {
namespace {

constexpr auto kRunLimit = std::chrono::minutes(4);

pid_t spawn(const std::vector<std::string>& argv, const std::string& out, const std::string& err) {
  posix_spawn_file_actions_t actions;
  ::posix_spawn_file_actions_init(&actions);
  if (!out.empty())
    ::posix_spawn_file_actions_addopen(&actions, 1, out.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                       0600);
  if (err == out && !out.empty()) {
    ::posix_spawn_file_actions_adddup2(&actions, 1, 2);
  } else if (!err.empty()) {
    ::posix_spawn_file_actions_addopen(&actions, 2, err.c_str(), O_WRONLY | O_CREAT | O_APPEND,
                                       0600);
  }
  std::vector<std::string> copies = argv;
  std::vector<char*> pointers;
  for (std::string& copy : copies) pointers.push_back(copy.data());
  pointers.push_back(nullptr);
  pid_t pid = 0;
  const int error = ::posix_spawn(&pid, pointers[0], &actions, nullptr, pointers.data(), environ);
  ::posix_spawn_file_actions_destroy(&actions);
  if (error != 0) throw std::runtime_error("cannot start " + argv[0]);
  return pid;
}

int exit_code(int status) {
  return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status);
}

}  // namespace

Process::Process(const std::vector<std::string>& argv, const std::string& log_path)
    : pid_(spawn(argv, log_path, log_path)) {}

Process::Process(Process&& other) noexcept : pid_(std::exchange(other.pid_, 0)) {}

Process::~Process() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGKILL);
  ::waitpid(pid_, nullptr, 0);
}

void Process::signal(int number) const { ::kill(pid_, number); }

std::optional<int> Process::wait_exit(std::chrono::milliseconds limit) {
  const auto pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid_, 0));
  pollfd entry{pidfd, POLLIN, 0};
  const int ready = ::poll(&entry, 1, static_cast<int>(limit.count()));
  ::close(pidfd);
  if (ready != 1) return std::nullopt;
  int status = 0;
  ::waitpid(pid_, &status, 0);
  pid_ = 0;
  return exit_code(status);
}

Output run(const std::vector<std::string>& argv) {
  const TemporaryFolder folder;
  const std::string out = folder.file("out");
  const std::string err = folder.file("err");
  const pid_t pid = spawn(argv, out, err);
  const auto pidfd = static_cast<int>(::syscall(SYS_pidfd_open, pid, 0));
  pollfd entry{pidfd, POLLIN, 0};
  const auto limit = std::chrono::duration_cast<std::chrono::milliseconds>(kRunLimit);
  const int ready = ::poll(&entry, 1, static_cast<int>(limit.count()));
  ::close(pidfd);
  if (ready != 1) ::kill(pid, SIGKILL);
  int status = 0;
  ::waitpid(pid, &status, 0);
  if (ready != 1) throw std::runtime_error(argv[0] + " did not end in time");
  return {exit_code(status), read_file(out), read_file(err)};
}

bool listens(const std::string& socket_path) {
  struct stat info {};
  return ::stat(socket_path.c_str(), &info) == 0 && S_ISSOCK(info.st_mode) &&
         (info.st_mode & ACCESSPERMS) != 0;
}

bool eventually(const std::function<bool()>& condition, std::chrono::milliseconds limit) {
  const auto deadline = std::chrono::steady_clock::now() + limit;
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    ::poll(nullptr, 0, 5);  // between two looks, so that the one looked at gets the processor
  }
  return true;
}

TemporaryFolder::TemporaryFolder() {
  std::string name = std::filesystem::temp_directory_path() / "larder-test-XXXXXX";
  if (::mkdtemp(name.data()) == nullptr) throw std::runtime_error("mkdtemp failed");
  path_ = name;
}

TemporaryFolder::~TemporaryFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

std::string read_file(const std::string& path) {
  std::ifstream file(path, std::ios::binary);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

}  // namespace larder::test
