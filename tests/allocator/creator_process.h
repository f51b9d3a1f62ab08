// segment_creator as a child of a test: it has created a segment and sent its fd, and can be
// killed.
#pragma once

#include <signal.h>
#include <spawn.h>
#include <string>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/allocator/fd_messages.h"

namespace larder::test {

class CreatorProcess {
 public:
  // Returns when the fd has come, which is invalid if the process could not create it.
  CreatorProcess(const char* kind, int64_t size_bytes) {
    int ends[2];
    REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0, ends) == 0);
    const OwnFd here(ends[0]);
    OwnFd there(ends[1]);
    const std::string size = std::to_string(size_bytes);
    const char* const argv[] = {LARDER_SEGMENT_CREATOR, kind, size.c_str(), "0", nullptr};
    posix_spawn_file_actions_t actions;
    REQUIRE(::posix_spawn_file_actions_init(&actions) == 0);
    REQUIRE(::posix_spawn_file_actions_adddup2(&actions, there.get(), STDIN_FILENO) == 0);
    const int failed =
        ::posix_spawn(&pid_, argv[0], &actions, nullptr, const_cast<char* const*>(argv), environ);
    ::posix_spawn_file_actions_destroy(&actions);
    REQUIRE(failed == 0);
    there.reset();
    fd_ = receive_fd(here.get());
  }
  ~CreatorProcess() { kill(); }
  CreatorProcess(const CreatorProcess&) = delete;
  CreatorProcess& operator=(const CreatorProcess&) = delete;

  const OwnFd& fd() const { return fd_; }
  // Returns when it is gone.
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    ::waitpid(pid_, nullptr, 0);
    pid_ = 0;
  }

 private:
  pid_t pid_ = 0;
  OwnFd fd_;
};

}  // namespace larder::test
