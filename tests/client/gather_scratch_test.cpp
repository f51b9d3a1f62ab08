// The reservation for gathers: numbers worked out by hand, and refusals.
#include "larder/gather_scratch.h"

#include <limits>

#include <doctest/doctest.h>

#include "larder/client.h"

namespace larder {
namespace {

constexpr int32_t kMaxInt32 = std::numeric_limits<int32_t>::max();
constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

AttentionGeometry geometry(int32_t heads, int32_t block_tokens, int32_t k_dim, int32_t v_dim) {
  return {2, heads, block_tokens, k_dim, v_dim, KvFormat::kNvfp4, KvFormat::kNvfp4};
}

void check(const Result<GatherScratch>& scratch, int64_t rows_per_sequence, int64_t rows,
           int64_t k_bytes, int64_t v_bytes) {
  CAPTURE(scratch.status().to_string());
  REQUIRE(scratch.ok());
  CHECK(scratch->rows_per_sequence == rows_per_sequence);
  CHECK(scratch->rows == rows);
  CHECK(scratch->k_bytes == k_bytes);
  CHECK(scratch->v_bytes == v_bytes);
  CHECK(scratch->bytes() == k_bytes + v_bytes);
}

TEST_CASE("layers without a window need room for the whole context") {
  check(gather_scratch(geometry(8, 16, 128, 128), -1, {Dtype::kBf16, 4, 4096, 512}), 4096, 16384,
        33554432, 33554432);
  check(gather_scratch(geometry(1, 16, 16, 32), -1, {Dtype::kFp32, 1, 1, 1}), 1, 1, 64, 128);
}

TEST_CASE("layers with a window need window and query rows, in whole blocks, within the context") {
  const AttentionGeometry shape = geometry(2, 16, 64, 32);
  check(gather_scratch(shape, 1024, {Dtype::kFp16, 1, 131072, 512}), 1536, 1536, 393216, 196608);
  // 1000 + 1 tokens are 62 blocks of 16 and 9 tokens more.
  check(gather_scratch(shape, 1000, {Dtype::kFp32, 3, 131072, 1}), 1008, 3024, 1548288, 774144);
  check(gather_scratch(shape, 1, {Dtype::kFp16, 1, 100, 1}), 16, 16, 4096, 2048);
  check(gather_scratch(shape, 4096, {Dtype::kFp16, 1, 1000, 512}), 1000, 1000, 256000, 128000);
  check(gather_scratch(shape, 990, {Dtype::kFp16, 1, 1000, 9}), 1000, 1000, 256000, 128000);
  check(gather_scratch(shape, kMaxInt32, {Dtype::kFp16, 1, 1000, kMaxInt32}), 1000, 1000, 256000,
        128000);
}

TEST_CASE("MLA rows are 576 keys, which are the values too") {
  const AttentionGeometry shape = mla_geometry(1, 64, MlaRow::kFp8Ds);
  check(gather_scratch(shape, -1, {Dtype::kFp8E4m3, 2, 100, 1}), 100, 200, 115200, 0);
  check(gather_scratch(shape, 128, {Dtype::kBf16, 2, 4096, 1}), 192, 384, 442368, 0);
}

TEST_CASE("what cannot be is refused with the field and the number") {
  const auto refused = [](const AttentionGeometry& shape, int32_t window,
                          const GatherLimits& limits, std::string_view part) {
    const auto scratch = gather_scratch(shape, window, limits);
    CAPTURE(part);
    CAPTURE(scratch.status().to_string());
    CHECK(scratch.status().code() == ErrorCode::kInvalidArgument);
    CHECK(scratch.status().message().find(part) != std::string::npos);
  };
  const AttentionGeometry shape = geometry(2, 16, 64, 32);
  refused(shape, 0, {Dtype::kBf16, 1, 1, 1}, "window_tokens is 0: expected 1 or more, or -1");
  refused(shape, -2, {Dtype::kBf16, 1, 1, 1}, "window_tokens is -2");
  refused(shape, -1, {Dtype::kBf16, 0, 1, 1}, "num_seqs is 0: expected 1 to");
  refused(shape, -1, {Dtype::kBf16, 1, 0, 1}, "context_tokens is 0: expected 1 to 2147483647");
  refused(shape, -1, {Dtype::kBf16, 1, int64_t{kMaxInt32} + 1, 1}, "context_tokens is 2147483648");
  refused(shape, -1, {Dtype::kBf16, 1, 1, 0}, "chunk_rows is 0");
  refused(shape, -1, {Dtype::kBf16, kMaxInt64, 2, 1},
          "num_seqs is 9223372036854775807 with 2 rows a sequence: the scratch passes 2^63 bytes");
  // 2^51 sequences of a row of 2 * (64 + 32) * 2 bytes: 384 * 2^51 < 2^60; 2^55 of them are not.
  CHECK(gather_scratch(shape, -1, {Dtype::kBf16, int64_t{1} << 51, 1, 1}).ok());
  refused(shape, -1, {Dtype::kBf16, int64_t{1} << 55, 1, 1}, "the scratch passes 2^63 bytes");
  refused(shape, -1, {Dtype::kFp8E4m3, 1, 1, 1}, "dtype is fp8_e4m3: expected bf16, fp16 or fp32");
  refused(shape, -1, {static_cast<Dtype>(9), 1, 1, 1}, "dtype is 9");
  refused(geometry(0, 16, 64, 32), -1, {Dtype::kBf16, 1, 1, 1}, "num_kv_heads is 0");
}

}  // namespace
}  // namespace larder
