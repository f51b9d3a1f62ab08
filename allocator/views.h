// What the state machine shows of itself: figures for metrics, larderctl and the status page.
//
// All of them are running counts, cheap enough to be read once a second.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "allocator/events.h"

namespace larder {

struct GroupStats {
  std::string name;
  // capacity = free + open + published + cached + quarantined, in blocks
  int64_t capacity = 0;
  int64_t free = 0;
  int64_t open = 0;
  int64_t published = 0;  // held by at least one session
  int64_t cached = 0;     // published, held by nobody: evictable once its children are
  int64_t quarantined = 0;
  // physical = used + slack, in bytes; used counts blocks that are not free, without padding
  int64_t physical_bytes = 0;
  int64_t used_bytes = 0;
  int64_t slack_bytes = 0;
};

struct PoolStats {
  PoolId pool;
  std::string tenant;
  std::string name;
  std::string model;
  Identity identity;
  bool creating = false;
  int64_t num_sessions = 0;
  std::vector<GroupStats> groups;
  // since the pool was created
  uint64_t allocated_blocks_total = 0;
  uint64_t evicted_blocks_total = 0;
  uint64_t published_blocks_total = 0;
  uint64_t lookup_tokens_total = 0;  // of lookups from the first block on
  uint64_t lookup_hit_tokens_total = 0;
};

struct SessionStats {
  SessionId session;
  std::string tenant;
  Role role;
  int64_t num_pools = 0;
  int64_t open_blocks = 0;
  int64_t holds = 0;  // on published blocks, counted with multiplicity
};

}  // namespace larder
