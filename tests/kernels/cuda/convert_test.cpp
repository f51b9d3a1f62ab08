// convert on the GPU: every byte where the page formula and the golden table of swizzled places
// have it, in both directions.
#include <limits>

#include "tests/kernels/cuda/device_calls.h"
#include "tests/kernels/foreign_pages.h"

namespace larder::kernels {
namespace {

using test::DeviceBytes;
using test::draw;
using test::pick;

constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

ConvertParams on_device(const test::Exchange& exchange, const DeviceBytes& pool,
                        const DeviceBytes& foreign, const DeviceBytes& blocks) {
  ConvertParams params = exchange.params;
  params.layer.base = pool.data();
  for (size_t r = 0; r < 4; ++r) {
    std::byte*& base = test::rows_of(params.paged, r).base;
    if (base != nullptr) base = foreign.data() + (base - exchange.foreign.data());
  }
  params.blocks = blocks.data<int32_t>();
  return params;
}

// Entries of the list that the device gets wrong: other ids, or blocks without the right.
struct Wrong {
  std::vector<int32_t> blocks;    // as the device gets them
  std::vector<bool> is_left_out;  // [num_blocks of the pool]
  std::vector<int64_t> values;
};

Wrong make_wrong(const test::Exchange& exchange, const test::PointOfUse& use, bool write, bool wild,
                 std::mt19937_64& engine) {
  Wrong wrong;
  wrong.is_left_out.resize(static_cast<size_t>(exchange.params.layer.num_blocks));
  for (const int32_t block : exchange.blocks) {
    int32_t named = block;
    if (wild && draw(engine, 0, 5) == 0)
      named = pick<int32_t>(engine, {-1, static_cast<int32_t>(exchange.params.layer.num_blocks),
                                     kInt32Max, -kInt32Max - 1});
    const bool may = use.may(named, write);
    wrong.blocks.push_back(named);
    wrong.is_left_out[static_cast<size_t>(block)] = !may;
    if (!may) wrong.values.push_back(named);
  }
  return wrong;
}

void expect_bytes(std::string_view what, const DeviceBytes& device,
                  const std::vector<std::byte>& expected) {
  const std::string text = test::differences(device.read(), expected);
  CHECK_MESSAGE(text.empty(), what << ": " << text);
}

void check_both_ways(test::Exchange& exchange, bool wild, std::mt19937_64& engine) {
  test::PointOfUse use(exchange.params.layer.num_blocks, wild, engine);
  for (const bool to_pool : {false, true}) {
    CAPTURE(to_pool);
    const Wrong wrong = make_wrong(exchange, use, to_pool, wild, engine);
    std::vector<std::byte> foreign(exchange.foreign.size(), test::kPoison);
    std::vector<std::byte> pool(exchange.pool.size(), test::kPoison);
    if (to_pool)
      for (std::byte& byte : foreign) byte = static_cast<std::byte>(engine());
    else
      pool = exchange.pool;
    const DeviceBytes device_pool(pool);
    const DeviceBytes device_foreign(foreign);
    const DeviceBytes blocks(wrong.blocks);
    exchange.params.to_pool = to_pool;
    test::check_ok(
        run_convert(on_device(exchange, device_pool, device_foreign, blocks), use.target()));
    exchange.each_byte([&](size_t in_pool, size_t in_foreign) {
      const auto stride = static_cast<size_t>(exchange.params.layer.block_stride_bytes);
      if (wrong.is_left_out[in_pool / stride]) return;
      if (to_pool)
        pool[in_pool] = foreign[in_foreign];
      else
        foreign[in_foreign] = pool[in_pool];
    });
    expect_bytes("pool", device_pool, pool);
    expect_bytes("foreign", device_foreign, foreign);
    use.check(wrong.values);
  }
}

void run_case(AttentionGeometry g, VScaleOrder v_order, std::mt19937_64& engine) {
  const bool swizzled = v_order == VScaleOrder::kSwizzled;
  const auto page_tokens = swizzled ? pick(engine, {4, 16, 32}) : pick(engine, {1, 3, 16, 24, 64});
  g.block_tokens = pick(engine, {1, 4, 16, 64, 100});
  // As many tokens in pages as in blocks.
  const int64_t num_pages = g.block_tokens * draw(engine, 1, g.block_tokens > 16 ? 1 : 3);
  if (num_pages * page_tokens > 2000) return run_case(g, v_order, engine);
  const auto order = pick(engine, {PageOrder::kNhd, PageOrder::kHnd});
  const auto gap_bytes = pick<int64_t>(engine, {0, 0, 0, 1, 40});
  const auto pool_gap_bytes = pick<int64_t>(engine, {0, 0, 16, 4, 5});
  CAPTURE(page_tokens);
  CAPTURE(num_pages);
  CAPTURE(name(order));
  CAPTURE(name(v_order));
  CAPTURE(gap_bytes);
  CAPTURE(pool_gap_bytes);
  LayerView layer;
  layer.geometry = g;
  CAPTURE(test::text_of(layer));
  test::Exchange exchange(g, page_tokens, num_pages, order, v_order, engine, gap_bytes,
                          pool_gap_bytes);
  check_both_ways(exchange, draw(engine, 0, 1) == 0, engine);
}

TEST_CASE("pages of every pair of formats go out and come in byte for byte") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7301);
  for (int k = 0; k < 5; ++k)
    for (int v = 0; v < 5; ++v)
      for (int repeat = 0; repeat < 4; ++repeat) {
        AttentionGeometry g = {1, 1, 1, 1, 1, static_cast<KvFormat>(k), static_cast<KvFormat>(v)};
        g.num_kv_heads = static_cast<int32_t>(draw(engine, 1, 8));
        g.k_dim = k == 4 ? pick(engine, {16, 64, 80, 128}) : pick(engine, {1, 7, 64, 96, 112, 192});
        g.v_dim = v == 4 ? pick(engine, {16, 64, 80, 128}) : pick(engine, {1, 33, 64, 128});
        run_case(g, VScaleOrder::kLinear, engine);
      }
}

