#include "allocator/extent.h"

#include <numeric>

#include <doctest/doctest.h>

#include "tests/support/machine_driver.h"
#include "tests/support/random.h"

namespace larder {
namespace {

using test::check_status;
// A group of a fixed size.
Result<GroupLayout> lay_out(int64_t block_bytes, int64_t num_blocks, bool one_segment = false) {
  return lay_out_group(GroupSize{block_bytes, num_blocks, 0, one_segment});
}

constexpr int64_t kMiB = int64_t{1} << 20;

TEST_CASE("a block is padded to a multiple of a power of two, by less than one part in 64") {
  CHECK(padded_block_bytes(1) == 1);
  CHECK(padded_block_bytes(63) == 63);
  CHECK(padded_block_bytes(127) == 127);
  CHECK(padded_block_bytes(129) == 130);
  CHECK(padded_block_bytes(18432) == 18432);  // 16 tokens, 8 heads of 128, K and V, NVFP4: 72 * 256
  CHECK(padded_block_bytes(36864) == 36864);  // MLA: 64 rows of 576 bytes
  CHECK(padded_block_bytes(int64_t{64} * 656) == 41984);  // 656 bytes a row: 82 * 512
  CHECK(padded_block_bytes(18433) == 18688);
  CHECK(padded_block_bytes(kMaxExtentBytes) == kMaxExtentBytes);
}

TEST_CASE("a group that fits in one extent is one segment, rounded up to the granularity") {
  const GroupLayout layout = lay_out(18432, 1000).value();
  CHECK(layout.block_stride_bytes == 18432);
  CHECK(layout.segment_bytes == std::vector<int64_t>{18 * kMiB});  // 18,432,000 bytes
  CHECK(layout.extent_bytes == 18 * kMiB);
  CHECK(lay_out(1, 1).value().segment_bytes == std::vector<int64_t>{2 * kMiB});
}

TEST_CASE("a larger group is whole extents and a shorter last one") {
  // 18432 = 9 * 2^11, so 18 MiB hold whole blocks, and 252 MiB is the largest multiple.
  const GroupLayout layout = lay_out(18432, 30000).value();
  CHECK(layout.extent_bytes == 252 * kMiB);
  CHECK(layout.segment_bytes == std::vector<int64_t>{252 * kMiB, 252 * kMiB, 24 * kMiB});
  CHECK(layout.extent_bytes / 18432 == 14336);
  CHECK(layout.physical_bytes() == 528 * kMiB);
}

TEST_CASE("blocks as large as an extent get one each, larger ones are refused with the numbers") {
  const GroupLayout layout = lay_out(kMaxExtentBytes - 1, 3).value();
  CHECK(layout.segment_bytes == std::vector<int64_t>(3, kMaxExtentBytes));
  check_status(lay_out(kMaxExtentBytes + 1, 3).status(), ErrorCode::kInvalidArgument,
               {"block_bytes", "268435457", "268435456"});
}

TEST_CASE("one_segment gives one piece of memory without padding") {
  const GroupLayout layout = lay_out(18433, 30000, true).value();
  CHECK(layout.block_stride_bytes == 18433);
  CHECK(layout.segment_bytes == std::vector<int64_t>{528 * kMiB});
  CHECK(layout.extent_bytes == 528 * kMiB);
}

TEST_CASE("sizes and counts outside the limits are refused with the numbers") {
  const auto code = ErrorCode::kInvalidArgument;
  for (const bool one_segment : {false, true}) {
    check_status(lay_out(0, 1, one_segment).status(), code, {"block_bytes is 0"});
    check_status(lay_out(-5, 1, one_segment).status(), code, {"block_bytes is -5"});
    check_status(lay_out(1, 0, one_segment).status(), code, {"num_blocks is 0"});
    check_status(lay_out(1, -1, one_segment).status(), code, {"num_blocks is -1"});
    check_status(lay_out(1, kMaxBlocksPerGroup + 1, one_segment).status(), code,
                 {"num_blocks is 2147483648", "2147483647"});
    check_status(lay_out(INT64_MAX, INT64_MAX, one_segment).status(), code,
                 {"9223372036854775807"});
    check_status(lay_out(1 << 20, kMaxBlocksPerGroup, one_segment).status(), code,
                 {"num_blocks is 2147483647", "1048576", "70368744177664"});
  }
  CHECK(lay_out(1 << 15, kMaxBlocksPerGroup).ok());
}

TEST_CASE("a group that grows has at most 65536 extents, larger ones where they are chosen here") {
  // 2^20 blocks of 2 MiB fill 2^16 extents of 32 MiB.
  const GroupLayout layout = lay_out_group(GroupSize{2 * kMiB, 1, 1 << 20}).value();
  CHECK(layout.extent_bytes == 32 * kMiB);
  CHECK(layout.num_extents() == 65536);
  check_status(lay_out_group(GroupSize{2 * kMiB, 1, 1 << 20, false, 2 * kMiB}).status(),
               ErrorCode::kInvalidArgument, {"max_blocks is 1048576", "1048576 segments", "65536"});
  check_status(lay_out_group(GroupSize{kMaxExtentBytes, 1, (1 << 16) + 1}).status(),
               ErrorCode::kInvalidArgument, {"65537 segments of 268435456"});
}

void check_layout(int64_t block_bytes, int64_t num_blocks) {
  CAPTURE(block_bytes);
  CAPTURE(num_blocks);
  const GroupLayout layout = lay_out(block_bytes, num_blocks).value();
  const int64_t stride = layout.block_stride_bytes;
  const int64_t used = num_blocks * stride;
  REQUIRE(stride >= block_bytes);
  REQUIRE((stride - block_bytes) * 64 <= block_bytes);
  REQUIRE(layout.physical_bytes() >= used);
  REQUIRE(layout.physical_bytes() - used < kSegmentGranularityBytes);
  for (size_t i = 0; i < layout.segment_bytes.size(); ++i) {
    const int64_t size_bytes = layout.segment_bytes[i];
    REQUIRE(size_bytes > 0);
    REQUIRE(size_bytes <= kMaxExtentBytes);
    REQUIRE(size_bytes % kSegmentGranularityBytes == 0);
    if (i + 1 == layout.segment_bytes.size()) continue;
    // Segments of whole blocks: none straddles the border to the next one.
    REQUIRE(size_bytes == layout.extent_bytes);
    REQUIRE(size_bytes % stride == 0);
    REQUIRE(size_bytes > kMaxExtentBytes / 2 - kSegmentGranularityBytes);
  }
}

TEST_CASE("every layout loses at most 1/64 and has no block in two segments") {
  INFO("seed " << test::seed());
  auto random = test::random_engine(1);
  for (int64_t block_bytes = 1; block_bytes <= 5000; ++block_bytes) check_layout(block_bytes, 7);
  for (int i = 0; i < 3000; ++i) {
    const int64_t block_bytes =
        1 + static_cast<int64_t>(random() % (uint64_t{1} << (random() % 29)));
    const int64_t most = std::min(kMaxBlocksPerGroup, (int64_t{1} << 34) / (2 * block_bytes) + 1);
    check_layout(block_bytes, 1 + static_cast<int64_t>(random() % static_cast<uint64_t>(most)));
  }
}

}  // namespace
}  // namespace larder
