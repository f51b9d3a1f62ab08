#include "client/control_connection.h"

#include <cstdlib>

#include "protocol/channel.h"
#include "protocol/limits.h"

namespace larder {
namespace {

constexpr const char* kDefaultSocketPath = "/run/larder/larderd.sock";

std::string socket_path(const std::string& path) {
  if (!path.empty()) return path;
  const char* from_environment = std::getenv("LARDER_SOCKET");
  return from_environment != nullptr ? from_environment : kDefaultSocketPath;
}

}  // namespace

Status ControlConnection::unexpected_reply(size_t kind) {
  return {ErrorCode::kInternal, "the daemon answered with a reply of kind " + std::to_string(kind)};
}

// Says who did not answer.
Status ControlConnection::name_peer(const Status& status) const {
  return {status.code(), "larderd at " + path_ + ": " + status.message()};
}

Result<ControlConnection> ControlConnection::connect(const std::string& path,
                                                     protocol::Connect hello,
                                                     std::chrono::microseconds deadline) {
  const std::string resolved = socket_path(path);
  auto socket = protocol::connect_before(resolved, std::chrono::steady_clock::now() + deadline);
  if (!socket) return Status(socket.status().code(), "larderd: " + socket.status().message());
  ControlConnection connection(resolved, std::move(*socket), deadline);
  hello.min_version = protocol::kMinVersion;
  hello.max_version = protocol::kMaxVersion;
  Result<Answer> answer = connection.call(std::move(hello));
  if (!answer) return answer.status();
  const auto* session = std::get_if<protocol::Connected>(&answer->body);
  if (session == nullptr) return unexpected_reply(answer->body.index());
  connection.session_ = *session;
  connection.fds_ = std::move(answer->fds);
  return connection;
}

Result<ControlConnection::Answer> ControlConnection::call(protocol::RequestBody body) {
  const auto deadline = std::chrono::steady_clock::now() + deadline_;
  const uint64_t id = next_id_++;
  const protocol::Bytes bytes = protocol::encode(
      protocol::Request{id, static_cast<uint64_t>(deadline_.count()), std::move(body)});
  if (bytes.size() > protocol::kMaxMessageBytes)
    return Status(ErrorCode::kInvalidArgument,
                  "the request has " + std::to_string(bytes.size()) + " bytes, at most " +
                      std::to_string(protocol::kMaxMessageBytes) + " are allowed");
  if (Status status = protocol::send_before(socket_.get(), bytes, {}, deadline); !status.ok())
    return name_peer(status);
  while (true) {
    auto received = protocol::receive_before(socket_.get(), deadline);
    if (!received) return name_peer(received.status());
    auto reply = protocol::decode_reply(received->bytes);
    if (!reply) return name_peer(reply.status());
    if (reply->id != id) continue;  // of a call that was given up
    boot_id_ = reply->boot_id;
    if (const auto* refusal = std::get_if<Status>(&reply->body)) return *refusal;
    return Answer{std::move(reply->body), std::move(received->fds)};
  }
}

}  // namespace larder
