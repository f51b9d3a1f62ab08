// A few short histories of a simulated node, and the proof that they were no quiet ones. larder-sim
// runs long ones (README.md).
#include <doctest/doctest.h>

#include "tests/simulation/keeper_host.h"
#include "tests/simulation/simulate.h"
#include "tests/simulation/violation.h"
#include "tests/support/random.h"

namespace larder::sim {
namespace {

Run run_of(uint64_t seed, uint64_t num_events) {
  Run run;
  run.seed = seed;
  run.num_events = num_events;
  return run;
}

TEST_CASE("nothing is lost, leaked or handed out twice, wherever a process of the node is killed") {
  Coverage coverage;
  for (const uint64_t seed : {1, 2, 3, 4}) {
    const std::string failure = simulate(run_of(seed, 100'000), coverage);
    REQUIRE_MESSAGE(failure.empty(), failure);
  }
  INFO(coverage.table());
  for (size_t activity = 0; activity < kNumActivities; ++activity)
    for (size_t i = 0; i < kNumCrashPoints; ++i) {
      const auto point = static_cast<CrashPoint>(i);
      if (!can_be_killed_at(activity, point)) continue;
      CAPTURE(activity_name(activity));
      CAPTURE(crash_point_name(point));
      CHECK(coverage.crashes[activity][i] >= 1);
    }
  for (size_t effect = 0; effect < kNumEffectKinds; ++effect) {
    CAPTURE(effect_name(effect));
    CHECK(coverage.effects[effect] >= 20);
  }
  for (size_t fault = 0; fault < kNumFaults; ++fault) {
    CAPTURE(fault_name(static_cast<Fault>(fault)));
    CHECK(coverage.faults[fault] >= 5);
  }
  for (const ErrorCode code :
       {ErrorCode::kInvalidArgument, ErrorCode::kUnsupported, ErrorCode::kResourceExhausted,
        ErrorCode::kNotFound, ErrorCode::kStaleGeneration, ErrorCode::kStaleSession,
        ErrorCode::kPermissionDenied, ErrorCode::kBusy, ErrorCode::kDeadlineExceeded,
        ErrorCode::kUnavailable})
    CHECK_MESSAGE(coverage.refusals[static_cast<size_t>(code)] >= 1, error_code_name(code));
  CHECK(coverage.recoveries >= 300);
  CHECK(coverage.resumed_sessions >= 1000);
  CHECK(coverage.checked_hits >= 10'000);
  CHECK(coverage.checked_sessions >= 500);
}

TEST_CASE("nor in a history that nobody has looked at") {
  Coverage coverage;
  const std::string failure = simulate(run_of(test::seed(), 50'000), coverage);
  CHECK_MESSAGE(failure.empty(), failure);
}

TEST_CASE("one seed makes one history") {
  Coverage first;
  Coverage second;
  CHECK(simulate(run_of(4, 20'000), first) == simulate(run_of(4, 20'000), second));
  CHECK(first.table() == second.table());
}

TEST_CASE("an episode by itself is the one that it is among others") {
  Coverage all;
  Coverage some;
  Run run = run_of(5, 1);
  REQUIRE(simulate(run, all) == "");
  run.only_episode = 1;
  Coverage alone;
  REQUIRE(simulate(run, alone) == "");
  run.only_episode.reset();
  run.num_events = all.num_events + 1;
  REQUIRE(simulate(run, some) == "");
  CHECK(some.num_events == all.num_events + alone.num_events);
  CHECK(some.recoveries == all.recoveries + alone.recoveries);
  CHECK(some.checked_hits == all.checked_hits + alone.checked_hits);
}

TEST_CASE("a larderd that deposits pidfds alone is found to hand out what a child still writes") {
  Run run = run_of(1, 300'000);
  run.options.pidfd_only = true;
  Coverage coverage;
  const std::string failure = simulate(run, coverage);
  // Whichever of its blocks and its memory the seed comes to first.
  const bool blamed = failure.find("two writers of block") != std::string::npos ||
                      failure.find("dropped that somebody maps") != std::string::npos;
  CHECK_MESSAGE(blamed, failure);
}

}  // namespace
}  // namespace larder::sim
