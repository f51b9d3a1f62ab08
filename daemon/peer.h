// Who is at the other end of a Unix socket.
#pragma once

#include <sys/types.h>

#include "larder/own_fd.h"

namespace larder::daemon {

struct PeerIdentity {
  pid_t pid = 0;  // 0 when the peer lives in a PID namespace that we cannot see
  uid_t uid = static_cast<uid_t>(-1);
  gid_t gid = static_cast<gid_t>(-1);
};
// As of connect (SO_PEERCRED). Throws SystemError.
PeerIdentity peer_identity(int socket);

// A pidfd of the process that connected: from the kernel where it can (SO_PEERPIDFD, Linux 6.5),
// else by number, which can miss a process that died and was replaced before this call. Invalid
// where neither works.
OwnFd open_peer_pidfd(int socket, const PeerIdentity& peer);

}  // namespace larder::daemon
