#include "allocator/state_machine.h"

#include <algorithm>

#include "allocator/event_codec.h"
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

// The event is a request of this session under this number.
bool is_request(const Event& event, SessionId session, uint64_t request) {
  return std::visit(
      [&](const auto& specific) {
        if constexpr (requires { specific.request; }) {
          return specific.session == session && specific.request == request;
        } else {
          return false;
        }
      },
      event);
}

}  // namespace

Effects StateMachine::apply(Event event, int64_t now_us) {
  now_us_ = now_us;
  changed_ = true;
  choices_.start_live();
  dispatch(event);
  record_.clear();
  if (changed_) put_record(record_, event, now_us, choices_.made());
  return std::exchange(effects_, {});
}

Status StateMachine::replay(std::span<const std::byte> bytes) {
  ByteReader in(bytes);
  Record record = get_record(in);
  if (!in.at_end())
    return {ErrorCode::kInternal,
            "a record of " + std::to_string(bytes.size()) + " bytes is no event of this build"};
  const size_t kind = record.event.index();
  now_us_ = record.now_us;
  changed_ = true;
  try {
    choices_.start_replay(std::move(record.choices));
    dispatch(record.event);
    choices_.end_replay();
  } catch (const ReplayError& error) {
    return {ErrorCode::kInternal, "an event of kind " + std::to_string(kind) +
                                      " does not fit to the state: " + error.what()};
  }
  effects_.clear();
  if (changed_) return {};
  return {ErrorCode::kInternal,
          "an event of kind " + std::to_string(kind) + " changes nothing, but it once did"};
}

void StateMachine::dispatch(Event& event) {
  std::visit(
      [this](auto& specific) {
        if constexpr (requires { specific.request; }) {
          if (!begin_request(specific.session, specific.request)) {
            changed_ = false;
            return;
          }
          Answer answer = handle(specific);
          if (!answer) return;
          if (std::holds_alternative<Status>(*answer)) changed_ = false;
          reply(specific.session, specific.request, std::move(*answer), specific.answered_below);
        } else {
          handle(specific);
        }
      },
      event);
  if (changed_ && memory_news_) serve_waiting();
  failed_growth_.reset();
}

// --------------------------------------------------------------------------- requests and answers

bool StateMachine::begin_request(SessionId id, uint64_t request) {
  const auto session = sessions_.find(id);
  if (session == sessions_.end()) return true;
  if (const ReplyBody* body = session->second.answers.find(request)) {
    effects_.emplace_back(Reply{request, *body, id});
    return false;
  }
  if (session->second.unanswered > 0 && is_waiting(id, request)) return false;
  ++session->second.unanswered;
  return true;
}

bool StateMachine::is_waiting(SessionId session, uint64_t request) const {
  const auto same = [&](const auto& entry) {
    return entry.session == session && entry.request == request;
  };
  for (const Event& event : waiting_)
    if (is_request(event, session, request)) return true;
  for (const auto& [id, copy] : copies_)
    if (same(copy)) return true;
  for (const auto& [id, pool] : pools_)
    if (std::any_of(pool.waiting.begin(), pool.waiting.end(), same)) return true;
  return false;
}

void StateMachine::reply(SessionId id, uint64_t request, ReplyBody body, uint64_t answered_below) {
  if (const auto session = sessions_.find(id); session != sessions_.end()) {
    --session->second.unanswered;
    if (changed_ && !std::holds_alternative<Status>(body)) {
      session->second.answers.forget_below(answered_below);
      // What was mapped then may be gone: who asks again is answered anew.
      if (!std::holds_alternative<ExtentsMapped>(body)) session->second.answers.keep(request, body);
    }
  }
  effects_.emplace_back(Reply{request, std::move(body), id});
}

void StateMachine::serve_waiting() {
  // What is served can bring memory back itself; each round that does evicts something.
  while (std::exchange(memory_news_, false) && !waiting_.empty()) {
    to_serve_.assign(std::make_move_iterator(waiting_.begin()),
                     std::make_move_iterator(waiting_.end()));
    waiting_.clear();
    while (!to_serve_.empty()) {
      Event event = std::move(to_serve_.front());
      to_serve_.pop_front();
      std::visit(
          [this](auto& specific) {
            if constexpr (requires { specific.request; }) {
              if (!sessions_.contains(specific.session)) return;
              Answer answer = handle(specific);
              if (answer)
                reply(specific.session, specific.request, std::move(*answer),
                      specific.answered_below);
            }
          },
          event);
    }
  }
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

Status StateMachine::no_such_group(const Pool& pool, uint32_t group) {
  return {ErrorCode::kNotFound, "group " + std::to_string(group) + " of pool \"" + pool.spec.name +
                                    "\" does not exist: it has " +
                                    std::to_string(pool.blocks.num_groups())};
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
  if (group >= found.blocks.num_groups()) return no_such_group(found, group);
  return Target{&found, &found.blocks.group(group), group};
}

void StateMachine::emit_words(Pool& pool) {
  for (uint32_t group = 0; group < pool.blocks.num_groups(); ++group) {
    if (!pool.blocks.group(group).has_changed_words()) continue;
    for (const WordChange& change : pool.blocks.group(group).take_changed_words())
      effects_.emplace_back(SetOwnerWord{pool.id, group, change.block, change.word});
  }
}

}  // namespace larder
