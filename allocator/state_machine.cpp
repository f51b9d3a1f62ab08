#include "allocator/state_machine.h"

#include <algorithm>

#include "larder/check.h"

namespace larder {
namespace {

std::string_view role_name(Role role) {
  switch (role) {
    case Role::kRead:
      return "read";
    case Role::kAppend:
      return "append";
    case Role::kAdmin:
      return "admin";
  }
  return "unknown";
}

}  // namespace

Effects StateMachine::apply(const Event& event, int64_t now_us) {
  now_us_ = now_us;
  std::visit(
      [this](const auto& specific) {
        if constexpr (requires { specific.request; }) {
          Answer answer = handle(specific);
          if (answer) effects_.emplace_back(Reply{specific.request, std::move(*answer)});
        } else {
          handle(specific);
        }
      },
      event);
  return std::exchange(effects_, {});
}

// -------------------------------------------------------------------------------------- sessions

void StateMachine::handle(const OpenSession& event) {
  // The ownership word has two bits for the state.
  LARDER_CHECK(value(event.session) != 0 && value(event.session) >> 62 == 0, value(event.session));
  const bool is_new =
      sessions_.emplace(event.session, Session{event.tenant, event.role, {}}).second;
  LARDER_CHECK(is_new && !fencing_.contains(event.session), value(event.session));
}

void StateMachine::handle(const CloseSession& event) {
  const auto session = sessions_.find(event.session);
  if (session == sessions_.end()) return;
  std::vector<QuarantinedBlocks> quarantined;
  for (PoolId id : session->second.pools) {
    Pool& pool = pools_.at(id);
    pool.sessions.erase(event.session);
    for (uint32_t group = 0; group < pool.block_pools.size(); ++group) {
      auto blocks = pool.block_pools[group].end_session(event.session, event.fenced, now_us_);
      if (!blocks.empty()) quarantined.push_back({id, group, std::move(blocks)});
    }
    emit_words(pool);
  }
  forget_waiting_opens(event.session);
  sessions_.erase(session);
  if (quarantined.empty()) return;
  fencing_.emplace(event.session, std::move(quarantined));
  effects_.emplace_back(FenceSession{event.session});
}

void StateMachine::handle(const SessionFenced& event) {
  const auto found = fencing_.find(event.session);
  if (found == fencing_.end()) return;
  for (const QuarantinedBlocks& quarantined : found->second) {
    // A pool with quarantined blocks cannot have been destroyed.
    Pool& pool = pools_.at(quarantined.pool);
    pool.block_pools[quarantined.group].fenced(quarantined.blocks);
    emit_words(pool);
  }
  fencing_.erase(found);
}

void StateMachine::forget_waiting_opens(SessionId session) {
  for (auto& [id, pool] : pools_)
    std::erase_if(pool.waiting, [&](const WaitingOpen& open) { return open.session == session; });
}

// ------------------------------------------------------------------ what a request may be about

Result<StateMachine::Session*> StateMachine::find_session(SessionId id, Role needed,
                                                          std::string_view action) {
  const auto found = sessions_.find(id);
  if (found == sessions_.end())
    return Status(ErrorCode::kStaleSession,
                  "session " + std::to_string(value(id)) + " is not open (any more)");
  if (found->second.role < needed)
    return Status(ErrorCode::kPermissionDenied,
                  "role " + std::string(role_name(found->second.role)) + " may not " +
                      std::string(action) + ": it takes role " + std::string(role_name(needed)));
  return &found->second;
}

Result<StateMachine::Pool*> StateMachine::find_pool(const Session& session, PoolId id) {
  // The same sentence for no pool and for another tenant's pool: nobody can guess at ids.
  const auto found = pools_.find(id);
  if (found == pools_.end() || found->second.tenant != session.tenant)
    return Status(ErrorCode::kNotFound, "pool " + std::to_string(value(id)) + " does not exist");
  return &found->second;
}

Result<StateMachine::Target> StateMachine::find_target(SessionId session_id, PoolId pool_id,
                                                       uint32_t group, Role needed,
                                                       std::string_view action) {
  const Result<Session*> session = find_session(session_id, needed, action);
  if (!session) return session.status();
  const Result<Pool*> pool = find_pool(**session, pool_id);
  if (!pool) return pool.status();
  Pool& found = **pool;
  if (!found.sessions.contains(session_id))
    return Status(ErrorCode::kNotFound, "pool " + std::to_string(value(pool_id)) + " (\"" +
                                            found.spec.name + "\") is not open in this session");
  if (group >= found.block_pools.size())
    return Status(ErrorCode::kNotFound, "group " + std::to_string(group) + " of pool \"" +
                                            found.spec.name + "\" does not exist: it has " +
                                            std::to_string(found.block_pools.size()));
  return Target{&found, &found.block_pools[group], group};
}

void StateMachine::emit_words(Pool& pool) {
  for (uint32_t group = 0; group < pool.block_pools.size(); ++group)
    for (const WordChange& change : pool.block_pools[group].take_changed_words())
      effects_.emplace_back(SetOwnerWord{pool.id, group, change.block, change.word});
}

int64_t StateMachine::Pool::physical_bytes() const {
  int64_t sum = 0;
  for (const GroupLayout& layout : layouts) sum += layout.physical_bytes();
  return sum;
}

}  // namespace larder
