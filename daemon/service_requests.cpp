// What each request does: checks that need no state, the handshake, and the way to the machine.
#include <algorithm>

#include <spdlog/spdlog.h>

#include "client/group_view.h"
#include "daemon/attachment.h"
#include "daemon/pool_identity.h"
#include "daemon/service.h"
#include "daemon/unit_order.h"
#include "kernels/kernel_table.h"
#include "larder/check.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

BlockRef to_ref(const protocol::Block& block) { return {block.id, block.generation}; }

std::vector<BlockRef> to_refs(const std::vector<protocol::Block>& blocks) {
  std::vector<BlockRef> refs;
  refs.reserve(blocks.size());
  for (const protocol::Block& block : blocks) refs.push_back(to_ref(block));
  return refs;
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
  if (!session.is_connected()) return;  // the answer is kept until the client asks again
  session.connection->send(protocol::encode(protocol::Reply{id, boot_id_, std::move(body)}),
                           std::move(fds));
}

void Service::handle(Session& session, protocol::Request request, std::vector<OwnFd> fds) {
  metrics_.count_request(request.body);
  const uint64_t id = request.id;
  if (std::holds_alternative<protocol::Connect>(request.body) ||
      std::holds_alternative<protocol::Resume>(request.body))
    return reply(session, id,
                 Status(ErrorCode::kInvalidArgument, "the session is connected already"));
  if (id <= session.last_request)
    return reply(session, id,
                 Status(ErrorCode::kInvalidArgument,
                        "the request's id is " + std::to_string(id) + ", but ids increase and " +
                            std::to_string(session.last_request) + " was used"));
  session.last_request = id;
  if (session.goodbye)
    return reply(session, id, Status(ErrorCode::kInvalidArgument, "the session has said goodbye"));
  if (std::holds_alternative<protocol::Goodbye>(request.body)) {
    session.goodbye = true;
    return reply(session, id, protocol::Done{});
  }
  if (const auto* body = std::get_if<protocol::OpenPool>(&request.body))
    return open_pool(session, request, *body);
  if (const auto* body = std::get_if<protocol::ListPools>(&request.body))
    return reply(session, id, list_pools(session, body->after));
  if (const auto* body = std::get_if<protocol::ListSessions>(&request.body))
    return reply(session, id, list_sessions(session, body->after));
  if (std::holds_alternative<protocol::ListTenants>(request.body))
    return reply(session, id, list_tenants(session));
  if (std::holds_alternative<protocol::GetStatus>(request.body))
    return reply(session, id, status());
  if (std::holds_alternative<protocol::GetCapabilities>(request.body))
    return reply(session, id, show_capabilities());
  if (const auto* body = std::get_if<protocol::RegisterImport>(&request.body))
    return register_import(session, id, *body, std::move(fds));
  if (const auto* body = std::get_if<protocol::DropImport>(&request.body))
    return drop_import(session, id, body->import_id);
  forward(session, request);
}

Status Service::add_pending(Session& session, const protocol::Request& request) {
  if (session.num_pending >= protocol::kMaxPendingRequestsPerSession)
    return {ErrorCode::kBusy,
            std::to_string(session.num_pending) + " requests of this session are waiting"};
  const int64_t deadline_us =
      request.deadline_us == 0 ? 0 : now() + static_cast<int64_t>(request.deadline_us);
  std::optional<PoolId> pool;
  std::visit(
      [&](const auto& body) {
        if constexpr (requires { PoolId{body.pool}; }) pool = PoolId{body.pool};
      },
      request.body);
  pending_.emplace(RequestName{session.id, request.id},
                   Pending{deadline_us, false, false, pool,
                           std::holds_alternative<protocol::ClosePool>(request.body)});
  ++session.num_pending;
  return {};
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
  const Result<std::string> device =
      devices_.resolve(whole->device.empty() ? config_.device : whole->device);
  if (!device) return reply(session, request.id, device.status());
  const StoredPool* existing = store_.find(session.tenant, whole->name);
  if (existing != nullptr && existing->device != *device)
    return reply(
        session, request.id,
        Status(ErrorCode::kInvalidArgument, "device is " + existing->device + " in the pool and " +
                                                *device + " in the request"));
  whole->device = *device;
  Result<PoolSpec> spec = to_machine_spec(*whole);
  if (!spec) return reply(session, request.id, spec.status());
  if (Status status = add_pending(session, request); !status.ok())
    return reply(session, request.id, status);
  submit(OpenPool{request.id, session.id, std::move(*spec), to_attachment(*whole),
                  request.answered_below},
         {session.id, request.id});
}

void Service::submit(Event event, const RequestName& name) {
  const auto pending = pending_.find(name);
  if (pending == pending_.end()) return;  // the session has ended meanwhile
  pending->second.applied = true;
  apply(std::move(event));
}

// Requests that the machine answers. One that could take a block from under queued work of the
// session itself waits until that work is done.
void Service::forward(Session& session, const protocol::Request& request) {
  Result<Event> event = to_event(session, request);
  if (!event) return reply(session, request.id, event.status());
  if (Status status = add_pending(session, request); !status.ok())
    return reply(session, request.id, status);
  const RequestName name{session.id, request.id};
  const bool touches_blocks =
      std::holds_alternative<Release>(*event) || std::holds_alternative<ClosePool>(*event) ||
      std::holds_alternative<Copy>(*event) || std::holds_alternative<Publish>(*event);
  // Only the executor knows what it runs: the ring's indices are the client's to write.
  if (!touches_blocks || !session.arena) return submit(std::move(*event), name);
  executor_of(session).when_idle(value(session.id),
                                 [this, name, ready = std::move(*event)] { submit(ready, name); });
}

