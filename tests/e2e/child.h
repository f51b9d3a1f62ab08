// A client in a process of its own: forked, talked to, killed when the test lets go of it.
#pragma once

#include <functional>
#include <signal.h>
#include <string>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/node.h"

namespace larder::test {

// One end of the talk between a test and its child; each word is one message.
class Talk {
 public:
  explicit Talk(int fd) : fd_(fd) {}
  void say(const std::string& word) const {
    if (::send(fd_, word.data(), word.size(), MSG_NOSIGNAL) < 0) failed("send");
  }
  std::string hear() const {
    std::string word(size_t{1} << 16, '\0');
    const ssize_t size = ::recv(fd_, word.data(), word.size(), 0);
    if (size <= 0) failed("receive");
    word.resize(static_cast<size_t>(size));
    return word;
  }
  int fd() const { return fd_; }

 private:
  // In the child nothing may unwind into the test; in the test it fails.
  static void failed(const char* what) {
    throw std::runtime_error(std::string("cannot ") + what + ": the other process has ended");
  }
  int fd_;
};

class Child {
 public:
  // Runs `live` in a fork, which exits with 0 when it returns and 1 when it throws.
  explicit Child(const std::function<void(const Talk&)>& live) {
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends_) == 0);
    pid_ = ::fork();
    if (pid_ == 0) {
      ::close(ends_[0]);
      run(live, ends_[1]);
    }
    ::close(ends_[1]);
  }
  ~Child() {
    kill();
    ::close(ends_[0]);
  }
  Child(const Child&) = delete;
  Child& operator=(const Child&) = delete;

  pid_t pid() const { return pid_; }
  void say(const std::string& word) const { Talk(ends_[0]).say(word); }
  std::string hear() const { return Talk(ends_[0]).hear(); }
  void signal(int number) const { REQUIRE(::kill(pid_, number) == 0); }
  // Returns when it is stopped: a signal is under way for a moment.
  void stop() const {
    signal(SIGSTOP);
    const std::string path = "/proc/" + std::to_string(pid_) + "/stat";
    REQUIRE(eventually([&] { return read_file(path).find(") T ") != std::string::npos; }));
  }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }
  // The exit status of one that ends by itself.
  int wait() {
    int status = 0;
    ::waitpid(std::exchange(pid_, 0), &status, 0);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }

 private:
  // noexcept: what goes wrong must not unwind into the parent's test.
  [[noreturn]] static void run(const std::function<void(const Talk&)>& live, int fd) noexcept {
    try {
      live(Talk(fd));
    } catch (const std::exception& error) {
      const std::string text = std::string("child: ") + error.what() + "\n";
      (void)!::write(2, text.data(), text.size());
      ::_exit(1);
    }
    ::_exit(0);
  }

  int ends_[2];
  pid_t pid_ = 0;
};

}  // namespace larder::test
