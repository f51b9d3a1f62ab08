// What each request does: checks that need no state, the handshake, and the way to the machine.
#include <algorithm>
#include <unistd.h>

#include <openssl/crypto.h>
#include <openssl/rand.h>
#include <spdlog/spdlog.h>

#include "client/group_view.h"
#include "daemon/pool_identity.h"
#include "daemon/service.h"
#include "kernels/kernel_table.h"
#include "larder/check.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

constexpr std::array<std::string_view, 3> kRoleNames = {"read", "append", "admin"};
// A page of a list stays well below the size of a message.
constexpr size_t kPoolsPerPage = 32;
constexpr size_t kSessionsPerPage = 128;
constexpr size_t kShownIdentityBytes = 64;

BlockRef to_ref(const protocol::Block& block) { return {block.id, block.generation}; }

std::vector<BlockRef> to_refs(const std::vector<protocol::Block>& blocks) {
  std::vector<BlockRef> refs;
  refs.reserve(blocks.size());
  for (const protocol::Block& block : blocks) refs.push_back(to_ref(block));
  return refs;
}

// Without a hint about how much of the token was right.
bool same_token(const std::string& a, const std::string& b) {
  return a.size() == b.size() && CRYPTO_memcmp(a.data(), b.data(), a.size()) == 0;
}

protocol::GroupInfo show(const GroupStats& stats) {
  return {stats.name,       stats.capacity,   stats.free,        stats.open,
          stats.published,  stats.cached,     stats.quarantined, stats.physical_bytes,
          stats.used_bytes, stats.slack_bytes};
}

protocol::PoolInfo show(const PoolStats& stats) {
  protocol::PoolInfo info;
  info.pool = value(stats.pool);
  info.tenant = stats.tenant;
  info.name = stats.name;
  info.model = stats.model;
  for (const auto& [name, text] : stats.identity)
    info.identity.emplace_back(name, text.substr(0, kShownIdentityBytes));
  info.num_sessions = stats.num_sessions;
  for (const GroupStats& group : stats.groups) info.groups.push_back(show(group));
  info.allocated_blocks_total = stats.allocated_blocks_total;
  info.evicted_blocks_total = stats.evicted_blocks_total;
  info.published_blocks_total = stats.published_blocks_total;
  info.lookup_tokens_total = stats.lookup_tokens_total;
  info.lookup_hit_tokens_total = stats.lookup_hit_tokens_total;
  return info;
}

protocol::Capabilities show_capabilities() {
  protocol::Capabilities reply;
  for (const kernels::Capability& row : kernels::capabilities())
    reply.rows.push_back(
        {row.op, row.backend, row.k_format, row.v_format, row.dim_multiple, row.dim_max});
  return reply;
}

}  // namespace

void Service::reply(Session& session, uint64_t id, protocol::ReplyBody body,
                    std::vector<OwnFd> fds) {
  if (const auto* refusal = std::get_if<Status>(&body)) metrics_.count_refusal(refusal->code());
  session.connection->send(protocol::encode(protocol::Reply{id, boot_id_, std::move(body)}),
                           std::move(fds));
}

