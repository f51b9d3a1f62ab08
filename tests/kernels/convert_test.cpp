// convert: every byte of every block, in both directions.
#include <cmath>
#include <string>

#include <doctest/doctest.h>

#include "tests/kernels/foreign_pages.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Exchange;
using test::kPoison;
using test::Side;

AttentionGeometry both(KvFormat format, int32_t heads, int32_t tokens, int32_t dim) {
  return {1, heads, tokens, dim, dim, format, format};
}

std::vector<std::byte> golden_page(const char* form) {
  std::ifstream file(LARDER_TEST_DATA "/nvfp4_goldens.json");
  const std::string hex = nlohmann::json::parse(file)["page"][form];
  std::vector<std::byte> bytes;
  for (size_t i = 0; i < hex.size(); i += 2)
    bytes.push_back(static_cast<std::byte>(std::stoul(hex.substr(i, 2), nullptr, 16)));
  return bytes;
}

// Out with poisoned memory, then back into a pool of other bytes.
void check_both_ways(Exchange& exchange) {
  REQUIRE_MESSAGE(run_convert(exchange.params).ok(), run_convert(exchange.params).to_string());
  CHECK(exchange.num_wrong_foreign_bytes() == 0);

  const std::vector<std::byte> before = exchange.pool;
  const std::vector<std::byte> foreign = exchange.foreign;
  std::vector<std::byte> expected(before.size(), kPoison);
  exchange.each_byte([&](size_t in_pool, size_t) { expected[in_pool] = before[in_pool]; });
  std::fill(exchange.pool.begin(), exchange.pool.end(), kPoison);
  exchange.params.to_pool = true;
  REQUIRE(run_convert(exchange.params).ok());
  CHECK(exchange.pool == expected);
  CHECK(exchange.foreign == foreign);
}

TEST_CASE("the golden page is swizzled and read back byte for byte") {
  const AttentionGeometry geometry = both(KvFormat::kNvfp4, 2, 4, 64);
  std::vector<std::byte> linear = golden_page("linear");
  const std::vector<std::byte> swizzled = golden_page("swizzled");
  REQUIRE(linear.size() == 576);
  REQUIRE(linear != swizzled);
  std::vector<std::byte> out(576, kPoison);
  const int32_t block = 0;
  ConvertParams params;
  params.layer = {linear.data(), 576, 1, geometry, page_layout(geometry)};
  params.blocks = &block;
  params.num_blocks = 1;
  params.paged = dense_pages(out.data(), geometry, 1, PageOrder::kHnd, VScaleOrder::kSwizzled);
  REQUIRE(run_convert(params).ok());
  CHECK(out == swizzled);

  std::fill(linear.begin(), linear.end(), kPoison);
  params.to_pool = true;
  REQUIRE(run_convert(params).ok());
  CHECK(linear == golden_page("linear"));
}

TEST_CASE("the same layout on both sides is a copy of the pages") {
  auto engine = test::random_engine(201);
  Exchange exchange(both(KvFormat::kNvfp4, 3, 8, 64), 8, 2, PageOrder::kHnd, VScaleOrder::kLinear,
                    engine);
  const AttentionGeometry& geometry = exchange.params.layer.geometry;
  const auto page_bytes = static_cast<size_t>(exchange.params.layer.page.page_bytes);
  exchange.foreign.assign(2 * page_bytes, kPoison);
  exchange.params.paged = dense_pages(exchange.foreign.data(), geometry, 2, PageOrder::kHnd);
  REQUIRE(run_convert(exchange.params).ok());
  for (size_t i = 0; i < 2; ++i) {
    const std::byte* block =
        exchange.pool.data() + exchange.blocks[i] * exchange.params.layer.block_stride_bytes;
    CHECK(std::equal(block, block + page_bytes, exchange.foreign.data() + i * page_bytes));
  }
}

