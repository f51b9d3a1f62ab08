// What the state machine wants done, and what it answers: plain data.
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

struct PoolOpened {
  PoolId pool;
  bool created;
  std::vector<GroupLayout> groups;
};
struct ExtentsMapped {
  std::vector<SegmentId> segments;  // 0 where the extent is not there
};
struct Resized {
  int64_t blocks_before;  // capacity; of EvictBlocks the cached blocks
  int64_t blocks_after;
  int64_t bytes_before;  // physical; those that sessions have still to unmap are not counted
  int64_t bytes_after;
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
using ReplyBody = std::variant<Status, Done, PoolOpened, BlocksAllocated, BlocksPublished,
                               PrefixFound, ExtentsMapped, Resized>;

struct Reply {
  uint64_t request;
  ReplyBody body;  // a Status only when it is a refusal
  SessionId session = SessionId{0};
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
// A group has got an extent: the executor may be told. Precedes the replies that name its blocks.
struct ExtentAdded {
  PoolId pool;
  uint32_t group;
  uint32_t index;
  SegmentId segment;
  int64_t size_bytes;
};
// A group has lost an extent, all of whose blocks are free: nobody may be given its memory any
// more. Its DropSegment follows when the last session has unmapped it.
struct ExtentRemoved {
  PoolId pool;
  uint32_t group;
  uint32_t index;
  SegmentId segment;
};
// The session has to unmap this extent and say so (SegmentUnmapped), or it has to be ended.
struct UnmapSegment {
  SessionId session;
  PoolId pool;
  uint32_t group;
  uint32_t index;
  SegmentId segment;
};
// The pool exists and all its first segments are there: the executor may be told. Precedes the
// Reply.
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
// Somebody has to say SessionFenced once the session's process can no longer write. Comes for every
// session that is closed with a class other than kFenced.
struct FenceSession {
  SessionId session;
  FenceClass fence;
};

using Effect =
    std::variant<Reply, CreateSegment, DropSegment, PoolCreated, PoolDestroyed, SetOwnerWord,
                 RunCopy, FenceSession, ExtentAdded, ExtentRemoved, UnmapSegment>;
using Effects = std::vector<Effect>;  // to be carried out in order

}  // namespace larder
