// Snapshots and records that have been damaged: a Status, or a state that is sound.
#include <algorithm>

#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"
#include "tests/support/random.h"

namespace larder {
namespace {

using namespace test;
using Bytes = std::vector<std::byte>;

constexpr int64_t kMiB = int64_t{1} << 20;

// A state with something of everything, and the records that made it.
struct Eventful {
  Eventful() {
    apply(Configure{64 * kMiB, 8, {{"a", "salt a", 8 * kMiB, 0}, {"b", "salt b", 0, 40 * kMiB}}});
    for (uint64_t id = 1; id <= 5; ++id)
      apply(OpenSession{SessionId{id}, id == 4 ? "b" : "a", Role::kAdmin, "attached"});
    PoolSpec spec = growing_pool(8, 22);
    spec.groups.push_back({"window", 1 << 20, 8, 4});
    spec.groups[1].kind = GroupKind::kWindow;
    spec.groups[1].window_tokens = 4;
    spec.groups[1].max_blocks = 16;
    spec.groups[1].segment_bytes = 4 * kMiB;
    for (uint64_t id : {1, 2, 3, 5}) settle(OpenPool{1, SessionId{id}, spec, "pool"});
    const auto a = allocate(1, 0, 6);
    const auto w = allocate(1, 1, 4);
    apply(MapExtents{4, SessionId{2}, PoolId{1}, 0, 0, 3});
    apply(Publish{
        5, SessionId{1}, PoolId{1}, "", {1, 2, 3, 4, 5, 6, 7, 8}, {a[0], {-1, 0}, a[1], w[0]}, {}});
    apply(Lookup{6, SessionId{2}, PoolId{1}, "", {1, 2, 3, 4, 5, 6, 7, 8}, {}, true});
    apply(Copy{7, SessionId{1}, PoolId{1}, 0, {a[0], a[2]}, {a[3], a[4]}});
    const auto b = allocate(3, 0, 2);
    apply(Copy{8, SessionId{3}, PoolId{1}, 0, {b[0]}, {b[1]}});
    apply(CloseSession{SessionId{3}, FenceClass::kUnprovable});
    allocate(5, 1, 2);
    apply(CloseSession{SessionId{5}, FenceClass::kPidfd});
    settle(ResizePool{9, SessionId{2}, PoolId{1}, 0, 16});
    apply(MapExtents{10, SessionId{2}, PoolId{1}, 0, 0, 5});
    apply(ResizePool{11, SessionId{2}, PoolId{1}, 0, 12});
    apply(Allocate{12, SessionId{2}, PoolId{1}, 0, 9});
    apply(Release{13, SessionId{1}, PoolId{1}, 1, {w[0], w[1]}});
    PoolSpec other = growing_pool(4, 8);
    other.name = "other";
    apply(OpenPool{14, SessionId{4}, other});
    apply(OpenPool{15, SessionId{4}, other});
    apply(SetQuota{16, SessionId{1}, "b", 4 * kMiB, 0});
  }
  Effects apply(const Event& event) {
    Effects effects = machine.apply(event, ++now);
    machine.check_consistency();
    if (const auto record = machine.record(); !record.empty()) {
      states.push_back(state);
      records.emplace_back(record.begin(), record.end());
      state = saved(machine);
    }
    return effects;
  }
  void settle(const Event& event) {
    for (const CreateSegment& create : effects_of<CreateSegment>(apply(event)))
      apply(SegmentCreated{create.segment, {}});
  }
  std::vector<BlockRef> allocate(uint64_t session, uint32_t group, int64_t count) {
    const auto replies =
        effects_of<Reply>(apply(Allocate{2 + group, SessionId{session}, PoolId{1}, group, count}));
    return std::get<BlocksAllocated>(replies.at(0).body).blocks;
  }
  StateMachine machine;
  int64_t now = 0;
  Bytes state = saved(machine);
  std::vector<Bytes> states;  // before each record
  std::vector<Bytes> records;
};

// Whatever was loaded is taken through the end of everything in it.
void live_on(StateMachine& machine) {
  machine.check_consistency();
  const auto apply = [&](const Event& event) {
    Effects effects = machine.apply(event, 1000);
    machine.check_consistency();
    return effects;
  };
  for (const Effect& effect : apply(Recovered{}))
    if (const auto* create = std::get_if<CreateSegment>(&effect))
      apply(SegmentCreated{create->segment, {}});
  for (uint64_t copy = 1; copy <= 3; ++copy) apply(CopyDone{copy, {}});
  for (const SegmentRecord& segment : machine.segments())
    for (const SessionStats& session : machine.session_stats())
      apply(SegmentUnmapped{segment.segment, session.session});
  for (const UnfencedSession& unfenced : machine.unfenced_sessions())
    apply(SessionFenced{unfenced.session});
  for (const SessionStats& session : machine.session_stats()) {
    apply(EvictBlocks{100, session.session, PoolId{1}, 1000});
    apply(Allocate{101, session.session, PoolId{1}, 0, 5});
    apply(ResizePool{102, session.session, PoolId{1}, 0, 0});
    apply(CloseSession{session.session, FenceClass::kFenced});
  }
  if (machine.last_session() >> 62 != 0 || (machine.last_session() + 1) >> 62 != 0) return;
  for (const PoolStats& pool : machine.pool_stats()) {
    const SessionId admin{machine.last_session() + 1};
    apply(OpenSession{admin, pool.tenant, Role::kAdmin});
    apply(DestroyPool{1, admin, pool.pool});
  }
}

TEST_CASE("the state of every record can be saved, loaded and gone on from") {
  Eventful eventful;
  CHECK(eventful.records.size() > 30);
  eventful.states.push_back(eventful.state);
  for (size_t i = 0; i < eventful.records.size(); ++i) {
    CAPTURE(i);
    StateMachine loaded;
    REQUIRE(loaded.load(eventful.states[i]).ok());
    REQUIRE(saved(loaded) == eventful.states[i]);
    const Status replayed = loaded.replay(eventful.records[i]);
    REQUIRE_MESSAGE(replayed.ok(), replayed.to_string());
    REQUIRE(saved(loaded) == eventful.states[i + 1]);
    live_on(loaded);
  }
}

TEST_CASE("a snapshot that was cut off is refused at every length") {
  Eventful eventful;
  for (size_t size = 0; size < eventful.state.size(); ++size) {
    StateMachine machine;
    REQUIRE(!machine.load(std::span(eventful.state).first(size)).ok());
  }
  Bytes longer = eventful.state;
  longer.push_back(std::byte{0});
  StateMachine machine;
  check_status(machine.load(longer), ErrorCode::kInternal, {"is no state"});
}

TEST_CASE("a snapshot with any byte changed is refused or sound") {
  INFO("seed " << seed());
  auto random = random_engine(71);
  Eventful eventful;
  for (size_t at = 0; at < eventful.state.size(); ++at) {
    CAPTURE(at);
    for (const int change : {1, 0x80, 0xff, static_cast<int>(random() % 255) + 1}) {
      CAPTURE(change);
      Bytes bytes = eventful.state;
      bytes[at] ^= static_cast<std::byte>(change);
      StateMachine machine;
      if (machine.load(bytes).ok()) live_on(machine);
    }
  }
}

TEST_CASE("a snapshot with several bytes changed is refused or sound") {
  INFO("seed " << seed());
  auto random = random_engine(72);
  Eventful eventful;
  for (int round = 0; round < 3000; ++round) {
    CAPTURE(round);
    Bytes bytes = eventful.state;
    for (uint64_t i = random() % 4; i < 5; ++i)
      bytes[random() % bytes.size()] = static_cast<std::byte>(random() % 8 == 0 ? random() : 0);
    StateMachine machine;
    if (machine.load(bytes).ok()) live_on(machine);
  }
}

TEST_CASE("a record that was cut off or changed is refused, or leaves a sound state") {
  INFO("seed " << seed());
  auto random = random_engine(73);
  Eventful eventful;
  for (size_t i = 0; i < eventful.records.size(); ++i) {
    CAPTURE(i);
    const Bytes& record = eventful.records[i];
    for (size_t at = 0; at < record.size(); ++at) {
      CAPTURE(at);
      StateMachine cut;
      REQUIRE(cut.load(eventful.states[i]).ok());
      REQUIRE(!cut.replay(std::span(record).first(at)).ok());
      Bytes bytes = record;
      bytes[at] ^= static_cast<std::byte>(random() % 255 + 1);
      StateMachine changed;
      REQUIRE(changed.load(eventful.states[i]).ok());
      if (changed.replay(bytes).ok()) live_on(changed);
    }
  }
}

TEST_CASE("records in the wrong order are refused, or leave a sound state") {
  Eventful eventful;
  for (const Bytes& state : eventful.states)
    for (const Bytes& record : eventful.records) {
      StateMachine machine;
      REQUIRE(machine.load(state).ok());
      if (machine.replay(record).ok()) machine.check_consistency();
    }
}

}  // namespace
}  // namespace larder
