#include "tests/simulation/simulate.h"

#include "tests/simulation/violation.h"
#include "tests/simulation/world.h"

namespace larder::sim {
namespace {

// Long enough for every pool to come, fill up and go several times.
constexpr uint64_t kMinEvents = 4'000;
constexpr uint64_t kMoreEvents = 12'000;

std::string repeat_command(const Run& run, uint64_t episode) {
  std::string command = "larder-sim --seed " + std::to_string(run.seed) + " --episode " +
                        std::to_string(episode) + " --only-check-every " +
                        std::to_string(run.options.check_every);
  if (run.options.pidfd_only) command += " --pidfd-only";
  return command;
}

}  // namespace

std::string simulate(const Run& run, Coverage& coverage) {
  const uint64_t end = coverage.num_events + run.num_events;
  const uint64_t first = run.only_episode.value_or(0);
  for (uint64_t episode = first; coverage.num_events < end; ++episode) {
    run.on_episode(repeat_command(run, episode));
    uint64_t steps = 0;
    try {
      const size_t descriptors = open_descriptors();
      {
        World world(run.seed, episode, run.options, coverage);
        // Decided by the episode alone, so that it is the same one when it is run by itself.
        const uint64_t length = kMinEvents + mix(run.seed, episode) % kMoreEvents;
        const uint64_t until = coverage.num_events + length;
        while (coverage.num_events < until) {
          ++steps;
          world.step();
        }
        world.drain();
      }
      SIM_CHECK(open_descriptors() == descriptors, "descriptors are left", open_descriptors(),
                descriptors);
    } catch (const std::exception& violation) {
      return "seed " + std::to_string(run.seed) + ", episode " + std::to_string(episode) +
             ", step " + std::to_string(steps) + ": " + violation.what();
    }
    if (run.only_episode) break;
  }
  return {};
}

}  // namespace larder::sim
