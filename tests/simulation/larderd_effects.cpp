// What larderd tells clients and the executor, and what has to be true when it does.
#include <algorithm>

#include "tests/simulation/larderd.h"
#include "tests/simulation/violation.h"
#include "tests/simulation/workload.h"

namespace larder::sim {
namespace {

constexpr size_t kMaxUnread = 24;  // messages; who lets more pile up is ended
constexpr int64_t kUnmapDeadlineUs = 5'000'000;

bool has_changed_something(const Event& event, const ReplyBody& body) {
  if (std::holds_alternative<MapExtents>(event)) return false;  // or so: what there is may change
  if (const auto* evicted = std::get_if<Resized>(&body);
      evicted != nullptr && std::holds_alternative<EvictBlocks>(event))
    return evicted->blocks_before != evicted->blocks_after;
  if (const auto* publish = std::get_if<Publish>(&event)) return !publish->blocks.empty();
  if (const auto* lookup = std::get_if<Lookup>(&event))
    return lookup->hold && std::holds_alternative<PrefixFound>(body) &&
           !std::get<PrefixFound>(body).blocks.empty();
  return true;
}

}  // namespace

void Larderd::carry_out(Effect effect) {
  ++scene_.coverage.effects[effect.index()];
  scene_.crash.pass(activity_, CrashPoint::kBeforeEffect);
  std::visit([this](const auto& specific) { tell(specific); }, effect);
}

void Larderd::send(Session& session, SessionId id, ToClient message) {
  if (!session.connection || !session.connection->daemon_end) return;
  session.connection->to_client.push_back(std::move(message));
  if (session.connection->to_client.size() > kMaxUnread) to_end_.insert(id);
}

// ---------------------------------------------------------------------------------------- replies

void Larderd::tell(const Reply& reply) {
  if (const auto* status = std::get_if<Status>(&reply.body))
    ++scene_.coverage.refusals[static_cast<size_t>(status->code())];
  const auto session = sessions_.find(reply.session);
  if (session == sessions_.end()) return;  // it has ended, or never was
  const auto asked = asked_.find({reply.session, reply.request});
  // It has not come back, or not asked again yet: it will be answered when it does.
  if (asked == asked_.end()) return;
  const bool first =
      scene_.books.request_answered(reply.session, reply.request, reply.body,
                                    has_changed_something(asked->second.event, reply.body));
  const Client* client = client_of(session->second.pid);
  SIM_CHECK(client != nullptr, "an answer to a process that is gone", session->second.pid);
  check_answer(*client, asked->second.event, reply.body, first);
  asked_.erase(asked);
  scene_.log("session " + std::to_string(value(reply.session)) + " is answered " +
             std::to_string(reply.request) + " kind " + std::to_string(reply.body.index()));
  Answer answer{reply.request, reply.body, {}, false};
  if (const auto* mapped = std::get_if<ExtentsMapped>(&reply.body))
    for (const SegmentId segment : mapped->segments) {
      const auto held = segments_.find(segment);
      answer.memories.push_back(held == segments_.end() ? nullptr : held->second.memory);
    }
  send(session->second, reply.session, std::move(answer));
}

void Larderd::check_answer(const Client& client, const Event& asked, const ReplyBody& body,
                           bool first) {
  if (const auto* allocated = std::get_if<BlocksAllocated>(&body); allocated != nullptr && first) {
    const Allocate& event = std::get<Allocate>(asked);
    for (const BlockRef& block : allocated->blocks) {
      const BlockName name{event.pool, event.group, block.id};
      scene_.check_nobody_uses(name, &client);
      scene_.books.handed_out(name, block.generation);
      SIM_CHECK(scene_.books.content(name) != nullptr, "a block without memory", block.id);
      for (const auto& [id, copy] : copies_)
        SIM_CHECK(copy.pool != event.pool || copy.group != event.group ||
                      std::count(copy.to.begin(), copy.to.end(), block.id) +
                              std::count(copy.from.begin(), copy.from.end(), block.id) ==
                          0,
                  "a copy waits for block", block.id);
    }
  }
  const auto check = [&](PoolId pool, const std::vector<int32_t>& tokens, int64_t first_unit,
                         const std::vector<BlockRef>& blocks, bool complete) {
    const PoolSpec spec = pool_of_name(scene_.books.pools().at(pool).name);
    scene_.check_prefix(pool, spec, path_of(tokens, unit_tokens(spec.groups)), first_unit, blocks,
                        complete);
  };
  if (const auto* found = std::get_if<PrefixFound>(&body)) {
    const Lookup& event = std::get<Lookup>(asked);
    check(event.pool, event.tokens, event.first_block, found->blocks, true);
  } else if (const auto* published = std::get_if<BlocksPublished>(&body)) {
    // A publish that was carried out before a crash may name blocks that were released since.
    const Publish& event = std::get<Publish>(asked);
    if (first) check(event.pool, event.tokens, event.first_block, published->blocks, false);
  }
}

// ---------------------------------------------------------------------------------- pools, copies

void Larderd::tell(const PoolCreated& created) {
  for (const PoolRecord& record : machine().pool_records())
    if (record.pool == created.pool) scene_.books.pool_created(record);
}

void Larderd::tell(const PoolDestroyed& destroyed) { scene_.books.pool_destroyed(destroyed.pool); }

void Larderd::tell(const RunCopy& run) {
  SIM_CHECK(copies_.emplace(run.copy, run).second, "a copy is run twice", run.copy);
  if (executor_ != nullptr) executor_->add_copy(run);
}

void Larderd::tell(const UnmapSegment& unmap) {
  const auto session = sessions_.find(unmap.session);
  if (session == sessions_.end()) return;
  unmapping_[{unmap.segment, unmap.session}] = scene_.now_us + kUnmapDeadlineUs;
  send(session->second, unmap.session,
       PleaseUnmap{unmap.pool, unmap.group, unmap.index, unmap.segment});
}

}  // namespace larder::sim
