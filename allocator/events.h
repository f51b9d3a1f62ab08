// What the state machine is told: plain data. What it wants done is in allocator/effects.h.
//
// The rules that the events follow are written at each of them; allocator/state_machine.h says what
// holds for all of them.
#pragma once

#include <cstdint>
#include <string>
#include <variant>
#include <vector>

#include "allocator/block_key.h"
#include "allocator/pool_spec.h"
#include "allocator/types.h"
#include "larder/status.h"

namespace larder {

// ---------------------------------------------------------------------------------------- events
// A request is named by its session and its `request`, which the client chooses: a session uses no
// number twice. One that comes again (after a restart of the daemon, say) is answered once more
// with the answer it had, or not at all while it waits; it is never carried out twice. Answers are
// kept until a request of the session says, by answered_below, that those below it have arrived.

struct TenantSpec {
  std::string name;
  std::string salt;  // made by the daemon; that of a tenant which is known already stays
  int64_t guaranteed_bytes = 0;
  int64_t maximum_bytes = 0;  // 0: no maximum
};
// What the operator says, at every start of the daemon. Tenants that are known and not named keep
// their pools and salt and have no guarantee.
struct Configure {
  int64_t memory_bytes;
  uint64_t max_pools;
  std::vector<TenantSpec> tenants;
  uint64_t cache_id =
      1;  // random; names the cache for as long as it lives, so only the first counts
};
// The daemon has started again from its journal. Sessions are absent until ResumeSession or
// CloseSession; creations that were under way are undone; the effects that may have been lost
// (RunCopy, FenceSession, UnmapSegment) come again.
struct Recovered {};

struct OpenSession {
  SessionId session;
  std::string tenant;
  Role role;
  std::string attachment = {};  // bytes that only the daemon understands
};
struct ResumeSession {
  SessionId session;
};
// The connection is gone, or its process. Holds on published blocks are released at once. Open
// blocks are free at once if `fence` is kFenced (the client said goodbye, say), else quarantined
// until SessionFenced. Blocks in a running copy stay quarantined until its CopyDone as well.
struct CloseSession {
  SessionId session;
  FenceClass fence;
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
  std::string attachment = {};  // bytes that only the daemon understands, kept with the pool
  uint64_t answered_below = 0;
};
// Answers one CreateSegment; each has to be answered once, also after another one of the pool has
// failed. A segment that comes after its creation was undone is dropped, and charged until then.
struct SegmentCreated {
  SegmentId segment;
  Status status;  // not ok: the creation is undone and every waiting open is answered with it
};
// The session has the extents [first, first + count) mapped, or is about to: what is given back of
// them has to be unmapped by it first. Answered with their segments, 0 for one that is not there.
// Asked again, it is answered with what is there then.
struct MapExtents {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  int64_t first;
  int64_t count;
  uint64_t answered_below = 0;
};
// Answers one UnmapSegment.
struct SegmentUnmapped {
  SegmentId segment;
  SessionId session;
};
// Grows a group to extents for num_blocks, or gives back as many extents as can be emptied by
// eviction, down to those for num_blocks: BUSY with the numbers where too much is in use.
// RESOURCE_EXHAUSTED where the memory is not there. Of a group that grows only. An admin need not
// have the pool open.
struct ResizePool {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  int64_t num_blocks;
  uint64_t answered_below = 0;
  // Filled in when the request begins, for its answer.
  int64_t blocks_before = -1;
  int64_t bytes_before = -1;
};
// Evicts cached prefixes, least recently used first, until num_blocks blocks are free again or
// nothing can be evicted any more. An admin need not have the pool open.
struct EvictBlocks {
  uint64_t request;
  SessionId session;
  PoolId pool;
  int64_t num_blocks;
  uint64_t answered_below = 0;
};
// Admin. RESOURCE_EXHAUSTED unless what all tenants are guaranteed or have taken fits.
struct SetQuota {
  uint64_t request;
  SessionId session;
  std::string tenant;
  int64_t guaranteed_bytes;
  int64_t maximum_bytes;  // 0: no maximum
  uint64_t answered_below = 0;
};
// The deadline of a request that waits for memory or for a pool's creation has passed: it is not
// carried out any more, and gets no answer. What was begun for it (growth, the creation) goes on.
struct CancelRequest {
  SessionId session;
  uint64_t number;
};
// Detaches the session: releases what it holds in the pool (open blocks become free, unless a copy
// runs on one: BUSY, nothing changed). The pool stays.
struct ClosePool {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint64_t answered_below = 0;
};
// Admin. Frees the pool's memory; BUSY, naming the count, while sessions are attached or blocks
// are quarantined. A pool of another tenant than the session's is NOT_FOUND.
struct DestroyPool {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint64_t answered_below = 0;
};
// All or nothing. Where the free blocks do not suffice, the group grows while it and its tenant
// may; then cached blocks are evicted, leaf first and least recently used; then memory is taken
// back from what others have cached above their guarantee, which can make the request wait.
// RESOURCE_EXHAUSTED carries requested, available, free, evictable and the limit. Of a request
// that comes in parts, total_blocks is what this part and the later ones want together: unless so
// many are available nothing is taken. 0: num_blocks.
struct Allocate {
  uint64_t request;
  SessionId session;
  PoolId pool;
  uint32_t group;
  int64_t num_blocks;
  int64_t total_blocks = 0;
  uint64_t answered_below = 0;
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
  uint64_t answered_below = 0;
};
// Publishes blocks as the units first_block, first_block + 1 ... of `tokens` (all tokens from the
// root), which must have so many whole units. In a pool of one group a unit is a block. Otherwise
// each unit is its blocks of group 0, then of group 1 and so on (blocks_in_unit each), id -1 where
// a window or state group has none. A block must be open and owned by the session, or already be
// published under exactly this key and held by the session (then nothing changes for it). If the
// key exists on another block, that block is returned and gains one hold, and the caller's own
// stays open. NOT_FOUND where first_block > 0 and the unit before it is not published.
// `extra` is empty or has one entry per whole unit of `tokens`, at least up to the last one named.
struct Publish {
  uint64_t request;
  SessionId session;
  PoolId pool;
  std::string adapter;
  std::vector<int32_t> tokens;
  std::vector<BlockRef> blocks;
  std::vector<std::string> extra;
  int64_t first_block = 0;
  uint64_t answered_below = 0;
  // Made from the fields above, and all of them that a journal keeps.
  std::vector<BlockKey> keys = {};    // of the units named
  std::vector<BlockKey> parent = {};  // of the unit before them, where first_block > 0
};
// The longest run of whole published units from the root that can serve: full groups have every
// block of it, window groups those of the last window_tokens tokens, state groups the one at the
// end. Of these the units from first_block on, at most max_blocks blocks, in the order of Publish,
// id -1 where the run needs none. With `hold`, one hold per block returned; without it nothing
// changes at all. `extra` is empty or has one entry per whole unit of `tokens`. In a pool
// with window or state groups nothing is found from a first_block above 0: what they need depends
// on the end of the run, which is therefore no longer than one answer.
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
  uint64_t answered_below = 0;
  std::vector<BlockKey> keys = {};  // of the units found, from the root; as in Publish
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
  uint64_t answered_below = 0;
};
struct CopyDone {
  uint64_t copy;
  Status status;
};

using Event = std::variant<Configure, Recovered, OpenSession, ResumeSession, CloseSession,
                           SessionFenced, OpenPool, SegmentCreated, MapExtents, SegmentUnmapped,
                           ResizePool, EvictBlocks, SetQuota, CancelRequest, ClosePool, DestroyPool,
                           Allocate, Release, Publish, Lookup, Copy, CopyDone>;

}  // namespace larder
