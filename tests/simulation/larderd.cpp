#include "tests/simulation/larderd.h"

#include <algorithm>
#include <cstring>

#include "allocator/event_codec.h"
#include "tests/simulation/violation.h"
#include "tests/simulation/workload.h"

namespace larder::sim {
namespace {

constexpr size_t kSegmentCreatedKind = 7;
static_assert(
    std::is_same_v<std::variant_alternative_t<kSegmentCreatedKind, Event>, SegmentCreated>);

std::vector<std::byte> saved(const StateMachine& machine) {
  ByteWriter out;
  machine.save(out);
  return {out.bytes().begin(), out.bytes().end()};
}

// A record begins with its time and its choices; then comes the number of the event's kind.
size_t kind_of(std::span<const std::byte> record) {
  uint32_t num_choices = 0;
  std::memcpy(&num_choices, record.data() + 8, sizeof num_choices);
  return static_cast<size_t>(record[12 + 8 * size_t{num_choices}]);
}

}  // namespace

uint64_t journal_key() { return protocol::keeper_key(protocol::KeeperKind::kJournal, 0); }
uint64_t segment_key(SegmentId id) {
  return protocol::keeper_key(protocol::KeeperKind::kSegment, value(id));
}
uint64_t process_key(SessionId id) {
  return protocol::keeper_key(protocol::KeeperKind::kProcess, value(id));
}
uint64_t executor_key() { return protocol::keeper_key(protocol::KeeperKind::kExecutor, 0); }

Larderd::Larderd(Scene& scene)
    : scene_(scene),
      process_(std::make_shared<SimProcess>(++scene.last_pid)),
      machine_(*this),
      replica_(std::make_unique<StateMachine>()) {}

Larderd::~Larderd() = default;

void Larderd::apply(Event event) {
  activity_ = event.index();
  ++scene_.coverage.num_events;
  ++scene_.coverage.activities[activity_];
  scene_.crash.consider();
  scene_.crash.pass(activity_, CrashPoint::kBeforeApply);
  machine_.apply(std::move(event));
  scene_.crash.pass(activity_, CrashPoint::kAfterEffects);
}

// ----------------------------------------------------------------------------------------- memory

Status Larderd::create_segment(const CreateSegment& effect) {
  ++scene_.coverage.effects[Effect(effect).index()];
  scene_.crash.pass(activity_, CrashPoint::kBeforeEffect);
  check_quota(effect);
  if (scene_.faults && scene_.chance.one_in(24)) {
    scene_.coverage.add(Fault::kSegmentRefused);
    return {ErrorCode::kUnavailable, "the provider has no memory"};
  }
  Memories::Made made = scene_.memories.make();
  const auto records = machine().pool_records();
  const auto pool = std::ranges::find(records, effect.pool, &PoolRecord::pool);
  SIM_CHECK(pool != records.end(), "memory for no pool", value(effect.pool));
  const GroupLayout& layout = pool->layouts.at(effect.group);
  SIM_CHECK(layout.segment_bytes.at(effect.index) == effect.size_bytes, effect.size_bytes);
  made.memory->blocks.resize(static_cast<size_t>(layout.blocks_in(effect.index)));

  scene_.crash.pass(activity_, CrashPoint::kBeforeDeposit);
  if (scene_.crash.due(activity_, CrashPoint::kInFlight)) {
    scene_.keeper.send_and_die(*link_, protocol::KeeperOp::kPut, segment_key(effect.segment),
                               made.fd.get(), {});
    throw LarderdKilled();
  }
  if (Status status = scene_.keeper.put(*link_, segment_key(effect.segment), made.fd.get(), {});
      !status.ok())
    return status;
  scene_.books.segment_made(effect, pool->tenant, made.memory);
  segments_.emplace(effect.segment, Held{std::move(made.fd), made.memory});
  scene_.crash.pass(activity_, CrashPoint::kAfterDeposit);
  return {};
}

// Nobody takes what is guaranteed to another tenant, nor more than its own maximum.
void Larderd::check_quota(const CreateSegment& effect) const {
  const auto records = machine().pool_records();
  const auto pool = std::ranges::find(records, effect.pool, &PoolRecord::pool);
  SIM_CHECK(pool != records.end(), "memory for no pool", value(effect.pool));
  int64_t kept = 0;
  for (const TenantStats& tenant : machine().tenant_stats()) {
    if (tenant.name != pool->tenant) {
      kept += std::max(tenant.guaranteed_bytes, tenant.used_bytes);
      continue;
    }
    kept += tenant.used_bytes;
    SIM_CHECK(tenant.maximum_bytes == 0 || tenant.used_bytes <= tenant.maximum_bytes, tenant.name,
              tenant.used_bytes, tenant.maximum_bytes);
  }
  SIM_CHECK(kept <= machine().memory_bytes(), "a guarantee is lent to", pool->tenant, kept);
}

void Larderd::drop_segment(SegmentId segment) {
  ++scene_.coverage.effects[Effect(DropSegment{segment}).index()];
  scene_.crash.pass(activity_, CrashPoint::kBeforeEffect);
  const auto held = segments_.find(segment);
  SIM_CHECK(held != segments_.end(), "a segment that was never made is dropped", value(segment));
  scene_.check_nobody_maps(held->second.memory);
  scene_.crash.pass(activity_, CrashPoint::kBeforeDrop);
  if (scene_.crash.due(activity_, CrashPoint::kInFlight)) {
    scene_.keeper.send_and_die(*link_, protocol::KeeperOp::kDrop, segment_key(segment), -1, {});
    throw LarderdKilled();
  }
  // Without a keeper there is nothing to drop; a new one is given what is there then.
  (void)scene_.keeper.drop(*link_, segment_key(segment)).ok();
  scene_.books.segment_dropped(segment);
  segments_.erase(held);
  scene_.crash.pass(activity_, CrashPoint::kAfterDrop);
}

// ---------------------------------------------------------------------------------------- journal

// What a record names outlives this process already, or nothing does.
void Larderd::check_record(std::span<const std::byte> bytes) const {
  ByteReader in(bytes);
  const Record record = get_record(in);
  const auto& created = std::get<SegmentCreated>(record.event);
  if (!created.status.ok()) return;
  SIM_CHECK(segments_.contains(created.segment), "named before it is made", value(created.segment));
  SIM_CHECK(
      scene_.keeper.holds(segment_key(created.segment)) || !scene_.keeper.holds(journal_key()),
      "named before it is deposited", value(created.segment));
}

bool Larderd::append(std::span<const std::byte> record) {
  activity_ = kind_of(record);
  if (activity_ == kSegmentCreatedKind) {
    ++scene_.coverage.num_events;
    ++scene_.coverage.activities[activity_];
    scene_.crash.consider();
    scene_.crash.pass(activity_, CrashPoint::kBeforeApply);
    check_record(record);
  }
  scene_.crash.pass(activity_, CrashPoint::kBeforeRecord);
  // Now and then as if it were full, and where something is to happen to the checkpoint.
  if (scene_.chance.one_in(400) || scene_.crash.wants_checkpoint(activity_)) return false;
  const size_t from = journal_->used_bytes();
  const size_t length = Journal::bytes_needed(record.size());
  if (from + length > journal_memory_->bytes.size()) {
    SIM_CHECK(!journal_->append(record), "a record fits that is too long", length);
    return false;
  }
  if (scene_.crash.due(activity_, CrashPoint::kTornRecord)) {
    if (append_torn(record)) replay_on_replica(record);
    throw LarderdKilled();
  }
  SIM_CHECK(journal_->append(record), "a record does not fit", length);
  replay_on_replica(record);
  scene_.crash.pass(activity_, CrashPoint::kAfterRecord);
  return true;
}

void Larderd::replay_on_replica(std::span<const std::byte> record) {
  const Status status = replica_->replay(record);
  SIM_CHECK(status.ok(), status.to_string());
}

// Journal::append, killed between two of its stores: the header without its CRC, the payload, the
// CRC, the committed bytes. True if the record is complete, committed or not.
bool Larderd::append_torn(std::span<const std::byte> record) {
  const std::span<std::byte> memory(journal_memory_->bytes);
  const std::span<std::byte> place = memory.subspan(journal_->used_bytes());
  const size_t header = Journal::kRecordHeaderBytes;
  const std::vector<std::byte> before(place.begin(), place.begin() + header + record.size());
  const std::vector<std::byte> committed(memory.begin(), memory.begin() + sizeof(JournalHeader));
  SIM_CHECK(journal_->append(record), "a record does not fit", record.size());
  std::copy(committed.begin(), committed.end(), memory.begin());
  const auto undo = [&](size_t first, size_t last) {
    std::copy(before.begin() + static_cast<ptrdiff_t>(first),
              before.begin() + static_cast<ptrdiff_t>(last),
              place.begin() + static_cast<ptrdiff_t>(first));
  };
  const size_t stage = static_cast<size_t>(scene_.chance.below(4));
  if (stage == 3) return true;
  undo(0, sizeof(uint32_t));  // the CRC
  if (stage == 2) return false;
  if (stage == 1) {  // some words of the payload are there, in whatever order
    const bool in_order = scene_.chance.one_in(2);
    const auto stored = static_cast<size_t>(scene_.chance.below(record.size() + 1));
    if (in_order) undo(header + stored, header + record.size());
    for (size_t word = 0; !in_order && word < record.size(); word += 8)
      if (scene_.chance.one_in(2)) undo(header + word, header + std::min(word + 8, record.size()));
    return false;
  }
  undo(static_cast<size_t>(scene_.chance.below(header + 1)), header + record.size());
  return false;
}

Metadata Larderd::journal_metadata() const {
  Metadata metadata{};
  std::memcpy(metadata.data(), &cache_, sizeof cache_);
  return metadata;
}

void Larderd::checkpoint(std::span<const std::byte> snapshot) {
  Memories::Made made = scene_.memories.make();
  const size_t capacity = Journal::kHeaderBytes + Journal::bytes_needed(snapshot.size()) +
                          (size_t{4} << 10) + static_cast<size_t>(scene_.chance.below(60'000));
  made.memory->bytes.resize((capacity + 7) / 8 * 8);
  Journal next =
      Journal::start(made.memory->bytes, journal_ ? journal_->last_sequence() : 0, snapshot);
  scene_.crash.pass(activity_, CrashPoint::kBeforeCheckpoint);
  if (scene_.crash.due(activity_, CrashPoint::kInFlight)) {
    scene_.keeper.send_and_die(*link_, protocol::KeeperOp::kPut, journal_key(), made.fd.get(),
                               journal_metadata());
    scene_.expected[made.memory->number] = {snapshot.begin(), snapshot.end()};
    throw LarderdKilled();
  }
  // Where the keeper is gone, its successor is given this one.
  (void)scene_.keeper.put(*link_, journal_key(), made.fd.get(), journal_metadata()).ok();
  journal_fd_ = std::move(made.fd);
  journal_memory_ = made.memory;
  journal_ = next;
  replace_replica(snapshot);
  scene_.crash.pass(activity_, CrashPoint::kAfterCheckpoint);
}

// A machine that is made of the snapshot goes on as the one that it was taken of.
void Larderd::replace_replica(std::span<const std::byte> snapshot) {
  auto loaded = std::make_unique<StateMachine>();
  const Status status = loaded->load(snapshot);
  SIM_CHECK(status.ok(), status.to_string());
  const std::vector<std::byte> again = saved(*loaded);
  SIM_CHECK(std::ranges::equal(again, snapshot), "a snapshot is loaded as another one");
  replica_ = std::move(loaded);
}

void Larderd::check_replica() const {
  SIM_CHECK(saved(*replica_) == saved(machine()), "the records lead to another state");
}

// ------------------------------------------------------------------------------------- its end

void Larderd::is_killed() {
  if (journal_memory_ != nullptr) scene_.expected[journal_memory_->number] = saved(*replica_);
  for (const auto& connection : connections_) {
    connection->daemon_end = false;
    connection->to_daemon.clear();
    // What had reached the socket can still be read.
    while (!connection->to_client.empty() && scene_.chance.one_in(2))
      connection->to_client.pop_back();
  }
  for (const auto& executor : scene_.executors) executor->larderd_is_gone();
  process_->kill();
}

}  // namespace larder::sim
