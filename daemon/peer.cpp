#include "daemon/peer.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "larder/system_error.h"

namespace larder::daemon {
namespace {

constexpr int kSoPeerPidfd = 77;  // SO_PEERPIDFD, newer than Debian 12's headers

}  // namespace

PeerIdentity peer_identity(int socket) {
  ucred credentials{};
  socklen_t size = sizeof credentials;
  if (::getsockopt(socket, SOL_SOCKET, SO_PEERCRED, &credentials, &size) != 0)
    throw SystemError("getsockopt(SO_PEERCRED)");
  return {credentials.pid, credentials.uid, credentials.gid};
}

OwnFd open_peer_pidfd(int socket, const PeerIdentity& peer) {
  int fd = -1;
  socklen_t size = sizeof fd;
  if (::getsockopt(socket, SOL_SOCKET, kSoPeerPidfd, &fd, &size) == 0 && fd >= 0) {
    ::fcntl(fd, F_SETFD, FD_CLOEXEC);
    return OwnFd(fd);
  }
  if (peer.pid <= 0) return OwnFd();
  return OwnFd(static_cast<int>(::syscall(SYS_pidfd_open, peer.pid, 0)));
}

}  // namespace larder::daemon
