// The state that decides: who holds which block, which generation, which key, which memory.
//
// One deterministic machine: apply(event, now) -> effects, free of sockets, clocks, threads and
// CUDA. larderd feeds it from sessions; the simulation feeds it faults. Every refusal leaves the
// state as it was. Thread rule: one thread at a time.
//
// record() is what the last event has to leave in a journal: the event and the choices made for it,
// empty when nothing has changed. A machine that is given the snapshot and then the records, in
// order, is in the same state. Nothing that an effect says may be acted on before its record is
// kept (allocator/recorded_machine.h).
//
// Block states: free -> open (one writer) -> published (read-only, keyed) -> cached (published,
// nobody holds it) -> free. Quarantined: open when its session ended, until SessionFenced says that
// the session's process cannot write any more.
#pragma once

#include <cstdint>
#include <deque>
#include <map>
#include <optional>
#include <set>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "allocator/byte_codec.h"
#include "allocator/choices.h"
#include "allocator/effects.h"
#include "allocator/events.h"
#include "allocator/group_extents.h"
#include "allocator/kept_answers.h"
#include "allocator/pool_blocks.h"
#include "allocator/tenant_ledger.h"
#include "allocator/views.h"

namespace larder {

class StateMachine {
 public:
  StateMachine() = default;
  StateMachine(const StateMachine&) = delete;
  StateMachine& operator=(const StateMachine&) = delete;

  // Sessions, pools and blocks that the event names but that do not exist are refusals (a Reply
  // with a Status), never bugs. Daemon-made events (SegmentCreated, CopyDone, SessionFenced,
  // CloseSession ...) for things that are gone are ignored. Requests of a session that has closed
  // meanwhile get no Reply.
  Effects apply(Event event, int64_t now_us);
  std::span<const std::byte> record() const { return record_.bytes(); }
  // Carries out a record. Not ok: the record does not fit to this state, which is then undefined.
  Status replay(std::span<const std::byte> record);
  // Everything, as bytes: equal states give equal bytes.
  void save(ByteWriter& out) const;
  // Into a machine that nothing has been applied to. Not ok: the bytes make no sense.
  Status load(std::span<const std::byte> snapshot);

  std::vector<PoolStats> pool_stats() const;
  std::vector<SessionStats> session_stats() const;
  std::vector<TenantStats> tenant_stats() const;
  int64_t memory_bytes() const { return ledger_.memory_bytes(); }  // the limit
  // Segments asked for and not yet dropped, all pools together.
  int64_t physical_bytes() const { return ledger_.used_bytes(); }
  // Of all sessions, absent ones too, and of all pools: what the daemon has attached to them.
  std::vector<SessionAttachment> session_attachments() const;
  std::vector<PoolRecord> pool_records() const;
  std::optional<PoolRecord> pool_record(PoolId pool) const;
  // Every segment that the machine counts on, of leaving extents too.
  std::vector<SegmentRecord> segments() const;
  // What SetOwnerWord has last said, for a new executor. Empty for a pool or group that is gone.
  std::vector<uint64_t> owner_words(PoolId pool, uint32_t group) const;
  // Sessions that have ended and whose SessionFenced is awaited.
  std::vector<UnfencedSession> unfenced_sessions() const;
  bool is_unfenced(SessionId session) const { return closing_.contains(session); }
  // Whether a later event will answer this request.
  bool is_waiting(SessionId session, uint64_t request) const;
  uint64_t last_session() const { return last_session_; }
  uint64_t cache_id() const { return cache_id_; }  // 0 before the first Configure
  bool has_session(SessionId session) const { return sessions_.contains(session); }
  // Whether the session has asked for memory that it has not given back.
  bool maps_memory(SessionId session) const;
  // Recounts everything from scratch and checks it against the running figures (LARDER_CHECK).
  void check_consistency() const;

