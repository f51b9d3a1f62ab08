// The memory of a pool's group in this process: its segments, each at its place in one range of
// addresses, mapped as replies name their blocks and unmapped when larderd asks for them back.
//
// Thread rule: the owner's thread and the session's thread may use both classes at the same time.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "allocator/memory_provider.h"
#include "larder/status.h"
#include "protocol/messages.h"

namespace larder {

class GroupMemory {
 public:
  // `layout` outlives the memory, and has been checked (check_layout).
  explicit GroupMemory(const protocol::GroupLayout& layout);

  // Takes the addresses; once, by the owner's thread. Throws SystemError or CudaError.
  void reserve(const MemoryProvider& provider);
  // nullptr before. An address of this process, or of the GPU.
  std::byte* base() const { return range_ == nullptr ? nullptr : range_->base(); }

  // The segment that a block of the group lies in.
  uint32_t segment_of(int64_t block) const;
  uint32_t num_segments() const { return static_cast<uint32_t>(offsets_.size() - 1); }
  // Those of the blocks' segments that are not mapped, in order; blocks < 0 have none.
  std::vector<uint32_t> missing(std::span<const protocol::Block> blocks) const;
  // Whether each segment is mapped; nothing where all are.
  std::optional<std::vector<bool>> mapped_unless_all() const;

  // How often a segment of the group has been unmapped on request.
  uint64_t num_unmaps() const;
  // Maps a segment of the size that the layout says, unless one was unmapped since num_unmaps()
  // was `unmaps`: then false, for the fd may be of the segment that was given back. Throws
  // SystemError.
  bool map(uint32_t segment, int fd, uint64_t unmaps);
  // On larderd's request. Throws SystemError, and then it is still mapped.
  void unmap(uint32_t segment);

 private:
  const protocol::GroupLayout& layout_;
  std::vector<int64_t> offsets_;  // of each segment, and the end of the last
  std::unique_ptr<AddressRange> range_;
  mutable std::mutex mutex_;
  std::vector<bool> mapped_;  // guarded by mutex_, like what follows
  size_t num_mapped_ = 0;
  uint64_t num_unmaps_ = 0;
};

// INTERNAL for a layout that no memory can have: it came from larderd.
Status check_layout(const protocol::GroupLayout& layout);

// All memories of a client, by pool and group: a pool may be open several times.
class GroupMemories {
 public:
  void add(uint64_t pool, uint32_t group, GroupMemory* memory);
  void remove(uint64_t pool, uint32_t group, GroupMemory* memory);
  // In all of them. Throws SystemError or CudaError.
  void unmap(uint64_t pool, uint32_t group, uint32_t segment);

 private:
  std::mutex mutex_;
  std::map<std::pair<uint64_t, uint32_t>, std::set<GroupMemory*>> memories_;
};

}  // namespace larder
