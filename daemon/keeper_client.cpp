#include "daemon/keeper_client.h"

#include <cstring>
#include <poll.h>

#include "daemon/peer.h"
#include "larder/system_error.h"
#include "protocol/channel.h"

namespace larder::daemon {
namespace {

using protocol::KeeperOp;
using protocol::kMaxKeeperEntriesPerList;

std::string key_text(uint64_t key) {
  return "kind " + std::to_string(static_cast<int>(protocol::keeper_kind(key))) + ", id " +
         std::to_string(protocol::keeper_id(key));
}

}  // namespace

KeeperClient::KeeperClient(OwnFd socket, int64_t pid) : socket_(std::move(socket)), pid_(pid) {}

Result<KeeperClient> KeeperClient::connect(const std::string& path) {
  auto socket = protocol::connect_before(path, std::chrono::steady_clock::now() + kDeadline);
  if (!socket) return Status(socket.status().code(), "larder-keeper: " + socket.status().message());
  const int64_t pid = peer_identity(socket->get()).pid;
  KeeperClient client(std::move(*socket), pid);
  auto hello = client.call(KeeperOp::kHello, 0);
  if (!hello) return hello.status();
  const auto code = static_cast<ErrorCode>(hello->reply.code);
  const std::string keeper = "the keeper at " + path + " (pid " + std::to_string(pid) + ")";
  if (code == ErrorCode::kBusy)
    return Status(code, keeper + " belongs to another larderd, whose process lives");
  if (code != ErrorCode::kOk) return Status(code, keeper + " refused this larderd");
  client.epoch_ = hello->reply.epoch;
  return client;
}

bool KeeperClient::connected() const {
  if (!socket_.valid()) return false;
  pollfd entry{socket_.get(), POLLRDHUP, 0};
  return ::poll(&entry, 1, 0) == 0;
}

// After a lost answer the next one could be taken for it: this connection is over.
Status KeeperClient::lost(const std::string& why) {
  socket_.reset();
  return {ErrorCode::kUnavailable,
          "the keeper (pid " + std::to_string(pid_) + ") does not answer: " + why};
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
  if (!received) return lost(received.status().message());
  Answer answer;
  if (received->bytes.size() != sizeof answer.reply)
    return lost("its answer has " + std::to_string(received->bytes.size()) + " bytes, expected " +
                std::to_string(sizeof answer.reply));
  std::memcpy(&answer.reply, received->bytes.data(), sizeof answer.reply);
  if (answer.reply.magic != protocol::kKeeperMagic ||
      answer.reply.num_listed > kMaxKeeperEntriesPerList ||
      answer.reply.num_listed != received->fds.size())
    return lost("its answer has magic " + std::to_string(answer.reply.magic) + ", lists " +
                std::to_string(answer.reply.num_listed) + " entries and carries " +
                std::to_string(received->fds.size()) + " fds");
  answer.fds = std::move(received->fds);
  num_entries_ = answer.reply.num_entries;
  return answer;
}

Status KeeperClient::put(uint64_t key, int fd, const std::array<uint8_t, 64>& metadata) {
  if (fd < 0) return {ErrorCode::kInvalidArgument, "fd is " + std::to_string(fd)};
  auto answer = call(KeeperOp::kPut, key, metadata, fd);
  if (!answer) return answer.status();
  if (answer->reply.code == 0) return {};
  return {static_cast<ErrorCode>(answer->reply.code),
          "the keeper refused a deposit (" + key_text(key) + "); it holds " +
              std::to_string(num_entries_) + " entries, and takes " +
              std::to_string(protocol::kMaxKeeperEntries) +
              " where its limit of descriptors allows it"};
}

Status KeeperClient::drop(uint64_t key) {
  auto answer = call(KeeperOp::kDrop, key);
  if (!answer) return answer.status();
  const auto code = static_cast<ErrorCode>(answer->reply.code);
  if (code == ErrorCode::kOk || code == ErrorCode::kNotFound) return {};
  return {code, "the keeper refused to drop an entry (" + key_text(key) + ")"};
}

Status KeeperClient::clear() {
  while (true) {
    auto entries = list_some(0);
    if (!entries) return entries.status();
    if (entries->empty()) return {};
    for (const Entry& entry : *entries)
      if (Status status = drop(entry.key); !status.ok()) return status;
  }
}

Result<std::vector<KeeperClient::Entry>> KeeperClient::list_some(uint64_t from) {
  auto answer = call(KeeperOp::kList, from);
  if (!answer) return answer.status();
  const auto code = static_cast<ErrorCode>(answer->reply.code);
  if (code != ErrorCode::kOk) return Status(code, "the keeper refused to list its entries");
  std::vector<Entry> entries;
  for (size_t i = 0; i < answer->fds.size(); ++i) {
    const protocol::KeeperEntry& listed = answer->reply.listed[i];
    if (i == 0 ? listed.key < from : listed.key <= answer->reply.listed[i - 1].key)
      return lost("it lists an entry out of order (" + key_text(listed.key) + ")");
    entries.push_back({listed.key, listed.metadata, std::move(answer->fds[i])});
  }
  return entries;
}

Result<std::vector<KeeperClient::Entry>> KeeperClient::list() {
  std::vector<Entry> entries;
  for (uint64_t from = 0;;) {
    auto some = list_some(from);
    if (!some) return some.status();
    for (Entry& entry : *some) entries.push_back(std::move(entry));
    // Keys rise, so this ends.
    if (some->size() < kMaxKeeperEntriesPerList || entries.back().key == UINT64_MAX) return entries;
    from = entries.back().key + 1;
  }
}

}  // namespace larder::daemon
