// One seed for every random test of a program: printed when a test fails, chosen by --seed=N.
#pragma once

#include <cstddef>
#include <cstdint>
#include <random>
#include <vector>

namespace larder::test {

// The program's seed. Fresh at every start unless --seed=N was given.
uint64_t seed();

// A generator that depends on the seed and on `stream` alone, so that tests do not influence each
// other's draws.
inline std::mt19937_64 random_engine(uint64_t stream) {
  std::seed_seq sequence{seed(), stream};
  return std::mt19937_64(sequence);
}

inline std::vector<float> random_values(size_t count, uint64_t stream) {
  auto engine = random_engine(stream);
  std::normal_distribution<float> normal;
  std::vector<float> values(count);
  for (float& value : values) value = normal(engine);
  return values;
}

}  // namespace larder::test
