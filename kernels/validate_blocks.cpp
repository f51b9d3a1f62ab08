// The checks of convert, copy, scrub and checksum calls.
#include <algorithm>
#include <vector>

#include "kernels/checked_int64.h"
#include "kernels/kernel_table.h"
#include "kernels/paged_kv_check.h"
#include "kernels/refuse.h"
#include "kernels/validate.h"

namespace larder::kernels {
namespace {

// Ids of `field`, each of which must be a block of the pool.
Status validate_ids(std::string_view field, const int32_t* ids, int64_t count, int64_t num_blocks,
                    Tables tables) {
  if (count < 0) return refuse(kInvalid, "the number of ", field, " is ", count);
  if (count > 0 && ids == nullptr)
    return refuse(kInvalid, field, " is null with ", count, " blocks");
  if (Status s = validate_array(field, ids, alignof(int32_t)); !s.ok()) return s;
  if (tables == Tables::kDevice) return {};
  for (int64_t i = 0; i < count; ++i)
    if (ids[i] < 0 || ids[i] >= num_blocks)
      return refuse(kInvalid, field, "[", i, "] is ", ids[i], ": the pool has ", num_blocks,
                    " blocks");
  return {};
}

std::vector<int32_t> sorted(const int32_t* ids, int64_t count) {
  std::vector<int32_t> result(ids, ids + count);
  std::sort(result.begin(), result.end());
  return result;
}

// `ids` are sorted.
Status validate_no_duplicates(std::string_view field, const std::vector<int32_t>& ids) {
  const auto twice = std::adjacent_find(ids.begin(), ids.end());
  if (twice == ids.end()) return {};
  return refuse(kInvalid, field, " names block ", *twice, " twice: each may be written once");
}

// A layer of blocks nests in one of two ways: layers inside a block, or blocks inside a layer.
Status validate_view(const BlocksView& view) {
  if (view.num_layers < 1)
    return refuse(kInvalid, "num_layers is ", view.num_layers, ": expected 1 or more");
  if (view.layer_bytes < 1)
    return refuse(kInvalid, "layer_bytes is ", view.layer_bytes, ": expected 1 or more");
  if (view.num_blocks < 0)
    return refuse(kInvalid, "num_blocks is ", view.num_blocks, ": expected 0 or more");
  const bool layers = view.num_layers > 1;
  const bool blocks = view.num_blocks > 1;
  if (layers && view.layer_stride_bytes < view.layer_bytes)
    return refuse(kInvalid, "layer_stride_bytes is ", view.layer_stride_bytes, ": a layer has ",
                  view.layer_bytes);
  if (blocks && view.block_stride_bytes < view.layer_bytes)
    return refuse(kInvalid, "block_stride_bytes is ", view.block_stride_bytes,
                  ": a layer of a block has ", view.layer_bytes);
  const CheckedInt64 layers_span =
      layers ? CheckedInt64(view.num_layers - 1) * view.layer_stride_bytes : CheckedInt64();
  const CheckedInt64 blocks_span =
      blocks ? CheckedInt64(view.num_blocks - 1) * view.block_stride_bytes : CheckedInt64();
  if (!(layers_span + blocks_span + view.layer_bytes).fits)
    return refuse(kInvalid, "num_layers ", view.num_layers, " with layer_stride_bytes ",
                  view.layer_stride_bytes, " and num_blocks ", view.num_blocks,
                  " with block_stride_bytes ", view.block_stride_bytes, " pass 2^63 bytes");
  if (layers && blocks && view.block_stride_bytes < layers_span.value + view.layer_bytes &&
      view.layer_stride_bytes < blocks_span.value + view.layer_bytes)
    return refuse(kInvalid, "block_stride_bytes is ", view.block_stride_bytes,
                  " and layer_stride_bytes ", view.layer_stride_bytes, ": ", view.num_layers,
                  " layers of ", view.layer_bytes, " bytes of ", view.num_blocks,
                  " blocks would overlap");
  return {};
}

Status validate_blocks(const BlocksView& view, const int32_t* blocks, int64_t count,
                       Tables tables) {
  if (Status s = validate_view(view); !s.ok()) return s;
  return validate_ids("blocks", blocks, count, view.num_blocks, tables);
}

// Bytes are moved and not looked at, so scales, encoder and transform play no part.
Status validate_pages(const LayerView& layer) {
  if (Status s = check_page_geometry("", layer.geometry); !s.ok()) return s;
  return validate_layer_memory(layer);
}

Status same_geometry(const AttentionGeometry& layer, const AttentionGeometry& paged) {
  const auto differs = [](std::string_view field, const auto& ours, const auto& theirs) {
    return refuse(kInvalid, "paged.geometry.", field, " is ", theirs, ": the pool has ", ours);
  };
  if (layer.mla_row != paged.mla_row)
    return differs("mla_row", name(layer.mla_row), name(paged.mla_row));
  if (layer.num_kv_heads != paged.num_kv_heads)
    return differs("num_kv_heads", layer.num_kv_heads, paged.num_kv_heads);
  if (layer.k_dim != paged.k_dim) return differs("k_dim", layer.k_dim, paged.k_dim);
  if (layer.v_dim != paged.v_dim) return differs("v_dim", layer.v_dim, paged.v_dim);
  if (layer.mla_row != MlaRow::kNone) return {};
  if (layer.k_format != paged.k_format)
    return differs("k_format", name(layer.k_format), name(paged.k_format));
  if (layer.v_format != paged.v_format)
    return differs("v_format", name(layer.v_format), name(paged.v_format));
  return {};
}

}  // namespace

Status validate_convert(const ConvertParams& params, Tables tables) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const PagedKv& paged = params.paged;
  if (Status s = validate_pages(params.layer); !s.ok()) return s;
  if (Status s = check_page_geometry("paged.geometry.", paged.geometry); !s.ok()) return s;
  if (Status s = same_geometry(geometry, paged.geometry); !s.ok()) return s;
  if (Status s = check_paged_kv(paged, params.to_pool); !s.ok()) return s;
  if (Status s =
          validate_ids("blocks", params.blocks, params.num_blocks, params.layer.num_blocks, tables);
      !s.ok())
    return s;
  const CheckedInt64 ours = CheckedInt64(params.num_blocks) * geometry.block_tokens;
  const CheckedInt64 theirs = CheckedInt64(paged.num_pages) * paged.geometry.block_tokens;
  if (!ours.fits || !theirs.fits || ours.value != theirs.value)
    return refuse(kInvalid, "paged has ", paged.num_pages, " pages of ",
                  paged.geometry.block_tokens, " tokens: ", params.num_blocks, " blocks of ",
                  geometry.block_tokens, " tokens need exactly as many tokens");
  const LayerView& layer = params.layer;
  if (Status s = check_outside_pool(paged, layer.base, layer.block_stride_bytes, layer.num_blocks,
                                    layer.page);
      !s.ok())
    return s;
  if (!params.to_pool || tables == Tables::kDevice) return {};
  return validate_no_duplicates("blocks", sorted(params.blocks, params.num_blocks));
}

