#include "protocol/channel.h"

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <fcntl.h>
#include <grp.h>
#include <memory>
#include <poll.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <time.h>

#include "larder/check.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder::protocol {
namespace {

// Room for one fd more than the limit, so that "too many" is seen, and for credentials, which the
// kernel puts first when the receiver has SO_PASSCRED set.
constexpr size_t kControlBytes =
    CMSG_SPACE((kMaxFdsPerMessage + 1) * sizeof(int)) + CMSG_SPACE(sizeof(ucred));

std::vector<OwnFd> take_fds(msghdr& message) {
  std::vector<OwnFd> fds;
  fds.reserve(kControlBytes / sizeof(int));  // nothing may fail while an fd has no owner
  for (cmsghdr* part = CMSG_FIRSTHDR(&message); part != nullptr;
       part = CMSG_NXTHDR(&message, part)) {
    if (part->cmsg_level != SOL_SOCKET || part->cmsg_type != SCM_RIGHTS) continue;
    const size_t count = (part->cmsg_len - CMSG_LEN(0)) / sizeof(int);
    for (size_t i = 0; i < count; ++i) {
      int fd = -1;
      std::memcpy(&fd, CMSG_DATA(part) + i * sizeof(int), sizeof fd);
      fds.emplace_back(fd);
    }
  }
  return fds;
}

Received refused(std::string why) {
  Received result;
  result.kind = Received::Kind::kRefused;
  result.status = Status(ErrorCode::kInvalidArgument, std::move(why));
  return result;
}

// recvmsg says 0 both for an empty message and for the end of the connection.
Received empty_or_end(int socket) {
  pollfd entry{socket, POLLRDHUP, 0};
  if (::poll(&entry, 1, 0) > 0 && (entry.revents & (POLLRDHUP | POLLHUP | POLLERR)) != 0) {
    Received result;
    result.kind = Received::Kind::kEnd;
    return result;
  }
  return refused("an empty message");
}

bool is_peer_gone(int error) {
  return error == EPIPE || error == ECONNRESET || error == ENOTCONN || error == ESHUTDOWN;
}

// Where the kernel has no event to wait for.
void pause_a_little() {
  const timespec pause{0, 1'000'000};
  ::nanosleep(&pause, nullptr);
}

Status wait_for(int socket, short events, Deadline deadline) {
  while (true) {
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(
        deadline - std::chrono::steady_clock::now() + std::chrono::microseconds(999));
    if (left.count() <= 0)
      return {ErrorCode::kDeadlineExceeded, "the other side did not " +
                                                std::string(events == POLLIN ? "answer" : "read") +
                                                " in time"};
    pollfd entry{socket, events, 0};
    const int ready =
        ::poll(&entry, 1, static_cast<int>(std::min<int64_t>(left.count(), 3'600'000)));
    if (ready > 0) return {};
    if (ready < 0 && errno != EINTR) throw SystemError("poll(socket)");
  }
}

Status describe_refused_path(const std::string& path) {
  struct stat info {};
  if (::stat(path.c_str(), &info) != 0)
    return {ErrorCode::kPermissionDenied, "the directory of socket " + path + " is closed to us"};
  std::string group = std::to_string(info.st_gid);
  ::group entry{};
  ::group* found = nullptr;
  std::array<char, 4096> strings;
  if (::getgrgid_r(info.st_gid, &entry, strings.data(), strings.size(), &found) == 0 &&
      found != nullptr)
    group = found->gr_name;
  return {ErrorCode::kPermissionDenied, "socket " + path + " is group " + group};
}

}  // namespace