TEST_CASE("one page-16 HND block becomes four page-4 NHD pages, and comes back") {
  constexpr int kHeads = 3;
  constexpr int kDim = 8;
  // K of (token, head, dim) is token * 16 + head * 4 + dim / 8: exact in bf16. V is -K - 1.
  const auto value = [](bool v, int64_t t, int64_t h, int64_t d) {
    const double k = static_cast<double>(t * 16 + h * 4) / 8 + static_cast<double>(d) / 8;
    return test::nearest_bf16(static_cast<float>(v ? -k - 1 : k));
  };
  std::vector<uint16_t> pool(2 * kHeads * 16 * kDim);
  for (size_t i = 0; i < pool.size(); ++i) {
    const auto n = static_cast<int64_t>(i);
    pool[i] =
        value(n / (kHeads * 16 * kDim) == 1, n / kDim % 16, n / (16 * kDim) % kHeads, n % kDim);
  }
  const std::vector<uint16_t> before = pool;
  std::vector<uint16_t> foreign(pool.size(), 0xE7E7);
  AttentionGeometry geometry = both(KvFormat::kBf16, kHeads, 16, kDim);
  const int32_t block = 0;
  ConvertParams params;
  params.layer = {reinterpret_cast<std::byte*>(pool.data()), 1536, 1, geometry,
                  page_layout(geometry)};
  params.blocks = &block;
  params.num_blocks = 1;
  geometry.block_tokens = 4;
  params.paged =
      dense_pages(reinterpret_cast<std::byte*>(foreign.data()), geometry, 4, PageOrder::kNhd);
  REQUIRE(run_convert(params).ok());
  size_t i = 0;
  for (int64_t page = 0; page < 4; ++page)
    for (const bool v : {false, true})
      for (int64_t token = 0; token < 4; ++token)
        for (int64_t head = 0; head < kHeads; ++head)
          for (int64_t dim = 0; dim < kDim; ++dim)
            REQUIRE(foreign[i++] == value(v, 4 * page + token, head, dim));
  std::fill(pool.begin(), pool.end(), 0xE7E7);
  params.to_pool = true;
  REQUIRE(run_convert(params).ok());
  CHECK(pool == before);
}

std::vector<AttentionGeometry> geometries(int32_t heads, int32_t tokens) {
  return {both(KvFormat::kNvfp4, heads, tokens, 64),
          {1, heads, tokens, 192, 128, KvFormat::kNvfp4, KvFormat::kNvfp4},
          {1, heads, tokens, 64, 64, KvFormat::kFp8E4m3, KvFormat::kNvfp4},
          {1, heads, tokens, 24, 9, KvFormat::kFp16, KvFormat::kFp8E5m2},
          both(KvFormat::kBf16, heads, tokens, 16)};
}

TEST_CASE("every order, number of heads and pair of block sizes, in both directions") {
  auto engine = test::random_engine(202);
  for (const int32_t heads : {1, 2, 3, 4, 8})
    for (const int32_t block_tokens : {4, 8, 16, 64})
      for (const int32_t page_tokens : {4, 8, 16, 64})
        for (const AttentionGeometry& geometry : geometries(heads, block_tokens))
          for (const PageOrder order : {PageOrder::kNhd, PageOrder::kHnd})
            for (const VScaleOrder v_order : {VScaleOrder::kLinear, VScaleOrder::kSwizzled}) {
              if (v_order == VScaleOrder::kSwizzled && geometry.v_format != KvFormat::kNvfp4)
                continue;
              CAPTURE(heads);
              CAPTURE(block_tokens);
              CAPTURE(page_tokens);
              CAPTURE(name(order));
              CAPTURE(name(v_order));
              Exchange exchange(geometry, page_tokens, std::max(block_tokens / page_tokens, 1),
                                order, v_order, engine);
              check_both_ways(exchange);
            }
}

TEST_CASE("random strides and ratios: every byte arrives and no gap is touched") {
  auto engine = test::random_engine(203);
  const auto pick = [&engine](int64_t low, int64_t high) {
    return std::uniform_int_distribution<int64_t>(low, high)(engine);
  };
  for (int i = 0; i < 300; ++i) {
    const auto block_tokens = static_cast<int32_t>(pick(1, 9));
    const auto heads = static_cast<int32_t>(pick(1, 4));
    const auto all = geometries(heads, block_tokens);
    const AttentionGeometry geometry = all[static_cast<size_t>(pick(0, 4))];
    const bool swizzled = geometry.v_format == KvFormat::kNvfp4 && pick(0, 1) == 1;
    const auto page_tokens = static_cast<int32_t>(swizzled ? 4 * pick(1, 3) : pick(1, 9));
    CAPTURE(block_tokens);
    CAPTURE(page_tokens);
    CAPTURE(heads);
    Exchange exchange(geometry, page_tokens, block_tokens * pick(1, 2), PageOrder::kHnd,
                      swizzled ? VScaleOrder::kSwizzled : VScaleOrder::kLinear, engine, 40);
    check_both_ways(exchange);
  }
}

TEST_CASE("MLA rows of every format move whole, whatever the distance of blocks") {
  auto engine = test::random_engine(204);
  for (const MlaRow row : {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16})
    for (const int64_t gap : {0, 700}) {
      CAPTURE(name(row));
      Exchange exchange(mla_geometry(1, 64, row), 32, 6, PageOrder::kNhd, VScaleOrder::kLinear,
                        engine, gap);
      check_both_ways(exchange);
    }
}

