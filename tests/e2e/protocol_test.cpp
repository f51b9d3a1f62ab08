// The control socket against peers that do not follow the protocol.
#include <random>
#include <sys/socket.h>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include "client/control_connection.h"
#include "protocol/channel.h"
#include "protocol/limits.h"
#include "protocol/messages.h"
#include "tests/support/node.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

using protocol::Request;
using protocol::RequestBody;

auto deadline() { return std::chrono::steady_clock::now() + std::chrono::seconds(10); }

// A bare connection: one message out, one reply in.
struct Wire {
  explicit Wire(const Node& node)
      : socket(protocol::connect_before(node.socket(), deadline()).value()) {}

  protocol::Reply exchange(std::span<const std::byte> bytes, std::span<const int> fds = {}) {
    REQUIRE(protocol::send_before(socket.get(), bytes, fds, deadline()).ok());
    auto received = protocol::receive_before(socket.get(), deadline());
    REQUIRE_MESSAGE(received.ok(), received.status().to_string());
    return protocol::decode_reply(received->bytes).value();
  }
  protocol::Reply exchange(RequestBody body) {
    return exchange(protocol::encode(Request{++id, 0, std::move(body)}));
  }
  ErrorCode refusal(RequestBody body) {
    const protocol::Reply reply = exchange(std::move(body));
    const auto* status = std::get_if<Status>(&reply.body);
    return status == nullptr ? ErrorCode::kOk : status->code();
  }
  protocol::Connect hello() const {
    protocol::Connect body;
    body.min_version = body.max_version = protocol::kMaxVersion;
    body.tenant = "default";
    body.role = "append";
    return body;
  }

  OwnFd socket;
  uint64_t id = 0;
};

TEST_CASE("the handshake is checked field by field, and may be tried again") {
  Node node;
  Wire wire(node);
  CHECK(wire.refusal(protocol::GetStatus{}) == ErrorCode::kInvalidArgument);
  auto hello = wire.hello();
  hello.min_version = hello.max_version = 99;
  CHECK(wire.refusal(hello) == ErrorCode::kUnsupported);
  hello = wire.hello();
  hello.role = "king";
  CHECK(wire.refusal(hello) == ErrorCode::kInvalidArgument);
  hello = wire.hello();
  hello.arena_bytes = 17;
  CHECK(wire.refusal(hello) == ErrorCode::kInvalidArgument);
  hello = wire.hello();
  hello.max_version = 1000;  // a newer client
  const protocol::Reply reply = wire.exchange(hello);
  REQUIRE(std::holds_alternative<protocol::Connected>(reply.body));
  CHECK(std::get<protocol::Connected>(reply.body).version == protocol::kMaxVersion);
  CHECK(reply.boot_id != 0);
  CHECK(reply.id == wire.id);
  CHECK(wire.refusal(wire.hello()) == ErrorCode::kInvalidArgument);  // twice
  CHECK(wire.refusal(protocol::GetStatus{}) == ErrorCode::kOk);
}

TEST_CASE("what nobody serves is UNSUPPORTED by name") {
  Node node;
  Wire wire(node);
  REQUIRE(wire.refusal(wire.hello()) == ErrorCode::kOk);
  const protocol::Reply reply = wire.exchange(protocol::RegisterImport{4096, "dma_buf", "", 0});
  const auto* status = std::get_if<Status>(&reply.body);
  REQUIRE(status != nullptr);
  CHECK(status->code() == ErrorCode::kUnsupported);
  CHECK(status->message().find("\"dma_buf\"; served: memfd, vmm, cuda_ipc") != std::string::npos);
  protocol::GroupSpec mla{"m", 64, 4, 0, "BLHNC", false, {}, protocol::MlaGroup{2, "v4", {}}};
  CHECK(wire.refusal(protocol::OpenPool{{"p", "m", {mla}}}) == ErrorCode::kUnsupported);
  protocol::GroupSpec opaque{"o", 64, 4, 0, "BLHNC", false, {}, protocol::OpaqueGroup{4096}};
  CHECK(wire.refusal(protocol::OpenPool{{"p", "m", {mla, opaque}}}) == ErrorCode::kUnsupported);
  CHECK(wire.refusal(protocol::OpenPool{{"p", "m", {}}}) == ErrorCode::kInvalidArgument);
}

