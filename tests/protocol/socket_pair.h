// Two connected sockets as the channel uses them, and counting of file descriptors.
#pragma once

#include <array>
#include <cstdlib>
#include <dirent.h>
#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>
#include <vector>

#include "larder/check.h"
#include "larder/own_fd.h"
#include "protocol/channel.h"

namespace larder::test {

struct SocketPair {
  OwnFd a;
  OwnFd b;
};

inline SocketPair socket_pair() {
  std::array<int, 2> fds{};
  LARDER_CHECK(
      ::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, fds.data()) == 0);
  SocketPair pair{OwnFd(fds[0]), OwnFd(fds[1])};
  protocol::prepare_socket(pair.a.get());
  protocol::prepare_socket(pair.b.get());
  return pair;
}

// The numbers of this process's open descriptors.
inline std::vector<int> open_fds() {
  std::vector<int> fds;
  DIR* folder = ::opendir("/proc/self/fd");
  LARDER_CHECK(folder != nullptr);
  while (const dirent* entry = ::readdir(folder))
    if (entry->d_name[0] != '.' && std::atoi(entry->d_name) != ::dirfd(folder))
      fds.push_back(std::atoi(entry->d_name));
  ::closedir(folder);
  return fds;
}

inline std::vector<OwnFd> new_fds(size_t count) {
  std::vector<OwnFd> fds;
  for (size_t i = 0; i < count; ++i) fds.emplace_back(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  for (const OwnFd& fd : fds) LARDER_CHECK(fd.valid());
  return fds;
}

inline std::vector<int> numbers(const std::vector<OwnFd>& fds) {
  std::vector<int> result;
  for (const OwnFd& fd : fds) result.push_back(fd.get());
  return result;
}

}  // namespace larder::test
