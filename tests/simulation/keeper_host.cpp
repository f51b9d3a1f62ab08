#include "tests/simulation/keeper_host.h"

#include "tests/simulation/violation.h"

namespace larder::sim {

using protocol::KeeperKind;
using protocol::KeeperOp;
using protocol::KeeperRequest;

std::optional<KeeperLink> KeeperHost::connect(std::shared_ptr<SimProcess> process) {
  if (!keeper_) return std::nullopt;
  return KeeperLink{++last_connection_, incarnation_, 0, std::move(process)};
}

daemon::Keeper::Answer KeeperHost::handle(const KeeperLink& link, const KeeperRequest& request,
                                          OwnFd fd) {
  std::vector<OwnFd> fds;
  if (fd.valid()) fds.push_back(std::move(fd));
  return keeper_->handle(
      {link.connection, static_cast<int64_t>(link.process->pid()), link.process->pidfd()}, request,
      std::move(fds));
}

uint64_t KeeperHost::memory_named(uint64_t key, int fd) {
  const KeeperKind kind = protocol::keeper_kind(key);
  const bool is_memory = kind == KeeperKind::kJournal || kind == KeeperKind::kSegment;
  return is_memory ? memories_.of(fd).number : 0;
}

// The keeper has accepted this.
void KeeperHost::note(const KeeperRequest& request, uint64_t memory) {
  if (request.op == KeeperOp::kDrop) {
    held_.erase(request.key);
    return;
  }
  const auto before = held_.find(request.key);
  // Nobody else has an old journal but the larderd that has just replaced it.
  if (before != held_.end() && protocol::keeper_kind(request.key) == KeeperKind::kJournal &&
      before->second.memory != memory)
    memories_.forget(before->second.memory);
  held_[request.key] = {memory, request.metadata};
}

Status KeeperHost::hello(KeeperLink& link) {
  if (!is_up(link)) return {ErrorCode::kUnavailable, "the keeper is gone"};
  const auto answer = handle(link, {}, OwnFd());
  const bool owned = owner_process_ && !owner_process_->exited() && owner_process_ != link.process;
  SIM_CHECK(answer.reply.code == static_cast<uint32_t>(owned ? ErrorCode::kBusy : ErrorCode::kOk),
            answer.reply.code, owned);
  if (owned) return {ErrorCode::kBusy, "another larderd owns this keeper"};
  SIM_CHECK(answer.reply.epoch > owner_epoch_, answer.reply.epoch, owner_epoch_);
  SIM_CHECK(answer.reply.num_entries == held_.size(), answer.reply.num_entries, held_.size());
  owner_ = link.connection;
  owner_process_ = link.process;
  owner_epoch_ = link.epoch = answer.reply.epoch;
  return {};
}

Status KeeperHost::put(const KeeperLink& link, uint64_t key, int fd, const Metadata& metadata) {
  if (!is_up(link)) return {ErrorCode::kUnavailable, "the keeper is gone"};
  KeeperRequest request{protocol::kKeeperMagic, KeeperOp::kPut, link.epoch, key, metadata};
  const auto answer = handle(link, request, duplicate(fd));
  SIM_CHECK(answer.reply.code == 0, answer.reply.code, key);
  note(request, memory_named(key, fd));
  return {};
}

Status KeeperHost::drop(const KeeperLink& link, uint64_t key) {
  if (!is_up(link)) return {ErrorCode::kUnavailable, "the keeper is gone"};
  KeeperRequest request{protocol::kKeeperMagic, KeeperOp::kDrop, link.epoch, key, {}};
  const auto answer = handle(link, request, OwnFd());
  const ErrorCode expected = held_.contains(key) ? ErrorCode::kOk : ErrorCode::kNotFound;
  SIM_CHECK(answer.reply.code == static_cast<uint32_t>(expected), answer.reply.code, key);
  note(request, 0);
  return {};
}

Result<std::vector<KeeperHost::Entry>> KeeperHost::list(const KeeperLink& link) {
  std::vector<Entry> entries;
  uint64_t from = 0;
  while (true) {
    if (!is_up(link)) return Status(ErrorCode::kUnavailable, "the keeper is gone");
    const auto answer =
        handle(link, {protocol::kKeeperMagic, KeeperOp::kList, link.epoch, from, {}}, OwnFd());
    SIM_CHECK(answer.reply.code == 0, answer.reply.code);
    for (uint32_t i = 0; i < answer.reply.num_listed; ++i)
      entries.push_back(
          {answer.reply.listed[i].key, answer.reply.listed[i].metadata, duplicate(answer.fds[i])});
    if (answer.reply.num_listed < protocol::kMaxKeeperEntriesPerList) break;
    from = entries.back().key + 1;
  }
  SIM_CHECK(entries.size() == held_.size(), entries.size(), held_.size());
  auto expected = held_.begin();
  for (const Entry& entry : entries) {
    SIM_CHECK(entry.key == expected->first && entry.metadata == expected->second.metadata,
              entry.key, expected->first);
    SIM_CHECK(memory_named(entry.key, entry.fd.get()) == expected->second.memory, entry.key);
    ++expected;
  }
  return entries;
}

void KeeperHost::send_and_die(const KeeperLink& link, KeeperOp op, uint64_t key, int fd,
                              const Metadata& metadata) {
  if (!is_up(link)) return;
  in_flight_.push_back({link,
                        {protocol::kKeeperMagic, op, link.epoch, key, metadata},
                        fd >= 0 ? duplicate(fd) : OwnFd()});
}

void KeeperHost::read_message() {
  Message message = std::move(in_flight_.front());
  in_flight_.erase(in_flight_.begin());
  const bool by_owner = message.link.connection == owner_;
  const bool there = held_.contains(message.request.key);
  const uint64_t memory =
      message.fd.valid() ? memory_named(message.request.key, message.fd.get()) : 0;
  const auto answer = handle(message.link, message.request, std::move(message.fd));
  if (!by_owner) {
    SIM_CHECK(answer.reply.code == static_cast<uint32_t>(ErrorCode::kPermissionDenied),
              answer.reply.code, message.request.key);
    coverage_.add(Fault::kLateDeposit);
    return;
  }
  const bool missing = message.request.op == KeeperOp::kDrop && !there;
  SIM_CHECK(
      answer.reply.code == static_cast<uint32_t>(missing ? ErrorCode::kNotFound : ErrorCode::kOk),
      answer.reply.code);
  note(message.request, memory);
}

void KeeperHost::kill() {
  keeper_.reset();
  in_flight_.clear();
  held_.clear();
  owner_ = -1;
  owner_process_.reset();
  owner_epoch_ = 0;
}

void KeeperHost::start() {
  ++incarnation_;
  keeper_ = std::make_unique<daemon::Keeper>();
}

}  // namespace larder::sim
