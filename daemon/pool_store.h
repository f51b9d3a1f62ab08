// PoolStore: the memory and the descriptions behind the state machine's ids.
//
// Holds for every pool what its creator stated, its segments' fds, and the ownership tables. It
// decides nothing. Thread rule: the loop's thread only.
#pragma once

#include <atomic>
#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "allocator/mapped_range.h"
#include "allocator/segment.h"
#include "allocator/state_machine.h"
#include "daemon/pool_counters.h"
#include "protocol/messages.h"

namespace larder::daemon {

// The ownership words of one group (allocator/owner_word.h), in a memfd that the executor maps too.
class OwnerTable {
 public:
  explicit OwnerTable(int64_t num_blocks);  // throws SystemError
  void set(int32_t block, uint64_t word);
  void set_all(const std::vector<uint64_t>& words);  // one per block
  int fd() const { return segment_.fd.get(); }
  static int64_t size_bytes(int64_t num_blocks);

 private:
  int64_t num_blocks_;
  Segment segment_;
  SharedMapping mapping_;
};

struct StoredGroup {
  protocol::GroupSpec spec;
  protocol::GroupLayout layout;
  OwnerTable owners;
  std::map<uint32_t, SegmentId> segment_ids;  // by extent, of those that are there
};

struct StoredPool {
  std::vector<StoredGroup> groups;
  SharedCounters counters;
  std::string tenant = {};
  std::string name = {};
  std::string device = {};  // whose memory it is (allocator/memory_devices.h)
  bool created = false;     // all its first segments are there
  int64_t unit_tokens = 1;
  std::vector<int32_t> blocks_per_unit = {};  // by group
};

class PoolStore {
 public:
  void add_pool(PoolId id, StoredPool pool) { pools_.emplace(id, std::move(pool)); }
  StoredPool* find(PoolId pool);
  const StoredPool* find(PoolId pool) const;
  const StoredPool* find(const std::string& tenant, const std::string& name) const;
  bool uses(const std::string& device) const;                // whether any pool is its memory
  bool is_on(PoolId pool, const std::string& device) const;  // false for a pool that is gone
  void remove_pool(PoolId pool) { pools_.erase(pool); }
  const std::map<PoolId, StoredPool>& pools() const { return pools_; }

  void add_segment(SegmentId id, Segment segment) { segments_.emplace(id, std::move(segment)); }
  void remove_segment(SegmentId id) { segments_.erase(id); }
  const Segment* find_segment(SegmentId id) const;
  int64_t num_segments() const { return std::ssize(segments_); }

 private:
  std::map<PoolId, StoredPool> pools_;
  std::map<SegmentId, Segment> segments_;
};

}  // namespace larder::daemon
