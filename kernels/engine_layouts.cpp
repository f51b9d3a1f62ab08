// vLLM's caches: layouts by name, views of one layer, manager blocks.
#include "larder/engine_layouts.h"

#include <map>
#include <utility>

#include "kernels/engine_view.h"
#include "kernels/refuse.h"

namespace larder {
namespace {

using kernels::refuse;
constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;

int64_t content_bytes(KvFormat format, int64_t dim) {
  return row_data_bytes(format, dim) + row_scale_bytes(format, dim);
}
int64_t k_bytes(const AttentionGeometry& g) { return content_bytes(g.k_format, g.k_dim); }
int64_t v_bytes(const AttentionGeometry& g) { return content_bytes(g.v_format, g.v_dim); }
bool has_scales(const AttentionGeometry& g) {
  return g.k_format == KvFormat::kNvfp4 || g.v_format == KvFormat::kNvfp4;
}

// Which pairs of formats vLLM packs in which way.
Status check_packing(const AttentionGeometry& g, KvPacking packing) {
  if (static_cast<size_t>(packing) >= kKvPackingNames.size())
    return refuse(kInvalid, "packing is ", static_cast<int>(packing),
                  ": expected 0 (head_slots) or 1 (contents)");
  const bool slots = packing == KvPacking::kHeadSlots;
  if (slots && (g.k_format != g.v_format || g.k_dim != g.v_dim))
    return refuse(kUnsupported, "packing is head_slots with K ", name(g.k_format), " of ", g.k_dim,
                  " dims and V ", name(g.v_format), " of ", g.v_dim,
                  ": the slots of K and V must be of one format and dim");
  if (slots || !has_scales(g)) return {};
  if (g.k_format == KvFormat::kFp8E4m3 && g.k_dim == g.v_dim) return {};
  return refuse(kUnsupported, "packing is contents with K ", name(g.k_format), " of ", g.k_dim,
                " dims and V ", name(g.v_format), " of ", g.v_dim,
                ": of block-scaled formats it holds K fp8_e4m3 and V nvfp4 of one dim; for nvfp4 "
                "use head_slots");
}

// Slots and content of one row of the layer's view.
std::pair<int64_t, int64_t> slots_and_content(const AttentionGeometry& g, KvPacking packing) {
  if (packing == KvPacking::kHeadSlots) return {int64_t{2} * g.num_kv_heads, k_bytes(g)};
  return {g.num_kv_heads, k_bytes(g) + v_bytes(g)};
}

// The view of one layer in the cache's layout: strides accumulate from the innermost axis outwards.
struct LayerPlace {
  ByteView view;
  CheckedInt64 layer_stride_bytes;
};
Result<LayerPlace> place_layer(const VllmCache& cache) {
  const auto [slots, content] = slots_and_content(cache.geometry, cache.packing);
  std::map<char, int64_t> sizes = {{'L', cache.geometry.num_layers},
                                   {'B', cache.num_blocks},
                                   {'H', slots},
                                   {'N', cache.geometry.block_tokens},
                                   {'C', content}};
  std::map<char, CheckedInt64> strides;
  CheckedInt64 dense = 1;
  const std::string_view axes = name(cache.layout);
  for (auto axis = axes.rbegin(); axis != axes.rend(); ++axis) {
    const int64_t wanted = *axis == 'B'   ? cache.block_stride_bytes
                           : *axis == 'L' ? cache.layer_stride_bytes
                                          : 0;
    if (wanted < 0 || (wanted != 0 && dense.fits && wanted < dense.value))
      return refuse(kInvalid, *axis == 'B' ? "block" : "layer", "_stride_bytes is ", wanted,
                    ": in layout ", axes, " expected 0 or at least ", dense.value);
    strides[*axis] = wanted != 0 && dense.fits ? CheckedInt64(wanted) : dense;
    dense = strides[*axis] * sizes[*axis];
  }
  if (!dense.fits)
    return refuse(kInvalid, "num_blocks is ", cache.num_blocks, ": the cache passes 2^63 bytes");
  return LayerPlace{{cache.base,
                     {sizes['B'], sizes['H'], sizes['N'], sizes['C']},
                     {strides['B'].value, strides['H'].value, strides['N'].value, 1}},
                    strides['L']};
}

Status check_order_of_scales(const VllmCache& cache) {
  if (!has_scales(cache.geometry) || cache.layout == VllmLayout::kLbhnc ||
      cache.layout == VllmLayout::kBlhnc)
    return {};
  const bool token_major = cache.layout == VllmLayout::kLbnhc || cache.layout == VllmLayout::kBlnhc;
  return refuse(kUnsupported, "layout is ", name(cache.layout), " with nvfp4: ",
                token_major ? "V would begin inside each token's row, where the data of K is read "
                            : "scales are looked for right behind the data of one page's heads, "
                              "which this layout does not keep together ",
                "(one corrupts the other); use LBHNC or BLHNC, or FlashInfer's separate tensors");
}

// K or V of one layer: where the contents of (page, head, token) lie.
struct SideView {
  std::byte* base = nullptr;
  int64_t page_stride_bytes = 0;
  int64_t head_stride_bytes = 0;
  int64_t token_stride_bytes = 0;
};

// Fills the regions of K or V whose contents lie at `side`. Where the format has scales, contents
// are bookkeeping: all data of a page's side comes first, then all scales.
void set_side(const AttentionGeometry& g, KvFormat format, int64_t dim, const SideView& side,
              PagedRows& data, PagedRows& scale) {
  data = {side.base, side.page_stride_bytes, side.head_stride_bytes, side.token_stride_bytes};
  const int64_t scale_bytes = row_scale_bytes(format, dim);
  if (scale_bytes == 0) return;
  const int64_t data_bytes = row_data_bytes(format, dim);
  const int64_t head_rows = side.head_stride_bytes / (data_bytes + scale_bytes);
  const int64_t token_rows = side.token_stride_bytes / (data_bytes + scale_bytes);
  data.head_stride_bytes = head_rows * data_bytes;
  data.token_stride_bytes = token_rows * data_bytes;
  const int64_t data_region_bytes = data_bytes * g.num_kv_heads * g.block_tokens;
  scale = {address(side.base, data_region_bytes), side.page_stride_bytes, head_rows * scale_bytes,
           token_rows * scale_bytes};
}

// A page of block-scaled formats is dense regions, whatever its view claims.
Result<PagedKv> scaled_pages(const ByteView& view, const AttentionGeometry& g,
                             VScaleOrder v_scale_order) {
  if (view.strides_bytes[2] != view.shape[3] ||
      view.strides_bytes[1] != view.shape[2] * view.shape[3])
    return refuse(kUnsupported, "view has ", describe(view),
                  ": nvfp4 needs the slots, tokens and contents of a block dense in this order "
                  "(HND), as data and scales are separate regions of the page; for tokens first "
                  "use FlashInfer's separate tensors");
  const int64_t page_stride_bytes = view.strides_bytes[0];
  PagedKv kv = dense_pages(view.data, g, view.shape[0], PageOrder::kHnd, v_scale_order);
  for (PagedRows* rows : {&kv.k_data, &kv.k_scale, &kv.v_data, &kv.v_scale})
    if (rows->page_stride_bytes != 0) rows->page_stride_bytes = page_stride_bytes;
  return checked_pages(kv);
}

}  // namespace

Result<VllmLayout> parse_vllm_layout(std::string_view text) {
  if (text == "NHD") return VllmLayout::kLbnhc;
  if (text == "HND") return VllmLayout::kLbhnc;
  for (size_t i = 0; i < kVllmLayoutNames.size(); ++i)
    if (kVllmLayoutNames[i] == text) return static_cast<VllmLayout>(i);
  return refuse(kInvalid, "layout is '", text,
                "': expected LBNHC (NHD), LBHNC (HND), LHBNC, BLNHC, BLHNC or BHLNC");
}

Result<PagedKv> vllm_layer(const VllmCache& cache, int32_t layer) {
  if (Status s = check_engine_geometry(cache.geometry); !s.ok()) return s;
  if (static_cast<size_t>(cache.layout) >= kVllmLayoutNames.size())
    return refuse(kInvalid, "layout is ", static_cast<int>(cache.layout), ": expected 0 to ",
                  kVllmLayoutNames.size() - 1);
  if (Status s = check_packing(cache.geometry, cache.packing); !s.ok()) return s;
  if (Status s = check_order_of_scales(cache); !s.ok()) return s;
  if (layer < 0 || layer >= cache.geometry.num_layers)
    return refuse(kInvalid, "layer is ", layer, ": the cache has ", cache.geometry.num_layers,
                  " layers");
  if (cache.num_blocks < 0)
    return refuse(kInvalid, "num_blocks is ", cache.num_blocks, ": expected 0 or more");
  auto place = place_layer(cache);
  if (!place) return place.status();
  place->view.data = address(cache.base, place->layer_stride_bytes * layer);
  return vllm_view(place->view, cache.packing, cache.geometry, cache.v_scale_order);
}

Result<PagedKv> vllm_view(const ByteView& view, KvPacking packing,
                          const AttentionGeometry& geometry, VScaleOrder v_scale_order) {
  if (Status s = check_engine_geometry(geometry); !s.ok()) return s;
  if (Status s = check_packing(geometry, packing); !s.ok()) return s;
  const auto canonical = canonical_view("view", view, 4, "[blocks, slots, tokens, content bytes]");
  if (!canonical) return canonical.status();
  const auto [slots, content] = slots_and_content(geometry, packing);
  const std::vector<int64_t>& shape = canonical->shape;
  if (shape[1] != slots || shape[2] != geometry.block_tokens || shape[3] != content)
    return refuse(kInvalid, "view has ", describe(view), ": expected [blocks, ", slots, ", ",
                  geometry.block_tokens, ", ", content, "] for packing ", name(packing), " of ",
                  geometry.num_kv_heads, " heads, K ", name(geometry.k_format), " and V ",
                  name(geometry.v_format));
  if (has_scales(geometry)) return scaled_pages(*canonical, geometry, v_scale_order);

  const std::vector<int64_t>& strides = canonical->strides_bytes;
  if (shape[0] > 1 && shape[2] > 1 && strides[0] <= strides[2])
    return refuse(kUnsupported, "view has ", describe(view),
                  ": tokens lie outside of blocks, which is none of LBNHC, LBHNC, LHBNC, BLNHC, "
                  "BLHNC and BHLNC");
  const CheckedInt64 v_offset = packing == KvPacking::kHeadSlots
                                    ? CheckedInt64(strides[1]) * geometry.num_kv_heads
                                    : CheckedInt64(k_bytes(geometry));
  PagedKv kv = empty_pages(geometry, shape[0], v_scale_order);
  kv.k_data = {canonical->data, strides[0], strides[1], strides[2]};
  kv.v_data = {address(canonical->data, v_offset), strides[0], strides[1], strides[2]};
  return checked_pages(kv);
}

Result<PagedKv> vllm_split_view(const ByteView& view, PageOrder order,
                                const AttentionGeometry& geometry, VScaleOrder v_scale_order) {
  if (Status s = check_engine_geometry(geometry); !s.ok()) return s;
  if (Status s = check_page_order(order); !s.ok()) return s;
  if (!has_scales(geometry)) return flashinfer_stacked(view, {}, order, geometry, v_scale_order);
  if (geometry.k_format != geometry.v_format || geometry.k_dim != geometry.v_dim)
    return refuse(kUnsupported, "K is ", name(geometry.k_format), " of ", geometry.k_dim,
                  " dims and V ", name(geometry.v_format), " of ", geometry.v_dim,
                  ": with nvfp4 the sides of [blocks, 2, ...] must be of one format and dim");
  const auto canonical =
      canonical_view("view", view, 5, "[blocks, 2, tokens, heads, content bytes]");
  if (!canonical) return canonical.status();
  const int64_t content = k_bytes(geometry);
  const size_t head_axis = order == PageOrder::kNhd ? 3 : 2;
  const size_t token_axis = order == PageOrder::kNhd ? 2 : 3;
  const std::vector<int64_t>& shape = canonical->shape;
  if (shape[1] != 2 || shape[head_axis] != geometry.num_kv_heads ||
      shape[token_axis] != geometry.block_tokens || shape[4] != content)
    return refuse(kInvalid, "view has ", describe(view), ": expected [blocks, 2, ",
                  order == PageOrder::kNhd ? geometry.block_tokens : geometry.num_kv_heads, ", ",
                  order == PageOrder::kNhd ? geometry.num_kv_heads : geometry.block_tokens, ", ",
                  content, "] in order ", name(order));
  const std::vector<int64_t>& strides = canonical->strides_bytes;
  const int64_t head = strides[head_axis];
  const int64_t token = strides[token_axis];
  // Sizes of 1 are canonical already, so a dense side has one of these two pairs of strides.
  const bool heads_first = token == content && head == content * geometry.block_tokens;
  const bool tokens_first = head == content && token == content * geometry.num_kv_heads;
  if (!heads_first && !tokens_first)
    return refuse(kUnsupported, "view has ", describe(view),
                  ": nvfp4 needs the tokens, heads and contents of K, and of V, dense, as data and "
                  "scales are separate regions");
  PagedKv kv = empty_pages(geometry, shape[0], v_scale_order);
  set_side(geometry, geometry.k_format, geometry.k_dim, {canonical->data, strides[0], head, token},
           kv.k_data, kv.k_scale);
  set_side(geometry, geometry.v_format, geometry.v_dim,
           {address(canonical->data, strides[1]), strides[0], head, token}, kv.v_data, kv.v_scale);
  return checked_pages(kv);
}

Result<ByteView> split_blocks(const ByteView& view, int64_t ratio) {
  const auto canonical = canonical_view("view", view, 4, "[blocks, slots, tokens, content bytes]");
  if (!canonical) return canonical.status();
  ByteView split = *canonical;
  const int64_t tokens = split.shape[2];
  if (ratio < 1 || tokens % ratio != 0)
    return refuse(kInvalid, "ratio is ", ratio, ": expected a divisor of the ", tokens,
                  " tokens of a block");
  const int64_t content = split.shape[3];
  const CheckedInt64 row = CheckedInt64(split.shape[1]) * content;
  const CheckedInt64 block = row * tokens;
  const CheckedInt64 num_blocks = CheckedInt64(split.shape[0]) * ratio;
  if (!block.fits || !num_blocks.fits)
    return refuse(kInvalid, "view has ", describe(view), ": it passes 2^63 bytes");
  std::vector<int64_t>& strides = split.strides_bytes;
  const bool heads_first = (split.shape[1] == 1 || strides[1] == content * tokens) &&
                           (tokens == 1 || strides[2] == content);
  const bool tokens_first =
      (split.shape[1] == 1 || strides[1] == content) && (tokens == 1 || strides[2] == row.value);
  if ((split.shape[0] > 1 && strides[0] != block.value) || (!heads_first && !tokens_first))
    return refuse(kUnsupported, "view has ", describe(view), ": blocks of ", block.value,
                  " bytes must lie without gaps to be split into ", ratio);
  split.shape[0] = num_blocks.value;
  split.shape[2] = tokens / ratio;
  strides = {block.value / ratio, heads_first ? content * (tokens / ratio) : content,
             heads_first ? content : row.value, 1};
  return split;
}

}  // namespace larder
