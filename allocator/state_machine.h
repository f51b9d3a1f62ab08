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
#include <memory>
#include <string>
#include <variant>
#include <vector>

#include "allocator/block_key.h"
#include "allocator/extent.h"
#include "allocator/types.h"
#include "larder/status.h"

namespace larder {

enum class Role : uint8_t { kRead = 0, kAppend = 1, kAdmin = 2 };  // each may do what those before may

// ---------------------------------------------------------------------------------- descriptions

struct GroupSpec {
  std::string name;
  int64_t block_bytes = 0;  // all layers of one block, unpadded
  int64_t num_blocks = 0;
  int32_t block_tokens = 0;
  bool one_segment = false;         // layout needs one piece of memory (LBHNC)
  bool reserve_block_zero = false;  // block 0 is a null block that is never handed out
  bool operator==(const GroupSpec&) const = default;
};

struct PoolSpec {
  std::string name;   // unique within the tenant
  std::string model;  // model and revision, as the engine states it
  Identity identity;  // everything else that must agree between sessions that share the pool
  std::vector<GroupSpec> groups;  // exactly one until pools with several groups are served
};

// ---------------------------------------------------------------------------------------- events
// `request` is chosen by the caller and comes back in the Reply.

struct OpenSession {
  SessionId session;
  std::string tenant;
  Role role;
};
// The connection is gone. Holds on published blocks are released at once. Open blocks are free at
// once if `fenced` (the client said goodbye, or never mapped memory), else quarantined until
// SessionFenced. Blocks in a running copy stay quarantined until its CopyDone as well.
struct CloseSession {
  SessionId session;
  bool fenced;
};
struct SessionFenced {
  SessionId session;
};
// Creates the pool or attaches to it. Creation emits CreateSegment per segment; the Reply follows
// when the last SegmentCreated arrives. Opens that arrive meanwhile wait for the same outcome.
struct OpenPool {
  uint64_t request;
  SessionId session;
  PoolSpec spec;
};
struct SegmentCreated {
  SegmentId segment;
  Status status;  // not ok: the creation is undone and every waiting open is answered with it
};
// Detaches the session: releases what it holds in the pool (open blocks become free, unless a copy
// runs on one: BUSY, nothing changed). The pool stays.
struct ClosePool {
  uint64_t request;
  SessionId session;
  PoolId pool;
};
// Admin. Frees the pool's memory; BUSY, naming the count, while sessions are attached or blocks
// are quarantined. A pool of another tenant than the session's is NOT_FOUND.
struct DestroyPool {
  uint64_t request;
  SessionId session;
  PoolId pool;
};
// All or nothing. Evicts cached blocks, leaf first and least recently used, when the free ones do
// not suffice. RESOURCE_EXHAUSTED carries requested and available (free + evictable).
struct Allocate {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  int64_t num_blocks;
};
// All or nothing. A block named twice needs two holds. NOT_FOUND for an id outside the pool or not
// held by the session, STALE_GENERATION for an old generation, BUSY while a copy runs on it.
struct Release {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  std::vector<BlockRef> blocks;
};
// Publishes blocks[i] as the i-th full block of `tokens` (all tokens from the root). blocks.size()
// <= tokens.size() / block_tokens. A block must be open and owned by the session, or already be
// published under exactly this key and held by the session (then nothing changes for it). If the
// key exists on another block, that block is returned and gains one hold, and the caller's own
// stays open. `extra` is empty or has one entry per block.
struct Publish {
  uint64_t request;
  SessionId session;
  PoolId pool;
  std::string adapter;
  std::vector<int32_t> tokens;
  std::vector<BlockRef> blocks;
  std::vector<std::string> extra;
};
// The longest run of whole published blocks from the root. With `hold`, one hold per block.
struct Lookup {
  uint64_t request;
  SessionId session;
  PoolId pool;
  std::string adapter;
  std::vector<int32_t> tokens;
  std::vector<std::string> extra;
  bool hold;
};
// Copies whole blocks from[i] to to[i]. `from` must be held by the session (open or published),
// `to` open and owned by it; a block may not be named twice in `to`, nor in both lists.
struct Copy {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  std::vector<BlockRef> from;
  std::vector<BlockRef> to;
};
struct CopyDone {
  uint64_t copy;
  Status status;
};

using Event = std::variant<OpenSession, CloseSession, SessionFenced, OpenPool, SegmentCreated,
                           ClosePool, DestroyPool, Allocate, Release, Publish, Lookup, Copy,
                           CopyDone>;

// --------------------------------------------------------------------------------------- effects

struct PoolOpened {
  PoolId pool;
  bool created;
  std::vector<GroupLayout> groups;
};
struct BlocksAllocated {
  std::vector<BlockRef> blocks;
};
struct BlocksPublished {
  std::vector<BlockKey> keys;
  std::vector<BlockRef> blocks;  // blocks[i] now serves keys[i]
};
struct PrefixFound {
  int64_t hit_tokens;
  std::vector<BlockRef> blocks;
};
struct Done {};
using ReplyBody =
    std::variant<Status, Done, PoolOpened, BlocksAllocated, BlocksPublished, PrefixFound>;

struct Reply {
  uint64_t request;
  ReplyBody body;  // a Status only when it is a refusal
};
struct CreateSegment {
  SegmentId segment;
  PoolId pool;
  uint32_t group;
  uint32_t index;  // position in the group's mapped range
  int64_t size_bytes;
};
struct DropSegment {
  SegmentId segment;
};
// The pool exists and all its segments are there: the executor may be told. Precedes the Reply.
struct PoolCreated {
  PoolId pool;
};
struct PoolDestroyed {
  PoolId pool;
};
// The ownership word of one block changed (allocator/owner_word.h).
struct SetOwnerWord {
  PoolId pool;
  uint32_t group;
  int32_t block;
  uint64_t word;
};
struct RunCopy {
  uint64_t copy;
  PoolId pool;
  uint32_t group;
  std::vector<int32_t> from;
  std::vector<int32_t> to;
};
// Somebody has to say SessionFenced once the session's process can no longer write.
struct FenceSession {
  SessionId session;
};

using Effect = std::variant<Reply, CreateSegment, DropSegment, PoolCreated, PoolDestroyed,
                            SetOwnerWord, RunCopy, FenceSession>;
using Effects = std::vector<Effect>;  // to be carried out in order

// ---------------------------------------------------------------------------------------- views

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
  uint64_t lookup_tokens_total = 0;
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

struct MachineConfig {
  int64_t memory_bytes = 0;                  // all pools together
  std::map<std::string, std::string> salts;  // tenant -> salt; an unknown tenant is refused
};

class StateMachine {
 public:
  explicit StateMachine(MachineConfig config);
  ~StateMachine();

  // Sessions, pools and blocks that the event names but that do not exist are refusals (a Reply
  // with a Status), never bugs. Daemon-made events (SegmentCreated, CopyDone, SessionFenced,
  // CloseSession) for things that are gone are ignored.
  Effects apply(const Event& event, int64_t now_us);

  std::vector<PoolStats> pool_stats() const;
  std::vector<SessionStats> session_stats() const;
  int64_t memory_bytes() const;      // the limit
  int64_t physical_bytes() const;    // sum over pools
  // What SetOwnerWord has last said, for a new executor.
  std::vector<uint64_t> owner_words(PoolId pool, uint32_t group) const;
  // Recounts everything from scratch and checks it against the running figures (LARDER_CHECK).
  void check_consistency() const;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace larder
