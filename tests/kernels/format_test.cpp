// Formats, page layout, tensor extents, geometry rules and the capability query.
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"

namespace larder::kernels {
namespace {

bool contains(const std::string& text, std::string_view part) {
  return text.find(part) != std::string::npos;
}

AttentionGeometry plain_geometry() { return {2, 2, 4, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4}; }

TEST_CASE("the page of 2 heads, 4 tokens and 64 dims has its regions where the formats page says") {
  const PageLayout page = page_layout(plain_geometry());
  CHECK(page.k_data_offset_bytes == 0);
  CHECK(page.k_scale_offset_bytes == 256);
  CHECK(page.v_data_offset_bytes == 288);
  CHECK(page.v_scale_offset_bytes == 544);
  CHECK(page.page_bytes == 576);
}

TEST_CASE("pages of other shapes and formats add up both dims") {
  AttentionGeometry geometry = {1, 8, 16, 128, 128, KvFormat::kNvfp4, KvFormat::kNvfp4};
  CHECK(page_layout(geometry).page_bytes == 18432);
  geometry = {1, 8, 16, 128, 128, KvFormat::kBf16, KvFormat::kBf16};
  CHECK(page_layout(geometry).page_bytes == 65536);
  CHECK(page_layout(geometry).k_scale_offset_bytes == page_layout(geometry).v_data_offset_bytes);
  geometry = {1, 1, 1, 192, 128, KvFormat::kNvfp4, KvFormat::kNvfp4};
  CHECK(page_layout(geometry).page_bytes == 96 + 12 + 64 + 8);
  geometry = {1, 1, 1, 192, 128, KvFormat::kBf16, KvFormat::kNvfp4};
  CHECK(page_layout(geometry).page_bytes == 384 + 64 + 8);
  geometry = {1, 1, 1, 64, 64, KvFormat::kFp8E4m3, KvFormat::kNvfp4};
  CHECK(page_layout(geometry).page_bytes == 64 + 36);
  geometry = {1,           kMaxKvHeads,     kMaxBlockTokens, kMaxHeadDim,
              kMaxHeadDim, KvFormat::kBf16, KvFormat::kBf16};
  CHECK(page_layout(geometry).page_bytes == int64_t{1} << 34);
}

TEST_CASE("format names parse to their formats, and nothing else does") {
  for (size_t i = 0; i < kKvFormatNames.size(); ++i)
    CHECK(parse_kv_format(kKvFormatNames[i]) == static_cast<KvFormat>(i));
  for (const auto* text : {"", "NVFP4", "nvfp4 ", "fp8", "auto"}) CHECK(!parse_kv_format(text));
}

TEST_CASE("the extent of a view covers its elements and ignores strides of size-1 axes") {
  TensorView view = {nullptr, Dtype::kBf16, {3, 2, 8}, {16, 8, 1}};
  CHECK(tensor_extent_bytes(view) == ByteRange{0, 96});
  view.strides = {100, -8, 2};
  CHECK(tensor_extent_bytes(view) == ByteRange{-16, (200 + 14 + 1) * 2});
  view = {nullptr, Dtype::kFp32, {1, 1, 4}, {int64_t{1} << 62, -7, 1}};
  CHECK(tensor_extent_bytes(view) == ByteRange{0, 16});
  view = {nullptr, Dtype::kFp32, {5, 0, 4}, {int64_t{1} << 62, 1, 1}};
  CHECK(tensor_extent_bytes(view) == ByteRange{0, 0});
  CHECK(tensor_extent_bytes(dense_tensor(nullptr, Dtype::kFp16, 7, 3, 64)) ==
        ByteRange{0, 7 * 3 * 64 * 2});
}

TEST_CASE("hostile views have no extent instead of a wrapped one") {
  constexpr int64_t kMax = std::numeric_limits<int64_t>::max();
  constexpr int64_t kMin = std::numeric_limits<int64_t>::min();
  CHECK(!tensor_extent_bytes({nullptr, Dtype::kBf16, {kMax, 1, 1}, {kMax, 1, 1}}));
  CHECK(!tensor_extent_bytes({nullptr, Dtype::kBf16, {2, 1, 1}, {kMax / 2 + 1, 1, 1}}));
  CHECK(!tensor_extent_bytes({nullptr, Dtype::kBf16, {2, 1, 1}, {kMin, 1, 1}}));
  CHECK(!tensor_extent_bytes({nullptr, Dtype::kBf16, {2, 2, 2}, {kMax / 4, kMax / 4, kMax / 4}}));
  CHECK(!tensor_extent_bytes({nullptr, Dtype::kBf16, {-1, 1, 1}, {1, 1, 1}}));
  CHECK(!tensor_extent_bytes({nullptr, static_cast<Dtype>(9), {1, 1, 1}, {1, 1, 1}}));
}

void check_refused(const AttentionGeometry& geometry, ErrorCode code, std::string_view field,
                   std::string_view number, Encoder encoder = Encoder::kReference) {
  const Status status = validate_geometry(geometry, encoder);
  CAPTURE(status.to_string());
  CHECK(status.code() == code);
  CHECK(contains(status.message(), field));
  CHECK(contains(status.message(), number));
}

TEST_CASE("a geometry is refused by the field that is wrong") {
  CHECK(validate_geometry(plain_geometry(), Encoder::kReference).ok());
  const auto with = [](auto change) {
    AttentionGeometry geometry = plain_geometry();
    change(geometry);
    return geometry;
  };
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  check_refused(with([](auto& g) { g.k_dim = 100; }), kInvalid, "k_dim is 100", "multiple of 16");
  check_refused(with([](auto& g) { g.v_dim = 72; }), kInvalid, "v_dim is 72", "multiple of 16");
  check_refused(with([](auto& g) { g.k_dim = 0; }), kInvalid, "k_dim is 0", "1024");
  check_refused(with([](auto& g) { g.v_dim = 1040; }), kInvalid, "v_dim is 1040", "1024");
  check_refused(with([](auto& g) { g.num_layers = 0; }), kInvalid, "num_layers is 0", "4096");
  check_refused(with([](auto& g) { g.num_kv_heads = -1; }), kInvalid, "num_kv_heads is -1", "1024");
  check_refused(with([](auto& g) { g.block_tokens = 5000; }), kInvalid, "block_tokens is 5000",
                "4096");
  check_refused(with([](auto& g) { g.k_format = static_cast<KvFormat>(77); }), kInvalid, "k_format",
                "77");
  check_refused(with([](auto& g) { g.v_format = static_cast<KvFormat>(77); }), kInvalid, "v_format",
                "77");
  check_refused(plain_geometry(), kInvalid, "encoder", "9", static_cast<Encoder>(9));
}

TEST_CASE("what no kernel serves is UNSUPPORTED and says what is served") {
  constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;
  AttentionGeometry geometry = plain_geometry();
  geometry.v_format = KvFormat::kFp8E4m3;
  check_refused(geometry, kUnsupported, "v_format is fp8_e4m3", "bf16 and nvfp4");
  geometry.k_format = KvFormat::kFp16;
  check_refused(geometry, kUnsupported, "k_format is fp16", "bf16 and nvfp4");
  check_refused(plain_geometry(), kUnsupported, "encoder is four_over_six", "reference",
                Encoder::kFourOverSix);
}

TEST_CASE("bf16 takes any dim, and K and V may differ in format and dim") {
  AttentionGeometry geometry = {1, 3, 1, 100, 7, KvFormat::kBf16, KvFormat::kBf16};
  CHECK(validate_geometry(geometry, Encoder::kReference).ok());
  geometry = {1, 3, 1, 100, 48, KvFormat::kBf16, KvFormat::kNvfp4};
  CHECK(validate_geometry(geometry, Encoder::kReference).ok());
}

TEST_CASE("a scale is judged as the float that it becomes") {
  CHECK(validate_scale("k_scale", 1.0).ok());
  CHECK(validate_scale("k_scale", std::numeric_limits<float>::min()).ok());
  CHECK(validate_scale("k_scale", std::numeric_limits<float>::max()).ok());
  const double infinity = std::numeric_limits<double>::infinity();
  for (const double value :
       {0.0, -0.0, -1.0, std::nan(""), infinity, -infinity, 1e-50, 1e300, 1e-46, 1e-40, 3.5e38}) {
    const Status status = validate_scale("layer 3 k_scale", value);
    CAPTURE(value);
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(contains(status.message(), "layer 3 k_scale is "));
  }
}

TEST_CASE("the capabilities list each op with each pair of formats that it serves") {
  const std::vector<Capability> lines = capabilities();
  CHECK(lines.size() == 8);
  int nvfp4_pairs = 0;
  for (const Capability& line : lines) {
    CHECK((line.op == "append" || line.op == "attend"));
    CHECK(line.backend == "cpu");
    CHECK(line.dim_max == 1024);
    const bool grouped = line.k_format == KvFormat::kNvfp4 || line.v_format == KvFormat::kNvfp4;
    CHECK(line.dim_multiple == (grouped ? 16 : 1));
    nvfp4_pairs += line.k_format == KvFormat::kNvfp4 && line.v_format == KvFormat::kNvfp4;
  }
  CHECK(nvfp4_pairs == 2);
}

}  // namespace
}  // namespace larder::kernels
