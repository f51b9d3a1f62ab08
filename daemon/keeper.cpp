#include "daemon/keeper.h"

#include <cstdio>
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
constexpr int kAcceptPauseMs = 100;

}  // namespace

bool Keeper::owner_lives() const {
  if (!owner_pidfd_.valid()) return owner_ >= 0;
  pollfd entry{owner_pidfd_.get(), POLLIN, 0};
  return ::poll(&entry, 1, 0) == 0;  // a pidfd is readable once its process has exited
}

Status Keeper::hello(const Asker& asker) {
  // The owner itself may come back on a new connection; while it lives, its pid is nobody else's.
  if (owner_lives() && asker.pid != owner_pid_)
    return {ErrorCode::kBusy, "another larderd owns this keeper"};
  owner_ = asker.connection;
  owner_pid_ = asker.pid;
  owner_pidfd_ = OwnFd(asker.pidfd >= 0 ? ::fcntl(asker.pidfd, F_DUPFD_CLOEXEC, 0) : -1);
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

Keeper::Answer Keeper::handle(const Asker& asker, const KeeperRequest& request,
                              std::vector<OwnFd> fds) {
  Answer answer;
  Status status;
  if (request.magic != protocol::kKeeperMagic) {
    status = {ErrorCode::kInvalidArgument, "wrong magic"};
  } else if (request.op == KeeperOp::kHello) {
    status = hello(asker);
  } else if (asker.connection != owner_ || request.epoch != epoch_) {
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
  PeerIdentity identity;
  OwnFd pidfd;
  bool closed = false;
};

// One message and its answer; false when the peer is gone, does not speak records, or does not
// read.
bool serve_message(Keeper& keeper, const Peer& peer) {
  protocol::Received received = protocol::receive(peer.socket.get());
  if (received.kind == protocol::Received::Kind::kNothing) return true;
  if (received.kind == protocol::Received::Kind::kEnd) return false;
  Keeper::Answer answer;
  KeeperRequest request;
  if (received.kind == protocol::Received::Kind::kRefused) {
    // Most likely a deposit for which this process has no descriptor left.
    answer.reply.code = static_cast<uint32_t>(ErrorCode::kResourceExhausted);
    answer.reply.num_entries = keeper.num_entries();
  } else if (received.bytes.size() == sizeof request) {
    std::memcpy(&request, received.bytes.data(), sizeof request);
    answer = keeper.handle({peer.socket.get(), peer.identity.pid, peer.pidfd.get()}, request,
                           std::move(received.fds));
  } else {
    return false;
  }
  const int fd = answer.fd.get();
  const auto bytes = std::as_bytes(std::span(&answer.reply, 1));
  const std::span<const int> fds = answer.fd.valid() ? std::span(&fd, 1) : std::span<const int>();
  return protocol::send(peer.socket.get(), bytes, fds) == protocol::Sent::kSent;
}

void serve_peer(Keeper& keeper, Peer& peer) {
  try {
    if (serve_message(keeper, peer)) return;
  } catch (const SystemError& error) {  // this peer's misfortune, not that of what is held
    std::fprintf(stderr, "larder-keeper: %s\n", error.what());
  }
  keeper.connection_closed(peer.socket.get());
  peer.closed = true;
}

// False when there is no descriptor for another peer.
bool accept_peer(int listener, std::list<Peer>& peers) {
  OwnFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) return errno != EMFILE && errno != ENFILE;
  if (peers.size() >= kMaxConnections) return true;
  try {
    protocol::prepare_socket(socket.get());
    const PeerIdentity identity = peer_identity(socket.get());
    OwnFd pidfd = open_peer_pidfd(socket.get(), identity);
    peers.push_back({std::move(socket), identity, std::move(pidfd), false});
  } catch (const SystemError& error) {
    std::fprintf(stderr, "larder-keeper: %s\n", error.what());
  }
  return true;
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
  bool accepting = true;
  while (true) {
    // A listener that cannot be served stays readable: it is left out for a while.
    std::vector<pollfd> entries = {{signals.get(), POLLIN, 0},
                                   {accepting ? listener : -1, POLLIN, 0}};
    for (const Peer& peer : peers) entries.push_back({peer.socket.get(), POLLIN, 0});
    if (::poll(entries.data(), entries.size(), accepting ? -1 : kAcceptPauseMs) < 0) {
      if (errno == EINTR) continue;
      throw SystemError("poll(keeper)");
    }
    if (entries[0].revents != 0) return 0;
    size_t index = 2;
    for (Peer& peer : peers)
      if (entries[index++].revents != 0) serve_peer(keeper, peer);
    accepting = entries[1].revents == 0 || accept_peer(listener, peers);
    peers.remove_if([](const Peer& peer) { return peer.closed; });
  }
}

}  // namespace larder::daemon
