// Carrying out what the state machine decides, in order: executor, sessions, replies.
#include <cstring>

#include <spdlog/spdlog.h>

#include "allocator/host_memory.h"
#include "client/group_view.h"
#include "daemon/attachment.h"
#include "daemon/pool_identity.h"
#include "daemon/service.h"
#include "daemon/unit_order.h"
#include "larder/check.h"
#include "larder/system_error.h"
#include "protocol/limits.h"
#include "protocol/notices.h"

namespace larder::daemon {
namespace {

// After so many deaths of the executor with the same call at the head of a ring, the ring is
// failed.
constexpr int kDeathsBeforeFailing = 3;

std::vector<protocol::Block> from_refs(const std::vector<BlockRef>& refs) {
  std::vector<protocol::Block> blocks;
  blocks.reserve(refs.size());
  for (const BlockRef& ref : refs) blocks.push_back({ref.id, ref.generation});
  return blocks;
}

// Too many for a message: the executor maps them.
OwnFd share_floats(const std::vector<float>& values) {
  constexpr int64_t kPageBytes = 4096;
  const auto bytes = static_cast<int64_t>(values.size() * sizeof(float));
  Segment segment =
      create_host_segment("larder-key-offsets", (bytes + kPageBytes - 1) / kPageBytes * kPageBytes);
  const SharedMapping mapping = SharedMapping::map(segment.fd.get(), segment.size_bytes, true);
  std::memcpy(mapping.data(), values.data(), static_cast<size_t>(bytes));
  return std::move(segment.fd);
}

struct ToWire {
  const PoolStore& store;
  std::vector<OwnFd>& fds;
  std::vector<int32_t> blocks_per_unit;  // of the pool that the request named
  const std::string& ring_device;        // of the session

