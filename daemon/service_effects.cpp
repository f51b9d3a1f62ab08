// Carrying out what the state machine decides, in order: memory, keeper, executor, replies.
#include <cstring>

#include <spdlog/spdlog.h>

#include "allocator/host_memory.h"
#include "client/group_view.h"
#include "daemon/service.h"
#include "larder/check.h"
#include "larder/system_error.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

// After so many deaths of the executor with the same call at the head of a ring, the ring is
// failed.
constexpr int kDeathsBeforeFailing = 3;

// What the keeper stores beside a segment's fd.
struct SegmentMetadata {
  char magic[8] = {'s', 'e', 'g', 'm', 'e', 'n', 't', '1'};
  uint64_t pool = 0;
  uint32_t group = 0;
  uint32_t index = 0;
  int64_t size_bytes = 0;
  uint8_t reserved[32] = {};
};
static_assert(sizeof(SegmentMetadata) == 64);

protocol::Block from_ref(const BlockRef& ref) { return {ref.id, ref.generation}; }

std::vector<protocol::Block> from_refs(const std::vector<BlockRef>& refs) {
  std::vector<protocol::Block> blocks;
  blocks.reserve(refs.size());
  for (const BlockRef& ref : refs) blocks.push_back(from_ref(ref));
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

  protocol::ReplyBody operator()(Status body) const { return body; }
  protocol::ReplyBody operator()(Done) const { return protocol::Done{}; }
  protocol::ReplyBody operator()(const PoolOpened& body) const {
    protocol::PoolOpened reply{value(body.pool), body.created, {}};
    for (const StoredGroup& group : store.pools().at(body.pool).groups)
      reply.groups.push_back(group.layout);
    return reply;
  }
  protocol::ReplyBody operator()(const BlocksAllocated& body) const {
    return protocol::Blocks{from_refs(body.blocks)};
  }
  protocol::ReplyBody operator()(const BlocksPublished& body) const {
    protocol::Published reply;
    for (size_t i = 0; i < body.blocks.size(); ++i)
      reply.blocks.push_back({body.keys[i], from_ref(body.blocks[i])});
    return reply;
  }
  protocol::ReplyBody operator()(const PrefixFound& body) const {
    return protocol::Prefix{body.hit_tokens, from_refs(body.blocks)};
  }
};

}  // namespace

// Effects can make new events (a segment was created); they are applied after the ones before.
void Service::apply(Event event) {
  events_.push_back(std::move(event));
  if (applying_) return;
  applying_ = true;
  while (!events_.empty()) {
    const Event next = std::move(events_.front());
    events_.pop_front();
    for (Effect& effect : machine_.apply(next, now_us())) {
      // What the machine has decided stands; the effects after one that failed are still due.
      try {
        carry_out(std::move(effect));
      } catch (const SystemError& error) {
        spdlog::error("event=effect_failed error=\"{}\"", error.what());
      }
    }
  }
  applying_ = false;
}

void Service::carry_out(Effect effect) {
  if (const auto* create = std::get_if<CreateSegment>(&effect)) {
    create_segment(*create);
  } else if (const auto* drop = std::get_if<DropSegment>(&effect)) {
    store_.remove_segment(drop->segment);
    if (Status status = keeper_.drop(value(drop->segment)); !status.ok())
      spdlog::error("event=keeper_drop_failed error=\"{}\"", status.to_string());
  } else if (const auto* created = std::get_if<PoolCreated>(&effect)) {
    StoredPool& pool = *store_.find(created->pool);
    pool.created = true;
    try {
      tell_executor_pool(created->pool, pool);
    } catch (const SystemError& error) {
      // A fresh executor is told everything again, by when there may be descriptors.
      spdlog::error("event=executor_not_told pool={} error=\"{}\"", value(created->pool),
                    error.what());
      executor_.restart();
    }
    spdlog::info("event=pool_created pool={}", value(created->pool));
  } else if (const auto* destroyed = std::get_if<PoolDestroyed>(&effect)) {
    executor_.send(protocol::DropPool{value(destroyed->pool)});
    store_.remove_pool(destroyed->pool);
    metrics_.forget_pool(value(destroyed->pool));
    spdlog::info("event=pool_destroyed pool={}", value(destroyed->pool));
  } else if (const auto* word = std::get_if<SetOwnerWord>(&effect)) {
    store_.find(word->pool)->groups[word->group].owners.set(word->block, word->word);
  } else if (auto* copy = std::get_if<RunCopy>(&effect)) {
    executor_.send(
        protocol::CopyBlocks{copy->copy, value(copy->pool), copy->group, copy->from, copy->to});
    copies_.emplace(copy->copy, std::move(*copy));
  } else if (const auto* fence = std::get_if<FenceSession>(&effect)) {
    watch_writer(fence->session);
  } else {
    answer(std::get<Reply>(std::move(effect)));
  }
}

void Service::create_segment(const CreateSegment& effect) {
  Status status;
  try {
    if (store_.find(effect.pool) == nullptr) add_staged_pool(effect.pool);
    Segment segment = create_host_segment("larder-pool", effect.size_bytes);
    status = deposit(effect, segment);
    if (status.ok()) {
      store_.find(effect.pool)->groups[effect.group].segment_ids[effect.index] = effect.segment;
      store_.add_segment(effect.segment, std::move(segment));
    }
  } catch (const SystemError& error) {
    status = {ErrorCode::kResourceExhausted, error.what()};
  }
  events_.push_back(SegmentCreated{effect.segment, status});
}