Result<std::vector<int32_t>> Service::tokens_of(const Session& session, uint64_t id,
                                                const protocol::TokenList& list) const {
  const StoredPool* pool = store_.find(PoolId{id});
  const auto* range = std::get_if<protocol::ArenaRange>(&list);
  const uint64_t count =
      range != nullptr ? range->count : std::get<std::vector<int32_t>>(list).size();
  if (pool != nullptr) {  // if not, the machine says so
    const auto unit_tokens = static_cast<uint64_t>(pool->unit_tokens);
    if (count / unit_tokens > protocol::kMaxBlocksPerTokenList)
      return Status(ErrorCode::kInvalidArgument,
                    "tokens has " + std::to_string(count) + " entries, " +
                        std::to_string(count / unit_tokens) + " blocks; at most " +
                        std::to_string(protocol::kMaxBlocksPerTokenList) +
                        " blocks go in one request");
  }
  if (range == nullptr) return std::get<std::vector<int32_t>>(list);
  if (!session.arena)
    return Status(ErrorCode::kInvalidArgument, "tokens: the session has no arena");
  return session.arena->read_tokens(*range);
}

std::vector<int32_t> Service::blocks_per_unit(PoolId id) const {
  const StoredPool* pool = store_.find(id);
  return pool == nullptr ? std::vector<int32_t>() : pool->blocks_per_unit;
}

Result<Event> Service::to_event(const Session& session, const protocol::Request& request,
                                const protocol::Publish& body) {
  auto tokens = tokens_of(session, body.pool, body.tokens);
  if (!tokens) return tokens.status();
  const PoolId pool{body.pool};
  return Event(
      Publish{request.id, session.id, pool, body.adapter, std::move(*tokens),
              reorder_units(to_refs(body.blocks), blocks_per_unit(pool), UnitOrder::kToMachine),
              body.extra, body.first_block, request.answered_below});
}

Result<Event> Service::to_event(const Session& session, const protocol::Request& request,
                                const protocol::Lookup& body) {
  auto tokens = tokens_of(session, body.pool, body.tokens);
  if (!tokens) return tokens.status();
  return Event(Lookup{request.id, session.id, PoolId{body.pool}, body.adapter, std::move(*tokens),
                      body.extra, body.hold, body.first_block,
                      static_cast<int64_t>(protocol::kMaxBlocksPerMessage),
                      request.answered_below});
}

Result<Event> Service::to_event(const Session& session, const protocol::Request& request,
                                const protocol::OpenSegments& body) {
  if (session.role == Role::kRead)
    return Status(ErrorCode::kPermissionDenied,
                  "role read gets no memory: open the pool on request");
  if (body.count == 0 || body.count > protocol::kMaxFdsPerMessage)
    return Status(ErrorCode::kInvalidArgument,
                  "count is " + std::to_string(body.count) + ": 1 to " +
                      std::to_string(protocol::kMaxFdsPerMessage) + " segments go at a time");
  if (session.connection->unread_bytes() > protocol::kMaxUnreadBytesForFds)
    return Status(ErrorCode::kBusy, "earlier replies with segments have not been read");
  return Event(MapExtents{request.id, session.id, PoolId{body.pool}, body.group,
                          int64_t{body.first}, int64_t{body.count}, request.answered_below});
}

Result<Event> Service::to_event(const Session& session, const protocol::Request& request) {
  const uint64_t id = request.id;
  const SessionId from = session.id;
  const uint64_t below = request.answered_below;
  if (const auto* body = std::get_if<protocol::ClosePool>(&request.body))
    return Event(ClosePool{id, from, PoolId{body->pool}, below});
  if (const auto* body = std::get_if<protocol::DestroyPool>(&request.body))
    return Event(DestroyPool{id, from, PoolId{body->pool}, below});
  if (const auto* body = std::get_if<protocol::Allocate>(&request.body))
    return Event(Allocate{id, from, PoolId{body->pool}, body->group, body->num_blocks,
                          body->total_blocks, below});
  if (const auto* body = std::get_if<protocol::Release>(&request.body))
    return Event(Release{id, from, PoolId{body->pool}, body->group, to_refs(body->blocks), below});
  if (const auto* body = std::get_if<protocol::Copy>(&request.body))
    return Event(Copy{id, from, PoolId{body->pool}, body->group, to_refs(body->from),
                      to_refs(body->to), below});
  if (const auto* body = std::get_if<protocol::ResizePool>(&request.body))
    return Event(ResizePool{id, from, PoolId{body->pool}, body->group, body->num_blocks, below});
  if (const auto* body = std::get_if<protocol::Evict>(&request.body))
    return Event(EvictBlocks{id, from, PoolId{body->pool}, body->num_blocks, below});
  if (const auto* body = std::get_if<protocol::SetQuota>(&request.body))
    return Event(
        SetQuota{id, from, body->tenant, body->guaranteed_bytes, body->maximum_bytes, below});
  if (const auto* body = std::get_if<protocol::OpenSegments>(&request.body))
    return to_event(session, request, *body);
  if (const auto* body = std::get_if<protocol::Publish>(&request.body))
    return to_event(session, request, *body);
  const auto* body = std::get_if<protocol::Lookup>(&request.body);
  LARDER_CHECK(body != nullptr, request.body.index());
  return to_event(session, request, *body);
}

}  // namespace larder::daemon
