#include "client/control_connection.h"

#include <algorithm>
#include <cstdlib>
#include <sys/socket.h>

#include "protocol/limits.h"

namespace larder {
namespace {

using std::chrono::steady_clock;

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

Status ControlConnection::name_peer(const Status& status) const {
  return {status.code(), "larderd at " + path_ + ": " + status.message()};
}

// The channel says UNAVAILABLE for a peer that is gone, and for nothing else.
Status ControlConnection::note_loss(const Status& status) {
  lost_ = lost_ || status.code() == ErrorCode::kUnavailable;
  return name_peer(status);
}

Result<ControlConnection> ControlConnection::open(const std::string& path,
                                                  protocol::Deadline deadline) {
  auto socket = protocol::connect_before(path, deadline);
  if (!socket) return Status(socket.status().code(), "larderd: " + socket.status().message());
  return ControlConnection(path, std::move(*socket));
}

Result<ControlConnection> ControlConnection::connect(const std::string& path,
                                                     protocol::Connect hello,
                                                     std::chrono::microseconds deadline) {
  auto connection = open(socket_path(path), steady_clock::now() + deadline);
  if (!connection) return connection;
  connection->deadline_ = deadline;
  hello.min_version = protocol::kMinVersion;
  hello.max_version = protocol::kMaxVersion;
  Result<Answer> answer = connection->call(std::move(hello));
  if (!answer) return answer.status();
  const auto* session = std::get_if<protocol::Connected>(&answer->body);
  if (session == nullptr) return unexpected_reply(answer->body.index());
  connection->session_ = *session;
  connection->fds_ = std::move(answer->fds);
  return connection;
}

Result<ControlConnection::Answer> ControlConnection::call(protocol::RequestBody body) {
  const uint64_t id = next_id_++;
  protocol::Request request{id, 0, std::move(body), id};
  return exchange(request, steady_clock::now() + deadline_);
}

Result<ControlConnection::Answer> ControlConnection::exchange(protocol::Request& request,
                                                              protocol::Deadline deadline,
                                                              std::span<const int> fds) {
  if (Status status = send(request, deadline, fds); !status.ok()) return status;
  return receive(request.id, deadline);
}

Status ControlConnection::send(protocol::Request& request, protocol::Deadline deadline,
                               std::span<const int> fds) {
  const auto left =
      std::chrono::duration_cast<std::chrono::microseconds>(deadline - steady_clock::now());
  request.deadline_us = static_cast<uint64_t>(
      std::clamp<int64_t>(left.count(), 1, static_cast<int64_t>(protocol::kMaxDeadlineUs)));
  const protocol::Bytes bytes = protocol::encode(request);
  if (bytes.size() > protocol::kMaxMessageBytes)
    return {ErrorCode::kInvalidArgument,
            "the request has " + std::to_string(bytes.size()) + " bytes, at most " +
                std::to_string(protocol::kMaxMessageBytes) + " are allowed"};
  const Status status = protocol::send_before(socket_.get(), bytes, fds, deadline);
  return status.ok() ? status : note_loss(status);
}

Result<ControlConnection::Answer> ControlConnection::receive(uint64_t id,
                                                             protocol::Deadline deadline) {
  while (true) {
    auto received = protocol::receive_before(socket_.get(), deadline);
    if (!received) return note_loss(received.status());
    auto reply = protocol::decode_reply(received->bytes);
    if (!reply) return name_peer(reply.status());
    if (reply->id != id) continue;  // of a call that was given up
    boot_id_ = reply->boot_id;
    if (const auto* refusal = std::get_if<Status>(&reply->body)) return *refusal;
    return Answer{std::move(reply->body), std::move(received->fds)};
  }
}

void ControlConnection::shut_down() const { ::shutdown(socket_.get(), SHUT_RDWR); }

}  // namespace larder
