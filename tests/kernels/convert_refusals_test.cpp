// convert: what it refuses, and that nothing is written then.
#include <cstring>
#include <functional>
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/foreign_pages.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Exchange;
using test::kPoison;

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

AttentionGeometry both(KvFormat format, int32_t heads, int32_t tokens, int32_t dim) {
  return {1, heads, tokens, dim, dim, format, format};
}

// A good export of 2 blocks of 4 tokens as 2 swizzled NHD pages with separate K and V.
struct Call {
  Call()
      : engine(test::random_engine(206)),
        exchange(both(KvFormat::kNvfp4, 2, 4, 64), 4, 2, PageOrder::kNhd, VScaleOrder::kSwizzled,
                 engine) {}
  ConvertParams& params() { return exchange.params; }
  std::mt19937_64 engine;
  Exchange exchange;
};

void check_refused(std::string_view part, const std::function<void(Call&)>& change,
                   bool to_pool = false) {
  Call call;
  call.params().to_pool = to_pool;
  change(call);
  const std::vector<std::byte> pool = call.exchange.pool;
  const Status status = run_convert(call.params());
  CAPTURE(status.to_string());
  CAPTURE(part);
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().find(part) != std::string::npos);
  CHECK(call.exchange.pool == pool);
  CHECK(std::all_of(call.exchange.foreign.begin(), call.exchange.foreign.end(),
                    [](std::byte byte) { return byte == kPoison; }));
}

// A pointer that nobody may follow.
std::byte* at_address(int64_t address) {
  std::byte* result = nullptr;
  std::memcpy(&result, &address, sizeof result);
  return result;
}

TEST_CASE("convert refuses pages that are not the pool's, naming the field") {
  check_refused("paged.geometry.k_dim is 128: the pool has 64",
                [](Call& c) { c.params().paged.geometry.k_dim = 128; });
  check_refused("paged.geometry.v_dim is 128: the pool has 64",
                [](Call& c) { c.params().paged.geometry.v_dim = 128; });
  check_refused("paged.geometry.num_kv_heads is 1: the pool has 2",
                [](Call& c) { c.params().paged.geometry.num_kv_heads = 1; });
  check_refused("paged.geometry.k_format is bf16: the pool has nvfp4",
                [](Call& c) { c.params().paged.geometry.k_format = KvFormat::kBf16; });
  check_refused("paged.geometry.v_format is fp8_e4m3: the pool has nvfp4",
                [](Call& c) { c.params().paged.geometry.v_format = KvFormat::kFp8E4m3; });
  check_refused("paged.geometry.mla_row is fp8_ds_mla: the pool has none", [](Call& c) {
    c.params().paged.geometry = mla_geometry(1, 4, MlaRow::kFp8Ds);
    c.params().paged.v_scale_order = VScaleOrder::kLinear;
  });
  check_refused("paged.geometry.num_layers is 2: pages are of 1 layer",
                [](Call& c) { c.params().paged.geometry.num_layers = 2; });
  check_refused("paged.geometry.block_tokens is 0",
                [](Call& c) { c.params().paged.geometry.block_tokens = 0; });
}

TEST_CASE("convert refuses another number of tokens, and blocks that are not the pool's") {
  check_refused(
      "paged has 3 pages of 4 tokens: 2 blocks of 4 tokens",
      [](Call& c) { c.params().paged.num_pages = 3; }, true);
  check_refused("paged has 2 pages of 4 tokens: 1 blocks of 4 tokens",
                [](Call& c) { c.params().num_blocks = 1; });
  check_refused("num_pages is -1", [](Call& c) { c.params().paged.num_pages = -1; });
  check_refused("blocks[1] is 4: the pool has 4 blocks", [](Call& c) { c.exchange.blocks[1] = 4; });
  check_refused("blocks[0] is -1", [](Call& c) { c.exchange.blocks[0] = -1; });
  check_refused("blocks is null", [](Call& c) { c.params().blocks = nullptr; });
  check_refused("number of blocks is -2", [](Call& c) { c.params().num_blocks = -2; });
  check_refused(
      "blocks names block 3 twice",
      [](Call& c) { c.exchange.blocks[0] = c.exchange.blocks[1] = 3; }, true);
}

TEST_CASE("one block may be written out twice") {
  Call call;
  call.exchange.blocks[0] = call.exchange.blocks[1] = 3;
  REQUIRE(run_convert(call.params()).ok());
  CHECK(call.exchange.num_wrong_foreign_bytes() == 0);
}