void Service::handle(Session& session, protocol::Request request) {
  metrics_.count_request(request.body);
  const uint64_t id = request.id;
  if (const auto* body = std::get_if<protocol::Connect>(&request.body))
    return connect(session, id, *body);
  if (!session.connected)
    return reply(session, id,
                 Status(ErrorCode::kInvalidArgument, "the first request must be connect"));
  if (session.goodbye)
    return reply(session, id, Status(ErrorCode::kInvalidArgument, "the session has said goodbye"));
  if (std::holds_alternative<protocol::Goodbye>(request.body)) {
    session.goodbye = true;
    return reply(session, id, protocol::Done{});
  }
  if (const auto* body = std::get_if<protocol::OpenPool>(&request.body))
    return open_pool(session, request, *body);
  if (const auto* body = std::get_if<protocol::OpenSegments>(&request.body))
    return open_segments(session, id, *body);
  if (const auto* body = std::get_if<protocol::ListPools>(&request.body))
    return reply(session, id, list_pools(session, body->after));
  if (const auto* body = std::get_if<protocol::ListSessions>(&request.body))
    return reply(session, id, list_sessions(session, body->after));
  if (std::holds_alternative<protocol::GetStatus>(request.body))
    return reply(session, id, status());
  if (std::holds_alternative<protocol::GetCapabilities>(request.body))
    return reply(session, id, show_capabilities());
  if (const auto* body = std::get_if<protocol::Unserved>(&request.body))
    return reply(session, id,
                 Status(ErrorCode::kUnsupported,
                        "the request " + body->what + " is not served by this build"));
  forward(session, request);
}

Status Service::check_access(const Session& session, const protocol::Connect& body) const {
  if (draining_) return {ErrorCode::kShuttingDown, "the daemon is shutting down"};
  if (session.connected) return {ErrorCode::kInvalidArgument, "the session is connected already"};
  if (body.min_version > body.max_version || body.min_version > protocol::kMaxVersion ||
      body.max_version < protocol::kMinVersion)
    return {ErrorCode::kUnsupported, "the client speaks versions " +
                                         std::to_string(body.min_version) + " to " +
                                         std::to_string(body.max_version) + ", this daemon " +
                                         std::to_string(protocol::kMinVersion) + " to " +
                                         std::to_string(protocol::kMaxVersion)};
  const auto tenant =
      std::find_if(config_.tenants.begin(), config_.tenants.end(),
                   [&](const TenantConfig& entry) { return entry.name == body.tenant; });
  if (tenant == config_.tenants.end())
    return {ErrorCode::kPermissionDenied, "tenant \"" + body.tenant + "\" is not configured"};
  if (!tenant->token.empty() && !same_token(tenant->token, body.token))
    return {ErrorCode::kPermissionDenied, "the token is not tenant \"" + body.tenant + "\"'s"};
  const auto role = std::find(kRoleNames.begin(), kRoleNames.end(), body.role);
  if (role == kRoleNames.end())
    return {ErrorCode::kInvalidArgument,
            "role \"" + body.role + "\" is unknown; known are read, append, admin"};
  if (body.role == "admin" && session.peer.uid != 0 && session.peer.uid != ::geteuid())
    return {ErrorCode::kPermissionDenied, "role admin is for uid 0 and " +
                                              std::to_string(::geteuid()) + ", the client is uid " +
                                              std::to_string(session.peer.uid)};
  uint64_t arena_bytes = 0;
  for (const auto& [id, other] : sessions_)
    if (other->arena) arena_bytes += other->arena->size_bytes();
  const auto arena_limit = static_cast<uint64_t>(config_.arena_memory_bytes);
  if (body.arena_bytes != 0 && arena_bytes + body.arena_bytes > arena_limit)
    return {ErrorCode::kResourceExhausted,
            "arena_bytes is " + std::to_string(body.arena_bytes) + ", available " +
                std::to_string(arena_limit - std::min(arena_limit, arena_bytes)) + " of " +
                std::to_string(arena_limit)};
  const auto connected =
      static_cast<size_t>(std::count_if(sessions_.begin(), sessions_.end(),
                                        [](const auto& entry) { return entry.second->connected; }));
  if (connected >= protocol::kMaxSessions)
    return {ErrorCode::kResourceExhausted, std::to_string(connected) +
                                               " sessions are connected, at most " +
                                               std::to_string(protocol::kMaxSessions) + " can be"};
  return {};
}

