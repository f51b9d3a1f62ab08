// The state that decides: who holds which block, which generation, which key, which memory.
//
// One deterministic machine: apply(event, now) -> effects, free of sockets, clocks, threads and
// CUDA. larderd feeds it from sessions; the simulation feeds it faults. The same events in the same
// order give the same effects, which is what a journal will replay. Every refusal leaves the state
// as it was. Thread rule: one thread at a time.
//
// Block states: free -> open (one writer) -> published (read-only, keyed) -> cached (published,
// nobody holds it) -> free. Quarantined: open when its session ended, until SessionFenced says that
// the session's process cannot write any more.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator/block_pool.h"
#include "allocator/events.h"
#include "allocator/views.h"

namespace larder {

struct MachineConfig {
  int64_t memory_bytes = 0;                  // all pools together
  std::map<std::string, std::string> salts;  // tenant -> salt; an unknown tenant opens no pool
  size_t max_pools = 1024;                   // of all tenants
};

class StateMachine {
 public:
  explicit StateMachine(MachineConfig config) : config_(std::move(config)) {}
  StateMachine(const StateMachine&) = delete;
  StateMachine& operator=(const StateMachine&) = delete;

  // Sessions, pools and blocks that the event names but that do not exist are refusals (a Reply
  // with a Status), never bugs. Daemon-made events (SegmentCreated, CopyDone, SessionFenced,
  // CloseSession) for things that are gone are ignored. Requests of a session that has closed
  // meanwhile get no Reply.
  Effects apply(const Event& event, int64_t now_us);

  std::vector<PoolStats> pool_stats() const;
  std::vector<SessionStats> session_stats() const;
  int64_t memory_bytes() const { return config_.memory_bytes; }  // the limit
  // Segments asked for and not yet dropped, all pools together.
  int64_t physical_bytes() const { return physical_bytes_; }
  // What SetOwnerWord has last said, for a new executor. Empty for a pool or group that is gone.
  std::vector<uint64_t> owner_words(PoolId pool, uint32_t group) const;
  // Recounts everything from scratch and checks it against the running figures (LARDER_CHECK).
  void check_consistency() const;

 private:
  struct Session {
    std::string tenant;
    Role role;
    std::set<PoolId> pools;  // attached
  };
  struct WaitingOpen {
    uint64_t request;
    SessionId session;
    bool created;
  };
  struct Pool {
    PoolId id;
    std::string tenant;
    PoolSpec spec;
    std::vector<GroupLayout> layouts;  // one per group, as are the block pools
    std::vector<BlockPool> block_pools;
    std::vector<SegmentId> segments;
    std::set<SegmentId> awaited;       // segments without a SegmentCreated
    std::vector<WaitingOpen> waiting;  // opens that its creation will answer
    std::set<SessionId> sessions;      // attached
    uint64_t lookup_tokens_total = 0;
    uint64_t lookup_hit_tokens_total = 0;

    bool creating() const { return !awaited.empty(); }
    int64_t physical_bytes() const;
  };
  struct RunningCopy {
    uint64_t request;
    SessionId session;
    PoolId pool;
    uint32_t group;
    std::vector<int32_t> from;
    std::vector<int32_t> to;
  };
  struct QuarantinedBlocks {
    PoolId pool;
    uint32_t group;
    std::vector<int32_t> blocks;
  };
  struct AwaitedSegment {
    PoolId pool;
    int64_t size_bytes;
  };
  // What a request on blocks is about, once it is known that the session may ask.
  struct Target {
    Pool* pool;
    BlockPool* blocks;
    uint32_t group;
  };
  // A request's reply, or nothing when a later event will bring it.
  using Answer = std::optional<ReplyBody>;

  void handle(const OpenSession& event);
  void handle(const CloseSession& event);
  void handle(const SessionFenced& event);
  void handle(const SegmentCreated& event);
  void handle(const CopyDone& event);
  Answer handle(const OpenPool& event);
  Answer handle(const ClosePool& event);
  Answer handle(const DestroyPool& event);
  Answer handle(const Allocate& event);
  Answer handle(const Release& event);
  Answer handle(const Publish& event);
  Answer handle(const Lookup& event);
  Answer handle(const Copy& event);

  Result<Session*> find_session(SessionId id, Role needed, std::string_view action);
  Result<Pool*> find_pool(const Session& session, PoolId id);
  Result<Target> find_target(SessionId session, PoolId pool, uint32_t group, Role needed,
                             std::string_view action);
  // Opens of the session that wait for a pool's creation go unanswered.
  void forget_waiting_opens(SessionId session);

  ReplyBody attach(Pool& pool, SessionId session, bool created);
  Answer open_existing(Pool& pool, const OpenPool& event);
  Answer create_pool(const OpenPool& event, const std::string& tenant);
  void finish_creation(Pool& pool);
  void undo_creation(Pool& pool, SegmentId failed, const Status& status);

  BlockKey root_key_of(const Pool& pool, const std::string& adapter) const;
  // SetOwnerWord for every word of the pool that has changed.
  void emit_words(Pool& pool);
  PoolStats stats_of(const Pool& pool) const;
  void check_pool(const Pool& pool) const;

  const MachineConfig config_;
  std::map<SessionId, Session> sessions_;
  std::map<SessionId, std::vector<QuarantinedBlocks>> fencing_;  // by the session that wrote them
  std::map<PoolId, Pool> pools_;
  std::map<std::pair<std::string, std::string>, PoolId> pool_names_;  // by (tenant, name)
  // Every CreateSegment without its SegmentCreated; of a pool whose creation was undone, too.
  std::map<SegmentId, AwaitedSegment> awaited_;
  std::map<uint64_t, RunningCopy> copies_;
  int64_t physical_bytes_ = 0;
  uint64_t last_pool_ = 0;
  uint64_t last_segment_ = 0;
  uint64_t last_copy_ = 0;

  // Of the event that is being applied.
  int64_t now_us_ = 0;
  Effects effects_;
};

}  // namespace larder
