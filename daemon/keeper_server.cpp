// The keeper's loop: connections, limits, signals.
#include <algorithm>
#include <condition_variable>
#include <cstdio>
#include <cstring>
#include <deque>
#include <list>
#include <mutex>
#include <poll.h>
#include <signal.h>
#include <stop_token>
#include <sys/resource.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <thread>

#include "daemon/keeper.h"
#include "daemon/peer.h"
#include "larder/system_error.h"
#include "protocol/channel.h"

namespace larder::daemon {
namespace {

using protocol::KeeperReply;
using protocol::KeeperRequest;

// More than one larderd connects only by mistake.
constexpr size_t kMaxConnections = 16;
constexpr int kAcceptPauseMs = 100;
constexpr size_t kMaxClosing = 16;
// Descriptors that are not for entries: two for each connection, those of one message, those being
// closed, and our own. With them a full keeper still takes a replacement and a new larderd.
constexpr size_t kReservedDescriptors = 128;

// Closes descriptors on a thread of its own. The last one of a memfd frees its pages, which takes
// some 100 ms per GiB, and the owner waits for the next answer.
class Closer {
 public:
  Closer() : thread_([this](const std::stop_token& stop) { run(stop); }) {}

  void close(OwnFd fd) {
    if (!fd.valid()) return;
    const std::lock_guard lock(mutex_);
    if (fds_.size() >= kMaxClosing)
      std::swap(fd, fds_.front());  // the caller waits for the oldest
    else
      fds_.push_back(std::move(fd));
    changed_.notify_one();
  }

 private:
  void run(const std::stop_token& stop) {
    std::unique_lock lock(mutex_);
    while (changed_.wait(lock, stop, [this] { return !fds_.empty(); })) {
      OwnFd fd = std::move(fds_.front());
      fds_.pop_front();
      lock.unlock();
      fd.reset();
      lock.lock();
    }
  }

  std::mutex mutex_;
  std::condition_variable_any changed_;
  std::deque<OwnFd> fds_;
  std::jthread thread_;  // the last: it uses the others until it has been joined
};

struct Peer {
  OwnFd socket;
  PeerIdentity identity;
  OwnFd pidfd;
  bool closed = false;
};

// False when the peer is gone or does not read.
bool send_answer(int socket, const Keeper::Answer& answer) {
  const auto bytes = std::as_bytes(std::span(&answer.reply, 1));
  const protocol::Sent sent = protocol::send(socket, bytes, answer.fds);
  if (sent != protocol::Sent::kFull || answer.fds.empty()) return sent == protocol::Sent::kSent;
  // Most likely too many fds are on their way to other peers of this user; that passes.
  KeeperReply reply;
  reply.code = static_cast<uint32_t>(ErrorCode::kResourceExhausted);
  reply.epoch = answer.reply.epoch;
  reply.num_entries = answer.reply.num_entries;
  return protocol::send(socket, std::as_bytes(std::span(&reply, 1))) == protocol::Sent::kSent;
}

// One message and its answer; false when the peer is gone, does not speak records, or does not
// read.
bool serve_message(Keeper& keeper, const Peer& peer, Closer& closer) {
  protocol::Received received = protocol::receive(peer.socket.get());
  if (received.kind == protocol::Received::Kind::kNothing) return true;
  if (received.kind == protocol::Received::Kind::kEnd) return false;
  Keeper::Answer answer;
  KeeperRequest request;
  if (received.kind == protocol::Received::Kind::kRefused) {
    // From larderd, a deposit for which this process has no descriptor left.
    answer.reply.code = static_cast<uint32_t>(ErrorCode::kResourceExhausted);
    answer.reply.num_entries = keeper.num_entries();
  } else if (received.bytes.size() == sizeof request) {
    std::memcpy(&request, received.bytes.data(), sizeof request);
    answer = keeper.handle({peer.socket.get(), peer.identity.pid, peer.pidfd.get()}, request,
                           std::move(received.fds));
    closer.close(std::move(answer.dropped));
  } else {
    return false;
  }
  return send_answer(peer.socket.get(), answer);
}

// Every failure is this peer's misfortune, not that of what is held.
void serve_peer(Keeper& keeper, Peer& peer, Closer& closer) {
  try {
    if (serve_message(keeper, peer, closer)) return;
  } catch (const std::exception& error) {
    std::fprintf(stderr, "larder-keeper: %s\n", error.what());
  }
  keeper.connection_closed(peer.socket.get());
  peer.closed = true;
}

// False when there is no descriptor for another peer. The owner's connection is never given up for
// a newcomer, but the oldest other one is: a larderd gets in past any number of idle ones.
bool accept_peer(int listener, const Keeper& keeper, std::list<Peer>& peers) {
  OwnFd socket(::accept4(listener, nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  if (!socket.valid()) return errno != EMFILE && errno != ENFILE;
  if (peers.size() >= kMaxConnections) {
    peers.erase(std::ranges::find_if(
        peers, [&](const Peer& peer) { return !keeper.is_owner(peer.socket.get()); }));
  }
  try {
    protocol::prepare_socket(socket.get());
    const PeerIdentity identity = peer_identity(socket.get());
    OwnFd pidfd = open_peer_pidfd(socket.get(), identity);
    peers.push_back({std::move(socket), identity, std::move(pidfd), false});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "larder-keeper: %s\n", error.what());
  }
  return true;
}

OwnFd make_signal_fd() {
  // stderr may be a pipe that nobody reads any more.
  ::signal(SIGPIPE, SIG_IGN);
  sigset_t signals;
  sigemptyset(&signals);
  sigaddset(&signals, SIGTERM);
  sigaddset(&signals, SIGINT);
  ::sigprocmask(SIG_BLOCK, &signals, nullptr);
  OwnFd fd(::signalfd(-1, &signals, SFD_CLOEXEC));
  if (!fd.valid()) throw SystemError("signalfd()");
  return fd;
}

// 0: none.
size_t room_for_entries() {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0) throw SystemError("getrlimit(RLIMIT_NOFILE)");
  if (limit.rlim_cur > kReservedDescriptors)
    return std::min<size_t>(limit.rlim_cur - kReservedDescriptors, protocol::kMaxKeeperEntries);
  std::fprintf(stderr, "larder-keeper: RLIMIT_NOFILE is %llu; more than %zu are needed\n",
               static_cast<unsigned long long>(limit.rlim_cur), kReservedDescriptors);
  return 0;
}

}  // namespace

int serve_keeper(int listener) {
  const size_t max_entries = room_for_entries();
  if (max_entries == 0) return 1;
  Keeper keeper(max_entries);
  std::list<Peer> peers;
  const OwnFd signals = make_signal_fd();  // first, so that the closer's thread blocks them too
  Closer closer;
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
      if (entries[index++].revents != 0) serve_peer(keeper, peer, closer);
    peers.remove_if([](const Peer& peer) { return peer.closed; });
    accepting = entries[1].revents == 0 || accept_peer(listener, keeper, peers);
  }
}

}  // namespace larder::daemon
