// The state machine as bytes: what a checkpoint of the journal begins with.
#include <string>

#include "allocator/consistency.h"
#include "allocator/event_codec.h"
#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {
namespace {

void put_sessions(ByteWriter& out, const std::set<SessionId>& sessions) {
  out.put_list(std::vector<SessionId>(sessions.begin(), sessions.end()));
}

std::set<SessionId> get_sessions(ByteReader& in) {
  const std::vector<SessionId> list = in.get_list<SessionId>();
  return {list.begin(), list.end()};
}

}  // namespace

void StateMachine::save(ByteWriter& out) const {
  out.put(kRecordVersion);
  ledger_.save(out);
  out.put(cache_id_);
  out.put(max_pools_);
  out.put(last_session_);
  out.put(last_pool_);
  out.put(last_segment_);
  out.put(last_copy_);
  out.put(static_cast<uint32_t>(sessions_.size()));
  for (const auto& [id, session] : sessions_) {
    out.put(id);
    out.put_text(session.tenant);
    out.put(session.role);
    out.put_text(session.attachment);
    out.put(static_cast<uint8_t>(session.absent));
    out.put_list(std::vector<PoolId>(session.pools.begin(), session.pools.end()));
    out.put(static_cast<uint32_t>(session.answers.all().size()));
    for (const auto& [request, body] : session.answers.all()) {
      out.put(request);
      put_reply(out, body);
    }
  }
  out.put(static_cast<uint32_t>(closing_.size()));
  for (const auto& [id, closing] : closing_) {
    out.put(id);
    out.put(closing.fence);
    out.put_list(std::vector<PoolId>(closing.pools.begin(), closing.pools.end()));
    out.put_text(closing.tenant);
    out.put_text(closing.attachment);
  }
  out.put(static_cast<uint32_t>(pools_.size()));
  for (const auto& [id, pool] : pools_) save_pool(pool, out);
  out.put(static_cast<uint32_t>(awaited_.size()));
  for (const auto& [segment, awaited] : awaited_) {
    out.put(segment);
    out.put(awaited.place);
    out.put_text(awaited.tenant);
    out.put(awaited.size_bytes);
  }
  out.put(static_cast<uint32_t>(leaving_.size()));
  for (const auto& [segment, leaving] : leaving_) {
    out.put(segment);
    out.put(leaving.place);
    out.put_text(leaving.tenant);
    out.put(leaving.size_bytes);
    put_sessions(out, leaving.mapped_by);
  }
  out.put(static_cast<uint32_t>(waiting_.size()));
  for (const Event& event : waiting_) put_event(out, event);
  out.put(static_cast<uint32_t>(copies_.size()));
  for (const auto& [id, copy] : copies_) {
    out.put(id);
    out.put(copy.request);
    out.put(copy.session);
    out.put(copy.pool);
    out.put(copy.group);
    out.put_list(copy.from);
    out.put_list(copy.to);
  }
}

void StateMachine::save_pool(const Pool& pool, ByteWriter& out) const {
  out.put(pool.id);
  out.put_text(pool.tenant);
  put_pool_spec(out, pool.spec);
  out.put_text(pool.attachment);
  out.put(static_cast<uint8_t>(pool.created));
  put_sessions(out, pool.sessions);
  out.put(static_cast<uint32_t>(pool.waiting.size()));
  for (const WaitingOpen& open : pool.waiting) {
    out.put(open.request);
    out.put(open.session);
    out.put(static_cast<uint8_t>(open.created));
  }
  for (const GroupExtents& extents : pool.extents)
    for (int64_t i = 0; i < extents.size(); ++i) {
      out.put(extents.at(i).state);
      if (extents.at(i).state == ExtentState::kAbsent) continue;
      out.put(extents.at(i).segment);
      put_sessions(out, extents.at(i).mapped_by);
    }
  pool.blocks.save(out);
}

Status StateMachine::load(std::span<const std::byte> snapshot) {
  LARDER_CHECK(last_session_ == 0 && pools_.empty(), last_session_, pools_.size());
  ByteReader in(snapshot);
  if (const auto version = in.get<uint32_t>(); version != kRecordVersion)
    return {ErrorCode::kUnsupported, "the snapshot has version " + std::to_string(version) +
                                         ", this build reads version " +
                                         std::to_string(kRecordVersion)};
  const std::string size = std::to_string(snapshot.size());
  if (!load_all(in) || !in.at_end())
    return {ErrorCode::kInternal, "the snapshot of " + size + " bytes is no state of this build"};
  try {
    recount();
  } catch (const Inconsistent& contradiction) {
    return {ErrorCode::kInternal,
            "the snapshot of " + size + " bytes contradicts itself: " + contradiction.what()};
  }
  return {};
}

