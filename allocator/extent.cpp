#include "allocator/extent.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <string>

namespace larder {
namespace {

// A block loses less than one part in kMaxLossDivisor to padding.
constexpr int64_t kMaxLossDivisor = 64;

// Callers keep `bytes` far below 2^63 - unit.
constexpr int64_t round_up(int64_t bytes, int64_t unit) { return (bytes + unit - 1) / unit * unit; }

// The largest multiple of both the stride and the granularity that one extent may have. It exists:
// stride = m * 2^k with m <= 128, so the least common multiple with 2^21 is at most
// 127 * 2 MiB where 2 MiB is the larger power, and the stride itself otherwise.
int64_t extent_bytes_of(int64_t stride_bytes) {
  const int64_t step_bytes = std::lcm(stride_bytes, kSegmentGranularityBytes);
  LARDER_CHECK(step_bytes <= kMaxExtentBytes, stride_bytes, step_bytes);
  return kMaxExtentBytes / step_bytes * step_bytes;
}

Status invalid(const std::string& text) { return {ErrorCode::kInvalidArgument, text}; }

Status check_count(const char* field, int64_t count, int64_t stride_bytes) {
  if (count < 1 || count > kMaxBlocksPerGroup)
    return invalid(std::string(field) + " is " + std::to_string(count) + ", but must be 1 to " +
                   std::to_string(kMaxBlocksPerGroup));
  if (count > kMaxGroupBytes / stride_bytes)
    return invalid(std::string(field) + " is " + std::to_string(count) + " of " +
                   std::to_string(stride_bytes) +
                   " bytes each with padding, but a group has at most " +
                   std::to_string(kMaxGroupBytes) + " bytes");
  return {};
}

Status check_block_bytes(const GroupSize& size) {
  const int64_t max_block_bytes = size.one_segment ? kMaxGroupBytes : kMaxExtentBytes;
  if (size.block_bytes >= 1 && size.block_bytes <= max_block_bytes) return {};
  return invalid("block_bytes is " + std::to_string(size.block_bytes) + ", but must be 1 to " +
                 std::to_string(max_block_bytes));
}

Status check_sizes(const GroupSize& size, int64_t stride_bytes) {
  if (Status status = check_count("num_blocks", size.num_blocks, stride_bytes); !status.ok())
    return status;
  if (size.max_blocks == 0) return {};
  if (Status status = check_count("max_blocks", size.max_blocks, stride_bytes); !status.ok())
    return status;
  if (size.max_blocks < size.num_blocks)
    return invalid("max_blocks is " + std::to_string(size.max_blocks) + ", but num_blocks is " +
                   std::to_string(size.num_blocks));
  if (size.one_segment && size.max_blocks > size.num_blocks)
    return {ErrorCode::kUnsupported,
            "max_blocks is " + std::to_string(size.max_blocks) + " and num_blocks " +
                std::to_string(size.num_blocks) +
                ": a layout that puts all blocks of a layer together has a fixed size"};
  return {};
}

Status check_num_extents(const GroupSize& size, int64_t stride_bytes, int64_t extent_bytes) {
  const int64_t extents = (size.max_blocks * stride_bytes + extent_bytes - 1) / extent_bytes;
  if (extents <= kMaxExtentsToGrow) return {};
  return invalid("max_blocks is " + std::to_string(size.max_blocks) + ", which takes " +
                 std::to_string(extents) + " segments of " + std::to_string(extent_bytes) +
                 " bytes, but a group can grow to " + std::to_string(kMaxExtentsToGrow));
}

// Whole blocks fill whole extents; one of tiny blocks that would hold more than the start needs
// is as small as that and the number of extents allow.
Result<int64_t> choose_extent_bytes(const GroupSize& size, int64_t stride_bytes) {
  const int64_t step_bytes = std::lcm(stride_bytes, kSegmentGranularityBytes);
  const int64_t most_bytes = extent_bytes_of(stride_bytes);
  if (size.segment_bytes != 0) {
    if (size.segment_bytes > 0 && size.segment_bytes % step_bytes == 0 &&
        size.segment_bytes <= most_bytes)
      return size.segment_bytes;
    return invalid("segment_bytes is " + std::to_string(size.segment_bytes) +
                   ", but must be a multiple of " + std::to_string(step_bytes) + " and at most " +
                   std::to_string(most_bytes) + " where a block takes " +
                   std::to_string(stride_bytes));
  }
  if (size.max_blocks <= size.num_blocks) return most_bytes;
  const int64_t start_bytes = size.num_blocks * stride_bytes / step_bytes * step_bytes;
  const int64_t least_bytes = round_up(
      (size.max_blocks * stride_bytes + kMaxExtentsToGrow - 1) / kMaxExtentsToGrow, step_bytes);
  return std::clamp(start_bytes, std::min(least_bytes, most_bytes), most_bytes);
}

}  // namespace

int64_t padded_block_bytes(int64_t block_bytes) {
  LARDER_CHECK(block_bytes > 0, block_bytes);
  const auto unit =
      std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(block_bytes / kMaxLossDivisor, 1)));
  return round_up(block_bytes, static_cast<int64_t>(unit));
}

Result<GroupLayout> lay_out_group(const GroupSize& size) {
  if (Status status = check_block_bytes(size); !status.ok()) return status;
  const int64_t stride_bytes =
      size.one_segment ? size.block_bytes : padded_block_bytes(size.block_bytes);
  if (Status status = check_sizes(size, stride_bytes); !status.ok()) return status;

  GroupLayout layout;
  layout.block_bytes = size.block_bytes;
  layout.block_stride_bytes = stride_bytes;
  layout.num_blocks = std::max(size.num_blocks, size.max_blocks);
  const bool grows = layout.num_blocks > size.num_blocks;
  const int64_t group_bytes = round_up(layout.num_blocks * stride_bytes, kSegmentGranularityBytes);
  layout.extent_bytes = group_bytes;
  if (!size.one_segment) {
    const Result<int64_t> extent_bytes = choose_extent_bytes(size, stride_bytes);
    if (!extent_bytes) return extent_bytes.status();
    layout.extent_bytes = std::min(group_bytes, *extent_bytes);
    if (grows)
      if (Status status = check_num_extents(size, stride_bytes, layout.extent_bytes); !status.ok())
        return status;
  }
  layout.blocks_per_extent = layout.extent_bytes / stride_bytes;
  for (int64_t begin = 0; begin < group_bytes; begin += layout.extent_bytes)
    layout.segment_bytes.push_back(std::min(layout.extent_bytes, group_bytes - begin));
  layout.first_extents = grows ? layout.extents_for(size.num_blocks) : layout.num_extents();
  return layout;
}

}  // namespace larder