void Service::connect(Session& session, uint64_t id, const protocol::Connect& body) {
  if (Status status = check_access(session, body); !status.ok()) return reply(session, id, status);
  constexpr uint64_t kPageBytes = 4096;
  std::vector<OwnFd> fds;
  if (body.arena_bytes != 0) {
    session.arena.emplace((body.arena_bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
    fds.push_back(duplicate(session.arena->fd()));
    fds.push_back(duplicate(session.arena->eventfd()));
  }
  // Everything that can fail comes before the session exists for the state machine.
  if (session.arena) tell_executor_session(session);
  LARDER_CHECK(RAND_bytes(session.token.data(), static_cast<int>(session.token.size())) == 1);
  session.tenant = body.tenant;
  session.client_name = body.client_name;
  session.role = static_cast<Role>(std::find(kRoleNames.begin(), kRoleNames.end(), body.role) -
                                   kRoleNames.begin());
  session.connected = true;
  apply(OpenSession{session.id, session.tenant, session.role});
  spdlog::info("event=session_opened session={} tenant=\"{}\" client=\"{}\" pid={} role={}",
               value(session.id), session.tenant, session.client_name, session.peer.pid, body.role);
  const protocol::Connected connected{std::min(protocol::kMaxVersion, body.max_version),
                                      value(session.id), session.token,
                                      session.arena ? session.arena->size_bytes() : 0};
  reply(session, id, connected, std::move(fds));
}

uint64_t Service::add_pending(Session& session, const protocol::Request& request) {
  const uint64_t ticket = next_ticket_++;
  const int64_t deadline_us =
      request.deadline_us == 0 ? 0 : now_us() + static_cast<int64_t>(request.deadline_us);
  std::optional<PoolId> closes;
  if (const auto* body = std::get_if<protocol::ClosePool>(&request.body))
    closes = PoolId{body->pool};
  pending_.emplace(ticket, Pending{session.id, request.id, deadline_us, false, closes});
  ++session.num_pending;
  return ticket;
}

Result<protocol::PoolSpec> Service::with_key_offsets(const Session& session,
                                                     protocol::PoolSpec spec) const {
  for (protocol::GroupSpec& group : spec.groups) {
    auto* attention = std::get_if<protocol::AttentionGroup>(&group.kind);
    if (attention == nullptr) continue;
    const auto* range = std::get_if<protocol::ArenaRange>(&attention->key_offsets);
    if (range == nullptr) continue;
    if (!session.arena)
      return Status(ErrorCode::kInvalidArgument, "key_offsets: the session has no arena");
    auto offsets = session.arena->read_floats("key_offsets", *range);
    if (!offsets) return offsets.status();
    attention->key_offsets = std::move(*offsets);
  }
  return spec;
}

void Service::open_pool(Session& session, const protocol::Request& request,
                        const protocol::OpenPool& body) {
  Result<protocol::PoolSpec> whole = with_key_offsets(session, body.spec);
  if (!whole) return reply(session, request.id, whole.status());
  Result<PoolSpec> spec = to_machine_spec(*whole);
  if (!spec) return reply(session, request.id, spec.status());
  if (session.num_pending >= protocol::kMaxPendingRequestsPerSession)
    return reply(session, request.id,
                 Status(ErrorCode::kBusy, std::to_string(session.num_pending) +
                                              " requests of this session are waiting"));
  const uint64_t ticket = add_pending(session, request);
  staged_spec_ = std::move(*whole);
  apply(OpenPool{ticket, session.id, std::move(*spec)});
  staged_spec_.reset();
  // Segments are made while the effects are carried out: what is not complete now was undone.
  store_.remove_uncreated();
}

void Service::open_segments(Session& session, uint64_t id, const protocol::OpenSegments& body) {
  if (session.role == Role::kRead)
    return reply(
        session, id,
        Status(ErrorCode::kPermissionDenied, "role read gets no memory: open the pool on request"));
  const StoredPool* pool = store_.find(PoolId{body.pool});
  if (pool == nullptr || !session.pools.contains(PoolId{body.pool}))
    return reply(session, id,
                 Status(ErrorCode::kNotFound,
                        "pool " + std::to_string(body.pool) + " is not open in this session"));
  if (body.group >= pool->groups.size())
    return reply(
        session, id,
        Status(ErrorCode::kNotFound, "group is " + std::to_string(body.group) + ", the pool has " +
                                         std::to_string(pool->groups.size())));
  const StoredGroup& group = pool->groups[body.group];
  const size_t num_segments = group.segment_ids.size();
  if (body.count == 0 || body.count > protocol::kMaxFdsPerMessage ||
      uint64_t{body.first} + body.count > num_segments)
    return reply(
        session, id,
        Status(ErrorCode::kInvalidArgument,
               "segments " + std::to_string(body.first) + " and on, count " +
                   std::to_string(body.count) + ": the group has " + std::to_string(num_segments) +
                   ", and 1 to " + std::to_string(protocol::kMaxFdsPerMessage) + " go at a time"));
  if (session.connection->unread_bytes() > protocol::kMaxUnreadBytesForFds)
    return reply(session, id,
                 Status(ErrorCode::kBusy, "earlier replies with segments have not been read"));
  protocol::Segments segments;
  std::vector<OwnFd> fds;
  for (uint32_t index = body.first; index < body.first + body.count; ++index) {
    const Segment* segment = store_.find_segment(group.segment_ids.at(index));
    LARDER_CHECK(segment != nullptr, index);
    segments.size_bytes.push_back(segment->size_bytes);
    fds.push_back(duplicate(segment->fd.get()));
  }
  session.mapped = true;
  reply(session, id, std::move(segments), std::move(fds));
}

// Requests that the machine answers. One that could take a block from under queued work of the
// session itself waits until that work is done.
void Service::forward(Session& session, const protocol::Request& request) {
  if (session.num_pending >= protocol::kMaxPendingRequestsPerSession)
    return reply(session, request.id,
                 Status(ErrorCode::kBusy, std::to_string(session.num_pending) +
                                              " requests of this session are waiting"));
  const uint64_t ticket = add_pending(session, request);
  Result<Event> event = to_event(session, ticket, request);
  if (!event) {
    pending_.erase(ticket);
    --session.num_pending;
    return reply(session, request.id, event.status());
  }
  const bool touches_blocks =
      std::holds_alternative<Release>(*event) || std::holds_alternative<ClosePool>(*event) ||
      std::holds_alternative<Copy>(*event) || std::holds_alternative<Publish>(*event);
  // Only the executor knows what it runs: the ring's indices are the client's to write.
  if (!touches_blocks || !session.arena) return apply(*event);
  executor_.when_idle(value(session.id), [this, ready = std::move(*event)] { apply(ready); });
}

Status Service::check_token_count(PoolId id, const protocol::TokenList& list) const {
  const StoredPool* pool = store_.find(id);
  if (pool == nullptr) return {};  // the machine says so
  const auto* range = std::get_if<protocol::ArenaRange>(&list);
  const uint64_t count =
      range != nullptr ? range->count : std::get<std::vector<int32_t>>(list).size();
  const auto block_tokens = static_cast<uint64_t>(pool->groups[0].spec.block_tokens);
  if (count / block_tokens <= protocol::kMaxBlocksPerTokenList) return {};
  return {ErrorCode::kInvalidArgument,
          "tokens has " + std::to_string(count) + " entries, " +
              std::to_string(count / block_tokens) + " blocks; at most " +
              std::to_string(protocol::kMaxBlocksPerTokenList) + " blocks go in one request"};
}

Result<Event> Service::to_event(const Session& session, uint64_t ticket,
                                const protocol::Request& request) {
  const auto tokens_of = [&](uint64_t pool,
                             const protocol::TokenList& list) -> Result<std::vector<int32_t>> {
    if (Status status = check_token_count(PoolId{pool}, list); !status.ok()) return status;
    if (const auto* tokens = std::get_if<std::vector<int32_t>>(&list)) return *tokens;
    if (!session.arena)
      return Status(ErrorCode::kInvalidArgument, "tokens: the session has no arena");
    return session.arena->read_tokens(std::get<protocol::ArenaRange>(list));
  };
  if (const auto* body = std::get_if<protocol::ClosePool>(&request.body))
    return Event(ClosePool{ticket, session.id, PoolId{body->pool}});
  if (const auto* body = std::get_if<protocol::DestroyPool>(&request.body))
    return Event(DestroyPool{ticket, session.id, PoolId{body->pool}});
  if (const auto* body = std::get_if<protocol::Allocate>(&request.body))
    return Event(Allocate{ticket, session.id, PoolId{body->pool}, body->group, body->num_blocks,
                          body->total_blocks});
  if (const auto* body = std::get_if<protocol::Release>(&request.body))
    return Event(
        Release{ticket, session.id, PoolId{body->pool}, body->group, to_refs(body->blocks)});
  if (const auto* body = std::get_if<protocol::Copy>(&request.body))
    return Event(Copy{ticket, session.id, PoolId{body->pool}, body->group, to_refs(body->from),
                      to_refs(body->to)});
  if (const auto* body = std::get_if<protocol::Publish>(&request.body)) {
    auto tokens = tokens_of(body->pool, body->tokens);
    if (!tokens) return tokens.status();
    return Event(Publish{ticket, session.id, PoolId{body->pool}, body->adapter, std::move(*tokens),
                         to_refs(body->blocks), body->extra, body->first_block});
  }
  const auto* body = std::get_if<protocol::Lookup>(&request.body);
  LARDER_CHECK(body != nullptr, request.body.index());
  auto tokens = tokens_of(body->pool, body->tokens);
  if (!tokens) return tokens.status();
  return Event(Lookup{ticket, session.id, PoolId{body->pool}, body->adapter, std::move(*tokens),
                      body->extra, body->hold, body->first_block,
                      static_cast<int64_t>(protocol::kMaxBlocksPerMessage)});
}

bool Service::may_see(const Session& session, const std::string& tenant) const {
  return session.role == Role::kAdmin || session.tenant == tenant;
}

protocol::Pools Service::list_pools(const Session& session, uint64_t after) const {
  protocol::Pools page;
  for (const PoolStats& stats : machine_.pool_stats()) {
    if (value(stats.pool) <= after || !may_see(session, stats.tenant)) continue;
    if (page.pools.size() == kPoolsPerPage) {
      page.more = true;
      break;
    }
    protocol::PoolInfo info = show(stats);
    metrics_.add_executor_counters(info);
    page.pools.push_back(std::move(info));
  }
  return page;
}

protocol::Sessions Service::list_sessions(const Session& session, uint64_t after) const {
  std::map<SessionId, SessionStats> held;
  for (const SessionStats& stats : machine_.session_stats()) held[stats.session] = stats;
  std::map<SessionId, std::pair<const Session*, bool>> all;
  for (const auto& [id, entry] : sessions_) all[id] = {entry.get(), !entry->connection->is_open()};
  for (const auto& [id, writer] : writers_) all[id] = {writer.session.get(), true};
  protocol::Sessions page;
  for (const auto& [id, entry] : all) {
    const auto& [shown, closing] = entry;
    if (value(id) <= after || !shown->connected || !may_see(session, shown->tenant)) continue;
    if (page.sessions.size() == kSessionsPerPage) {
      page.more = true;
      break;
    }
    const SessionStats& stats = held[id];
    page.sessions.push_back({value(id), shown->tenant,
                             std::string(kRoleNames[static_cast<size_t>(shown->role)]),
                             shown->client_name, shown->peer.pid, shown->peer.uid, stats.num_pools,
                             stats.open_blocks, stats.holds, shown->mapped,
                             static_cast<uint64_t>(now_us() - shown->connected_at_us), closing});
  }
  return page;
}

}  // namespace larder::daemon