Received receive(int socket) {
  // Not a vector: nothing is cleared, and a queued small message does not keep the room of a large.
  const auto buffer = std::make_unique_for_overwrite<std::byte[]>(kMaxMessageBytes);
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control;
  iovec part{buffer.get(), kMaxMessageBytes};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  message.msg_control = control.data();
  message.msg_controllen = control.size();
  ssize_t size = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  // A peer that closes with our messages unread resets the connection. That is reported first and
  // once, in front of what the peer had sent, which may well be the reason.
  for (int resets = 0; size < 0 && (errno == EINTR || (errno == ECONNRESET && resets == 0));) {
    if (errno == ECONNRESET) ++resets;
    size = ::recvmsg(socket, &message, MSG_DONTWAIT | MSG_CMSG_CLOEXEC);
  }
  if (size < 0) {
    Received result;
    if (errno == EAGAIN || errno == EWOULDBLOCK) return result;
    if (!is_peer_gone(errno)) throw SystemError("recvmsg(socket)");
    result.kind = Received::Kind::kEnd;
    return result;
  }
  std::vector<OwnFd> fds = take_fds(message);
  if (size == 0) return empty_or_end(socket);
  if ((message.msg_flags & MSG_TRUNC) != 0)
    return refused("a message of more than " + std::to_string(kMaxMessageBytes) + " bytes");
  // Either more fds than the limit, or this process has no free descriptors for them.
  if ((message.msg_flags & MSG_CTRUNC) != 0 || fds.size() > kMaxFdsPerMessage)
    return refused("file descriptors were lost: " + std::to_string(fds.size()) +
                   " arrived; at most " + std::to_string(kMaxFdsPerMessage) +
                   " may be sent, and the receiver needs as many free descriptors");
  Received result;
  result.kind = Received::Kind::kMessage;
  result.bytes.assign(buffer.get(), buffer.get() + size);
  result.fds = std::move(fds);
  return result;
}

Sent send(int socket, std::span<const std::byte> bytes, std::span<const int> fds) {
  LARDER_CHECK(!bytes.empty() && bytes.size() <= kMaxMessageBytes, bytes.size());
  LARDER_CHECK(fds.size() <= kMaxFdsPerMessage, fds.size());
  alignas(cmsghdr) std::array<std::byte, kControlBytes> control{};
  iovec part{const_cast<std::byte*>(bytes.data()), bytes.size()};
  msghdr message{};
  message.msg_iov = &part;
  message.msg_iovlen = 1;
  if (!fds.empty()) {
    message.msg_control = control.data();
    message.msg_controllen = CMSG_SPACE(fds.size_bytes());
    cmsghdr* header = CMSG_FIRSTHDR(&message);
    header->cmsg_level = SOL_SOCKET;
    header->cmsg_type = SCM_RIGHTS;
    header->cmsg_len = CMSG_LEN(fds.size_bytes());
    std::memcpy(CMSG_DATA(header), fds.data(), fds.size_bytes());
  }
  ssize_t size = 0;
  do {
    size = ::sendmsg(socket, &message, MSG_DONTWAIT | MSG_NOSIGNAL);
  } while (size < 0 && errno == EINTR);
  if (size == static_cast<ssize_t>(bytes.size())) return Sent::kSent;
  // ETOOMANYREFS: too many fds are under way to peers that do not read; it passes.
  if (errno == EAGAIN || errno == EWOULDBLOCK || errno == ETOOMANYREFS || errno == ENOBUFS)
    return Sent::kFull;
  if (is_peer_gone(errno)) return Sent::kClosed;
  throw SystemError("sendmsg(socket, " + std::to_string(bytes.size()) + " bytes, " +
                    std::to_string(fds.size()) + " fds)");
}

