// The order in which decisions are recorded and carried out, with a scripted outside.
#include "allocator/recorded_machine.h"

#include <algorithm>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/effect_text.h"
#include "tests/support/machine_driver.h"

namespace larder {
namespace {

using namespace test;

// Writes down what it is told, and checks that every effect's record has been kept before.
class Script : public Outside {
 public:
  int64_t now_us() override { return ++now; }
  Status create_segment(const CreateSegment& create) override {
    log.push_back("create " + std::to_string(value(create.segment)));
    return creation;
  }
  void drop_segment(SegmentId segment) override {
    log.push_back("drop " + std::to_string(value(segment)));
  }
  bool append(std::span<const std::byte> record) override {
    if (room-- == 0) return false;
    records.emplace_back(record.begin(), record.end());
    log.push_back("record");
    return true;
  }
  void checkpoint(std::span<const std::byte> bytes) override {
    snapshot.assign(bytes.begin(), bytes.end());
    records.clear();
    log.push_back("checkpoint");
  }
  void carry_out(Effect effect) override {
    if (const auto* fence = std::get_if<FenceSession>(&effect); fence && machine != nullptr)
      machine->apply(SessionFenced{fence->session});
    log.push_back(effect_texts({effect})[0].substr(0, 12));
  }
  JournalContents contents() const {
    JournalContents journal;
    journal.snapshot_sequence = 7;
    journal.snapshot = snapshot;
    journal.records.assign(records.begin(), records.end());
    return journal;
  }
  std::vector<std::string> take_log() { return std::exchange(log, {}); }

  int64_t now = 0;
  int64_t room = 1000;
  Status creation;
  std::vector<std::string> log;
  std::vector<std::byte> snapshot;
  std::vector<std::vector<std::byte>> records;
  RecordedMachine* machine = nullptr;  // to be told at once that a session is fenced
};

using Log = std::vector<std::string>;

struct Fixture {
  Fixture() {
    const auto empty = machine.snapshot();
    script.snapshot.assign(empty.begin(), empty.end());
    machine.apply(two_tenants(int64_t{1} << 30));
    machine.apply(OpenSession{SessionId{1}, "a", Role::kAdmin});
    script.take_log();
  }
  Script script;
  RecordedMachine machine{script};
};

TEST_CASE("a segment is made after its request is recorded, and told after its creation is") {
  Fixture f;
  f.machine.apply(OpenPool{1, SessionId{1}, growing_pool(8, 16)});
  CHECK(f.script.take_log() ==
        Log{"record", "create 1", "create 2", "record", "record", "pool created", "reply to 1.1"});
}

TEST_CASE("nothing is carried out before its record is kept; a full journal begins anew") {
  Fixture f;
  f.machine.apply(OpenPool{1, SessionId{1}, growing_pool(4, 16)});
  f.script.take_log();
  f.script.room = 0;
  f.machine.apply(Allocate{2, SessionId{1}, PoolId{1}, 0, 1});
  CHECK(f.script.take_log() == Log{"checkpoint", "word of bloc", "reply to 1.2"});
  // The checkpoint has the event in it.
  Script other;
  RecordedMachine recovered(other);
  REQUIRE(recovered.recover(f.script.contents()).ok());
  CHECK(saved(recovered.machine()) == saved(f.machine.machine()));
  CHECK(other.log.empty());
}

TEST_CASE("what changes nothing leaves no record") {
  Fixture f;
  f.machine.apply(Allocate{2, SessionId{1}, PoolId{1}, 0, 1});
  CHECK(f.script.take_log() == Log{"reply to 1.2"});
}

TEST_CASE("a creation that fails is recorded before it is told") {
  Fixture f;
  f.script.creation = Status(ErrorCode::kResourceExhausted, "no memory");
  f.machine.apply(OpenPool{1, SessionId{1}, growing_pool(8, 16)});
  CHECK(f.script.take_log() ==
        Log{"record", "create 1", "create 2", "record", "reply to 1.1", "record"});
  CHECK(f.machine.machine().physical_bytes() == 0);
}

TEST_CASE("an event that an effect brings comes after the effects of the one at hand") {
  Fixture f;
  f.script.machine = &f.machine;
  f.machine.apply(OpenPool{1, SessionId{1}, growing_pool(4, 16)});
  f.machine.apply(Allocate{2, SessionId{1}, PoolId{1}, 0, 1});
  f.script.take_log();
  f.machine.apply(CloseSession{SessionId{1}, FenceClass::kPidfd});
  CHECK(f.script.take_log() == Log{"record", "word of bloc", "fence 1 pidf", "record"});
  CHECK(f.machine.machine().unfenced_sessions().empty());
}

TEST_CASE("memory is dropped in its place among the effects") {
  Fixture f;
  f.machine.apply(OpenPool{1, SessionId{1}, growing_pool(8, 16)});
  f.machine.apply(ClosePool{2, SessionId{1}, PoolId{1}});
  f.script.take_log();
  f.machine.apply(DestroyPool{3, SessionId{1}, PoolId{1}});
  CHECK(f.script.take_log() == Log{"record", "pool destroy", "drop 1", "drop 2", "reply to 1.3"});
}

TEST_CASE("a journal makes the same machine at every length") {
  Fixture f;
  std::vector<std::vector<std::byte>> states;
  const auto apply = [&](const Event& event) {
    const size_t before = f.script.records.size();
    f.machine.apply(event);
    REQUIRE(f.script.records.size() > before);
    states.resize(f.script.records.size());
    states.back() = saved(f.machine.machine());
  };
  const SessionId session{1};
  apply(OpenPool{1, session, growing_pool(4, 16)});
  apply(Allocate{2, session, PoolId{1}, 0, 6});
  apply(Publish{3, session, PoolId{1}, "", {1, 2, 3, 4}, {{0, 1}}, {}});
  apply(Release{4, session, PoolId{1}, 0, {{0, 1}, {1, 1}}});
  apply(Lookup{5, session, PoolId{1}, "", {1, 2, 3, 4}, {}, true});
  apply(CloseSession{session, FenceClass::kPidfd});
  for (size_t length = 0; length <= f.script.records.size(); ++length) {
    JournalContents journal = f.script.contents();
    journal.records.resize(length);
    Script other;
    RecordedMachine recovered(other);
    REQUIRE(recovered.recover(journal).ok());
    recovered.machine().check_consistency();
    if (length > 0 && !states[length - 1].empty())
      CHECK(saved(recovered.machine()) == states[length - 1]);
  }
}

TEST_CASE("a record that does not fit is refused by its number, and so is another version") {
  Fixture f;
  f.machine.apply(OpenPool{1, SessionId{1}, growing_pool(4, 16)});
  JournalContents journal = f.script.contents();
  REQUIRE(journal.records.size() == 4);
  std::swap(journal.records[2], journal.records[3]);
  Script other;
  RecordedMachine first(other);
  check_status(first.recover(journal), ErrorCode::kInternal, {"record 10:", "kind 7"});
  journal = f.script.contents();
  journal.records[1] = journal.records[1].subspan(1);
  RecordedMachine second(other);
  check_status(second.recover(journal), ErrorCode::kInternal, {"record 9:", "no event"});
  f.script.snapshot[0] = std::byte{99};
  RecordedMachine third(other);
  check_status(third.recover(f.script.contents()), ErrorCode::kUnsupported,
               {"version 99", "version 1"});
}

}  // namespace
}  // namespace larder
