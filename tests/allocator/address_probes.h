// What tests ask of addresses without touching them, and of calls that are to abort.
#pragma once

#include <cstddef>
#include <fcntl.h>
#include <signal.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/wait.h>
#include <unistd.h>

#include <doctest/doctest.h>

namespace larder::test {

// Unlike a read, write(2) says EFAULT.
inline bool cpu_can_read(const std::byte* address) {
  int ends[2];
  REQUIRE(::pipe2(ends, O_CLOEXEC) == 0);
  const bool readable = ::write(ends[1], address, 1) == 1;
  ::close(ends[0]);
  ::close(ends[1]);
  return readable;
}

inline bool is_mapped(const std::byte* address) {
  unsigned char resident;
  return ::mincore(const_cast<std::byte*>(address), 1, &resident) == 0;
}

// In a fork, as it is to abort.
template <typename Function>
bool aborts(const Function& function) {
  const pid_t pid = ::fork();
  if (pid == 0) {
    const int null = ::open("/dev/null", O_WRONLY);
    ::dup2(null, STDERR_FILENO);
    ::signal(SIGABRT, SIG_DFL);  // doctest would report it
    function();
    ::_exit(0);
  }
  int status = 0;
  REQUIRE(::waitpid(pid, &status, 0) == pid);
  return WIFSIGNALED(status) && WTERMSIG(status) == SIGABRT;
}

}  // namespace larder::test
