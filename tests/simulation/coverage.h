// Coverage: how often what has happened in a simulation, and where larderd was killed meanwhile.
#pragma once

#include <array>
#include <cstdint>
#include <string>
#include <string_view>

#include "allocator/effects.h"
#include "allocator/events.h"

namespace larder::sim {

inline constexpr size_t kNumEventKinds = std::variant_size_v<Event>;
inline constexpr size_t kNumEffectKinds = std::variant_size_v<Effect>;
// What larderd does besides events.
inline constexpr size_t kStarting = kNumEventKinds;
inline constexpr size_t kRedepositing = kNumEventKinds + 1;
inline constexpr size_t kNumActivities = kNumEventKinds + 2;

std::string_view activity_name(size_t activity);
std::string_view effect_name(size_t effect);

// Where larderd is killed. Those from kBeforeDeposit on are passed only by events that come there.
enum class CrashPoint : uint8_t {
  kBeforeApply,       // the event is known and has changed nothing
  kBeforeRecord,      // the machine has decided, the journal does not say so
  kTornRecord,        // in the middle of the stores of Journal::append
  kAfterRecord,       // the record is committed
  kBeforeEffect,      // before one of the effects, the first or a later one
  kAfterEffects,      // everything is done
  kBeforeDeposit,     // create_segment: the memory is made, the keeper has not got it
  kAfterDeposit,      // create_segment: the keeper has it, its creation is not decided
  kBeforeDrop,        // drop_segment: the keeper has it still
  kAfterDrop,         // drop_segment: the keeper has it no longer
  kBeforeCheckpoint,  // the new journal is written, the keeper has the old one
  kAfterCheckpoint,   // the keeper has the new one
  kInFlight,          // a message to the keeper was sent; it is read when larderd is dead
  kStep,              // between two steps of starting, or of depositing again
};
inline constexpr size_t kNumCrashPoints = 14;
std::string_view crash_point_name(CrashPoint point);

// Whether larderd comes past this point while it does this, so that it has to be killed there.
bool can_be_killed_at(size_t activity, CrashPoint point);

enum class Fault : uint8_t {
  kLarderdKilled,
  kKeeperKilled,
  kBothKilled,  // the cache is lost, and the next larderd must notice
  kExecutorKilled,
  kClientKilled,
  kClientKilledWithChild,
  kClientNeverReturns,
  kClientStopsReading,
  kClientStopsUnmapping,
  kSegmentRefused,
  kCopyFails,
  kCopyDoneTwice,
  kLateDeposit,  // a message of a dead larderd reaches the keeper after the next one's hello
  kClockJumpsBack,
  kClockJumpsForward,
  kDamagedJournal,  // on a copy: it must be refused
  kSecondLarderd,   // refused while the first one lives
};
inline constexpr size_t kNumFaults = 17;
std::string_view fault_name(Fault fault);

struct Coverage {
  uint64_t num_events = 0;
  std::array<uint64_t, kNumActivities> activities{};
  std::array<uint64_t, kNumEffectKinds> effects{};
  std::array<uint64_t, kNumErrorCodes> refusals{};
  std::array<uint64_t, kNumFaults> faults{};
  std::array<std::array<uint64_t, kNumCrashPoints>, kNumActivities> crashes{};
  uint64_t recoveries = 0;  // a larderd went on where another one was killed
  uint64_t resumed_sessions = 0;
  uint64_t checked_hits = 0;      // blocks whose content was compared
  uint64_t checked_sessions = 0;  // whose holds were compared one by one

  void add(Fault fault) { ++faults[static_cast<size_t>(fault)]; }
  uint64_t crashes_at(CrashPoint point) const;
  std::string table() const;
};

}  // namespace larder::sim
