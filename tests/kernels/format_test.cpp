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
  check_refused(with([](auto& g) { g.mla_row = static_cast<MlaRow>(5); }), kInvalid, "mla_row is 5",
                "0 to 4");
  const Status status =
      validate_geometry(plain_geometry(), Encoder::kReference, static_cast<KeyTransform>(4));
  CHECK(status.code() == kInvalid);
  CHECK(contains(status.message(), "key_transform is 4: expected 0 to 3"));
}

TEST_CASE("every pair of formats is served by every encoder and key transform") {
  for (size_t k = 0; k < kKvFormatNames.size(); ++k)
    for (size_t v = 0; v < kKvFormatNames.size(); ++v)
      for (size_t encoder = 0; encoder < kEncoderNames.size(); ++encoder)
        for (size_t transform = 0; transform < kKeyTransformNames.size(); ++transform) {
          AttentionGeometry geometry = plain_geometry();
          geometry.k_format = static_cast<KvFormat>(k);
          geometry.v_format = static_cast<KvFormat>(v);
          CHECK(validate_geometry(geometry, static_cast<Encoder>(encoder),
                                  static_cast<KeyTransform>(transform))
                    .ok());
        }
}

TEST_CASE("rotated keys need a k_dim that is a multiple of 16, whatever their format") {
  AttentionGeometry geometry = plain_geometry();
  geometry.k_format = KvFormat::kBf16;
  geometry.k_dim = 40;
  CHECK(validate_geometry(geometry, Encoder::kReference, KeyTransform::kCentred).ok());
  for (const KeyTransform transform : {KeyTransform::kRotated, KeyTransform::kCentredRotated}) {
    const Status status = validate_geometry(geometry, Encoder::kReference, transform);
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(contains(status.message(), "k_dim is 40: key_transform"));
  }
}

TEST_CASE("MLA rows leave only layers, block size and row format to choose") {
  constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
  for (size_t row = 1; row < kMlaRowNames.size(); ++row) {
    const AttentionGeometry good = mla_geometry(61, 64, static_cast<MlaRow>(row));
    CHECK(validate_geometry(good, Encoder::kReference).ok());
    const auto with = [&](auto change) {
      AttentionGeometry geometry = good;
      change(geometry);
      return geometry;
    };
    check_refused(with([](auto& g) { g.k_dim = 512; }), kInvalid, "k_dim is 512", "576");
    check_refused(with([](auto& g) { g.v_dim = 576; }), kInvalid, "v_dim is 576", "512");
    check_refused(with([](auto& g) { g.num_kv_heads = 2; }), kInvalid, "num_kv_heads is 2", "1");
    check_refused(with([](auto& g) { g.k_format = KvFormat::kNvfp4; }), kInvalid,
                  "k_format is nvfp4", "needs bf16");
    check_refused(with([](auto& g) { g.v_format = KvFormat::kFp16; }), kInvalid, "v_format is fp16",
                  "needs bf16");
    check_refused(good, ErrorCode::kUnsupported, "encoder is best_scale", "reference",
                  Encoder::kBestScale);
    const Status status = validate_geometry(good, Encoder::kReference, KeyTransform::kRotated);
    CHECK(status.code() == ErrorCode::kUnsupported);
    CHECK(contains(status.message(), "key_transform is rotated"));
  }
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

TEST_CASE(
    "the capabilities list append, gather and attend of each pair of formats and each MLA row") {
  for (const std::string op : {"append", "gather", "attend"}) {
    int pairs = 0;
    int mla_rows = 0;
    for (const Capability& line : capabilities()) {
      if (line.op != op || line.backend != "cpu") continue;
      if (contains(line.k_format, "mla")) {
        ++mla_rows;
        CHECK(line.v_format == line.k_format);
        CHECK(576 % line.dim_multiple == 0);
        CHECK(512 % line.dim_multiple == 0);
        CHECK(line.dim_max == 576);
        continue;
      }
      ++pairs;
      const bool grouped = line.k_format == "nvfp4" || line.v_format == "nvfp4";
      CHECK(line.dim_multiple == (grouped ? 16 : 1));
      CHECK(line.dim_max == 1024);
    }
    CHECK(pairs == 25);
    CHECK(mla_rows == 4);
  }
}

}  // namespace
}  // namespace larder::kernels
