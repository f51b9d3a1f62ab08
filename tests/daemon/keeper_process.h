// A larder-keeper process in a folder of the test's own, and child processes that stand for
// larderds.
#pragma once

#include <chrono>
#include <filesystem>
#include <functional>
#include <optional>
#include <signal.h>
#include <string>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include "daemon/keeper_client.h"
#include "protocol/channel.h"
#include "tests/support/process.h"

namespace larder::test {

class KeeperProcess {
 public:
  // `max_fds` is its hard limit of descriptors; 0: this process's own.
  explicit KeeperProcess(int max_fds = 0) : max_fds_(max_fds) { start(); }

  void start() {
    const std::string program = std::string(LARDER_BIN_DIR) + "/larder-keeper";
    std::filesystem::remove(socket());
    process_.reset();
    if (max_fds_ == 0) {
      process_.emplace(std::vector<std::string>{program, "--socket", socket()}, log_path());
    } else {
      const std::string limited =
          "ulimit -n " + std::to_string(max_fds_) + " && exec \"$0\" \"$@\"";
      process_.emplace(
          std::vector<std::string>{"/bin/sh", "-c", limited, program, "--socket", socket()},
          log_path());
    }
    REQUIRE(eventually([&] { return listens(socket()); }));
  }
  Process& process() { return *process_; }
  std::string socket() const { return folder_.file("keeper.sock"); }
  std::string log_path() const { return folder_.file("keeper.log"); }

  // Fails the test when this process cannot own the keeper.
  daemon::KeeperClient connect() const {
    auto client = daemon::KeeperClient::connect(socket());
    REQUIRE_MESSAGE(client.ok(), client.status().to_string());
    return std::move(*client);
  }
  // A connection that says what it likes.
  OwnFd connect_raw() const {
    auto raw = protocol::connect_before(
        socket(), std::chrono::steady_clock::now() + std::chrono::seconds(10));
    REQUIRE_MESSAGE(raw.ok(), raw.status().to_string());
    return std::move(*raw);
  }
  ptrdiff_t num_fds() const {
    const std::string fds = "/proc/" + std::to_string(process_->pid()) + "/fd";
    return std::distance(std::filesystem::directory_iterator(fds),
                         std::filesystem::directory_iterator());
  }

 private:
  int max_fds_;
  TemporaryFolder folder_;
  std::optional<Process> process_;
};

// A forked child that runs `body` and then exits; killed at the latest by the destructor.
class Child {
 public:
  explicit Child(const std::function<void()>& body) : pid_(::fork()) {
    if (pid_ != 0) return;
    ::alarm(60);  // whatever becomes of the test
    try {
      body();
    } catch (...) {  // a failed check must not run the tests that follow
      ::_exit(1);
    }
    ::_exit(0);
  }
  ~Child() {
    kill();
    ::waitpid(pid_, nullptr, 0);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  // Waits until it is dead, and leaves the zombie.
  void kill() const {
    ::kill(pid_, SIGKILL);
    siginfo_t info{};
    ::waitid(P_PID, static_cast<id_t>(pid_), &info, WEXITED | WNOWAIT);
  }

 private:
  pid_t pid_;
};

// An object that is shared with forked children.
template <typename T>
class Shared {
 public:
  Shared()
      : memory_(
            ::mmap(nullptr, sizeof(T), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0)) {
    REQUIRE(memory_ != MAP_FAILED);
    new (memory_) T();
  }
  ~Shared() { ::munmap(memory_, sizeof(T)); }
  Shared(const Shared&) = delete;
  Shared& operator=(const Shared&) = delete;

  T* operator->() const { return static_cast<T*>(memory_); }

 private:
  void* memory_;
};

}  // namespace larder::test