Status validate_copy(const CopyParams& params, Tables tables) {
  if (Status s = validate_view(params.view); !s.ok()) return s;
  if (Status s = validate_ids("from", params.from, params.count, params.view.num_blocks, tables);
      !s.ok())
    return s;
  if (Status s = validate_ids("to", params.to, params.count, params.view.num_blocks, tables);
      !s.ok())
    return s;
  if (tables == Tables::kDevice) return {};
  const std::vector<int32_t> to = sorted(params.to, params.count);
  if (Status s = validate_no_duplicates("to", to); !s.ok()) return s;
  for (int64_t i = 0; i < params.count; ++i)
    if (std::binary_search(to.begin(), to.end(), params.from[i]))
      return refuse(kInvalid, "from[", i, "] is ", params.from[i],
                    ", which is also in to: expected no block that is both");
  return {};
}

Status validate_scrub(const ScrubParams& params, Tables tables) {
  return validate_blocks(params.view, params.blocks, params.count, tables);
}

Status validate_checksum(const ChecksumParams& params, Tables tables) {
  if (Status s = validate_blocks(params.view, params.blocks, params.count, tables); !s.ok())
    return s;
  if (params.count > 0 && params.checksums == nullptr)
    return refuse(kInvalid, "checksums is null with ", params.count, " blocks");
  if (!is_aligned(params.checksums, alignof(uint64_t)))
    return refuse(kInvalid, "checksums is not aligned to ", alignof(uint64_t), " bytes");
  return {};
}

}  // namespace larder::kernels
