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
// fp8_e4m3 and fp8_e5m2 store x / k_scale (or v_scale) by IEEE division, to nearest even,
// saturating to the largest finite value (448: 0x7E; 57344: 0x7B), infinities too; a NaN stays a
// NaN (0x7F). bf16 and fp16 store the value itself, to nearest even, and a value of their own type
// bit for bit: k_scale and v_scale do not apply to them.
//
// MLA pools store one row per token, of one of the row formats below; a page is block_tokens rows.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

namespace larder {

// Element type of tensors that cross an API. K, V and Q are bf16, fp16 or fp32; outputs may also be
// fp8_e4m3, or e2m1x2: bytes of two E2M1 values, the even element in the low nibble.
enum class Dtype : uint8_t { kBf16 = 0, kFp16 = 1, kFp32 = 2, kFp8E4m3 = 3, kE2m1x2 = 4 };

// How a K or V row is stored in a pool.
enum class KvFormat : uint8_t { kBf16 = 0, kFp16 = 1, kFp8E4m3 = 2, kFp8E5m2 = 3, kNvfp4 = 4 };

// Which search chooses the block scales of nvfp4. Every encoder writes bytes of the same format,
// and all treat special values as above (other libraries' four_over_six stores a NaN as +6). With
// amax the largest magnitude of a group and g the tensor's scale:
//   reference      e4m3(amax / (6 g)), the bytes of FlashInfer's append with IEEE division.
//   four_over_six  maps amax to 6 or to 4, whichever has the lesser squared error; vLLM's bytes. 6
//                  where the errors are alike or not comparable (a NaN, an infinity).
//   best_scale     of the E4M3 bytes from 3 below to 9 above the reference's, that with the least
//                  squared error; of equals the one nearest to the reference's, then the lower. A
//                  NaN adds no error. Errors are compared in half precision where g is from 2^-64
//                  to 2^64 and the reference's byte from 4 to 0x75 (kernels/cpu/nvfp4_search.h),
//                  else in float: so the choice may be worse than the least, or the reference, by
//                  what a half cannot tell (of normal values: by 1.3 %, on average 10^-5).
enum class Encoder : uint8_t { kReference = 0, kFourOverSix = 1, kBestScale = 2 };

// What is done to keys before they are stored, and undone by every reader. Centred: a fixed vector
// per layer and KV head is subtracted (the pool's key offsets). Rotated: an orthonormal Hadamard
// transform in natural (Sylvester) order over consecutive stretches of rotation_dim(k_dim)
// elements, after centring. Attention is the same up to rounding: queries are rotated too, and what
// centring takes from every logit of a row is added back. A NaN or an infinity spreads over the
// stretch that is rotated with it, and no further.
enum class KeyTransform : uint8_t { kNone = 0, kCentred = 1, kRotated = 2, kCentredRotated = 3 };

constexpr bool is_centred(KeyTransform transform) {
  return transform == KeyTransform::kCentred || transform == KeyTransform::kCentredRotated;
}
constexpr bool is_rotated(KeyTransform transform) {
  return transform == KeyTransform::kRotated || transform == KeyTransform::kCentredRotated;
}
// The largest power of two that divides the dim: the whole of 64, 128, 256, and 32 of 96.
constexpr int32_t rotation_dim(int32_t k_dim) { return k_dim & -k_dim; }

// How one token of an MLA layer is stored: 512 latent values and 64 RoPE values.
//   nvfp4_ds_mla 352 B: [0, 256) latent as E2M1 pairs; [256, 320) rope as e4m3, unscaled;
//                [320, 352) the E4M3 scales: that of latent group s at 320 + 8 * (s & 3) + (s >>
//                2). Scales are rounded up and at least 2^-9. There is no tensor scale.
//   fp8_ds_mla   656 B: [0, 512) latent as e4m3; [512, 528) four float32 scales, one per 128 latent
//                values, max(amax / 448, smallest normal float); [528, 656) rope as bf16. No tensor
//                scale.
//   fp8_mla      576 B: latent, then rope, as e4m3 of x / k_scale.
//   bf16_mla    1152 B: latent, then rope, as bf16.
// NaNs are left out of every maximum and stored as in nvfp4 and e4m3 above; an infinity counts as
// the largest float in the tile scale of fp8_ds_mla, and saturates elsewhere.
enum class MlaRow : uint8_t { kNone = 0, kNvfp4Ds = 1, kFp8Ds = 2, kFp8 = 3, kBf16 = 4 };

inline constexpr int32_t kMlaLatentDim = 512;                       // K and V
inline constexpr int32_t kMlaRopeDim = 64;                          // K only
inline constexpr int32_t kMlaKeyDim = kMlaLatentDim + kMlaRopeDim;  // latent, then rope

// Where layer l of block b lies. BLHNC: all layers of a block are together. LBHNC: all blocks of a
// layer are together; such a pool has a fixed size.
enum class KvLayout : uint8_t { kBlhnc = 0, kLbhnc = 1 };

inline constexpr int kNvfp4GroupElements = 16;  // elements that share one scale byte

inline constexpr std::array<std::string_view, 5> kDtypeNames = {"bf16", "fp16", "fp32", "fp8_e4m3",
                                                                "e2m1x2"};
inline constexpr std::array<std::string_view, 5> kKvFormatNames = {"bf16", "fp16", "fp8_e4m3",
                                                                   "fp8_e5m2", "nvfp4"};
inline constexpr std::array<std::string_view, 3> kEncoderNames = {"reference", "four_over_six",
                                                                  "best_scale"};
inline constexpr std::array<std::string_view, 4> kKeyTransformNames = {"none", "centred", "rotated",
                                                                       "centred_rotated"};
inline constexpr std::array<std::string_view, 5> kMlaRowNames = {
    "none", "nvfp4_ds_mla", "fp8_ds_mla", "fp8_mla", "bf16_mla"};
inline constexpr std::array<std::string_view, 2> kKvLayoutNames = {"BLHNC", "LBHNC"};

constexpr std::string_view name(Dtype value) { return kDtypeNames[static_cast<size_t>(value)]; }
constexpr std::string_view name(KvFormat value) {
  return kKvFormatNames[static_cast<size_t>(value)];
}
constexpr std::string_view name(Encoder value) { return kEncoderNames[static_cast<size_t>(value)]; }
constexpr std::string_view name(KeyTransform value) {
  return kKeyTransformNames[static_cast<size_t>(value)];
}
constexpr std::string_view name(MlaRow value) { return kMlaRowNames[static_cast<size_t>(value)]; }
constexpr std::string_view name(KvLayout value) {
  return kKvLayoutNames[static_cast<size_t>(value)];
}

// "nvfp4" -> kNvfp4; empty for a name that is not one of ours.
std::optional<KvFormat> parse_kv_format(std::string_view text);

// Bytes of one element; of e2m1x2, of one pair.
constexpr int64_t dtype_bytes(Dtype dtype) {
  constexpr std::array<int64_t, 5> kBytes = {2, 2, 4, 1, 1};
  return kBytes[static_cast<size_t>(dtype)];
}

constexpr int64_t mla_row_bytes(MlaRow row) {
  constexpr std::array<int64_t, 5> kBytes = {0, 352, 656, 576, 1152};
  return kBytes[static_cast<size_t>(row)];
}

// Bytes of the data and of the block scales of one row (one token, one head) of `dim` elements.
int64_t row_data_bytes(KvFormat format, int64_t dim);
int64_t row_scale_bytes(KvFormat format, int64_t dim);

// The shape of one group of layers that store K and V of attention, or rows of MLA.
struct AttentionGeometry {
  int32_t num_layers = 0;
  int32_t num_kv_heads = 0;
  int32_t block_tokens = 0;
  int32_t k_dim = 0;
  int32_t v_dim = 0;
  KvFormat k_format = KvFormat::kNvfp4;
  KvFormat v_format = KvFormat::kNvfp4;
  MlaRow mla_row = MlaRow::kNone;  // other than none: see mla_geometry

  bool operator==(const AttentionGeometry&) const = default;
};

// The geometry of MLA layers: one KV head, keys of 576 and values of 512 elements. k_format and
// v_format mean nothing there.
constexpr AttentionGeometry mla_geometry(int32_t num_layers, int32_t block_tokens, MlaRow row) {
  return {num_layers,      1,  block_tokens, kMlaKeyDim, kMlaLatentDim, KvFormat::kBf16,
          KvFormat::kBf16, row};
}

// Byte offsets of the four regions inside a page, and its size. MLA rows are the K data; the other
// regions are empty.
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
