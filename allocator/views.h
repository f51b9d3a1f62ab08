// What the state machine shows of itself: figures for metrics, larderctl and the status page.
//
// All of them are running counts, cheap enough to be read once a second.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "allocator/extent.h"
#include "allocator/pool_spec.h"
#include "allocator/types.h"

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
  int64_t max_blocks = 0;                   // of a group that grows; else its capacity
  int64_t evictable = 0;                    // cached blocks that nothing in use depends on
  int64_t by_fence[kNumFenceClasses] = {};  // quarantined, by class; kFenced: wait for a copy
  int64_t leaving_bytes = 0;  // given back, but still mapped by sessions; not in physical_bytes
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
  int64_t holds = 0;            // on published blocks, counted with multiplicity
  bool absent = false;          // the daemon has restarted and the client has not come back yet
  int64_t unmapping_bytes = 0;  // that the session has been asked to unmap
};

struct TenantStats {
  std::string name;
  int64_t guaranteed_bytes = 0;
  int64_t maximum_bytes = 0;  // 0: none
  int64_t used_bytes = 0;     // leaving ones included
  int64_t evictable_bytes = 0;
  int64_t leaving_bytes = 0;
};

// What the daemon needs to have of a pool again after a restart.
struct PoolRecord {
  PoolId pool;
  std::string tenant;
  bool created;
  std::string attachment;
  std::vector<GroupLayout> layouts;
  std::vector<SessionId> sessions;  // attached
};

struct SessionAttachment {
  SessionId session;
  std::string tenant;
  Role role;
  std::string attachment;
};

struct UnfencedSession {
  SessionId session;
  FenceClass fence;
  std::string tenant;
  std::string attachment;  // what the session had
};

struct SegmentRecord {
  SegmentId segment;
  PoolId pool;
  uint32_t group;
  uint32_t index;
  int64_t size_bytes;
  bool leaving;
};

}  // namespace larder
