// Separate, stacked and MLA tensors, plain strides, and names of formats.
#include <string>
#include <vector>

#include "tests/kernels/engine_views.h"

namespace larder {
namespace {

using namespace test;

TEST_CASE("strides of axes of size 1 become those of a dense tensor, others stay") {
  using Sizes = std::vector<int64_t>;
  CHECK(good(canonical_strides({5, 1, 16, 64}, {2048, 7, 64, 1})) == Sizes{2048, 1024, 64, 1});
  CHECK(good(canonical_strides({1, 1, 1}, {0, kMaxInt64, -3})) == Sizes{1, 1, 1});
  CHECK(good(canonical_strides({1, 4, 1}, {99, 10, 99})) == Sizes{40, 10, 1});
  CHECK(good(canonical_strides({3, 2}, {7, 5})) == Sizes{7, 5});
  CHECK(good(canonical_strides({}, {})).empty());
  check_refused(canonical_strides({1, 2}, {1}), kInvalid, "strides has 1 axes: shape has 2");
  check_refused(canonical_strides({1, -2}, {1, 1}), kInvalid, "shape[1] is -2");
  check_refused(canonical_strides({1, 3}, {1, kMaxInt64}), kInvalid, "their product passes 2^63");
}

TEST_CASE("dense pages have their regions where the formats page says") {
  const AttentionGeometry geometry = both(KvFormat::kNvfp4, 2, 4, 64);
  PagedKv kv = dense_pages(kBase, geometry, 3, PageOrder::kHnd);
  CHECK(kv.k_data == PagedRows{kBase, 576, 128, 32});
  CHECK(kv.k_scale == PagedRows{kBase + 256, 576, 16, 4});
  CHECK(kv.v_data == PagedRows{kBase + 288, 576, 128, 32});
  CHECK(kv.v_scale == PagedRows{kBase + 544, 576, 16, 4});
  CHECK(kv.num_pages == 3);
  kv = dense_pages(kBase, geometry, 3, PageOrder::kNhd);
  CHECK(kv.k_data == PagedRows{kBase, 576, 32, 64});
  CHECK(kv.v_scale == PagedRows{kBase + 544, 576, 4, 8});
  kv = dense_pages(kBase, mla_geometry(7, 64, MlaRow::kFp8Ds), 2, PageOrder::kHnd);
  CHECK(kv.k_data == PagedRows{kBase, 64 * 656, 64 * 656, 656});
  CHECK(kv.v_data == PagedRows{});
  CHECK(kv.geometry.num_layers == 1);
}

TEST_CASE("FlashInfer's separate tensors may have any strides, in both orders") {
  const AttentionGeometry geometry = {1, 2, 4, 64, 128, KvFormat::kNvfp4, KvFormat::kNvfp4};
  FlashinferPair pair;
  pair.k = {kBase, {3, 4, 2, 32}, {256, 64, 32, 1}};
  pair.v = {kBase + 1024, {3, 4, 2, 64}, {2048, 64, 512, 1}};
  pair.k_scale = {kBase + 16384, {3, 4, 2, 4}, {64, 16, 8, 1}};
  pair.v_scale = {kBase + 32768, {3, 4, 2, 8}, {64, 16, 8, 1}};
  PagedKv kv = good(flashinfer_pair(pair, PageOrder::kNhd, geometry));
  CHECK(kv.k_data == PagedRows{kBase, 256, 32, 64});
  CHECK(kv.v_data == PagedRows{kBase + 1024, 2048, 512, 64});
  CHECK(kv.k_scale == PagedRows{kBase + 16384, 64, 8, 16});
  CHECK(kv.v_scale == PagedRows{kBase + 32768, 64, 8, 16});
  CHECK(kv.num_pages == 3);
  check_refused(flashinfer_pair(pair, PageOrder::kHnd, geometry), kInvalid,
                "k has shape [3, 4, 2, 32] with strides [256, 64, 32, 1] bytes: expected "
                "[3, 2, 4, 32] in order HND");
  const auto with = [&](auto change) {
    FlashinferPair changed = pair;
    change(changed);
    return flashinfer_pair(changed, PageOrder::kNhd, geometry);
  };
  check_refused(with([](auto& p) { p.v.shape[0] = 4; }), kInvalid, "v has shape [4, 4, 2, 64]");
  check_refused(
      with([](auto& p) { p.k_scale = {}; }), kInvalid,
      "k_scale has shape [] with strides [] bytes: expected [pages, tokens, heads, bytes]");
  check_refused(with([](auto& p) { p.v_scale.data = nullptr; }), kInvalid, "v_scale: data is null");
  check_refused(with([](auto& p) { p.v.data = p.k.data; }), kInvalid, "k_data and v_data overlap");
  check_refused(with([](auto& p) { p.k.strides_bytes[0] = 0; }), kInvalid, "overlap");
  const AttentionGeometry bf16 = both(KvFormat::kBf16, 2, 4, 16);
  pair.k = {kBase, {3, 2, 4, 32}, {512, 256, 64, 1}};  // K and V rows side by side
  pair.v = {kBase + 32, {3, 2, 4, 32}, {512, 256, 64, 1}};
  check_refused(flashinfer_pair(pair, PageOrder::kHnd, bf16), kInvalid,
                "expected no tensor, as the format has no block scales");
  pair.k_scale = pair.v_scale = {};
  kv = good(flashinfer_pair(pair, PageOrder::kHnd, bf16));
  CHECK(kv.v_data == PagedRows{kBase + 32, 512, 256, 64});
}

TEST_CASE("FlashInfer's stacked tensors hold K, then V") {
  const AttentionGeometry geometry = both(KvFormat::kNvfp4, 2, 4, 64);
  const ByteView kv_view = {kBase, {3, 2, 2, 4, 32}, {512, 256, 128, 32, 1}};
  const ByteView scales = {kBase + 4096, {3, 2, 2, 4, 4}, {64, 32, 16, 4, 1}};
  const PagedKv kv =
      good(flashinfer_stacked(kv_view, scales, PageOrder::kHnd, geometry, VScaleOrder::kSwizzled));
  CHECK(kv.k_data == PagedRows{kBase, 512, 128, 32});
  CHECK(kv.v_data == PagedRows{kBase + 256, 512, 128, 32});
  CHECK(kv.k_scale == PagedRows{kBase + 4096, 64, 16, 4});
  CHECK(kv.v_scale == PagedRows{kBase + 4096 + 32, 64, 16, 4});
  check_refused(flashinfer_stacked(kv_view, {}, PageOrder::kHnd, geometry), kInvalid,
                "kv_scale has shape []");
  ByteView three = kv_view;
  three.shape[1] = 3;
  check_refused(flashinfer_stacked(three, scales, PageOrder::kHnd, geometry), kInvalid,
                "expected 2 (K and V) on axis 1");
  AttentionGeometry mixed = geometry;
  mixed.v_format = KvFormat::kBf16;
  check_refused(flashinfer_stacked(kv_view, scales, PageOrder::kHnd, mixed), kUnsupported,
                "stacked tensors hold one format and dim");
  const AttentionGeometry fp8 = both(KvFormat::kFp8E4m3, 2, 4, 32);
  CHECK(good(flashinfer_stacked(kv_view, {}, PageOrder::kHnd, fp8)).v_scale == PagedRows{});
  check_refused(flashinfer_stacked(kv_view, scales, PageOrder::kHnd, fp8), kInvalid,
                "expected no tensor");
}

TEST_CASE("tensors of elements become bytes") {
  const ByteView view = good(byte_view(kBase, {3, 1, 2, 16}, {64, kMaxInt64, 16, 1}, 2));
  CHECK(view.shape == std::vector<int64_t>{3, 1, 2, 32});
  CHECK(view.strides_bytes == std::vector<int64_t>{128, 0, 32, 1});
  check_refused(byte_view(kBase, {3, 16}, {32, 2}, 2), kInvalid, "the last stride is 2");
  check_refused(byte_view(kBase, {3, 16}, {kMaxInt64, 1}, 2), kInvalid, "pass 2^63 bytes");
  check_refused(byte_view(kBase, {3, kMaxInt64}, {1, 1}, 2), kInvalid, "pass 2^63 bytes");
  check_refused(byte_view(kBase, {3, 16}, {16, 1}, 0), kInvalid, "element_bytes is 0");
  check_refused(byte_view(kBase, {}, {}, 2), kInvalid, "strides has 0 axes");
}

TEST_CASE("MLA views have rows of the format's size, and blocks may lie apart") {
  const PagedKv kv =
      good(mla_view({kBase, {3, 64, 352}, {3 * 64 * 352, 352, 1}}, MlaRow::kNvfp4Ds));
  CHECK(kv.k_data.page_stride_bytes == 3 * 64 * 352);
  CHECK(kv.k_data.token_stride_bytes == 352);
  CHECK(kv.geometry == mla_geometry(1, 64, MlaRow::kNvfp4Ds));
  CHECK(kv.num_pages == 3);
  check_refused(mla_view({kBase, {3, 64, 432}, {64 * 432, 432, 1}}, MlaRow::kNvfp4Ds), kInvalid,
                "a row of nvfp4_ds_mla has 352 bytes");
  check_refused(mla_view({kBase, {3, 64, 352}, {63 * 352, 352, 1}}, MlaRow::kNvfp4Ds), kInvalid,
                "overlap");
  check_refused(mla_view({kBase, {3, 0, 352}, {352, 352, 1}}, MlaRow::kNvfp4Ds), kInvalid,
                "expected 1 to 4096 tokens per block");
  check_refused(mla_view({kBase, {3, 64, 352}, {352, 352, 1}}, MlaRow::kNone), kInvalid,
                "row is 0");
}

TEST_CASE("names of formats: served, known but not served, and unknown") {
  using F = KvFormat;
  const auto is = [](std::string_view text, F k, F v, Encoder encoder = Encoder::kReference,
                     VScaleOrder order = VScaleOrder::kLinear) {
    CHECK(good(parse_engine_format(text)) == EngineFormat{k, v, encoder, MlaRow::kNone, order});
  };
  is("bfloat16", F::kBf16, F::kBf16);
  is("half", F::kFp16, F::kFp16);
  is("fp8", F::kFp8E4m3, F::kFp8E4m3);
  is("fp8_e4m3", F::kFp8E4m3, F::kFp8E4m3);
  is("fp8_e5m2", F::kFp8E5m2, F::kFp8E5m2);
  is("nvfp4", F::kNvfp4, F::kNvfp4);
  is("nvfp4_4over6", F::kNvfp4, F::kNvfp4, Encoder::kFourOverSix);
  is("fp8_k_nvfp4_v", F::kFp8E4m3, F::kNvfp4, Encoder::kReference, VScaleOrder::kSwizzled);
  is("fp8_k_nvfp4_v_linear_sf", F::kFp8E4m3, F::kNvfp4);
  for (const KvFormat format : {F::kBf16, F::kFp16, F::kFp8E4m3, F::kFp8E5m2, F::kNvfp4})
    is(name(format), format, format);
  CHECK(good(parse_engine_format("nvfp4_ds_mla")).mla_row == MlaRow::kNvfp4Ds);
  CHECK(good(parse_engine_format("fp8_ds_mla")).mla_row == MlaRow::kFp8Ds);
  for (const auto* text :
       {"int8_per_token_head", "fp8_per_token_head", "int4_per_token_head", "turboquant_4bit_nc",
        "turboquant_k8v4", "fp4_e2m1", "mxfp4", "kivi_2bit", "fp8_inc", "float32"}) {
    check_refused(parse_engine_format(text), kUnsupported, std::string("format is '") + text + "'");
    check_refused(parse_engine_format(text), kUnsupported, "served are bfloat16");
  }
  for (const auto* text : {"", "NVFP4", "nvfp4 ", "fp9", "nvfp4_5over6"})
    check_refused(parse_engine_format(text), kInvalid, "which is no name we know");
  check_refused(parse_engine_format("auto"), kInvalid, "the model's own dtype");
  check_refused(parse_engine_format(std::string(1 << 20, 'x')), kInvalid, "no name we know");
  CHECK(parse_engine_format(std::string(1 << 20, 'x')).status().message().size() < 1000);
}

TEST_CASE("names of MLA rows are taken with the size of the row only") {
  CHECK(good(parse_engine_mla_row("nvfp4_ds_mla", 352)) == MlaRow::kNvfp4Ds);
  CHECK(good(parse_engine_mla_row("fp8_ds_mla", 656)) == MlaRow::kFp8Ds);
  CHECK(good(parse_engine_mla_row("fp8", 576)) == MlaRow::kFp8);
  CHECK(good(parse_engine_mla_row("bfloat16", 1152)) == MlaRow::kBf16);
  for (const int64_t bytes : {368, 432, 384})
    check_refused(parse_engine_mla_row("nvfp4_ds_mla", bytes), kUnsupported,
                  "rows of 'nvfp4_ds_mla' have " + std::to_string(bytes) + " bytes");
  for (const int64_t bytes : {528, 584})
    check_refused(parse_engine_mla_row("fp8_ds_mla", bytes), kUnsupported,
                  "those of fp8_ds_mla have 656");
  check_refused(parse_engine_mla_row("nvfp4_ds_mla", 353), kInvalid, "have 353 bytes: those of");
  check_refused(parse_engine_mla_row("half", 1152), kUnsupported, "format is 'half' for MLA rows");
  check_refused(parse_engine_mla_row("nvfp4", 324), kUnsupported, "format is 'nvfp4' for MLA rows");
  check_refused(parse_engine_mla_row("int8_per_token_head", 580), kUnsupported, "int8");
}

}  // namespace
}  // namespace larder
