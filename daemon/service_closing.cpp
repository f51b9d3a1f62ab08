// What of a session outlives it: fencing, until nothing of it can write any more.
#include <algorithm>

#include <spdlog/spdlog.h>

#include "daemon/service.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

const char* name(Service::End how) {
  switch (how) {
    case Service::End::kPeerClosed:
      return "closed";
    case Service::End::kProcessGone:
      return "process_gone";
    case Service::End::kEnded:
      return "ended";
    case Service::End::kNotBack:
      return "not_back";
  }
  return "unknown";
}

}  // namespace

FenceClass Service::fence_class(const Session& session, End how) const {
  const bool may_be_queued = session.arena.has_value() && executors_.may_run();
  if (session.goodbye || !session.mapped)
    return may_be_queued ? FenceClass::kExecutorOnly : FenceClass::kFenced;
  // Without a lifeline only the end of the socket, which the peer must have closed, tells that no
  // forked child lives on.
  const bool end_is_seen = session.lifeline.valid() || how == End::kPeerClosed;
  return session.pidfd.valid() && end_is_seen ? FenceClass::kPidfd : FenceClass::kUnprovable;
}

void Service::end_session(SessionId id, End how) {
  auto node = sessions_.extract(id);
  if (node.empty()) return;
  Session& session = *node.mapped();
  const FenceClass fence = fence_class(session, how);
  spdlog::info("event=session_closed session={} client=\"{}\" goodbye={} how={} pid={} fence={}",
               value(id), session.record.client_name, session.goodbye, name(how),
               session.record.pid, fence_class_name(fence));
  std::erase_if(pending_, [id](const auto& entry) { return entry.first.first == id; });
  session.process.reset();
  if (session.notices) session.notices->close();
  // The executor lets go of the session's ring: after that, nothing that the session has submitted
  // can run into a block that somebody else has got.
  executor_of(session).send(protocol::DropSession{value(id)});
  if (session.connection != nullptr) session.connection->close();
  connections_.erase(session.connection_number);
  if (fence == FenceClass::kFenced) {
    apply(CloseSession{id, fence});
    forget_deposits(id);
  } else {
    ClosingSession& closing = closing_[id];
    closing.id = id;
    closing.fence = fence;
    closing.record = std::move(session.record);
    closing.tenant = std::move(session.tenant);
    closing.since_us = now_us();
    closing.let_go = how == End::kPeerClosed;
    apply(CloseSession{id, fence});
    watch_closing(closing, std::move(session.pidfd), std::move(session.lifeline));
  }
  if (draining_ && sessions_.empty() && drained_) drained_();
}

void Service::watch_closing(ClosingSession& closing, OwnFd process, OwnFd lifeline) {
  const SessionId id = closing.id;
  const auto after = [this, id](bool ClosingSession::*what) {
    return [this, id, what] {
      const auto found = closing_.find(id);
      if (found == closing_.end()) return;
      found->second.*what = true;
      settle(id);
    };
  };
  if (closing.fence == FenceClass::kUnprovable)
    spdlog::warn("event=writer_unprovable session={} pid={}", value(id), closing.record.pid);
  if (lifeline.valid()) {
    closing.let_go = false;
    closing.lifeline.emplace(loop_, std::move(lifeline), after(&ClosingSession::let_go));
  }
  if (process.valid())
    closing.process.emplace(loop_, std::move(process), after(&ClosingSession::exited));
  executors_.when_idle_everywhere(value(id), after(&ClosingSession::drained));
}

// An open block that an engine itself could write is free again when its process is gone and nobody
// else has what it had; one that only the executor writes, when that has done what was queued.
void Service::settle(SessionId id) {
  const auto found = closing_.find(id);
  if (found == closing_.end()) return;
  const ClosingSession& closing = found->second;
  if (!closing.drained) return;
  if (closing.fence == FenceClass::kUnprovable) return;  // the machine knows when
  if (closing.fence == FenceClass::kPidfd && (!closing.exited || !closing.let_go)) return;
  const int64_t took_us = now_us() - closing.since_us;
  spdlog::info("event=session_fenced session={} fence={} took_us={}", value(id),
               fence_class_name(closing.fence), took_us);
  metrics_.observe_fence(closing.fence, took_us);
  closing_.erase(found);
  apply(SessionFenced{id});
  forget_deposits(id);
}

// The machine has taken back the blocks of sessions whose end nothing proves.
void Service::forget_settled_sessions() {
  std::vector<SessionId> settled;
  for (const auto& [id, closing] : closing_)
    if (closing.fence == FenceClass::kUnprovable && !machine().is_unfenced(id))
      settled.push_back(id);
  for (const SessionId id : settled) {
    spdlog::info("event=session_settled session={}", value(id));
    closing_.erase(id);
    forget_deposits(id);
  }
}

void Service::forget_deposits(SessionId id) {
  using protocol::KeeperKind;
  for (const KeeperKind kind :
       {KeeperKind::kArena, KeeperKind::kWakeUp, KeeperKind::kProcess, KeeperKind::kLifeline})
    if (Status status = keeper_.drop(protocol::keeper_key(kind, value(id)));
        !status.ok() && status.code() != ErrorCode::kUnavailable)
      spdlog::error("event=keeper_drop_failed error=\"{}\"", status.to_string());
}

}  // namespace larder::daemon
