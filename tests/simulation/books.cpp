#include "tests/simulation/books.h"

#include <algorithm>

#include "allocator/event_codec.h"
#include "tests/simulation/chance.h"
#include "tests/simulation/violation.h"

namespace larder::sim {

uint64_t content_for(const std::string& tenant, const std::string& pool, const Path& path,
                     size_t num_units, uint32_t group, int32_t slot) {
  uint64_t content = 1;
  for (const std::string& text : {tenant, pool})
    for (const char letter : text) content = mix(content, static_cast<uint8_t>(letter));
  for (size_t i = 0; i < num_units; ++i) content = mix(content, path[i]);
  return mix(mix(content, group), static_cast<uint64_t>(slot)) | 1;
}

// ----------------------------------------------------------------------------------------- memory

void Books::segment_made(const CreateSegment& effect, const std::string& tenant, Memory* memory) {
  const bool fresh = segments_
                         .emplace(effect.segment, Segment{tenant, effect.pool, effect.group,
                                                          effect.index, effect.size_bytes, memory})
                         .second;
  SIM_CHECK(fresh, "segment made twice", value(effect.segment));
}

void Books::segment_dropped(SegmentId segment) {
  SIM_CHECK(segments_.erase(segment) == 1, "unknown segment dropped", value(segment));
}

const Books::Segment& Books::segment(SegmentId id) const {
  const auto found = segments_.find(id);
  SIM_CHECK(found != segments_.end(), "unknown segment", value(id));
  return found->second;
}

// ---------------------------------------------------------------------------------------- effects

void Books::pool_created(const PoolRecord& record) {
  Pool pool{record.tenant, record.attachment, record.layouts, {}, {}};
  for (const GroupLayout& layout : record.layouts) {
    pool.extents.emplace_back(layout.segment_bytes.size(), SegmentId{0});
    pool.words.emplace_back(static_cast<size_t>(layout.num_blocks), 0);
  }
  for (const auto& [id, segment] : segments_)
    if (segment.pool == record.pool) pool.extents[segment.group][segment.index] = id;
  pools_[record.pool] = std::move(pool);
}

void Books::extent_added(const ExtentAdded& effect) {
  SegmentId& there = pools_.at(effect.pool).extents.at(effect.group).at(effect.index);
  SIM_CHECK(there == SegmentId{0}, "extent added twice", value(there), value(effect.segment));
  there = effect.segment;
}

void Books::extent_removed(const ExtentRemoved& effect) {
  SegmentId& there = pools_.at(effect.pool).extents.at(effect.group).at(effect.index);
  SIM_CHECK(there == effect.segment, "another extent", value(there), value(effect.segment));
  there = SegmentId{0};
}

void Books::word_changed(const SetOwnerWord& effect) {
  pools_.at(effect.pool).words.at(effect.group).at(static_cast<size_t>(effect.block)) = effect.word;
}

// --------------------------------------------------------------------------------------- requests

void Books::request_taken(SessionId session, uint64_t number) { ++asked_[session][number].times; }

bool Books::request_answered(SessionId session, uint64_t number, const ReplyBody& body, bool kept) {
  const auto of_session = asked_.find(session);
  if (of_session == asked_.end()) return false;  // it has ended
  const auto found = of_session->second.find(number);
  SIM_CHECK(found != of_session->second.end(), "answer to nothing", value(session), number);
  Asked& asked = found->second;
  SIM_CHECK(++asked.answers <= asked.times, "answered too often", value(session), number,
            asked.answers);
  if (std::holds_alternative<Status>(body)) {
    SIM_CHECK(asked.carried_out.empty(), "refused after it was carried out", value(session), number,
              std::get<Status>(body).to_string());
    return false;
  }
  if (!kept) return false;
  ByteWriter out;
  put_reply(out, body);
  std::vector<std::byte> bytes(out.bytes().begin(), out.bytes().end());
  SIM_CHECK(asked.carried_out.empty() || asked.carried_out == bytes, "two different answers",
            value(session), number);
  const bool first = asked.carried_out.empty();
  asked.carried_out = std::move(bytes);
  return first;
}

void Books::request_over(SessionId session, uint64_t number) {
  if (const auto found = asked_.find(session); found != asked_.end()) found->second.erase(number);
}

void Books::forget_session(SessionId session) { asked_.erase(session); }

void Books::handed_out(const BlockName& name, uint32_t generation) {
  uint32_t& last = generations_[name];
  SIM_CHECK(generation > last, "a generation is handed out again", value(name.pool), name.group,
            name.block, generation, last);
  last = generation;
}

// ---------------------------------------------------------------------------------------- content

uint64_t* Books::content(const BlockName& name) const {
  const auto pool = pools_.find(name.pool);
  if (pool == pools_.end()) return nullptr;
  const GroupLayout& layout = pool->second.layouts.at(name.group);
  const auto extent = static_cast<size_t>(layout.extent_of(name.block));
  const SegmentId segment = pool->second.extents[name.group].at(extent);
  if (segment == SegmentId{0}) return nullptr;
  const int64_t first = layout.first_block(static_cast<int64_t>(extent));
  return &this->segment(segment).memory->blocks.at(static_cast<size_t>(name.block - first));
}

uint64_t Books::word(const BlockName& name) const {
  const auto pool = pools_.find(name.pool);
  SIM_CHECK(pool != pools_.end(), "no such pool", value(name.pool));
  return pool->second.words.at(name.group).at(static_cast<size_t>(name.block));
}

// ----------------------------------------------------------------------------------- agreement

void Books::new_cache() { *this = Books(); }

void Books::recovered(const StateMachine& machine) {
  std::map<SegmentId, Segment> named;
  for (const SegmentRecord& record : machine.segments()) {
    const Segment& known = segment(record.segment);
    SIM_CHECK(known.size_bytes == record.size_bytes && known.pool == record.pool &&
                  known.group == record.group && known.index == record.index,
              "the journal has another place for segment", value(record.segment));
    named.emplace(record.segment, known);
  }
  segments_ = std::move(named);
  pools_.clear();
  for (const PoolRecord& record : machine.pool_records())
    if (record.created) pool_created(record);
  for (const SegmentRecord& record : machine.segments())
    if (const auto pool = pools_.find(record.pool); record.leaving && pool != pools_.end())
      pool->second.extents[record.group][record.index] = SegmentId{0};
  for (auto& [id, pool] : pools_)
    for (uint32_t group = 0; group < pool.words.size(); ++group)
      pool.words[group] = machine.owner_words(id, group);
}

void Books::check_words(const StateMachine& machine) const {
  for (const auto& [id, pool] : pools_)
    for (uint32_t group = 0; group < pool.words.size(); ++group)
      SIM_CHECK(machine.owner_words(id, group) == pool.words[group], "owner words", value(id),
                group);
}

void Books::check(const StateMachine& machine) const {
  std::map<std::string, int64_t> used;
  for (const auto& [id, segment] : segments_) used[segment.tenant] += segment.size_bytes;
  int64_t sum = 0;
  for (const TenantStats& tenant : machine.tenant_stats()) {
    SIM_CHECK(tenant.used_bytes == used[tenant.name], tenant.name, tenant.used_bytes,
              used[tenant.name]);
    sum += tenant.used_bytes;
  }
  SIM_CHECK(sum == machine.physical_bytes() && sum <= machine.memory_bytes(), sum,
            machine.physical_bytes(), machine.memory_bytes());
  size_t created = 0;
  for (const PoolStats& pool : machine.pool_stats()) {
    created += pool.creating ? 0 : 1;
    for (const GroupStats& group : pool.groups) {
      SIM_CHECK(group.capacity ==
                    group.free + group.open + group.published + group.cached + group.quarantined,
                pool.name, group.name, group.capacity);
      SIM_CHECK(group.physical_bytes == group.used_bytes + group.slack_bytes &&
                    group.slack_bytes >= 0 && group.evictable <= group.cached,
                pool.name, group.name, group.physical_bytes, group.used_bytes);
    }
  }
  SIM_CHECK(created == pools_.size(), created, pools_.size());
  check_words(machine);
}

}  // namespace larder::sim