  protocol::ReplyBody operator()(Status body) const { return body; }
  protocol::ReplyBody operator()(Done) const { return protocol::Done{}; }
  protocol::ReplyBody operator()(const PoolOpened& body) const {
    const StoredPool& pool = store.pools().at(body.pool);
    protocol::PoolOpened reply{
        value(body.pool), body.created, {}, pool.device, pool.device == ring_device};
    for (const StoredGroup& group : pool.groups) reply.groups.push_back(group.layout);
    return reply;
  }
  protocol::ReplyBody operator()(const BlocksAllocated& body) const {
    return protocol::Blocks{from_refs(body.blocks)};
  }
  protocol::ReplyBody operator()(const BlocksPublished& body) const {
    const std::vector<protocol::Block> blocks =
        reorder_units(from_refs(body.blocks), blocks_per_unit, UnitOrder::kToWire);
    protocol::Published reply;
    for (size_t i = 0; i < blocks.size(); ++i) {
      // A key names a unit; in a pool of several groups the blocks past the units have none.
      const BlockKey key = i < body.keys.size() ? body.keys[i] : BlockKey{};
      reply.blocks.push_back({key, blocks[i]});
    }
    return reply;
  }
  protocol::ReplyBody operator()(const PrefixFound& body) const {
    return protocol::Prefix{body.hit_tokens, reorder_units(from_refs(body.blocks), blocks_per_unit,
                                                           UnitOrder::kToWire)};
  }
  protocol::ReplyBody operator()(const ExtentsMapped& body) const {
    protocol::Segments reply;
    for (const SegmentId id : body.segments) {
      const Segment* segment = store.find_segment(id);
      reply.size_bytes.push_back(segment == nullptr ? 0 : segment->size_bytes);
      if (segment != nullptr) fds.push_back(duplicate(segment->fd.get()));
    }
    return reply;
  }
  protocol::ReplyBody operator()(const Resized& body) const {
    return protocol::Resized{body.blocks_before, body.blocks_after, body.bytes_before,
                             body.bytes_after};
  }
};

}  // namespace

// What the machine has decided stands; the effects after one that failed are still due.
void Service::carry_out(Effect effect) {
  try {
    carry_out_one(effect);
  } catch (const std::runtime_error& error) {  // SystemError, CudaError
    spdlog::error("event=effect_failed error=\"{}\"", error.what());
  }
}

void Service::carry_out_one(Effect& effect) {
  if (const auto* word = std::get_if<SetOwnerWord>(&effect)) {
    store_.find(word->pool)->groups[word->group].owners.set(word->block, word->word);
  } else if (auto* reply = std::get_if<Reply>(&effect)) {
    answer(std::move(*reply));
  } else if (const auto* created = std::get_if<PoolCreated>(&effect)) {
    StoredPool& pool = *store_.find(created->pool);
    // The first pool of a GPU starts its executor, which is told of the pools that are there.
    ExecutorLink& executor = executor_of(created->pool);
    pool.created = true;
    tell_executor_or_restart(executor, [&] { tell_executor_pool(created->pool, pool); });
    spdlog::info("event=pool_created pool={}", value(created->pool));
  } else if (const auto* destroyed = std::get_if<PoolDestroyed>(&effect)) {
    const std::string device = store_.find(destroyed->pool)->device;
    executors_.of(device).send(protocol::DropPool{value(destroyed->pool)});
    forget_pool(destroyed->pool);
    retire_executor(device);
    spdlog::info("event=pool_destroyed pool={}", value(destroyed->pool));
  } else if (const auto* added = std::get_if<ExtentAdded>(&effect)) {
    const OwnFd fd = duplicate(store_.find_segment(added->segment)->fd.get());
    ExecutorLink& executor = executor_of(added->pool);
    tell_executor_or_restart(executor, [&] {
      std::vector<OwnFd> fds;
      fds.push_back(duplicate(fd.get()));
      executor.send(
          protocol::AddSegments{
              value(added->pool), added->group, {added->size_bytes}, added->index},
          std::move(fds));
    });
  } else if (const auto* removed = std::get_if<ExtentRemoved>(&effect)) {
    store_.find(removed->pool)->groups[removed->group].segment_ids.erase(removed->index);
    executor_of(removed->pool)
        .send(protocol::DropExtent{value(removed->pool), removed->group, removed->index});
  } else if (auto* copy = std::get_if<RunCopy>(&effect)) {
    executor_of(copy->pool)
        .send(
            protocol::CopyBlocks{copy->copy, value(copy->pool), copy->group, copy->from, copy->to});
    copies_.emplace(copy->copy, std::move(*copy));
  } else if (const auto* unmap = std::get_if<UnmapSegment>(&effect)) {
    ask_to_unmap(*unmap);
  } else if (const auto* fence = std::get_if<FenceSession>(&effect)) {
    // Of a session that was closing when the last larderd ended; others are watched already.
    auto fds = closing_fds_.extract(fence->session);
    if (!fds.empty())
      watch_closing(closing_.at(fence->session), std::move(fds.mapped().first),
                    std::move(fds.mapped().second));
  }
}

// A fresh executor is told everything again, by when there may be descriptors.
void Service::tell_executor_or_restart(ExecutorLink& executor, const std::function<void()>& tell) {
  try {
    tell();
  } catch (const SystemError& error) {
    spdlog::error("event=executor_not_told error=\"{}\"", error.what());
    executor.restart();
  }
}

void Service::ask_to_unmap(const UnmapSegment& effect) {
  Session* session = find(effect.session);
  if (session == nullptr) return;
  // Without a notice socket nobody can be asked: the deadline ends such a session.
  session->unmapping[{value(effect.pool), effect.group, effect.index}] = {
      effect.segment, now() + int64_t{config_.unmap_deadline_ms} * 1000};
  if (session->notices)
    session->notices->send(
        protocol::encode(protocol::Unmap{value(effect.pool), effect.group, effect.index}));
}

Result<StoredPool> Service::make_pool(const PoolRecord& record,
                                      std::optional<SharedCounters> counters) {
  Result<protocol::PoolSpec> spec = pool_spec(record.attachment);
  if (!spec) return spec.status();
  Result<PoolSpec> machine_spec = to_machine_spec(*spec);
  if (!machine_spec || machine_spec->groups.size() != record.layouts.size())
    return Status(ErrorCode::kInternal, "this build cannot serve pool " +
                                            std::to_string(value(record.pool)) + ": " +
                                            machine_spec.status().message());
  StoredPool pool{{}, counters ? std::move(*counters) : SharedCounters::create()};
  pool.tenant = record.tenant;
  pool.name = spec->name;
  pool.device = spec->device.empty() ? kHostDevice : spec->device;
  pool.unit_tokens = unit_tokens(machine_spec->groups);
  for (size_t i = 0; i < spec->groups.size(); ++i) {
    const protocol::GroupSpec& group = spec->groups[i];
    const GroupLayout& machine_layout = record.layouts[i];
    const GroupView view = view_group(group).value();
    protocol::GroupLayout layout;
    layout.block_bytes = machine_layout.block_bytes;
    layout.block_stride_bytes =
        view.layout == KvLayout::kBlhnc ? machine_layout.block_stride_bytes : view.page.page_bytes;
    layout.layer_stride_bytes = layer_stride_bytes(view, machine_layout.num_blocks);
    layout.num_blocks = machine_layout.grows() ? group.num_blocks : machine_layout.num_blocks;
    layout.max_blocks = machine_layout.num_blocks;
    layout.extent_bytes = machine_layout.extent_bytes;
    layout.segment_bytes = machine_layout.segment_bytes;
    OwnerTable owners(layout.num_ids());
    pool.groups.push_back({group, std::move(layout), std::move(owners), {}});
    pool.blocks_per_unit.push_back(blocks_in_unit(machine_spec->groups, machine_spec->groups[i]));
  }
  return pool;
}

void Service::forget_pool(PoolId pool) {
  store_.remove_pool(pool);
  if (Status status =
          keeper_.drop(protocol::keeper_key(protocol::KeeperKind::kCounters, value(pool)));
      !status.ok() && status.code() != ErrorCode::kUnavailable)
    spdlog::error("event=keeper_drop_failed error=\"{}\"", status.to_string());
}

void Service::answer(Reply effect) {
  Session* session = find(effect.session);
  if (session == nullptr) return;
  const auto node = pending_.extract({effect.session, effect.request});
  if (!node.empty()) --session->num_pending;
  if (!node.empty() && node.mapped().closes && std::holds_alternative<Done>(effect.body)) {
    const PoolId closed = *node.mapped().pool;
    session->pools.erase(closed);
    executor_of(*session).send(protocol::DetachPool{value(session->id), value(closed)});
  }
  if (const auto* opened = std::get_if<PoolOpened>(&effect.body)) {
    const std::string& device = store_.find(opened->pool)->device;
    if (session->pools.empty()) move_ring(*session, device);
    session->pools.insert(opened->pool);
    if (device == session->ring_device)
      executor_of(*session).send(protocol::AttachPool{value(session->id), value(opened->pool)});
  }
  if (std::holds_alternative<ExtentsMapped>(effect.body)) session->mapped = true;
  if (node.empty() || node.mapped().answered) return;  // the client asks again, or not any more
  std::vector<OwnFd> fds;
  protocol::ReplyBody body = std::visit(
      ToWire{store_, fds,
             node.mapped().pool ? blocks_per_unit(*node.mapped().pool) : std::vector<int32_t>(),
             session->ring_device},
      std::move(effect.body));
  reply(*session, effect.request, std::move(body), std::move(fds));
}

// ---------------------------------------------------------------------------------------- executor

void Service::tell_executor_all(const std::string& device) {
  for (const auto& [id, pool] : store_.pools())
    if (pool.created && pool.device == device) tell_executor_pool(id, pool);
  for (const auto& [id, session] : sessions_)
    if (session->ring_device == device) tell_executor_session(*session);
  for (const auto& [id, copy] : copies_)
    if (store_.is_on(copy.pool, device))
      executors_.of(device).send(
          protocol::CopyBlocks{id, value(copy.pool), copy.group, copy.from, copy.to});
}

void Service::tell_executor_pool(PoolId id, const StoredPool& pool) {
  for (uint32_t index = 0; index < pool.groups.size(); ++index) {
    const StoredGroup& group = pool.groups[index];
    protocol::AddGroup add{value(id), index, group.spec, group.layout};
    std::vector<OwnFd> fds;
    fds.push_back(duplicate(group.owners.fd()));
    fds.push_back(duplicate(pool.counters.fd()));
    if (auto* attention = std::get_if<protocol::AttentionGroup>(&add.spec.kind))
      if (const auto offsets = std::get<std::vector<float>>(
              std::exchange(attention->key_offsets, std::vector<float>()));
          !offsets.empty())
        fds.push_back(share_floats(offsets));
    executors_.of(pool.device).send(add, std::move(fds));
    tell_executor_segments(id, index, group);
  }
}

// Runs of extents that are there, at most a message's worth at a time.
void Service::tell_executor_segments(PoolId id, uint32_t group_index, const StoredGroup& group) {
  protocol::AddSegments batch{value(id), group_index, {}};
  std::vector<OwnFd> fds;
  const auto send = [&] {
    if (!fds.empty()) executor_of(id).send(batch, std::move(fds));
    batch.size_bytes.clear();
    fds.clear();
  };
  for (const auto& [index, segment_id] : group.segment_ids) {
    if (fds.size() == protocol::kMaxFdsPerMessage ||
        index != batch.first_index + batch.size_bytes.size())
      send();
    if (fds.empty()) batch.first_index = index;
    const Segment* segment = store_.find_segment(segment_id);
    batch.size_bytes.push_back(segment->size_bytes);
    fds.push_back(duplicate(segment->fd.get()));
  }
  send();
}

void Service::tell_executor_session(const Session& session) {
  if (!session.arena) return;
  std::vector<OwnFd> fds;
  fds.push_back(duplicate(session.arena->fd()));
  fds.push_back(duplicate(session.arena->eventfd()));
  protocol::AddSession command{value(session.id), session.arena->size_bytes(), {}};
  for (const PoolId pool : session.pools)
    if (store_.is_on(pool, session.ring_device)) command.pools.push_back(value(pool));
  executor_of(session).send(command, std::move(fds));
  for (const auto& [id, memory] : session.imports) tell_executor_import(session, id, memory);
}

// What an executor was running when it died stands at the head of some ring. A head that has stood
// through several deaths may be the cause, and is not run again.
void Service::on_executor_died(const std::string& device) {
  for (const auto& [id, session] : sessions_) {
    if (session->ring_device != device || !session->arena || !session->arena->busy()) continue;
    const uint32_t head = session->arena->header().submit_head.load(std::memory_order_acquire);
    session->deaths_at_head = head == session->head_at_death ? session->deaths_at_head + 1 : 1;
    session->head_at_death = head;
    if (session->deaths_at_head < kDeathsBeforeFailing) continue;
    spdlog::error("event=calls_failed session={} deaths={}", value(id), session->deaths_at_head);
    session->arena->fail_outstanding(Status(
        ErrorCode::kUnavailable, "the executor died " + std::to_string(session->deaths_at_head) +
                                     " times while this call was in its ring"));
    session->deaths_at_head = 0;
  }
}

}  // namespace larder::daemon