TEST_CASE("convert refuses strides under which rows would overlap or pass 2^63") {
  // K data rows have 32 bytes; NHD strides are [256, 32, 64].
  check_refused(
      "k_data: strides of page, head and token [255, 32, 64] bytes let rows of 32 bytes "
      "overlap (2 pages, 2 heads, 4 tokens)",
      [](Call& c) { c.params().paged.k_data.page_stride_bytes = 255; });
  check_refused("v_data: strides", [](Call& c) { c.params().paged.v_data.head_stride_bytes = 0; });
  check_refused("v_scale: strides",
                [](Call& c) { c.params().paged.v_scale.token_stride_bytes = 7; });
  check_refused(
      "k_scale: strides of page, head and token [32, -4, 8] bytes: expected none below 0",
      [](Call& c) { c.params().paged.k_scale.head_stride_bytes = -4; }, true);
  for (const bool to_pool : {false, true}) {
    check_refused(
        "k_data: strides of page, head and token [9223372036854775807, 32, 64] bytes with "
        "2 pages pass 2^63 bytes",
        [](Call& c) { c.params().paged.k_data.page_stride_bytes = kMaxInt64; }, to_pool);
    check_refused(
        "v_data: strides",
        [](Call& c) { c.params().paged.v_data.token_stride_bytes = kMaxInt64 / 2; }, to_pool);
    check_refused(
        "pass 2^63 bytes",
        [](Call& c) { c.params().paged.v_data.base = at_address(kMaxInt64 - 9); }, to_pool);
    check_refused(
        "v_scale: base is null", [](Call& c) { c.params().paged.v_scale.base = nullptr; }, to_pool);
  }
}

TEST_CASE("convert refuses regions that share bytes with each other or with the pool") {
  check_refused("k_data and v_data overlap: v_data begins 0 bytes after k_data",
                [](Call& c) { c.params().paged.v_data = c.params().paged.k_data; });
  check_refused("k_data and v_data overlap: v_data begins 31 bytes",
                [](Call& c) { c.params().paged.v_data.base = c.params().paged.k_data.base + 31; });
  check_refused(
      "k_data begins 3 bytes after the pool's pages and overlaps them",
      [](Call& c) { c.params().paged.k_data.base = c.exchange.pool.data() + 3; }, true);
}

TEST_CASE("a broadcast source may be read, as nothing is written there") {
  Call call;
  std::fill(call.exchange.foreign.begin(), call.exchange.foreign.end(), std::byte{0x11});
  call.params().to_pool = true;
  call.params().paged.k_data.page_stride_bytes = 0;
  REQUIRE(run_convert(call.params()).ok());
  call.exchange.each_byte(
      [&](size_t in_pool, size_t) { REQUIRE(call.exchange.pool[in_pool] == std::byte{0x11}); });
}

TEST_CASE("swizzled V scales are refused where the tiles do not fit") {
  check_refused("v_scale_order is 7",
                [](Call& c) { c.params().paged.v_scale_order = static_cast<VScaleOrder>(7); });
  auto engine = test::random_engine(208);
  const auto refused = [&engine](const AttentionGeometry& geometry, int32_t page_tokens,
                                 std::string_view part) {
    Exchange exchange(geometry, page_tokens, geometry.block_tokens, PageOrder::kHnd,
                      VScaleOrder::kSwizzled, engine);
    const Status status = run_convert(exchange.params);
    CAPTURE(status.to_string());
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(status.message().find(part) != std::string::npos);
    CHECK(std::all_of(exchange.foreign.begin(), exchange.foreign.end(),
                      [](std::byte byte) { return byte == kPoison; }));
  };
  refused(both(KvFormat::kNvfp4, 1, 4, 96), 4,
          "v_dim is 96: swizzled V scales need a multiple of 64");
  refused(both(KvFormat::kNvfp4, 1, 4, 64), 6, "pages have 6 tokens: swizzled V scales need");
  refused(both(KvFormat::kBf16, 1, 4, 64), 4, "only nvfp4 values have scales, and these are bf16");
  refused(mla_geometry(1, 4, MlaRow::kNvfp4Ds), 4, "these are rows of nvfp4_ds_mla");
}

