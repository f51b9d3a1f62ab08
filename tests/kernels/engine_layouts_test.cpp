// vLLM's layouts: where each row lies, by an odometer over the axes; and refusals by name.
#include <map>
#include <string>
#include <vector>

#include "tests/kernels/engine_views.h"
#include "tests/kernels/foreign_pages.h"
#include "tests/support/random.h"

namespace larder {
namespace {

using namespace test;

int64_t offset(const PagedRows& rows, int64_t page, int64_t head, int64_t token) {
  return rows.base - kBase + page * rows.page_stride_bytes + head * rows.head_stride_bytes +
         token * rows.token_stride_bytes;
}

// The offset of an element of a dense tensor whose axes stand in `order`, outermost first.
int64_t odometer(std::string_view order, const std::map<char, int64_t>& sizes,
                 const std::map<char, int64_t>& index) {
  int64_t result = 0;
  for (const char axis : order) result = result * sizes.at(axis) + index.at(axis);
  return result;
}

TEST_CASE("each of vLLM's layouts puts every row where its name says") {
  for (const std::string_view layout : kVllmLayoutNames)
    for (const KvPacking packing : {KvPacking::kHeadSlots, KvPacking::kContents})
      for (const KvFormat format : {KvFormat::kFp8E4m3, KvFormat::kBf16})
        for (const int32_t heads : {1, 2, 3, 4, 8})
          for (const int32_t tokens : {1, 4, 16, 64}) {
            CAPTURE(layout);
            CAPTURE(name(packing));
            CAPTURE(heads);
            CAPTURE(tokens);
            VllmCache cache;
            cache.base = kBase;
            cache.layout = good(parse_vllm_layout(layout));
            cache.packing = packing;
            cache.geometry = both(format, heads, tokens, 32);
            cache.geometry.num_layers = 3;
            cache.num_blocks = 5;
            const int64_t row = format == KvFormat::kBf16 ? 64 : 32;
            const bool slots = packing == KvPacking::kHeadSlots;
            const std::map<char, int64_t> sizes = {{'L', 3},
                                                   {'B', 5},
                                                   {'H', slots ? 2 * heads : heads},
                                                   {'N', tokens},
                                                   {'C', slots ? row : 2 * row}};
            int64_t wrong = 0;
            for (int32_t layer = 0; layer < 3; ++layer) {
              const PagedKv kv = good(vllm_layer(cache, layer));
              for (int64_t b = 0; b < 5; ++b)
                for (int64_t h = 0; h < heads; ++h)
                  for (int64_t n = 0; n < tokens; ++n) {
                    std::map<char, int64_t> index = {
                        {'L', layer}, {'B', b}, {'H', h}, {'N', n}, {'C', 0}};
                    wrong += offset(kv.k_data, b, h, n) != odometer(layout, sizes, index);
                    slots ? index['H'] += heads : index['C'] += row;
                    wrong += offset(kv.v_data, b, h, n) != odometer(layout, sizes, index);
                  }
            }
            CHECK(wrong == 0);
          }
}

TEST_CASE("nvfp4 pages of vLLM are four dense regions, in LBHNC and in BLHNC") {
  for (const int32_t heads : {1, 2, 3, 4, 8})
    for (const int32_t tokens : {4, 8, 16, 64})
      for (const bool block_first : {false, true}) {
        VllmCache cache;
        cache.base = kBase;
        cache.layout = block_first ? VllmLayout::kBlhnc : VllmLayout::kLbhnc;
        cache.geometry = both(KvFormat::kNvfp4, heads, tokens, 128);
        cache.geometry.num_layers = 4;
        cache.num_blocks = 3;
        const PagedKv kv = good(vllm_layer(cache, 2));
        const int64_t page = int64_t{2} * heads * tokens * 72;
        int64_t wrong = 0;
        for (int64_t b = 0; b < 3; ++b)
          for (int64_t h = 0; h < heads; ++h)
            for (int64_t t = 0; t < tokens; ++t) {
              const int64_t begin = page * (block_first ? b * 4 + 2 : 2 * 3 + b);
              const int64_t side = page / 2;
              const int64_t data = (h * tokens + t) * 64;
              const int64_t scale = heads * tokens * 64 + (h * tokens + t) * 8;
              wrong += offset(kv.k_data, b, h, t) != begin + data;
              wrong += offset(kv.k_scale, b, h, t) != begin + scale;
              wrong += offset(kv.v_data, b, h, t) != begin + side + data;
              wrong += offset(kv.v_scale, b, h, t) != begin + side + scale;
            }
        CHECK(wrong == 0);
      }
}

TEST_CASE("padded blocks and layers move the rows apart") {
  VllmCache cache;
  cache.base = kBase;
  cache.geometry = both(KvFormat::kNvfp4, 2, 4, 64);  // pages of 576 bytes
  cache.geometry.num_layers = 2;
  cache.num_blocks = 3;
  cache.block_stride_bytes = 640;
  PagedKv kv = good(vllm_layer(cache, 1));
  CHECK(kv.k_data == PagedRows{kBase + 3 * 640, 640, 128, 32});
  CHECK(kv.v_scale == PagedRows{kBase + 3 * 640 + 544, 640, 16, 4});
  cache.layout = VllmLayout::kBlhnc;
  cache.block_stride_bytes = 0;
  cache.layer_stride_bytes = 600;
  kv = good(vllm_layer(cache, 1));
  CHECK(kv.k_data == PagedRows{kBase + 600, 1200, 128, 32});
  cache.block_stride_bytes = 4096;
  CHECK(good(vllm_layer(cache, 1)).k_data == PagedRows{kBase + 600, 4096, 128, 32});
  cache.block_stride_bytes = 1199;
  check_refused(vllm_layer(cache, 1), kInvalid,
                "block_stride_bytes is 1199: in layout BLHNC expected 0 or at least 1200");
  cache.block_stride_bytes = 0;
  cache.layer_stride_bytes = 575;
  check_refused(vllm_layer(cache, 1), kInvalid,
                "layer_stride_bytes is 575: in layout BLHNC expected 0 or at least 576");
  cache.layer_stride_bytes = -600;
  check_refused(vllm_layer(cache, 1), kInvalid, "layer_stride_bytes is -600");
}

TEST_CASE("layout names and their aliases are known, others are refused") {
  CHECK(good(parse_vllm_layout("NHD")) == VllmLayout::kLbnhc);
  CHECK(good(parse_vllm_layout("HND")) == VllmLayout::kLbhnc);
  for (const std::string_view layout : kVllmLayoutNames)
    CHECK(name(good(parse_vllm_layout(layout))) == layout);
  for (const auto* text : {"", "hnd", "LBHN", "HBLNC"})
    check_refused(parse_vllm_layout(text), kInvalid, "expected LBNHC (NHD), LBHNC (HND)");
}

TEST_CASE("nvfp4 in a layout where scales have no place of their own is refused by name") {
  VllmCache cache;
  cache.base = kBase;
  cache.geometry = both(KvFormat::kNvfp4, 2, 4, 64);
  cache.num_blocks = 3;
  for (const VllmLayout layout : {VllmLayout::kLbnhc, VllmLayout::kBlnhc}) {
    cache.layout = layout;
    const auto result = vllm_layer(cache, 0);
    check_refused(result, kUnsupported, "V would begin inside each token's row");
    check_refused(result, kUnsupported, "layout is " + std::string(name(layout)));
    check_refused(result, kUnsupported, "use LBHNC or BLHNC, or FlashInfer's separate tensors");
  }
  for (const VllmLayout layout : {VllmLayout::kLhbnc, VllmLayout::kBhlnc}) {
    cache.layout = layout;
    check_refused(vllm_layer(cache, 0), kUnsupported, "this layout does not keep together");
  }
}

TEST_CASE("vLLM caches that cannot be are refused by field") {
  VllmCache cache;
  cache.base = kBase;
  cache.geometry = both(KvFormat::kNvfp4, 2, 4, 64);
  cache.num_blocks = 3;
  const auto with = [&cache](auto change) {
    VllmCache changed = cache;
    change(changed);
    return vllm_layer(changed, 0);
  };
  check_refused(vllm_layer(cache, 1), kInvalid, "layer is 1: the cache has 1 layers");
  check_refused(vllm_layer(cache, -1), kInvalid, "layer is -1");
  check_refused(with([](auto& c) { c.num_blocks = -1; }), kInvalid, "num_blocks is -1");
  check_refused(with([](auto& c) { c.num_blocks = kMaxInt64; }), kInvalid, "passes 2^63 bytes");
  check_refused(with([](auto& c) { c.block_stride_bytes = kMaxInt64; }), kInvalid, "2^63");
  check_refused(with([](auto& c) { c.base = nullptr; }), kInvalid, "data is null with 3 pages");
  check_refused(with([](auto& c) { c.layout = static_cast<VllmLayout>(6); }), kInvalid,
                "layout is 6");
  check_refused(with([](auto& c) { c.packing = static_cast<KvPacking>(2); }), kInvalid,
                "packing is 2");
  check_refused(with([](auto& c) { c.geometry.k_dim = 100; }), kInvalid, "geometry.k_dim is 100");
  check_refused(with([](auto& c) { c.geometry = mla_geometry(1, 64, MlaRow::kFp8); }), kInvalid,
                "geometry.mla_row is fp8_mla: MLA rows have no heads, see mla_view");
  check_refused(with([](auto& c) { c.geometry.v_dim = 128; }), kUnsupported,
                "the slots of K and V must be of one format and dim");
  check_refused(with([](auto& c) { c.packing = KvPacking::kContents; }), kUnsupported,
                "for nvfp4 use head_slots");
  check_refused(with([](auto& c) {
                  c.geometry = both(KvFormat::kBf16, 2, 4, 64);
                  c.v_scale_order = VScaleOrder::kSwizzled;
                }),
                kInvalid, "only nvfp4 values have scales");
  CHECK(good(with([](auto& c) { c.num_blocks = 0; })).num_pages == 0);
}

TEST_CASE("a view whose axes of size 1 have arbitrary strides is the dense one") {
  const AttentionGeometry geometry = both(KvFormat::kBf16, 1, 1, 32);
  const PagedKv dense =
      good(vllm_view({kBase, {4, 1, 1, 128}, {128, 128, 128, 1}}, KvPacking::kContents, geometry));
  for (const int64_t stride : {int64_t{7}, int64_t{0}, int64_t{1} << 40, int64_t{-3}, kMaxInt64}) {
    const PagedKv kv = good(vllm_view({kBase, {4, 1, 1, 128}, {128, stride, stride, 1}},
                                      KvPacking::kContents, geometry));
    CHECK(kv.k_data == dense.k_data);
    CHECK(kv.v_data == dense.v_data);
  }
  const PagedKv kv = good(vllm_view({kBase, {1, 2, 4, 36}, {kMaxInt64, 144, 36, 1}},
                                    KvPacking::kHeadSlots, both(KvFormat::kNvfp4, 1, 4, 64)));
  CHECK(kv.k_scale == PagedRows{kBase + 128, 288, 16, 4});
}

TEST_CASE("a view is known by its strides, or refused with shape and strides") {
  const AttentionGeometry bf16 = both(KvFormat::kBf16, 2, 4, 16);  // content 64, page 512
  const auto contents = [&bf16](std::vector<int64_t> strides) {
    return vllm_view({kBase, {3, 2, 4, 64}, std::move(strides)}, KvPacking::kContents, bf16);
  };
  CHECK(good(contents({512, 256, 64, 1})).v_data == PagedRows{kBase + 32, 512, 256, 64});  // HND
  CHECK(good(contents({600, 64, 128, 1})).k_data == PagedRows{kBase, 600, 64, 128});       // NHD
  CHECK(good(contents({256, 768, 64, 1})).k_data == PagedRows{kBase, 256, 768, 64});       // LHBNC
  check_refused(contents({64, 768, 192, 1}), kUnsupported,
                "shape [3, 2, 4, 64] with strides [64, 768, 192, 1] bytes: tokens lie outside of "
                "blocks");
  check_refused(contents({512, 255, 64, 1}), kInvalid, "overlap");
  check_refused(contents({512, 256, 64, 2}), kInvalid, "the bytes of a row must be contiguous");
  check_refused(contents({512, -256, 64, 1}), kInvalid, "expected no stride below 0");
  check_refused(contents({512, 256, 64}), kInvalid, "strides has 3 axes: shape has 4");
  check_refused(contents({kMaxInt64, 256, 64, 1}), kInvalid, "2^63");
  check_refused(vllm_view({kBase, {3, 2, 4, 32}, {256, 128, 32, 1}}, KvPacking::kContents, bf16),
                kInvalid, "expected [blocks, 2, 4, 64] for packing contents of 2 heads");
  check_refused(vllm_view({kBase, {3, 2, 4}, {512, 64, 1}}, KvPacking::kContents, bf16), kInvalid,
                "expected [blocks, slots, tokens, content bytes]");
  check_refused(vllm_view({nullptr, {3, 2, 4, 64}, {512, 256, 64, 1}}, KvPacking::kContents, bf16),
                kInvalid, "data is null with 3 pages");

  const AttentionGeometry nvfp4 = both(KvFormat::kNvfp4, 2, 4, 64);
  const auto slots = [&nvfp4](std::vector<int64_t> strides) {
    return vllm_view({kBase, {3, 4, 4, 36}, std::move(strides)}, KvPacking::kHeadSlots, nvfp4,
                     VScaleOrder::kSwizzled);
  };
  const PagedKv kv = good(slots({1000, 144, 36, 1}));
  CHECK(kv.v_scale == PagedRows{kBase + 544, 1000, 16, 4});
  CHECK(kv.v_scale_order == VScaleOrder::kSwizzled);
  check_refused(slots({576, 36, 144, 1}), kUnsupported,
                "shape [3, 4, 4, 36] with strides [576, 36, 144, 1] bytes: nvfp4 needs");
  check_refused(slots({144, 432, 36, 1}), kUnsupported, "FlashInfer's separate tensors");
}

TEST_CASE("fp8 keys with nvfp4 values are one dense page in HND") {
  const AttentionGeometry geometry = {1, 2, 4, 64, 64, KvFormat::kFp8E4m3, KvFormat::kNvfp4};
  const PagedKv kv = good(vllm_view({kBase, {3, 2, 4, 100}, {800, 400, 100, 1}},
                                    KvPacking::kContents, geometry, VScaleOrder::kSwizzled));
  CHECK(kv.k_data == PagedRows{kBase, 800, 256, 64});
  CHECK(kv.k_scale == PagedRows{});
  CHECK(kv.v_data == PagedRows{kBase + 512, 800, 128, 32});
  CHECK(kv.v_scale == PagedRows{kBase + 768, 800, 16, 4});
}

TEST_CASE("the older view with K and V on one axis is sound in both orders, for nvfp4 too") {
  const AttentionGeometry geometry = both(KvFormat::kNvfp4, 2, 4, 64);
  // NHD: data of (token, head) at (t * H + h) * D / 2, scales behind all data of the side.
  PagedKv kv = good(
      vllm_split_view({kBase, {3, 2, 4, 2, 36}, {576, 288, 72, 36, 1}}, PageOrder::kNhd, geometry));
  CHECK(kv.k_data == PagedRows{kBase, 576, 32, 64});
  CHECK(kv.k_scale == PagedRows{kBase + 256, 576, 4, 8});
  CHECK(kv.v_data == PagedRows{kBase + 288, 576, 32, 64});
  CHECK(kv.v_scale == PagedRows{kBase + 544, 576, 4, 8});
  // The axes of NHD over memory in HND: what the strides say counts.
  kv = good(vllm_split_view({kBase, {3, 2, 4, 2, 36}, {576, 288, 36, 144, 1}}, PageOrder::kNhd,
                            geometry));
  const PagedKv dense = dense_pages(kBase, geometry, 3, PageOrder::kHnd);
  CHECK(kv.k_data == dense.k_data);
  CHECK(kv.v_scale == dense.v_scale);
  kv = good(vllm_split_view({kBase, {3, 2, 2, 4, 36}, {576, 288, 144, 36, 1}}, PageOrder::kHnd,
                            geometry));
  CHECK(kv.v_data == dense.v_data);
  // K and V of all blocks apart: [2, B, ...] in memory.
  const AttentionGeometry bf16 = both(KvFormat::kBf16, 2, 4, 16);
  kv = good(
      vllm_split_view({kBase, {3, 2, 4, 2, 32}, {256, 768, 64, 32, 1}}, PageOrder::kNhd, bf16));
  CHECK(kv.k_data == PagedRows{kBase, 256, 32, 64});
  CHECK(kv.v_data == PagedRows{kBase + 768, 256, 32, 64});

  check_refused(
      vllm_split_view({kBase, {3, 2, 4, 2, 36}, {640, 320, 80, 36, 1}}, PageOrder::kNhd, geometry),
      kUnsupported, "strides [640, 320, 80, 36, 1] bytes: nvfp4 needs the tokens");
  check_refused(
      vllm_split_view({kBase, {3, 2, 4, 2, 36}, {576, 288, 72, 36, 1}}, PageOrder::kHnd, geometry),
      kInvalid, "expected [blocks, 2, 2, 4, 36] in order HND");
  check_refused(
      vllm_split_view({kBase, {3, 2, 4, 2, 36}, {576, 200, 72, 36, 1}}, PageOrder::kNhd, geometry),
      kInvalid, "overlap");
  check_refused(vllm_split_view({kBase, {3, 2, 4, 2, 36}, {576, 288, 72, 36, 1}},
                                static_cast<PageOrder>(5), geometry),
                kInvalid, "order is 5");
  AttentionGeometry mixed = geometry;
  mixed.v_dim = 128;
  check_refused(
      vllm_split_view({kBase, {3, 2, 4, 2, 36}, {576, 288, 72, 36, 1}}, PageOrder::kNhd, mixed),
      kUnsupported, "must be of one format and dim");
}

TEST_CASE("manager blocks split into kernel blocks whose regions repeat") {
  const ByteView manager = {kBase, {3, 4, 64, 36}, {9216, 2304, 36, 1}};
  const ByteView kernel = good(split_blocks(manager, 4));
  CHECK(kernel.shape == std::vector<int64_t>{12, 4, 16, 36});
  CHECK(kernel.strides_bytes == std::vector<int64_t>{2304, 576, 36, 1});
  const PagedKv kv =
      good(vllm_view(kernel, KvPacking::kHeadSlots, both(KvFormat::kNvfp4, 2, 16, 64)));
  CHECK(kv.num_pages == 12);
  CHECK(kv.v_scale == PagedRows{kBase + 2304 - 128, 2304, 64, 4});
  const ByteView nhd = good(split_blocks({kBase, {3, 4, 64, 36}, {9216, 36, 144, 1}}, 2));
  CHECK(nhd.strides_bytes == std::vector<int64_t>{4608, 36, 144, 1});
  check_refused(split_blocks({kBase, {3, 4, 64, 36}, {9220, 2304, 36, 1}}, 4), kUnsupported,
                "strides [9220, 2304, 36, 1] bytes: blocks of 9216 bytes must lie without gaps");
  check_refused(split_blocks({kBase, {3, 4, 64, 36}, {9216, 2304, 40, 1}}, 4), kUnsupported,
                "without gaps");
  check_refused(split_blocks(manager, 5), kInvalid, "ratio is 5: expected a divisor of the 64");
  check_refused(split_blocks(manager, 0), kInvalid, "ratio is 0");
  check_refused(split_blocks(manager, -4), kInvalid, "ratio is -4");
  check_refused(split_blocks({kBase, {1, 1 << 30, 1 << 30, 16}, {1, 1, 16, 1}}, 4), kInvalid,
                "2^63");
}

TEST_CASE("a layer goes into each of vLLM's layouts and back, and the other layers stay") {
  auto engine = test::random_engine(401);
  for (const std::string_view layout : kVllmLayoutNames)
    for (const KvPacking packing : {KvPacking::kHeadSlots, KvPacking::kContents}) {
      CAPTURE(layout);
      CAPTURE(name(packing));
      Exchange exchange(both(KvFormat::kBf16, 3, 16, 32), 4, 8, PageOrder::kHnd,
                        VScaleOrder::kLinear, engine);
      VllmCache cache;
      cache.layout = good(parse_vllm_layout(layout));
      cache.packing = packing;
      cache.geometry = both(KvFormat::kBf16, 3, 4, 32);
      cache.geometry.num_layers = 5;
      cache.num_blocks = 8;
      exchange.foreign.assign(5 * 8 * 2 * 3 * 4 * 64, kPoison);
      cache.base = exchange.foreign.data();
      exchange.params.paged = good(vllm_layer(cache, 3));
      REQUIRE(kernels::run_convert(exchange.params).ok());
      CHECK(exchange.num_wrong_foreign_bytes() == 0);
      const std::vector<std::byte> before = exchange.pool;
      exchange.each_byte([&](size_t in_pool, size_t) { exchange.pool[in_pool] = kPoison; });
      exchange.params.to_pool = true;
      REQUIRE(kernels::run_convert(exchange.params).ok());
      CHECK(exchange.pool == before);
    }
}

}  // namespace
}  // namespace larder
