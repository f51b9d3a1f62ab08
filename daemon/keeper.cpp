#include "daemon/keeper.h"

#include <fcntl.h>
#include <poll.h>

namespace larder::daemon {

using protocol::KeeperOp;
using protocol::KeeperRequest;

bool Keeper::owner_lives() const {
  if (!owner_pidfd_.valid()) return owner_ >= 0;
  pollfd entry{owner_pidfd_.get(), POLLIN, 0};
  // A pidfd is readable once its process has exited; a failure to look proves nothing.
  return ::poll(&entry, 1, 0) != 1 || (entry.revents & POLLIN) == 0;
}

Status Keeper::check(const Asker& asker, const KeeperRequest& request, size_t num_fds) const {
  if (request.magic != protocol::kKeeperMagic) return {ErrorCode::kInvalidArgument, "wrong magic"};
  switch (request.op) {
    case KeeperOp::kHello:
    case KeeperOp::kPut:
    case KeeperOp::kDrop:
    case KeeperOp::kList:
      break;
    default:
      return {ErrorCode::kInvalidArgument, "unknown op"};
  }
  if (request.op != KeeperOp::kHello && (asker.connection != owner_ || request.epoch != epoch_))
    return {ErrorCode::kPermissionDenied, "not the owner of this epoch"};
  if (num_fds != (request.op == KeeperOp::kPut ? 1 : 0))
    return {ErrorCode::kInvalidArgument, "put carries one fd, and nothing else does"};
  return {};
}

Status Keeper::hello(const Asker& asker) {
  // The owner itself may come back on a new connection; while it lives, its pid is nobody else's.
  // Processes whose pids cannot be seen are not told apart by them.
  const bool is_same = asker.pid > 0 && asker.pid == owner_pid_;
  if (owner_lives() && !is_same && asker.connection != owner_)
    return {ErrorCode::kBusy, "another larderd owns this keeper"};
  OwnFd pidfd(asker.pidfd >= 0 ? ::fcntl(asker.pidfd, F_DUPFD_CLOEXEC, 0) : -1);
  if (asker.pidfd >= 0 && !pidfd.valid())
    return {ErrorCode::kResourceExhausted, "no free descriptor"};
  owner_ = asker.connection;
  owner_pid_ = asker.pid;
  owner_pidfd_ = std::move(pidfd);
  ++epoch_;
  return {};
}

Status Keeper::put(const KeeperRequest& request, OwnFd fd, Answer& answer) {
  if (entries_.size() >= max_entries_ && !entries_.contains(request.key))
    return {ErrorCode::kResourceExhausted, "the keeper is full"};
  Entry& entry = entries_[request.key];
  answer.dropped = std::exchange(entry.fd, std::move(fd));
  entry.metadata = request.metadata;
  return {};
}

Status Keeper::drop(uint64_t key, Answer& answer) {
  auto node = entries_.extract(key);
  if (node.empty()) return {ErrorCode::kNotFound, "no such key"};
  answer.dropped = std::move(node.mapped().fd);
  return {};
}

void Keeper::list(uint64_t from, Answer& answer) const {
  for (auto entry = entries_.lower_bound(from);
       entry != entries_.end() && answer.fds.size() < protocol::kMaxKeeperEntriesPerList; ++entry) {
    answer.reply.listed[answer.fds.size()] = {entry->first, entry->second.metadata};
    answer.fds.push_back(entry->second.fd.get());
  }
  answer.reply.num_listed = static_cast<uint32_t>(answer.fds.size());
}

Keeper::Answer Keeper::handle(const Asker& asker, const KeeperRequest& request,
                              std::vector<OwnFd> fds) {
  Answer answer;
  Status status = check(asker, request, fds.size());
  if (status.ok() && request.op == KeeperOp::kHello) status = hello(asker);
  if (status.ok() && request.op == KeeperOp::kPut) status = put(request, std::move(fds[0]), answer);
  if (status.ok() && request.op == KeeperOp::kDrop) status = drop(request.key, answer);
  if (status.ok() && request.op == KeeperOp::kList) list(request.key, answer);
  answer.reply.code = static_cast<uint32_t>(status.code());
  answer.reply.epoch = is_owner(asker.connection) ? epoch_ : 0;
  answer.reply.num_entries = entries_.size();
  return answer;
}

void Keeper::connection_closed(int connection) {
  if (owner_ == connection) owner_ = -1;
}

}  // namespace larder::daemon
