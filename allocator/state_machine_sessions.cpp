// The state machine's handlers of sessions: how they come, come back and go, and of quotas.
#include <algorithm>
#include <utility>

#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {

void StateMachine::handle(const Configure& event) {
  ledger_.configure(event);
  max_pools_ = event.max_pools;
  if (cache_id_ == 0) cache_id_ = event.cache_id;
  memory_news_ = true;
}

void StateMachine::handle(const Recovered&) {
  for (auto& [id, session] : sessions_) session.absent = true;
  // Nobody makes what was being made. What has been made of it and is not in a record is not kept.
  for (const auto& [segment, awaited] : std::exchange(awaited_, {})) {
    ledger_.give_back(awaited.tenant, awaited.size_bytes);
    const auto pool = pools_.find(awaited.place.pool);
    if (pool != pools_.end())
      pool->second.extents[awaited.place.group].set(awaited.place.index, ExtentState::kAbsent,
                                                    SegmentId{0});
  }
  std::vector<PoolId> uncreated;
  for (const auto& [id, pool] : pools_)
    if (!pool.created) uncreated.push_back(id);
  for (const PoolId id : uncreated) {
    Pool& pool = pools_.at(id);
    // Whoever waits asks again.
    for (const WaitingOpen& open : std::exchange(pool.waiting, {}))
      --sessions_.at(open.session).unanswered;
    undo_creation(pool, {});
  }
  for (const auto& [id, copy] : copies_)
    effects_.emplace_back(RunCopy{id, copy.pool, copy.group, copy.from, copy.to});
  for (const auto& [id, closing] : closing_) effects_.emplace_back(FenceSession{id, closing.fence});
  memory_news_ = true;
}

void StateMachine::handle(const OpenSession& event) {
  // The ownership word has two bits for the state.
  const bool fresh = value(event.session) > last_session_ && value(event.session) >> 62 == 0;
  if (!fresh && choices_.replaying()) throw ReplayError("the session is not a new one");
  LARDER_CHECK(fresh, value(event.session), last_session_);
  last_session_ = value(event.session);
  Session session;
  session.tenant = event.tenant;
  session.role = event.role;
  session.attachment = event.attachment;
  sessions_.emplace(event.session, std::move(session));
}

void StateMachine::handle(const ResumeSession& event) {
  const auto session = sessions_.find(event.session);
  if (session == sessions_.end() || !session->second.absent) {
    changed_ = false;
    return;
  }
  session->second.absent = false;
  for (const auto& [segment, leaving] : leaving_)
    if (leaving.mapped_by.contains(event.session))
      effects_.emplace_back(UnmapSegment{event.session, leaving.place.pool, leaving.place.group,
                                         leaving.place.index, segment});
}

void StateMachine::handle(const CloseSession& event) {
  const auto session = sessions_.find(event.session);
  if (session == sessions_.end()) {
    changed_ = false;
    return;
  }
  const std::set<PoolId> attached = session->second.pools;
  for (const PoolId id : attached) {
    Pool& pool = pools_.at(id);
    pool.sessions.erase(event.session);
    pool.blocks.end_session(event.session, event.fence, now_us_);
    emit_words(pool);
    if (event.fence == FenceClass::kFenced) unmap_all(event.session, pool);
  }
  forget_waiting(event.session);
  Closing closing{event.fence, attached, session->second.tenant, session->second.attachment};
  sessions_.erase(session);
  if (event.fence != FenceClass::kFenced) {
    closing_.emplace(event.session, std::move(closing));
    effects_.emplace_back(FenceSession{event.session, event.fence});
  }
  settle_unprovable();
  memory_news_ = true;
}

void StateMachine::handle(const SessionFenced& event) {
  if (!closing_.contains(event.session)) {
    changed_ = false;
    return;
  }
  fenced(event.session);
  settle_unprovable();
}

void StateMachine::fenced(SessionId session) {
  const auto node = closing_.extract(session);
  for (const PoolId id : node.mapped().pools) {
    const auto pool = pools_.find(id);
    if (pool == pools_.end()) continue;
    pool->second.blocks.fenced(session);
    emit_words(pool->second);
    unmap_all(session, pool->second);
  }
  // Of pools that were destroyed meanwhile, too.
  std::vector<SegmentId> mapped;
  for (const auto& [segment, leaving] : leaving_)
    if (leaving.mapped_by.contains(session)) mapped.push_back(segment);
  for (const SegmentId segment : mapped) unmapped(segment, session);
  memory_news_ = true;
}

// Nothing tells when the process of such a session is gone. Its blocks are taken back when nobody
// who could be harmed is left: no session is attached, and of those that were none can write.
void StateMachine::settle_unprovable() {
  const auto in_the_way = [this](PoolId id) {
    const auto pool = pools_.find(id);
    if (pool == pools_.end()) return false;
    if (!pool->second.sessions.empty()) return true;
    return std::any_of(closing_.begin(), closing_.end(), [&](const auto& entry) {
      return entry.second.fence != FenceClass::kUnprovable && entry.second.pools.contains(id);
    });
  };
  std::vector<SessionId> settled;
  for (const auto& [session, closing] : closing_)
    if (closing.fence == FenceClass::kUnprovable &&
        std::none_of(closing.pools.begin(), closing.pools.end(), in_the_way))
      settled.push_back(session);
  for (const SessionId session : settled) fenced(session);
}

void StateMachine::forget_waiting(SessionId session) {
  for (auto& [id, pool] : pools_)
    std::erase_if(pool.waiting, [&](const WaitingOpen& open) { return open.session == session; });
  std::erase_if(waiting_, [&](const Event& event) {
    return std::visit(
        [&](const auto& specific) {
          if constexpr (requires { specific.request; }) return specific.session == session;
          return false;
        },
        event);
  });
}

void StateMachine::handle(const CancelRequest& event) {
  size_t cancelled = std::erase_if(waiting_, [&](const Event& waiting) {
    return std::visit(
        [&](const auto& specific) {
          if constexpr (requires { specific.request; })
            return specific.session == event.session && specific.request == event.number;
          return false;
        },
        waiting);
  });
  for (auto& [id, pool] : pools_)
    cancelled += std::erase_if(pool.waiting, [&](const WaitingOpen& open) {
      return open.session == event.session && open.request == event.number;
    });
  changed_ = cancelled > 0;
  if (changed_) sessions_.at(event.session).unanswered -= static_cast<int64_t>(cancelled);
}

StateMachine::Answer StateMachine::handle(const SetQuota& event) {
  const Result<Session*> session = find_session(event.session, Role::kAdmin, "set quotas");
  if (!session) return session.status();
  if (Status status =
          ledger_.check_quota(event.tenant, event.guaranteed_bytes, event.maximum_bytes);
      !status.ok())
    return status;
  ledger_.set_quota(event.tenant, event.guaranteed_bytes, event.maximum_bytes);
  memory_news_ = true;
  return Done{};
}

}  // namespace larder
