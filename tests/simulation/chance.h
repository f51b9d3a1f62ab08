// Chance: every decision of a simulated world comes from here, so that a seed is a whole history.
#pragma once

#include <cstddef>
#include <cstdint>
#include <iterator>

namespace larder::sim {

class Chance {
 public:
  Chance(uint64_t seed, uint64_t episode) : state_(seed * 0x9e3779b97f4a7c15u + episode) {
    for (int i = 0; i < 4; ++i) next();
  }

  // SplitMix64: the same numbers on every machine and with every library.
  uint64_t next() {
    uint64_t mixed = state_ += 0x9e3779b97f4a7c15u;
    mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9u;
    mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111ebu;
    return mixed ^ mixed >> 31;
  }
  // 0 to limit - 1; limit is positive.
  int below(size_t limit) { return static_cast<int>(next() % limit); }
  bool one_in(size_t times) { return below(times) == 0; }
  // An element; the container is not empty.
  template <typename Container>
  auto pick(Container& from) {
    return std::next(from.begin(), below(from.size()));
  }

 private:
  uint64_t state_;
};

// A number that depends on all bits of both.
constexpr uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t mixed = (a ^ b * 0x9e3779b97f4a7c15u) + 0x632be59bd9b4e019u;
  mixed = (mixed ^ mixed >> 29) * 0xbf58476d1ce4e5b9u;
  return mixed ^ mixed >> 32;
}

}  // namespace larder::sim