 private:
  struct Session {
    std::string tenant;
    Role role = Role::kRead;
    std::string attachment;
    bool absent = false;
    std::set<PoolId> pools;  // attached
    KeptAnswers answers;     // given, and not yet said to be there
    int64_t unanswered = 0;  // requests that wait for a later event
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
    std::string attachment;
    std::vector<GroupLayout> layouts;   // one per group
    std::vector<GroupExtents> extents;  // one per group
    PoolBlocks blocks;
    bool created = false;              // all its first segments are there
    std::vector<WaitingOpen> waiting;  // opens that its creation will answer
    std::set<SessionId> sessions;      // attached
    // The root key of the adapter that was used last.
    std::optional<std::pair<std::string, BlockKey>> root = {};
    // Not in a journal: figures since the daemon's start.
    uint64_t lookup_tokens_total = 0;
    uint64_t lookup_hit_tokens_total = 0;
  };
  struct RunningCopy {
    uint64_t request;
    SessionId session;
    PoolId pool;
    uint32_t group;
    std::vector<int32_t> from;
    std::vector<int32_t> to;
  };
  // A session that has ended while its process may still write to what it had mapped or open.
  struct Closing {
    FenceClass fence;
    std::set<PoolId> pools;
    std::string tenant;
    std::string attachment;
  };
  struct GroupId {
    PoolId pool;
    uint32_t group;
    auto operator<=>(const GroupId&) const = default;
  };
  struct Place {
    PoolId pool;
    uint32_t group;
    uint32_t index;
  };
  struct AwaitedSegment {
    Place place;
    std::string tenant;
    int64_t size_bytes;
  };
  struct LeavingSegment {
    Place place;
    std::string tenant;
    int64_t size_bytes;
    std::set<SessionId> mapped_by;  // not empty
  };
  // What a request on blocks is about, once it is known that the session may ask.
  struct Target {
    Pool* pool;
    BlockTable* blocks;
    uint32_t group;
  };
  // A request's reply, or nothing when a later event will bring it.
  using Answer = std::optional<ReplyBody>;

  void dispatch(Event& event);
  // False for a request that has begun before: it is answered again, or still waits.
  bool begin_request(SessionId session, uint64_t request);
  void serve_waiting();
  void reply(SessionId session, uint64_t request, ReplyBody body, uint64_t answered_below);

  // state_machine_sessions.cpp
  void handle(const Configure& event);
  void handle(const Recovered& event);
  void handle(const OpenSession& event);
  void handle(const ResumeSession& event);
  void handle(const CloseSession& event);
  void handle(const SessionFenced& event);
  void handle(const CancelRequest& event);
  Answer handle(const SetQuota& event);
  void forget_waiting(SessionId session);
  void fenced(SessionId session);
  void settle_unprovable();
  // state_machine_pools.cpp
  Answer handle(const OpenPool& event);
  Answer handle(const ClosePool& event);
  Answer handle(const DestroyPool& event);
  ReplyBody attach(Pool& pool, SessionId session, bool created);
  Answer open_existing(Pool& pool, const OpenPool& event);
  Answer create_pool(const OpenPool& event, const std::string& tenant);
  void undo_creation(Pool& pool, const Status& status);
  // state_machine_extents.cpp: how memory comes and goes
  void handle(const SegmentCreated& event);
  void handle(const SegmentUnmapped& event);
  Answer handle(const MapExtents& event);
  void create_segment(Pool& pool, uint32_t group, uint32_t index);
  void extent_is_there(Pool& pool, const Place& place, SegmentId segment);
  void start_leaving(Pool& pool, uint32_t group, int64_t index);
  void unmapped(SegmentId segment, SessionId session);
  void drop_segment(SegmentId segment, const Place& place, const std::string& tenant,
                    int64_t size_bytes);
  void unmap_all(SessionId session, Pool& pool);
  // state_machine_growth.cpp: what is done when there is not enough
  Answer handle(const Allocate& event);
  struct Plan;
  Plan plan_allocation(const Pool& pool, const Allocate& event) const;
  struct Growth;
  Growth growth_for(const Pool& pool, uint32_t group, int64_t total) const;
  Status refuse_allocation(const Pool& pool, const Allocate& event) const;
  void grow(Pool& pool, uint32_t group, int64_t extents);
  bool growth_has_failed(PoolId pool, uint32_t group) const;
  // state_machine_reclaim.cpp: memory taken back from what is cached
  struct Candidate;
  class Room;
  std::vector<Candidate> candidates(const std::string& tenant, GroupId except) const;
  std::set<GroupId> groups_waited_for() const;
  // (cost, index) of the extents that eviction can empty, ascending by index.
  std::vector<std::pair<int64_t, uint32_t>> emptyable_extents(const Pool& pool,
                                                              uint32_t group) const;
  // Whether memory for `bytes` more can be had by taking back, or is on its way already.
  bool can_reclaim(const std::string& tenant, int64_t bytes, GroupId except) const;
  void reclaim(const std::string& tenant, int64_t bytes, GroupId except);
  // state_machine_resize.cpp
  Answer handle(const ResizePool& event);
  Answer handle(const EvictBlocks& event);
  Result<Pool*> find_managed_pool(SessionId session, PoolId pool, std::string_view action);
  Status check_resize(const Pool& pool, const ResizePool& event) const;
  Answer grow_to(Pool& pool, const ResizePool& event, int64_t missing);
  Answer shrink_to(Pool& pool, const ResizePool& event);
  std::vector<int64_t> extents_to_shrink(const Pool& pool, const ResizePool& event,
                                         int64_t& needed) const;
  ReplyBody resized(const Pool& pool, const ResizePool& event) const;
  // state_machine_blocks.cpp
  Answer handle(const Release& event);
  Answer handle(Publish& event);
  Answer handle(Lookup& event);
  Answer handle(const Copy& event);
  void handle(const CopyDone& event);
  const BlockKey& root_key_of(Pool& pool, const std::string& adapter) const;
  Status make_keys(Pool& pool, Publish& event) const;
  Status find_keys(Pool& pool, Lookup& event) const;
  std::vector<int32_t> units_of(const Pool& pool, const std::vector<BlockKey>& keys) const;

