// Other libraries' paged KV caches: recognised by name, shape and strides, or refused by name.
//
// Each function turns an engine's description of one layer into a PagedKv, which convert calls
// take, or says in one sentence what is wrong with it (INVALID_ARGUMENT) or what is not served
// (UNSUPPORTED). Nothing here reads or writes the memory that is described.
//
// Which shape goes where:
//   vLLM, one allocation and a layout's name     vllm_layer
//   vLLM, per-layer view [B, slots, N, C]        vllm_view
//   vLLM before head slots, [B, 2, N, H, C]      vllm_split_view
//   FlashInfer, separate K and V [P, N, H, C]    flashinfer_pair
//   FlashInfer, stacked [P, 2, N, H, C]          flashinfer_stacked
//   MLA rows [B, N, C]                           mla_view
// B or P: blocks or pages; H: KV heads; N: tokens of a page; C: bytes of the content.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "larder/kv_format.h"
#include "larder/paged_kv.h"
#include "larder/status.h"

namespace larder {

// A strided tensor of bytes. The last axis is the content of one row and must be contiguous; the
// stride of an axis of size 1 may be anything.
struct ByteView {
  std::byte* data = nullptr;
  std::vector<int64_t> shape;
  std::vector<int64_t> strides_bytes;  // as many as the shape has axes; not negative
};

// The ByteView of a tensor of `element_bytes`-byte elements, its strides in elements.
Result<ByteView> byte_view(void* data, std::vector<int64_t> shape, std::vector<int64_t> strides,
                           int64_t element_bytes);

// vLLM's canonicalize_singleton_dim_strides: the stride of an axis of size 1 becomes what it would
// be if the axes after it were dense (last axis: 1); other strides stay.
Result<std::vector<int64_t>> canonical_strides(const std::vector<int64_t>& shape,
                                               const std::vector<int64_t>& strides);

// vLLM's layouts: the axes layer, block, head slot, token and content, outermost first.
enum class VllmLayout : uint8_t {
  kLbnhc = 0,
  kLbhnc = 1,
  kLhbnc = 2,
  kBlnhc = 3,
  kBlhnc = 4,
  kBhlnc = 5
};
inline constexpr std::array<std::string_view, 6> kVllmLayoutNames = {"LBNHC", "LBHNC", "LHBNC",
                                                                     "BLNHC", "BLHNC", "BHLNC"};
constexpr std::string_view name(VllmLayout value) {
  return kVllmLayoutNames[static_cast<size_t>(value)];
}
// The names above, and vLLM's aliases NHD (LBNHC) and HND (LBHNC).
Result<VllmLayout> parse_vllm_layout(std::string_view text);

// How K and V share a layer of vLLM.
//   kHeadSlots  [B, 2H, N, C]: slots 0 to H - 1 are K, H to 2H - 1 are V; C bytes each. nvfp4 is
//               stored so: C = 9 dim / 16 is bookkeeping, the page being the four dense regions of
//               PageLayout.
//   kContents   [B, H, N, C]: each slot holds the K row, then the V row. fp8, bf16 and fp16 are
//               stored so by default, and the dense page of fp8_k_nvfp4_v is described so.
enum class KvPacking : uint8_t { kHeadSlots = 0, kContents = 1 };
inline constexpr std::array<std::string_view, 2> kKvPackingNames = {"head_slots", "contents"};
constexpr std::string_view name(KvPacking value) {
  return kKvPackingNames[static_cast<size_t>(value)];
}

// One allocation that holds all layers of one shape. Strides that are 0 are dense: the product of
// what lies further inside. vLLM's page_size_padded is the block stride of layouts that begin with
// LB, and the layer stride of those that begin with BL.
struct VllmCache {
  std::byte* base = nullptr;  // of layer 0, block 0
  VllmLayout layout = VllmLayout::kLbhnc;
  KvPacking packing = KvPacking::kHeadSlots;
  AttentionGeometry geometry;  // all layers; block_tokens: of a kernel block
  int64_t num_blocks = 0;      // kernel blocks
  int64_t block_stride_bytes = 0;
  int64_t layer_stride_bytes = 0;
  VScaleOrder v_scale_order = VScaleOrder::kLinear;
};

// One layer of the cache. UNSUPPORTED for block-scaled formats in any layout but LBHNC and BLHNC:
// vLLM's own writer and reader disagree about where the bytes are in the others.
Result<PagedKv> vllm_layer(const VllmCache& cache, int32_t layer);

// vLLM's view of one layer, [B, slots, N, C], whatever its layout is called: any strides in which
// tokens lie inside blocks and no rows overlap; block-scaled formats need each block's slots,
// tokens and contents dense, in this order.
Result<PagedKv> vllm_view(const ByteView& view, KvPacking packing,
                          const AttentionGeometry& geometry,
                          VScaleOrder v_scale_order = VScaleOrder::kLinear);

// vLLM's older view of one layer: [B, 2, N, H, C], or [B, 2, H, N, C] with order kHnd. `order` is
// that of the shape's axes; where they lie in memory is for the strides to say. nvfp4: C holds data
// and scales, so each side (K, V) is a dense data region, then a dense scale region.
Result<PagedKv> vllm_split_view(const ByteView& view, PageOrder order,
                                const AttentionGeometry& geometry,
                                VScaleOrder v_scale_order = VScaleOrder::kLinear);

// FlashInfer's tuple form: K and V [P, N, H, C], or [P, H, N, C] with order kHnd, C the bytes of
// row_data_bytes; scales of the same shape, C of row_scale_bytes, and no axes at all where a format
// has none. Any strides that keep rows apart.
struct FlashinferPair {
  ByteView k;
  ByteView v;
  ByteView k_scale;
  ByteView v_scale;
};
Result<PagedKv> flashinfer_pair(const FlashinferPair& tensors, PageOrder order,
                                const AttentionGeometry& geometry,
                                VScaleOrder v_scale_order = VScaleOrder::kLinear);

// FlashInfer's stacked form: [P, 2, N, H, C] (K, then V), scales likewise.
Result<PagedKv> flashinfer_stacked(const ByteView& kv, const ByteView& kv_scale, PageOrder order,
                                   const AttentionGeometry& geometry,
                                   VScaleOrder v_scale_order = VScaleOrder::kLinear);

// MLA rows: [B, N, C]. Blocks may be further apart than their rows.
Result<PagedKv> mla_view(const ByteView& view, MlaRow row);

// A view [B, slots, N, C] of an engine's own (manager) blocks as one of B * ratio kernel blocks of
// N / ratio tokens: block id * ratio + r. Needs blocks without gaps. nvfp4: the four regions then
// repeat in every kernel block, which is how vLLM's kernels write them.
Result<ByteView> split_blocks(const ByteView& view, int64_t ratio);

// What a name of an engine's KV-cache format means here.
struct EngineFormat {
  KvFormat k_format = KvFormat::kBf16;
  KvFormat v_format = KvFormat::kBf16;
  Encoder encoder = Encoder::kReference;
  MlaRow mla_row = MlaRow::kNone;  // other than none: the formats above mean nothing
  // As the name says. Of nvfp4 the name does not say: vLLM writes swizzled V scales on SM100.
  VScaleOrder v_scale_order = VScaleOrder::kLinear;
  bool operator==(const EngineFormat&) const = default;
};

// vLLM's and our own names: "fp8", "bfloat16", "nvfp4_4over6", "fp8_k_nvfp4_v", "nvfp4_ds_mla", ...
// UNSUPPORTED for formats that others have and Larder does not serve ("int8_per_token_head",
// "turboquant_..."), INVALID_ARGUMENT for a name that is none, and for "auto".
Result<EngineFormat> parse_engine_format(std::string_view text);

// The rows of an MLA layer whose format an engine calls `text`, "fp8" and "bfloat16" included. Some
// libraries use the names above for other rows, so the row's size must be right too.
Result<MlaRow> parse_engine_mla_row(std::string_view text, int64_t row_bytes);

}  // namespace larder