// Root of the summed squares of differences, relative to the first's.
double relative_l2(test::Pool& expected, test::Pool& got, Side side) {
  double error = 0;
  double norm = 0;
  for (int64_t slot = 0; slot < 16; ++slot)
    for (int64_t head = 0; head < 2; ++head) {
      const std::vector<double> a = expected.read(side, slot, head);
      const std::vector<double> b = got.read(side, slot, head);
      for (size_t i = 0; i < a.size(); ++i) {
        error += (a[i] - b[i]) * (a[i] - b[i]);
        norm += a[i] * a[i];
      }
    }
  return std::sqrt(error / norm);
}

TEST_CASE("V scales read in the wrong order give wrong values, and K is not affected") {
  auto engine = test::random_engine(205);
  std::normal_distribution<float> normal;
  const AttentionGeometry geometry = both(KvFormat::kNvfp4, 2, 16, 64);
  test::Pool pool(geometry, 1);
  for (const Side side : {Side::kK, Side::kV})
    for (int64_t slot = 0; slot < 16; ++slot)
      for (int64_t head = 0; head < 2; ++head)
        for (int64_t group = 0; group < 4; ++group) {
          float values[16];
          const float amplitude = std::exp2(2 * normal(engine));
          for (float& x : values) x = amplitude * normal(engine);
          const test::Nvfp4Group bytes = test::nvfp4_group(values, 1.0f);
          std::byte* data = pool.bytes().data() + pool.data_offset(side, slot, head) + 8 * group;
          std::memcpy(data, bytes.data, 8);
          pool.bytes()[static_cast<size_t>(pool.scale_offset(side, slot, head) + group)] =
              static_cast<std::byte>(bytes.scale);
        }
  for (const VScaleOrder read_as : {VScaleOrder::kSwizzled, VScaleOrder::kLinear}) {
    test::Pool back(geometry, 1);
    std::vector<std::byte> foreign(pool.bytes().size(), kPoison);
    const int32_t block = 0;
    ConvertParams params;
    params.layer = pool.layer();
    params.blocks = &block;
    params.num_blocks = 1;
    params.paged =
        dense_pages(foreign.data(), geometry, 1, PageOrder::kHnd, VScaleOrder::kSwizzled);
    REQUIRE(run_convert(params).ok());
    params.layer = back.layer();
    params.paged.v_scale_order = read_as;
    params.to_pool = true;
    REQUIRE(run_convert(params).ok());
    CHECK(relative_l2(pool, back, Side::kK) == 0);
    const double v_error = relative_l2(pool, back, Side::kV);
    if (read_as == VScaleOrder::kSwizzled)
      CHECK(v_error == 0);
    else
      CHECK(v_error > 0.15);
  }
}

TEST_CASE("K and V rows in turn, and two layers in one memory, do not overlap") {
  auto engine = test::random_engine(207);
  // K and V heads alternate in each token: [pages, tokens, heads, 2, bytes].
  Exchange exchange(both(KvFormat::kBf16, 3, 8, 16), 4, 4, PageOrder::kNhd, VScaleOrder::kLinear,
                    engine);
  PagedKv& kv = exchange.params.paged;
  kv.k_data = kv.v_data = {exchange.foreign.data(), 4 * 3 * 64, 64, 3 * 64};
  kv.v_data.base += 32;
  check_both_ways(exchange);

  // Layer 1 of a pool whose blocks hold 2 layers, from layer 0.
  const AttentionGeometry geometry = both(KvFormat::kNvfp4, 2, 4, 64);
  std::vector<std::byte> bytes(2 * 1152);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
  const int32_t blocks[] = {0, 1};
  ConvertParams params;
  params.layer = {bytes.data(), 1152, 2, geometry, page_layout(geometry)};
  params.blocks = blocks;
  params.num_blocks = 2;
  params.paged = dense_pages(bytes.data() + 576, geometry, 2, PageOrder::kHnd);
  for (PagedRows* rows :
       {&params.paged.k_data, &params.paged.k_scale, &params.paged.v_data, &params.paged.v_scale})
    rows->page_stride_bytes = 1152;
  REQUIRE(run_convert(params).ok());
  for (const size_t block : {0, 1})
    CHECK(std::equal(bytes.begin() + static_cast<int64_t>(block) * 1152,
                     bytes.begin() + static_cast<int64_t>(block) * 1152 + 576,
                     bytes.begin() + static_cast<int64_t>(block) * 1152 + 576));
}

}  // namespace
}  // namespace larder::kernels