  Result<Session*> find_session(SessionId id, Role needed, std::string_view action);
  Result<Pool*> find_pool(const Session& session, PoolId id);
  static Status no_such_group(const Pool& pool, uint32_t group);
  Result<Target> find_target(SessionId session, PoolId pool, uint32_t group, Role needed,
                             std::string_view action);
  // SetOwnerWord for every word of the pool that has changed.
  void emit_words(Pool& pool);
  PoolStats stats_of(const Pool& pool) const;
  // state_machine_recount.cpp; they throw Inconsistent
  void recount() const;
  void recount_sessions() const;
  std::map<SessionId, int64_t> count_unanswered() const;
  void recount_memory() const;
  void recount_copies() const;
  void recount_pool(const Pool& pool) const;
  void recount_extents(const Pool& pool) const;
  bool is_closing_in(SessionId session, PoolId pool) const;
  // state_machine_snapshot.cpp
  void save_pool(const Pool& pool, ByteWriter& out) const;
  bool load_all(ByteReader& in);
  bool load_sessions(ByteReader& in);
  bool load_pool(ByteReader& in);
  bool load_segments(ByteReader& in);
  bool load_copies(ByteReader& in);

  TenantLedger ledger_;
  uint64_t cache_id_ = 0;
  uint64_t max_pools_ = 0;
  std::map<SessionId, Session> sessions_;
  std::map<SessionId, Closing> closing_;
  std::map<PoolId, Pool> pools_;
  std::map<std::pair<std::string, std::string>, PoolId> pool_names_;  // by (tenant, name)
  // Every CreateSegment without its SegmentCreated; of a pool whose creation was undone, too.
  std::map<SegmentId, AwaitedSegment> awaited_;
  std::map<SegmentId, LeavingSegment> leaving_;
  std::vector<Event> waiting_;  // OpenPool, Allocate, ResizePool: for memory, in their order
  std::map<uint64_t, RunningCopy> copies_;
  uint64_t last_session_ = 0;
  uint64_t last_pool_ = 0;
  uint64_t last_segment_ = 0;
  uint64_t last_copy_ = 0;

  // Of the event that is being applied.
  int64_t now_us_ = 0;
  bool changed_ = false;
  bool memory_news_ = false;    // what waits for memory may go on
  std::deque<Event> to_serve_;  // of those that waited, the ones whose turn is still to come
  Choices choices_;
  Effects effects_;
  ByteWriter record_;
  // A growth has just failed: of this group nothing more is asked for in this event.
  std::optional<std::pair<GroupId, Status>> failed_growth_;
};

}  // namespace larder