TEST_CASE("things that do not exist are refused with their number") {
  Node node;
  Wire wire(node);
  REQUIRE(wire.refusal(wire.hello()) == ErrorCode::kOk);
  CHECK(wire.refusal(protocol::ClosePool{77}) == ErrorCode::kNotFound);
  CHECK(wire.refusal(protocol::DestroyPool{77}) == ErrorCode::kPermissionDenied);
  CHECK(wire.refusal(protocol::ResizePool{77, 0, 8}) == ErrorCode::kNotFound);
  CHECK(wire.refusal(protocol::Evict{77, 8}) == ErrorCode::kNotFound);
  CHECK(wire.refusal(protocol::SetQuota{"default", 1, 2}) == ErrorCode::kPermissionDenied);
  CHECK(wire.refusal(protocol::Resume{}) == ErrorCode::kInvalidArgument);  // connected already
  CHECK(wire.refusal(protocol::OpenSegments{77, 0, 0, 1}) == ErrorCode::kNotFound);
  CHECK(wire.refusal(protocol::Allocate{77, 0, 1}) == ErrorCode::kNotFound);
  CHECK(wire.refusal(protocol::Allocate{77, 0, 1 << 20}) == ErrorCode::kInvalidArgument);
  CHECK(wire.refusal(protocol::Release{77, 0, {{1, 1}}}) == ErrorCode::kNotFound);
  CHECK(wire.refusal(protocol::Lookup{77, "", protocol::ArenaRange{0, 4}, {}, false, 0}) ==
        ErrorCode::kInvalidArgument);  // the session has no arena
}

TEST_CASE("a reader gets no memory and no blocks") {
  Node node;
  Client client = node.connect();
  REQUIRE(client.open_pool(small_pool("p", Execution::kInProcess)).ok());
  Wire wire(node);
  auto hello = wire.hello();
  hello.role = "read";
  REQUIRE(wire.refusal(hello) == ErrorCode::kOk);
  CHECK(wire.refusal(protocol::OpenSegments{1, 0, 0, 1}) == ErrorCode::kPermissionDenied);
  CHECK(wire.refusal(protocol::Allocate{1, 0, 1}) == ErrorCode::kPermissionDenied);
  CHECK(wire.refusal(protocol::DestroyPool{1}) == ErrorCode::kPermissionDenied);
}

TEST_CASE("garbage, fds and oversize are answered, and the connection goes on") {
  Node node;
  Wire wire(node);
  REQUIRE(wire.refusal(wire.hello()) == ErrorCode::kOk);
  auto engine = random_engine(1);
  for (int i = 0; i < 300; ++i) {
    std::vector<std::byte> bytes(1 + engine() % 600);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
    const protocol::Reply reply = wire.exchange(bytes);
    CHECK(std::holds_alternative<Status>(reply.body));
  }
  const protocol::Bytes status = protocol::encode(Request{5, 0, protocol::GetStatus{}});
  for (size_t size = 8; size < status.size(); size += 8)
    wire.exchange(std::span(status).first(size));
  const int fds[2] = {0, 1};
  const protocol::Reply with_fds = wire.exchange(status, fds);
  CHECK(std::get<Status>(with_fds.body).message().find("2 fds") != std::string::npos);
  CHECK(wire.refusal(protocol::GetStatus{}) == ErrorCode::kOk);
}

TEST_CASE("connections that come and go at any moment leave nothing") {
  Node node;
  auto engine = random_engine(2);
  for (int i = 0; i < 200; ++i) {
    Wire wire(node);
    if (engine() % 4 == 0) continue;
    auto hello = wire.hello();
    hello.arena_bytes = engine() % 2 == 0 ? 0 : protocol::kMinArenaBytes;
    const protocol::Bytes bytes = protocol::encode(Request{1, 0, hello});
    REQUIRE(protocol::send_before(wire.socket.get(), bytes, {}, deadline()).ok());
    if (engine() % 2 == 0) ::shutdown(wire.socket.get(), SHUT_WR);
  }
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 1; }));
}

TEST_CASE("after goodbye a session asks for nothing more") {
  Node node;
  Wire wire(node);
  REQUIRE(wire.refusal(wire.hello()) == ErrorCode::kOk);
  CHECK(wire.refusal(protocol::Goodbye{}) == ErrorCode::kOk);
  CHECK(wire.refusal(protocol::ListPools{}) == ErrorCode::kInvalidArgument);
}

TEST_CASE("a peer that does not read is dropped") {
  Node node;
  Wire wire(node);
  REQUIRE(wire.refusal(wire.hello()) == ErrorCode::kOk);
  const protocol::Bytes bytes = protocol::encode(Request{1, 0, protocol::GetCapabilities{}});
  bool closed = false;
  for (int i = 0; i < 100000 && !closed; ++i)
    closed = !protocol::send_before(wire.socket.get(), bytes, {}, deadline()).ok();
  CHECK(closed);
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 1; }));
}

}  // namespace
}  // namespace larder::test
