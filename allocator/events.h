// What the state machine is told (events) and what it wants done (effects): plain data.
//
// The rules that the events follow are written at each of them; allocator/state_machine.h says what
// holds for all of them.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "allocator/block_key.h"
#include "allocator/extent.h"
#include "allocator/types.h"
#include "larder/status.h"

namespace larder {

// Each may do what those before may.
enum class Role : uint8_t { kRead = 0, kAppend = 1, kAdmin = 2 };

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
// when the last SegmentCreated arrives. Opens that arrive meanwhile wait for the same outcome. It
// goes on when the session that asked for it ends. Opening a pool that the session has open already
// changes nothing: one ClosePool closes it.
struct OpenPool {
  uint64_t request;
  SessionId session;
  PoolSpec spec;
};
// Answers one CreateSegment; each has to be answered once, also after another one of the pool has
// failed. A segment that comes after its creation was undone is dropped, and charged until then.
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
// not suffice. RESOURCE_EXHAUSTED carries requested and available (free + evictable). Of a request
// that comes in parts, total_blocks is what this part and the later ones want together: unless so
// many are available nothing is taken. 0: num_blocks.
struct Allocate {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  int64_t num_blocks;
  int64_t total_blocks = 0;
};
// All or nothing. A block named twice needs two holds. NOT_FOUND for an id outside the pool or not
// held by the session, STALE_GENERATION for an old generation, BUSY while a copy of this session
// runs on it.
struct Release {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  std::vector<BlockRef> blocks;
};
// Publishes blocks[i] as full block first_block + i of `tokens` (all tokens from the root), which
// must have so many full blocks. A block must be open and owned by the session, or already be
// published under exactly this key and held by the session (then nothing changes for it). If the
// key exists on another block, that block is returned and gains one hold, and the caller's own
// stays open. NOT_FOUND where first_block > 0 and the block before it is not published.
// `extra` is empty or has one entry per full block of `tokens`, at least up to the last one named.
struct Publish {
  uint64_t request;
  SessionId session;
  PoolId pool;
  std::string adapter;
  std::vector<int32_t> tokens;
  std::vector<BlockRef> blocks;
  std::vector<std::string> extra;
  int64_t first_block = 0;
};
// The longest run of whole published blocks from the root; of these the ones from first_block on,
// at most max_blocks. With `hold`, one hold per block returned. `extra` is empty or has one entry
// per whole block of `tokens`.
struct Lookup {
  uint64_t request;
  SessionId session;
  PoolId pool;
  std::string adapter;
  std::vector<int32_t> tokens;
  std::vector<std::string> extra;
  bool hold;
  int64_t first_block = 0;
  int64_t max_blocks = kMaxBlocksPerGroup;
};
// Copies whole blocks from[i] to to[i]. `from` must be held by the session (open or published),
// `to` open and owned by it; a block may not be named twice in `to`, nor in both lists. BUSY while
// another copy writes to one of the blocks, or reads one of `to`. The Reply follows CopyDone.
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

using Event =
    std::variant<OpenSession, CloseSession, SessionFenced, OpenPool, SegmentCreated, ClosePool,
                 DestroyPool, Allocate, Release, Publish, Lookup, Copy, CopyDone>;

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
  int64_t hit_tokens;  // of the blocks returned
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

}  // namespace larder
