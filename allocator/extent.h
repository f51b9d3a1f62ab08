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
inline constexpr int64_t kMaxBlocksPerGroup = (int64_t{1} << 31) - 1;  // device tables are int32

struct GroupLayout {
  int64_t block_bytes = 0;         // without padding
  int64_t block_stride_bytes = 0;  // with padding: at most 1/64 more
  int64_t num_blocks = 0;
  int64_t extent_bytes = 0;            // size of every segment but the last; of an only segment too
  std::vector<int64_t> segment_bytes;  // one per segment, multiples of the granularity
  int64_t physical_bytes() const {
    int64_t sum = 0;
    for (int64_t bytes : segment_bytes) sum += bytes;
    return sum;
  }
  bool operator==(const GroupLayout&) const = default;
};

// The padded stride: a multiple of the largest power of two not above block_bytes / 64 (1 for
// blocks below 64 bytes).
int64_t padded_block_bytes(int64_t block_bytes);

// Lays out num_blocks blocks. `one_segment` (layouts that put all blocks of a layer together) gives
// one segment and no padding. INVALID_ARGUMENT names the field and the numbers when a count or a
// size is not positive or past the limits above.
Result<GroupLayout> lay_out_group(int64_t block_bytes, int64_t num_blocks, bool one_segment);

}  // namespace larder
