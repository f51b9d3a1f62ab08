// How blocks fill segments: the padding of a block and the size of an extent.
//
// A segment is one extent of at most 256 MiB, or the whole group where that is smaller or where
// the layout needs one piece of memory. No block straddles two segments, and because segments are
// mapped back to back, block b lies at b * block_stride_bytes of the mapped range.
#pragma once

#include <cstdint>
#include <vector>

#include "larder/status.h"

namespace larder {

inline constexpr int64_t kMaxExtentBytes = int64_t{256} << 20;
// The unit of CUDA VMM. Host memory uses the same, so that one description serves both.
inline constexpr int64_t kSegmentGranularityBytes = int64_t{2} << 20;
inline constexpr int64_t kMaxGroupBytes = int64_t{1} << 46;
// Of a group that grows: so many are kept track of, whether they are there or not.
inline constexpr int64_t kMaxExtentsToGrow = int64_t{1} << 16;
inline constexpr int64_t kMaxBlocksPerGroup = (int64_t{1} << 31) - 1;  // device tables are int32

struct GroupLayout {
  int64_t block_bytes = 0;             // without padding
  int64_t block_stride_bytes = 0;      // with padding: at most 1/64 more
  int64_t num_blocks = 0;              // that there can be: ids are below it
  int64_t extent_bytes = 0;            // size of every segment but the last; of an only segment too
  std::vector<int64_t> segment_bytes;  // one per extent, multiples of the granularity
  int64_t blocks_per_extent = 0;
  int64_t first_extents = 0;  // so many are there from the start; all of them where it cannot grow

  int64_t num_extents() const { return static_cast<int64_t>(segment_bytes.size()); }
  bool grows() const { return first_extents < num_extents(); }
  int64_t extent_of(int64_t block) const { return block / blocks_per_extent; }
  // Ids [first_block(e), first_block(e + 1)) are in extent e.
  int64_t first_block(int64_t extent) const {
    const int64_t first = extent * blocks_per_extent;
    return first < num_blocks ? first : num_blocks;
  }
  int64_t blocks_in(int64_t extent) const { return first_block(extent + 1) - first_block(extent); }
  int64_t extents_for(int64_t blocks) const {
    return (blocks + blocks_per_extent - 1) / blocks_per_extent;
  }
  int64_t physical_bytes() const {  // of all extents
    int64_t sum = 0;
    for (int64_t bytes : segment_bytes) sum += bytes;
    return sum;
  }
  int64_t first_bytes() const {  // of those that are there from the start
    int64_t sum = 0;
    for (int64_t i = 0; i < first_extents; ++i) sum += segment_bytes[static_cast<size_t>(i)];
    return sum;
  }
  bool operator==(const GroupLayout&) const = default;
};

struct GroupSize {
  int64_t block_bytes = 0;
  int64_t num_blocks = 0;     // at the start
  int64_t max_blocks = 0;     // 0: num_blocks, the group has a fixed size
  bool one_segment = false;   // layouts that put all blocks of a layer together
  int64_t segment_bytes = 0;  // of an extent; 0: chosen here
};

// The padded stride: a multiple of the largest power of two not above block_bytes / 64 (1 for
// blocks below 64 bytes).
int64_t padded_block_bytes(int64_t block_bytes);

// one_segment gives one segment and no padding, and a fixed size. A group that grows has whole
// extents: num_blocks is rounded up to them, and never past max_blocks. INVALID_ARGUMENT names the
// field and the numbers when a count or a size is not positive or past the limits above.
Result<GroupLayout> lay_out_group(const GroupSize& size);

}  // namespace larder
