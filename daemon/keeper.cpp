#include "daemon/keeper.h"

#include <cstring>
#include <fcntl.h>
#include <list>
#include <poll.h>
#include <signal.h>
#include <sys/signalfd.h>
#include <sys/socket.h>

#include "daemon/peer.h"
#include "larder/system_error.h"
#include "protocol/channel.h"

namespace larder::daemon {
namespace {

using protocol::KeeperOp;
using protocol::KeeperReply;
using protocol::KeeperRequest;

// More than one larderd connects only by mistake.
constexpr size_t kMaxConnections = 16;

}  // namespace

bool Keeper::owner_lives() const {
  if (!owner_pidfd_.valid()) return owner_ >= 0;
  pollfd entry{owner_pidfd_.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 0;  // a pidfd is readable once its process has exited
}

Status Keeper::hello(int connection, int pidfd) {
  if (owner_ != connection && owner_lives())
    return {ErrorCode::kBusy, "another larderd owns this keeper"};
  owner_ = connection;
  owner_pidfd_ = OwnFd(pidfd >= 0 ? ::fcntl(pidfd, F_DUPFD_CLOEXEC, 0) : -1);
  ++epoch_;
  return {};
}

Status Keeper::put(const KeeperRequest& request, std::vector<OwnFd> fds) {
  if (fds.size() != 1) return {ErrorCode::kInvalidArgument, "put carries one fd"};
  const auto found = entries_.find(request.key);
  if (found == entries_.end() && entries_.size() >= protocol::kMaxKeeperEntries)
    return {ErrorCode::kResourceExhausted, "the keeper is full"};
  entries_.insert_or_assign(request.key, Entry{std::move(fds[0]), request.metadata});
  return {};
}

Keeper::Answer Keeper::handle(int connection, int pidfd, const KeeperRequest& request,
                              std::vector<OwnFd> fds) {
  Answer answer;
  Status status;
  if (request.magic != protocol::kKeeperMagic) {
    status = {ErrorCode::kInvalidArgument, "wrong magic"};
  } else if (request.op == KeeperOp::kHello) {
    status = hello(connection, pidfd);
  } else if (connection != owner_ || request.epoch != epoch_) {
    status = {ErrorCode::kPermissionDenied, "not the owner of this epoch"};
  } else if (request.op == KeeperOp::kPut) {
    status = put(request, std::move(fds));
  } else if (request.op == KeeperOp::kDrop) {
    if (entries_.erase(request.key) == 0) status = {ErrorCode::kNotFound, "no such key"};
  } else if (request.op == KeeperOp::kList) {
    const auto found = entries_.lower_bound(request.key);
    if (found == entries_.end()) {
      status = {ErrorCode::kNotFound, "no further entry"};
    } else {
      answer.reply.key = found->first;
      answer.reply.metadata = found->second.metadata;
      answer.fd = OwnFd(::fcntl(found->second.fd.get(), F_DUPFD_CLOEXEC, 0));
      if (!answer.fd.valid()) status = {ErrorCode::kResourceExhausted, "no free descriptor"};
    }
  } else {
    status = {ErrorCode::kInvalidArgument, "unknown op"};
  }
  answer.reply.code = static_cast<uint32_t>(status.code());
  answer.reply.epoch = status.code() == ErrorCode::kPermissionDenied ? 0 : epoch_;
  answer.reply.num_entries = entries_.size();
  return answer;
}

void Keeper::connection_closed(int connection) {
  if (owner_ == connection) owner_ = -1;
}

namespace {

struct Peer {
  OwnFd socket;
  OwnFd pidfd;
  bool closed = false;
};

// Answers one message. A peer that does not read its answers is dropped.
void serve_peer(Keeper& keeper, Peer& peer) {
  protocol::Received received = protocol::receive(peer.socket.get());
  if (received.kind == protocol::Received::Kind::kNothing) return;
  KeeperRequest request;
  const bool usable = received.kind == protocol::Received::Kind::kMessage &&
                      received.bytes.size() == sizeof request;
  if (!usable) {
    keeper.connection_closed(peer.socket.get());
    peer.closed = true;
    return;
  }
  std::memcpy(&request, received.bytes.data(), sizeof request);
  const Keeper::Answer answer =
      keeper.handle(peer.socket.get(), peer.pidfd.get(), request, std::move(received.fds));
  const int fd = answer.fd.get();
  const auto bytes = std::as_bytes(std::span(&answer.reply, 1));
  const std::span<const int> fds = answer.fd.valid() ? std::span(&fd, 1) : std::span<const int>();
  if (protocol::send(peer.socket.get(), bytes, fds) == protocol::Sent::kSent) return;
  keeper.connection_closed(peer.socket.get());
  peer.closed = true;
}

void accept_peer(int listener, std::list<Peer>& peers) {
  OwnFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid() || peers.size() >= kMaxConnections) return;
  protocol::prepare_socket(socket.get());
  OwnFd pidfd = open_peer_pidfd(socket.get(), peer_identity(socket.get()));
  peers.push_back({std::move(socket), std::move(pidfd), false});
}

OwnFd make_signal_fd() {
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  OwnFd fd(::signalfd(-1, &signals, SFD_CLOEXEC));
  if (!fd.valid()) throw SystemError("signalfd()");
  return fd;
}

}  // namespace

int serve_keeper(int listener) {
  Keeper keeper;
  std::list<Peer> peers;
  const OwnFd signals = make_signal_fd();
  while (true) {
    std::vector<pollfd> entries = {{signals.get(), POLLIN, 0}, {listener, POLLIN, 0}};
    for (const Peer& peer : peers) entries.push_back({peer.socket.get(), POLLIN, 0});
    if (::poll(entries.data(), entries.size(), -1) < 0) {
      if (errno == EINTR) continue;
      throw SystemError("poll(keeper)");
    }
    if (entries[0].revents != 0) return 0;
    size_t index = 2;
    for (Peer& peer : peers)
      if (entries[index++].revents != 0) serve_peer(keeper, peer);
    if (entries[1].revents != 0) accept_peer(listener, peers);
    peers.remove_if([](const Peer& peer) { return peer.closed; });
  }
}

}  // namespace larder::daemon
