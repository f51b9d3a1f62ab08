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

Status check_sizes(int64_t block_bytes, int64_t num_blocks, bool one_segment) {
  const int64_t max_block_bytes = one_segment ? kMaxGroupBytes : kMaxExtentBytes;
  if (block_bytes < 1 || block_bytes > max_block_bytes)
    return {ErrorCode::kInvalidArgument, "block_bytes is " + std::to_string(block_bytes) +
                                             ", but must be 1 to " +
                                             std::to_string(max_block_bytes)};
  if (num_blocks < 1 || num_blocks > kMaxBlocksPerGroup)
    return {ErrorCode::kInvalidArgument, "num_blocks is " + std::to_string(num_blocks) +
                                             ", but must be 1 to " +
                                             std::to_string(kMaxBlocksPerGroup)};
  const int64_t stride_bytes = one_segment ? block_bytes : padded_block_bytes(block_bytes);
  if (num_blocks > kMaxGroupBytes / stride_bytes)
    return {ErrorCode::kInvalidArgument, "num_blocks is " + std::to_string(num_blocks) + " of " +
                                             std::to_string(stride_bytes) +
                                             " bytes each with padding, but a group has at most " +
                                             std::to_string(kMaxGroupBytes) + " bytes"};
  return {};
}

}  // namespace

int64_t padded_block_bytes(int64_t block_bytes) {
  LARDER_CHECK(block_bytes > 0, block_bytes);
  const auto unit =
      std::bit_floor(static_cast<uint64_t>(std::max<int64_t>(block_bytes / kMaxLossDivisor, 1)));
  return round_up(block_bytes, static_cast<int64_t>(unit));
}

Result<GroupLayout> lay_out_group(int64_t block_bytes, int64_t num_blocks, bool one_segment) {
  if (Status status = check_sizes(block_bytes, num_blocks, one_segment); !status.ok())
    return status;

  GroupLayout layout;
  layout.block_bytes = block_bytes;
  layout.block_stride_bytes = one_segment ? block_bytes : padded_block_bytes(block_bytes);
  layout.num_blocks = num_blocks;
  const int64_t group_bytes =
      round_up(num_blocks * layout.block_stride_bytes, kSegmentGranularityBytes);
  layout.extent_bytes =
      one_segment ? group_bytes : std::min(group_bytes, extent_bytes_of(layout.block_stride_bytes));
  for (int64_t begin = 0; begin < group_bytes; begin += layout.extent_bytes)
    layout.segment_bytes.push_back(std::min(layout.extent_bytes, group_bytes - begin));
  return layout;
}

}  // namespace larder