TEST_CASE("V scales are swizzled and put straight again") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7302);
  for (const int32_t v_dim : {64, 128, 256})
    for (int repeat = 0; repeat < 8; ++repeat) {
      AttentionGeometry g = {1, 1, 1, 64, v_dim, KvFormat::kNvfp4, KvFormat::kNvfp4};
      g.num_kv_heads = static_cast<int32_t>(draw(engine, 1, 5));
      run_case(g, VScaleOrder::kSwizzled, engine);
    }
}

TEST_CASE("pages of every MLA row format go out and come in byte for byte") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7303);
  for (int row = 1; row <= 4; ++row)
    for (int repeat = 0; repeat < 4; ++repeat)
      run_case(mla_geometry(1, 1, static_cast<MlaRow>(row)), VScaleOrder::kLinear, engine);
}

// The golden places end at 16 scale columns.
TEST_CASE("V scales of any width are swizzled as the CPU does it") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7304);
  for (const int32_t v_dim : {192, 320, 512, 1024})
    for (const auto order : {PageOrder::kNhd, PageOrder::kHnd})
      for (const int64_t gap_bytes : {0, 9})
        for (const int32_t block_tokens : {16, 64, 6}) {
          CAPTURE(v_dim);
          CAPTURE(name(order));
          CAPTURE(gap_bytes);
          CAPTURE(block_tokens);
          const AttentionGeometry g = {
              1, 3, block_tokens, 64, v_dim, KvFormat::kFp8E4m3, KvFormat::kNvfp4};
          test::Exchange exchange(g, 12, block_tokens, order, VScaleOrder::kSwizzled, engine,
                                  gap_bytes, 0);
          const DeviceBytes blocks(exchange.blocks);
          for (const bool to_pool : {false, true}) {
            CAPTURE(to_pool);
            std::vector<std::byte>& source = to_pool ? exchange.foreign : exchange.pool;
            std::vector<std::byte>& target = to_pool ? exchange.pool : exchange.foreign;
            for (std::byte& byte : source) byte = static_cast<std::byte>(engine());
            std::fill(target.begin(), target.end(), test::kPoison);
            const DeviceBytes pool(exchange.pool);
            const DeviceBytes foreign(exchange.foreign);
            exchange.params.to_pool = to_pool;
            test::PointOfUse use(exchange.params.layer.num_blocks, false, engine);
            test::check_ok(run_convert(on_device(exchange, pool, foreign, blocks), use.target()));
            test::check_ok(run_convert(exchange.params));
            expect_bytes("pool", pool, exchange.pool);
            expect_bytes("foreign", foreign, exchange.foreign);
          }
        }
}

TEST_CASE("more blocks than CTAs go out and come in byte for byte") {
  if (!test::has_gpu()) return;
  auto engine = test::random_engine(7305);
  for (const int32_t page_tokens : {1, 7}) {
    CAPTURE(page_tokens);
    const AttentionGeometry g = {1, 1, 1, 16, 16, KvFormat::kNvfp4, KvFormat::kNvfp4};
    test::Exchange exchange(g, page_tokens, 14'000 / page_tokens, PageOrder::kHnd,
                            VScaleOrder::kLinear, engine);
    check_both_ways(exchange, true, engine);
  }
}

}  // namespace
}  // namespace larder::kernels
