#include "daemon/keeper_client.h"

#include <cstring>
#include <poll.h>

#include "daemon/peer.h"
#include "larder/system_error.h"
#include "protocol/channel.h"

namespace larder::daemon {

using protocol::KeeperOp;

KeeperClient::KeeperClient(OwnFd socket, int64_t pid) : socket_(std::move(socket)), pid_(pid) {}

Result<KeeperClient> KeeperClient::connect(const std::string& path) {
  auto socket = protocol::connect_before(path, std::chrono::steady_clock::now() + kDeadline);
  if (!socket) return Status(socket.status().code(), "larder-keeper: " + socket.status().message());
  const int64_t pid = peer_identity(socket->get()).pid;
  KeeperClient client(std::move(*socket), pid);
  auto hello = client.call(KeeperOp::kHello, 0, {}, -1);
  if (!hello) return hello.status();
  if (hello->reply.code != 0)
    return Status(static_cast<ErrorCode>(hello->reply.code),
                  "the keeper at " + path + " (pid " + std::to_string(pid) +
                      ") belongs to another larderd, whose process lives");
  client.epoch_ = hello->reply.epoch;
  return client;
}

bool KeeperClient::connected() const {
  if (!socket_.valid()) return false;
  pollfd entry{socket_.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) == 0;
}

Result<KeeperClient::Answer> KeeperClient::call(KeeperOp op, uint64_t key,
                                                const std::array<uint8_t, 64>& metadata, int fd) {
  if (!connected()) return Status(ErrorCode::kUnavailable, "the keeper is gone");
  const protocol::KeeperRequest request{protocol::kKeeperMagic, op, epoch_, key, metadata};
  const auto deadline = std::chrono::steady_clock::now() + kDeadline;
  const std::span<const int> fds = fd >= 0 ? std::span(&fd, 1) : std::span<const int>();
  Result<protocol::Received> received = Status(ErrorCode::kUnavailable, "not asked");
  try {
    const Status sent =
        protocol::send_before(socket_.get(), std::as_bytes(std::span(&request, 1)), fds, deadline);
    received = sent.ok() ? protocol::receive_before(socket_.get(), deadline) : sent;
  } catch (const SystemError& error) {
    received = Status(ErrorCode::kUnavailable, error.what());
  }
  Answer answer;
  if (!received || received->bytes.size() != sizeof answer.reply) {
    // After a lost answer the next one could be taken for it: this connection is done.
    socket_.reset();
    return Status(ErrorCode::kUnavailable,
                  "the keeper (pid " + std::to_string(pid_) + ") does not answer");
  }
  std::memcpy(&answer.reply, received->bytes.data(), sizeof answer.reply);
  if (!received->fds.empty()) answer.fd = std::move(received->fds[0]);
  num_entries_ = answer.reply.num_entries;
  return answer;
}

Status KeeperClient::put(uint64_t key, int fd, const std::array<uint8_t, 64>& metadata) {
  auto answer = call(KeeperOp::kPut, key, metadata, fd);
  if (!answer) return answer.status();
  if (answer->reply.code == 0) return {};
  return {static_cast<ErrorCode>(answer->reply.code),
          "the keeper refused a deposit; it holds " + std::to_string(num_entries_) + " of " +
              std::to_string(protocol::kMaxKeeperEntries) + " entries"};
}

Status KeeperClient::drop(uint64_t key) {
  auto answer = call(KeeperOp::kDrop, key, {}, -1);
  if (!answer) return answer.status();
  const auto code = static_cast<ErrorCode>(answer->reply.code);
  if (code == ErrorCode::kOk || code == ErrorCode::kNotFound) return {};
  return {code, "the keeper refused to drop an entry"};
}

Status KeeperClient::clear() {
  while (true) {
    auto entry = next(0);
    if (!entry) return entry.status();
    if (!entry->has_value()) return {};
    if (Status status = drop((*entry)->key); !status.ok()) return status;
  }
}

Result<std::optional<KeeperClient::Entry>> KeeperClient::next(uint64_t from) {
  auto answer = call(KeeperOp::kList, from, {}, -1);
  if (!answer) return answer.status();
  const auto code = static_cast<ErrorCode>(answer->reply.code);
  if (code == ErrorCode::kNotFound) return std::optional<Entry>();
  if (code != ErrorCode::kOk) return Status(code, "the keeper refused to list its entries");
  return std::optional<Entry>(
      Entry{answer->reply.key, answer->reply.metadata, std::move(answer->fd)});
}

}  // namespace larder::daemon