Status send_before(int socket, std::span<const std::byte> bytes, std::span<const int> fds,
                   Deadline deadline) {
  if (bytes.empty() || bytes.size() > kMaxMessageBytes || fds.size() > kMaxFdsPerMessage)
    return {ErrorCode::kInvalidArgument,
            "a message of " + std::to_string(bytes.size()) + " bytes and " +
                std::to_string(fds.size()) + " fds: 1 to " + std::to_string(kMaxMessageBytes) +
                " bytes and at most " + std::to_string(kMaxFdsPerMessage) + " fds are allowed"};
  for (bool waited = false;; waited = true) {
    switch (send(socket, bytes, fds)) {
      case Sent::kSent:
        return {};
      case Sent::kClosed:
        return {ErrorCode::kUnavailable, "the connection is closed"};
      case Sent::kFull:
        if (waited) pause_a_little();  // writable and yet full: the fds' fault, see send()
        if (Status status = wait_for(socket, POLLOUT, deadline); !status.ok()) return status;
    }
  }
}

Result<Received> receive_before(int socket, Deadline deadline) {
  while (true) {
    Received received = receive(socket);
    switch (received.kind) {
      case Received::Kind::kMessage:
        return received;
      case Received::Kind::kRefused:
        return received.status;
      case Received::Kind::kEnd:
        return Status(ErrorCode::kUnavailable, "the connection is closed");
      case Received::Kind::kNothing:
        if (Status status = wait_for(socket, POLLIN, deadline); !status.ok()) return status;
    }
  }
}

OwnFd make_socket() {
  OwnFd socket(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!socket.valid()) throw SystemError("socket(AF_UNIX, SOCK_SEQPACKET)");
  prepare_socket(socket.get());
  return socket;
}

void prepare_socket(int socket) {
  const int wanted = kSocketBufferBytes;
  for (const int option : {SO_SNDBUF, SO_RCVBUF}) {
    if (::setsockopt(socket, SOL_SOCKET, option, &wanted, sizeof wanted) != 0)
      throw SystemError("setsockopt(buffer, " + std::to_string(wanted) + " bytes)");
    int got = 0;
    socklen_t length = sizeof got;
    if (::getsockopt(socket, SOL_SOCKET, option, &got, &length) != 0)
      throw SystemError("getsockopt(buffer)");
    // The kernel caps at net.core.wmem_max; one largest message and its bookkeeping must fit.
    if (got < static_cast<int>(kMaxMessageBytes) + 4096)
      throw SystemError("the socket buffer is " + std::to_string(got) + " bytes after asking for " +
                            std::to_string(wanted) + "; net.core.wmem_max is too small",
                        ENOBUFS);
  }
}

Result<OwnFd> connect_before(const std::string& path, Deadline deadline) {
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  if (path.find('\0') != std::string::npos)
    return Status(ErrorCode::kInvalidArgument, "socket path has a zero byte");
  if (path.empty() || path.size() >= sizeof address.sun_path)
    return Status(ErrorCode::kInvalidArgument,
                  "socket path has " + std::to_string(path.size()) + " bytes, 1 to " +
                      std::to_string(sizeof address.sun_path - 1) + " are allowed");
  std::memcpy(address.sun_path, path.c_str(), path.size() + 1);
  OwnFd socket = make_socket();
  while (true) {
    if (::connect(socket.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0)
      return socket;
    switch (errno) {
      case EINTR:
        continue;
      case EAGAIN: {  // the backlog is full; a Unix socket gives no event for room in it
        if (std::chrono::steady_clock::now() >= deadline)
          return Status(ErrorCode::kDeadlineExceeded, "the backlog of " + path + " is full");
        pause_a_little();
        continue;
      }
      case ENOENT:
        return Status(ErrorCode::kUnavailable, "not running: there is no socket " + path);
      case ECONNREFUSED:
        return Status(ErrorCode::kUnavailable,
                      "not running: " + path + " is a stale socket or no socket");
      case EACCES:
      case EPERM:
        return describe_refused_path(path);
      case ENOTDIR:
      case EPROTOTYPE:
        return Status(ErrorCode::kInvalidArgument,
                      path + " is not a SOCK_SEQPACKET socket of Larder");
      default:
        throw SystemError("connect(" + path + ")");
    }
  }
}

}  // namespace larder::protocol