Status Service::deposit(const CreateSegment& effect, const Segment& segment) {
  SegmentMetadata metadata;
  metadata.pool = value(effect.pool);
  metadata.group = effect.group;
  metadata.index = effect.index;
  metadata.size_bytes = effect.size_bytes;
  std::array<uint8_t, 64> bytes;
  std::memcpy(bytes.data(), &metadata, sizeof metadata);
  return keeper_.put(value(effect.segment), segment.fd.get(), bytes);
}

void Service::add_staged_pool(PoolId id) {
  LARDER_CHECK(staged_spec_.has_value(), value(id));
  StoredPool pool;  // added when it is whole: an ownership table may find no memory
  for (const protocol::GroupSpec& spec : staged_spec_->groups) {
    // The same checks have passed when the event was made.
    const GroupView view = view_group(spec).value();
    const GroupLayout machine_layout =
        lay_out_group(block_bytes(view), spec.num_blocks, view.layout == KvLayout::kLbhnc).value();
    protocol::GroupLayout layout;
    layout.block_bytes = machine_layout.block_bytes;
    layout.block_stride_bytes =
        view.layout == KvLayout::kBlhnc ? machine_layout.block_stride_bytes : view.page.page_bytes;
    layout.layer_stride_bytes = layer_stride_bytes(view, spec.num_blocks);
    layout.num_blocks = spec.num_blocks;
    layout.segment_bytes = machine_layout.segment_bytes;
    pool.groups.push_back({spec, std::move(layout), OwnerTable(spec.num_blocks), {}});
  }
  store_.add_pool(id, std::move(pool));
}

void Service::answer(Reply effect) {
  const auto node = pending_.extract(effect.request);
  if (node.empty()) return;  // the session has closed
  const Pending& pending = node.mapped();
  Session* session = find(pending.session);
  if (session == nullptr) return;
  --session->num_pending;
  if (pending.closes && std::holds_alternative<Done>(effect.body)) {
    session->pools.erase(*pending.closes);
    executor_.send(protocol::DetachPool{value(session->id), value(*pending.closes)});
  }
  if (const auto* opened = std::get_if<PoolOpened>(&effect.body)) {
    session->pools.insert(opened->pool);
    executor_.send(protocol::AttachPool{value(session->id), value(opened->pool)});
  }
  if (!pending.answered)
    reply(*session, pending.id, std::visit(ToWire{store_}, std::move(effect.body)));
}

void Service::tell_executor_all() {
  for (const auto& [id, pool] : store_.pools())
    if (pool.created) tell_executor_pool(id, pool);
  for (const auto& [id, session] : sessions_)
    if (session->arena && session->connection->is_open()) tell_executor_session(*session);
  for (const auto& [id, copy] : copies_)
    executor_.send(protocol::CopyBlocks{id, value(copy.pool), copy.group, copy.from, copy.to});
}

void Service::tell_executor_pool(PoolId id, const StoredPool& pool) {
  for (uint32_t index = 0; index < pool.groups.size(); ++index) {
    const StoredGroup& group = pool.groups[index];
    protocol::AddGroup add{value(id), index, group.spec, group.layout};
    std::vector<OwnFd> group_fds;
    group_fds.push_back(duplicate(group.owners.fd()));
    if (auto* attention = std::get_if<protocol::AttentionGroup>(&add.spec.kind))
      if (const auto offsets = std::get<std::vector<float>>(
              std::exchange(attention->key_offsets, std::vector<float>()));
          !offsets.empty())
        group_fds.push_back(share_floats(offsets));
    executor_.send(add, std::move(group_fds));
    protocol::AddSegments batch{value(id), index, {}};
    std::vector<OwnFd> fds;
    for (const auto& [position, segment_id] : group.segment_ids) {
      const Segment* segment = store_.find_segment(segment_id);
      batch.size_bytes.push_back(segment->size_bytes);
      fds.push_back(duplicate(segment->fd.get()));
      if (fds.size() < protocol::kMaxFdsPerMessage && position + 1 < group.segment_ids.size())
        continue;
      executor_.send(batch, std::move(fds));
      batch.size_bytes.clear();
      fds.clear();
    }
  }
}

void Service::tell_executor_session(const Session& session) {
  std::vector<OwnFd> fds;
  fds.push_back(duplicate(session.arena->fd()));
  fds.push_back(duplicate(session.arena->eventfd()));
  protocol::AddSession command{value(session.id), session.arena->size_bytes(), {}};
  for (const PoolId pool : session.pools) command.pools.push_back(value(pool));
  executor_.send(command, std::move(fds));
}

// What an executor was running when it died stands at the head of some ring. A head that has stood
// through several deaths may be the cause, and is not run again.
void Service::on_executor_died() {
  metrics_.executor_died();
  for (const auto& [id, session] : sessions_) {
    if (!session->arena || !session->arena->busy()) continue;
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
