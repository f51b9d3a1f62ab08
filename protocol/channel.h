// One message and its file descriptors over a SOCK_SEQPACKET Unix socket.
//
// The plain calls never block: larderd and the executor wait in their event loop. The *_before
// calls wait until a deadline, for clients. Every fd that arrives is close-on-exec and owned by the
// result; a message that is refused (truncated, too many fds, empty) has its fds closed, and the
// connection stays usable. Thread rule: one thread at a time per socket and direction.
#pragma once

#include <chrono>
#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "larder/own_fd.h"
#include "larder/status.h"

namespace larder::protocol {

using Deadline = std::chrono::steady_clock::time_point;

struct Received {
  enum class Kind {
    kMessage,
    kNothing,  // would block
    kEnd,      // the peer has closed, or the connection broke
    kRefused,  // a message that cannot be used; `status` says why
  };
  Kind kind = Kind::kNothing;
  std::vector<std::byte> bytes;
  std::vector<OwnFd> fds;
  Status status;
};
Received receive(int socket);

enum class Sent {
  kSent,
  kFull,    // would block; nothing was sent
  kClosed,  // the peer is gone
};
// 1 to kMaxMessageBytes and at most kMaxFdsPerMessage (a bug otherwise). The fds stay the caller's.
// Throws SystemError for anything that is not the peer's doing. kFull may also mean that too many
// fds are on their way to peers that do not read (see RLIMIT_NOFILE in unix(7)): then the socket
// polls as writable, and an event loop must try again after a pause.
Sent send(int socket, std::span<const std::byte> bytes, std::span<const int> fds = {});

// UNAVAILABLE when the peer is gone, DEADLINE_EXCEEDED when the time is up. send_before() answers
// INVALID_ARGUMENT for a message or a number of fds that send() would not take.
Status send_before(int socket, std::span<const std::byte> bytes, std::span<const int> fds,
                   Deadline deadline);
Result<Received> receive_before(int socket, Deadline deadline);

// A non-blocking, close-on-exec SEQPACKET socket with buffers that hold the largest message.
// Throws SystemError.
OwnFd make_socket();
// Sets and checks the buffers of a socket that came from accept or socketpair.
void prepare_socket(int socket);

// INVALID_ARGUMENT for a path that is empty, longer than sun_path or has a zero byte, or that is a
// socket of another type; UNAVAILABLE when nobody listens there (the
// message says whether the file is missing or stale), PERMISSION_DENIED naming the path and its
// group, DEADLINE_EXCEEDED.
Result<OwnFd> connect_before(const std::string& path, Deadline deadline);

}  // namespace larder::protocol