bool StateMachine::load_all(ByteReader& in) {
  if (!ledger_.load(in)) return false;
  cache_id_ = in.get<uint64_t>();
  max_pools_ = in.get<uint64_t>();
  last_session_ = in.get<uint64_t>();
  last_pool_ = in.get<uint64_t>();
  last_segment_ = in.get<uint64_t>();
  last_copy_ = in.get<uint64_t>();
  if (!load_sessions(in)) return false;
  for (size_t i = in.count_of(1); i > 0; --i)
    if (!load_pool(in)) return false;
  if (!load_segments(in)) return false;
  for (size_t i = in.count_of(1); i > 0 && !in.failed(); --i) waiting_.push_back(get_event(in));
  if (!load_copies(in)) return false;
  for (const auto& [id, count] : count_unanswered())
    if (const auto session = sessions_.find(id); session != sessions_.end())
      session->second.unanswered = count;
  return true;
}

bool StateMachine::load_sessions(ByteReader& in) {
  for (size_t i = in.count_of(1); i > 0 && !in.failed(); --i) {
    Session& session = sessions_[in.get<SessionId>()];
    session.tenant = in.get_text();
    session.role = in.get_up_to(Role::kAdmin);
    session.attachment = in.get_text();
    session.absent = in.get_bool();
    const auto attached = in.get_list<PoolId>();
    session.pools = {attached.begin(), attached.end()};
    for (size_t answers = in.count_of(1); answers > 0 && !in.failed(); --answers) {
      const auto request = in.get<uint64_t>();
      session.answers.keep(request, get_reply(in));
    }
  }
  for (size_t i = in.count_of(1); i > 0 && !in.failed(); --i) {
    Closing& closing = closing_[in.get<SessionId>()];
    closing.fence = in.get_up_to(FenceClass::kUnprovable);
    const auto pools = in.get_list<PoolId>();
    closing.pools = {pools.begin(), pools.end()};
    closing.tenant = in.get_text();
    closing.attachment = in.get_text();
  }
  return !in.failed();
}

bool StateMachine::load_pool(ByteReader& in) {
  const PoolId id = in.get<PoolId>();
  std::string tenant = in.get_text();
  PoolSpec spec = get_pool_spec(in);
  if (in.failed() || !ledger_.knows(tenant) || !check_pool_spec(spec).ok()) return false;
  std::vector<GroupLayout> layouts;
  for (const GroupSpec& group : spec.groups) {
    Result<GroupLayout> layout = lay_out_group(group);
    if (!layout) return false;
    layouts.push_back(std::move(*layout));
  }
  PoolBlocks blocks(spec.groups, layouts);
  std::vector<GroupExtents> all_extents(layouts.begin(), layouts.end());
  Pool pool{id,
            std::move(tenant),
            std::move(spec),
            in.get_text(),
            std::move(layouts),
            std::move(all_extents),
            std::move(blocks),
            in.get_bool(),
            {},
            get_sessions(in)};
  for (size_t i = in.count_of(17); i > 0; --i) {
    const auto request = in.get<uint64_t>();
    const auto session = in.get<SessionId>();
    pool.waiting.push_back({request, session, in.get_bool()});
  }
  for (GroupExtents& extents : pool.extents)
    for (int64_t i = 0; i < extents.size() && !in.failed(); ++i) {
      const auto state = in.get_up_to(ExtentState::kLeaving);
      if (state == ExtentState::kAbsent) continue;
      extents.set(i, state, in.get<SegmentId>());
      for (const SessionId session : get_sessions(in)) extents.add_mapping(i, session);
    }
  if (in.failed() || !pool.blocks.load(in)) return false;
  pool_names_.emplace(std::pair(pool.tenant, pool.spec.name), id);
  return pools_.emplace(id, std::move(pool)).second;
}

bool StateMachine::load_segments(ByteReader& in) {
  for (size_t i = in.count_of(1); i > 0 && !in.failed(); --i) {
    AwaitedSegment& awaited = awaited_[in.get<SegmentId>()];
    awaited.place = in.get<Place>();
    awaited.tenant = in.get_text();
    awaited.size_bytes = in.get<int64_t>();
  }
  for (size_t i = in.count_of(1); i > 0 && !in.failed(); --i) {
    LeavingSegment& leaving = leaving_[in.get<SegmentId>()];
    leaving.place = in.get<Place>();
    leaving.tenant = in.get_text();
    leaving.size_bytes = in.get<int64_t>();
    leaving.mapped_by = get_sessions(in);
  }
  return !in.failed();
}

bool StateMachine::load_copies(ByteReader& in) {
  for (size_t i = in.count_of(1); i > 0; --i) {
    const auto id = in.get<uint64_t>();
    RunningCopy copy{in.get<uint64_t>(), in.get<SessionId>(),    in.get<PoolId>(),
                     in.get<uint32_t>(), in.get_list<int32_t>(), in.get_list<int32_t>()};
    const auto pool = pools_.find(copy.pool);
    if (in.failed() || pool == pools_.end() || copy.group >= pool->second.blocks.num_groups())
      return false;
    for (const auto& ids : {copy.from, copy.to})
      for (const int32_t block : ids)
        if (block < 0 || block >= pool->second.blocks.group(copy.group).used_limit()) return false;
    pool->second.blocks.restore_copy(copy.session, copy.group, copy.from, copy.to);
    if (!copies_.emplace(id, std::move(copy)).second) return false;
  }
  return !in.failed();
}

}  // namespace larder
