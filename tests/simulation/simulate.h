// simulate: worlds one after the other, until so many events have been applied.
#pragma once

#include <functional>
#include <optional>
#include <string>

#include "tests/simulation/coverage.h"
#include "tests/simulation/scene.h"

namespace larder::sim {

struct Run {
  uint64_t seed = 1;
  uint64_t num_events = 100'000;
  std::optional<uint64_t> only_episode;
  Options options;
  // Before each episode: the command that repeats it.
  std::function<void(const std::string&)> on_episode = [](const std::string&) {};
};

// Empty, or which invariant did not hold, and where. Coverage is added to.
std::string simulate(const Run& run, Coverage& coverage);

}  // namespace larder::sim