TEST_CASE("convert refuses a layer that cannot be") {
  check_refused("k_dim is 100: nvfp4 needs a multiple of 16",
                [](Call& c) { c.params().layer.geometry.k_dim = 100; });
  check_refused("page is not the layout of the geometry",
                [](Call& c) { c.params().layer.geometry.num_kv_heads = 4; });
  check_refused("block_stride_bytes is 10",
                [](Call& c) { c.params().layer.block_stride_bytes = 10; });
  check_refused("base is null", [](Call& c) { c.params().layer.base = nullptr; });
  check_refused(
      "num_kv_heads, k_dim and v_dim are 2, 64 and 64: rows of fp8_mla have 1, 576 and 512",
      [](Call& c) { c.params().layer.geometry.mla_row = MlaRow::kFp8; });
}

TEST_CASE("no blocks and no pages are nothing to do") {
  ConvertParams params;
  params.layer.geometry = params.paged.geometry = both(KvFormat::kBf16, 1, 4, 8);
  params.layer.page = page_layout(params.layer.geometry);
  params.layer.block_stride_bytes = params.layer.page.page_bytes;
  CHECK(run_convert(params).ok());
}

// Marks every byte of every row; false if one was marked before.
bool mark_rows(const PagedKv& kv, std::byte* memory, std::vector<bool>& marked) {
  const std::array<int64_t, 4> sizes = test::row_sizes(kv.geometry);
  PagedKv copy = kv;
  for (size_t r = 0; r < 4; ++r)
    for (int64_t page = 0; page < kv.num_pages; ++page)
      for (int64_t head = 0; head < kv.geometry.num_kv_heads; ++head)
        for (int64_t token = 0; token < kv.geometry.block_tokens; ++token)
          for (int64_t j = 0; j < sizes[r]; ++j) {
            const PagedRows& rows = test::rows_of(copy, r);
            const auto at = static_cast<size_t>(rows.base - memory + page * rows.page_stride_bytes +
                                                head * rows.head_stride_bytes +
                                                token * rows.token_stride_bytes + j);
            if (marked.at(at)) return false;
            marked[at] = true;
          }
  return true;
}

TEST_CASE(
    "whatever strides convert accepts for writing, no two rows and no pool page share a byte") {
  auto engine = test::random_engine(209);
  const auto pick = [&engine](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
  };
  constexpr int64_t kSize = 6000;
  std::vector<std::byte> memory(kSize);
  int num_accepted = 0;
  int num_refused = 0;
  for (int i = 0; i < 60000; ++i) {
    const auto heads = static_cast<int32_t>(pick(1, 3));
    const auto tokens = static_cast<int32_t>(pick(1, 3));
    AttentionGeometry geometry = both(KvFormat::kNvfp4, heads, tokens, 16);
    if (pick(0, 1) == 0) geometry.k_format = geometry.v_format = KvFormat::kFp8E4m3;
    ConvertParams params;
    params.layer.geometry = geometry;
    params.layer.page = page_layout(geometry);
    params.layer.num_blocks = 3;
    params.layer.block_stride_bytes = params.layer.page.page_bytes + 64 * pick(0, 3);
    params.layer.base = memory.data() + 4 * pick(0, 200);
    params.paged.geometry = geometry;
    params.paged.num_pages = pick(1, 3);
    const int64_t shared_page_stride = 16 * pick(1, 60);
    for (size_t r = 0; r < 4; ++r) {
      const bool same = pick(0, 3) != 0;
      test::rows_of(params.paged, r) = {memory.data() + 4 * pick(0, 500),
                                        same ? shared_page_stride : 4 * pick(0, 200),
                                        8 * pick(1, 12), 8 * pick(1, 12)};
    }
    std::vector<int32_t> blocks = {0, 1, 2};
    params.blocks = blocks.data();
    params.num_blocks = params.paged.num_pages;
    if (!validate_convert(params).ok()) {
      ++num_refused;
      continue;
    }
    ++num_accepted;
    std::vector<bool> marked(kSize);
    for (int64_t block = 0; block < 3; ++block)
      for (int64_t j = 0; j < params.layer.page.page_bytes; ++j)
        marked.at(static_cast<size_t>(params.layer.base - memory.data() +
                                      block * params.layer.block_stride_bytes + j)) = true;
    REQUIRE(mark_rows(params.paged, memory.data(), marked));
  }
  CHECK(num_accepted > 100);
  CHECK(num_refused > 1000);
}

}  // namespace
}  // namespace larder::kernels
