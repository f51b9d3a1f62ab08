// Scene: what all actors of a simulated node share, and what only somebody who sees all of them can
// say: whether two may write to one block, and whether somebody still has a memory mapped.
#pragma once

#include <memory>
#include <vector>

#include "tests/simulation/books.h"
#include "tests/simulation/chance.h"
#include "tests/simulation/crash_plan.h"
#include "tests/simulation/keeper_host.h"

namespace larder::sim {

class Client;
class Executor;

struct Options {
  int check_every = 16;  // events from one recount of everything to the next
  // What a larderd that deposits pidfds alone would do: see README.md, "What larderd has to
  // deposit".
  bool pidfd_only = false;
  bool verbose = false;
};

struct Scene {
  Scene(uint64_t seed, uint64_t episode, const Options& with_options, Coverage& counted);
  ~Scene();

  // May the block be handed out to this client: nobody else, dead or alive, can write to it, and no
  // work on it is under way.
  void check_nobody_uses(const BlockName& name, const Client* but) const;
  bool is_in_a_copy(const BlockName& name) const;
  // A block of the live cache is about to be written by this session.
  void check_may_write(const BlockName& name, SessionId session) const;
  void check_nobody_maps(const Memory* memory) const;
  // Content of the blocks of a prefix that was found, or published, from unit `first_unit` on. A
  // complete one has every block that the groups need.
  void check_prefix(PoolId pool, const PoolSpec& spec, const Path& path, int64_t first_unit,
                    const std::vector<BlockRef>& blocks, bool complete) const;
  void log(const std::string& text) const;

  Chance chance;
  Coverage& coverage;
  const Options options;
  CrashPlan crash;
  Memories memories;
  Books books;
  KeeperHost keeper;
  int64_t now_us = 1'000'000;
  uint64_t cache = 0;  // that the books are about
  uint64_t last_pid = 0;
  bool faults = true;
  // What a journal (by its memory) leads to, by what is known of what its larderd did.
  std::map<uint64_t, std::vector<std::byte>> expected;
  std::vector<std::unique_ptr<Client>> clients;  // until their processes are gone
  std::vector<std::unique_ptr<Executor>> executors;
};

}  // namespace larder::sim
