#include "tests/support/scripted_daemon.h"

#include <array>
#include <cerrno>
#include <fcntl.h>
#include <poll.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "protocol/limits.h"

namespace larder::test {
namespace {

bool is_ready(int fd, int timeout_ms) {
  pollfd entry{fd, POLLIN, 0};
  return ::poll(&entry, 1, timeout_ms) == 1;
}

protocol::SessionToken token() {
  protocol::SessionToken token{};
  for (size_t i = 0; i < token.size(); ++i) token[i] = static_cast<uint8_t>(i + 1);
  return token;
}

}  // namespace

protocol::Request Peer::next() {
  auto received = protocol::receive_before(control_.get(), soon());
  REQUIRE_MESSAGE(received.ok(), received.status().to_string());
  auto decoded = protocol::decode_request(received->bytes);
  REQUIRE_MESSAGE(decoded.request.ok(), decoded.request.status().to_string());
  return std::move(*decoded.request);
}

void Peer::reply(uint64_t id, protocol::ReplyBody body, const std::vector<int>& fds) {
  const protocol::Bytes bytes = protocol::encode(protocol::Reply{id, boot_id_, std::move(body)});
  REQUIRE(protocol::send_before(control_.get(), bytes, fds, soon()).ok());
}

void Peer::notify(const protocol::Bytes& bytes) {
  REQUIRE(protocol::send_before(notices_.get(), bytes, {}, soon()).ok());
}

protocol::NoticeAck Peer::next_ack() {
  auto received = protocol::receive_before(notices_.get(), soon());
  REQUIRE_MESSAGE(received.ok(), received.status().to_string());
  auto ack = protocol::decode_notice_ack(received->bytes);
  REQUIRE_MESSAGE(ack.ok(), ack.status().to_string());
  return *ack;
}

bool Peer::has_ack() const { return is_ready(notices_.get(), 0); }

OwnFd Peer::open_notices() {
  std::array<int, 2> ends{};
  REQUIRE(::socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0, ends.data()) ==
          0);
  notices_ = OwnFd(ends[0]);
  protocol::prepare_socket(notices_.get());
  return OwnFd(ends[1]);
}

void ScriptedDaemon::listen() {
  listener_ = OwnFd(::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0));
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  socket().copy(address.sun_path, sizeof address.sun_path - 1);
  REQUIRE(::bind(listener_.get(), reinterpret_cast<const sockaddr*>(&address), sizeof address) ==
          0);
  REQUIRE(::listen(listener_.get(), 8) == 0);
}

void ScriptedDaemon::stop_listening() {
  listener_.reset();
  REQUIRE(::unlink(socket().c_str()) == 0);
}

bool ScriptedDaemon::has_connection() const { return is_ready(listener_.get(), 0); }

Peer ScriptedDaemon::accept() {
  REQUIRE(is_ready(listener_.get(), 20'000));
  OwnFd control(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
  REQUIRE(control.valid());
  protocol::prepare_socket(control.get());
  return {std::move(control), ++boot_id_};
}

protocol::Connected ScriptedDaemon::connected(uint64_t arena_bytes) const {
  return {protocol::kMaxVersion, kSession, token(), arena_bytes, kCache};
}

Peer ScriptedDaemon::accept_connect(const std::vector<int>& arena_fds, uint64_t arena_bytes) {
  Peer peer = accept();
  const auto [request, hello] = peer.expect<protocol::Connect>();
  CHECK(hello.notices);
  const OwnFd notices = peer.open_notices();
  std::vector<int> fds = arena_fds;
  fds.push_back(notices.get());
  peer.reply(request.id, connected(arena_bytes), fds);
  return peer;
}

Peer ScriptedDaemon::accept_resume() {
  Peer peer = accept();
  const auto [request, resume] = peer.expect<protocol::Resume>();
  CHECK(resume.session_token == token());
  CHECK(resume.cache_id == kCache);
  CHECK(resume.min_version == protocol::kMinVersion);
  CHECK(resume.max_version == protocol::kMaxVersion);
  CHECK(resume.notices);
  const OwnFd notices = peer.open_notices();
  peer.reply(request.id, connected(0), {notices.get()});
  return peer;
}

ClientOptions ScriptedDaemon::no_arena() {
  ClientOptions options;
  options.arena_bytes = 0;
  options.deadline = std::chrono::seconds(60);
  return options;
}

ScriptedDaemon::Joined ScriptedDaemon::join(ClientOptions options,
                                            const std::vector<int>& arena_fds,
                                            uint64_t arena_bytes) {
  options.socket_path = socket();
  auto connecting = beside([&] { return Client::connect(options); });
  Peer peer = accept_connect(arena_fds, arena_bytes);
  auto client = connecting.get();
  REQUIRE_MESSAGE(client.ok(), client.status().to_string());
  return {std::move(*client), std::move(peer)};
}

void ScriptedDaemon::end(Client client, Peer& peer) {
  auto ending =
      beside([ended = std::move(client)]() mutable { const Client last(std::move(ended)); });
  peer.answer<protocol::Goodbye>(protocol::Done{});
  ending.get();
}

bool is_readable(const std::byte* address) {
  std::array<int, 2> ends{};
  REQUIRE(::pipe2(ends.data(), O_CLOEXEC) == 0);
  const OwnFd reader(ends[0]);
  const OwnFd writer(ends[1]);
  const bool readable = ::write(writer.get(), address, 1) == 1;
  CHECK((readable || errno == EFAULT));
  return readable;
}

}  // namespace larder::test
