// Element types, KV formats and the byte layout of one page (one layer of one block).
//
// A page is byte-compatible with vLLM and FlashInfer (HND): four dense regions
//     [ K data | K scales | V data | V scales ]
// each in the order [num_kv_heads, block_tokens, bytes of one row]; formats without block scales
// have empty scale regions. K and V may differ in format and in dim.
//
// nvfp4: E2M1 pairs, the even element in the low nibble; one E4M3 scale byte per 16 consecutive
// elements of one token and head, linear order for K and for V; x = e2m1 * e4m3(scale) * k_scale
// (or v_scale). Rounding is to nearest even and saturating in both codes; a group whose scale
// encodes to 0 decodes to exact zeros; a NaN element is dropped from the group's maximum and
// stored as a zero with the NaN's sign; scale bytes are never negative and never NaN.
//
// bf16 and fp16 store the value itself: k_scale and v_scale do not apply to them.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace larder {

// Element type of tensors that cross an API (K, V, Q, output).
enum class Dtype : uint8_t { kBf16 = 0, kFp16 = 1, kFp32 = 2 };

// How a K or V row is stored in a pool.
enum class KvFormat : uint8_t { kBf16 = 0, kFp16 = 1, kFp8E4m3 = 2, kFp8E5m2 = 3, kNvfp4 = 4 };

// Which search chooses the block scales of nvfp4. Every encoder writes bytes of the same format.
enum class Encoder : uint8_t { kReference = 0, kFourOverSix = 1, kBestScale = 2 };

// Where layer l of block b lies. BLHNC: all layers of a block are together. LBHNC: all blocks of a
// layer are together; such a pool has a fixed size.
enum class KvLayout : uint8_t { kBlhnc = 0, kLbhnc = 1 };

inline constexpr int kNvfp4GroupElements = 16;  // elements that share one scale byte

inline constexpr std::array<std::string_view, 3> kDtypeNames = {"bf16", "fp16", "fp32"};
inline constexpr std::array<std::string_view, 5> kKvFormatNames = {"bf16", "fp16", "fp8_e4m3",
                                                                   "fp8_e5m2", "nvfp4"};
inline constexpr std::array<std::string_view, 3> kEncoderNames = {"reference", "four_over_six",
                                                                  "best_scale"};
inline constexpr std::array<std::string_view, 2> kKvLayoutNames = {"BLHNC", "LBHNC"};

constexpr std::string_view name(Dtype value) { return kDtypeNames[static_cast<size_t>(value)]; }
constexpr std::string_view name(KvFormat value) {
  return kKvFormatNames[static_cast<size_t>(value)];
}
constexpr std::string_view name(Encoder value) { return kEncoderNames[static_cast<size_t>(value)]; }
constexpr std::string_view name(KvLayout value) {
  return kKvLayoutNames[static_cast<size_t>(value)];
}

// "nvfp4" -> kNvfp4; empty for a name that is not one of ours.
std::optional<KvFormat> parse_kv_format(std::string_view text);

constexpr int64_t dtype_bytes(Dtype dtype) { return dtype == Dtype::kFp32 ? 4 : 2; }

// Bytes of the data and of the block scales of one row (one token, one head) of `dim` elements.
int64_t row_data_bytes(KvFormat format, int64_t dim);
int64_t row_scale_bytes(KvFormat format, int64_t dim);

// The shape of one group of layers that store attention K and V.
struct AttentionGeometry {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t block_tokens = 0;
  int32_t k_dim = 0;
  int32_t v_dim = 0;
  KvFormat k_format = KvFormat::kNvfp4;
  KvFormat v_format = KvFormat::kNvfp4;

  bool operator==(const AttentionGeometry&) const = default;
};

// Byte offsets of the four regions inside a page, and its size.
struct PageLayout {
  int64_t k_data_offset_bytes = 0;
  int64_t k_scale_offset_bytes = 0;
  int64_t v_data_offset_bytes = 0;
  int64_t v_scale_offset_bytes = 0;
  int64_t page_bytes = 0;

  bool operator==(const PageLayout&) const = default;
};

// The geometry's fields must be positive (checked by validate_geometry in kernels/kernel_table.h).
PageLayout page_layout(const AttentionGeometry& geometry);

}  // namespace larder
