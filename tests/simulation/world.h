// World: a simulated node from its start to its end. One seed and one number of an episode make one
// history, whatever the machine that it runs on.
#pragma once

#include "tests/simulation/client.h"
#include "tests/simulation/larderd.h"
#include "tests/simulation/scene.h"

namespace larder::sim {

class World {
 public:
  World(uint64_t seed, uint64_t episode, const Options& options, Coverage& coverage);

  // One thing happens. Throws Violation when an invariant does not hold.
  void step();
  // Faults end, everybody leaves, and nothing may be left of anything.
  void drain();

 private:
  void pass_time();
  void change_population();
  void break_something();
  void kill_larderd();
  void run_larderd(int times);
  void start_larderd();
  void try_second_larderd();
  void run_others();
  void forget_the_gone();
  bool is_drained();

  // world_checks.cpp
  void check();
  void compare_counts() const;
  void compare_holds() const;
  void probe_guarantees();
  void check_drained() const;

  Scene scene_;
  std::unique_ptr<Larderd> larderd_;
  std::vector<std::shared_ptr<SimProcess>> old_larderds_;  // killed, and not yet gone
  size_t population_;
  uint64_t checked_at_ = 0;
  uint64_t compared_at_ = 0;
  bool draining_ = false;
};

}  // namespace larder::sim
