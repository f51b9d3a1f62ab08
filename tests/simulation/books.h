// Books: what has to be true of the node, kept from requests, replies and effects alone.
//
// They know nothing of how the machine works. The contents of blocks are one number each: what the
// tokens up to the block's end make of it (content_for), or garbage.
#pragma once

#include <map>
#include <set>
#include <string>
#include <tuple>
#include <vector>

#include "allocator/state_machine.h"
#include "tests/simulation/memories.h"

namespace larder::sim {

// A prefix: for each unit which of a few texts it has.
using Path = std::vector<uint8_t>;

struct BlockName {
  PoolId pool;
  uint32_t group;
  int32_t block;
  auto operator<=>(const BlockName&) const = default;
};

uint64_t content_for(const std::string& tenant, const std::string& pool, const Path& path,
                     size_t num_units, uint32_t group, int32_t slot);

class Books {
 public:
  struct Segment {
    std::string tenant;
    PoolId pool;
    uint32_t group;
    uint32_t index;
    int64_t size_bytes;
    Memory* memory;
  };
  struct Pool {
    std::string tenant;
    std::string name;
    std::vector<GroupLayout> layouts;
    std::vector<std::vector<SegmentId>> extents;  // [group][index], 0: none
    std::vector<std::vector<uint64_t>> words;     // [group][block]
  };

  // ------------------------------------------------------------------------------------ memory
  void segment_made(const CreateSegment& effect, const std::string& tenant, Memory* memory);
  void segment_dropped(SegmentId segment);
  const Segment& segment(SegmentId id) const;
  const std::map<SegmentId, Segment>& segments() const { return segments_; }

  // ------------------------------------------------------------------------------------ effects
  // Its attachment is its name.
  void pool_created(const PoolRecord& record);
  void pool_destroyed(PoolId pool) { pools_.erase(pool); }
  void extent_added(const ExtentAdded& effect);
  void extent_removed(const ExtentRemoved& effect);
  void word_changed(const SetOwnerWord& effect);
  const std::map<PoolId, Pool>& pools() const { return pools_; }

  // ----------------------------------------------------------------------------------- requests
  void request_taken(SessionId session, uint64_t number);
  // At most one answer each time it was asked; and the same one if it was carried out.
  // True the first time that it is told to have been carried out. `kept`: unless it is a refusal,
  // it has changed something, and the answer is the same for ever.
  bool request_answered(SessionId session, uint64_t number, const ReplyBody& body, bool kept);
  void request_over(SessionId session, uint64_t number);  // the client has the answer
  void forget_session(SessionId session);
  // The block was never handed out under this generation.
  void handed_out(const BlockName& name, uint32_t generation);

  // ------------------------------------------------------------------------------------ content
  // Where a block's content is now; null where its extent is not there.
  uint64_t* content(const BlockName& name) const;
  uint64_t word(const BlockName& name) const;

  // A larderd has started: from its journal, or with a new cache.
  void recovered(const StateMachine& machine);
  void new_cache();
  // Everything that both know agrees.
  void check(const StateMachine& machine) const;

 private:
  struct Asked {
    int times = 0;
    int answers = 0;
    std::vector<std::byte> carried_out;  // the answer that was no refusal
  };
  void check_words(const StateMachine& machine) const;

  std::map<SegmentId, Segment> segments_;
  std::map<PoolId, Pool> pools_;
  std::map<SessionId, std::map<uint64_t, Asked>> asked_;
  std::map<BlockName, uint32_t> generations_;
};

}  // namespace larder::sim
