#include "kernels/paged_kv_check.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "kernels/checked_int64.h"
#include "kernels/kernel_table.h"
#include "kernels/refuse.h"

namespace larder {
namespace {

using kernels::refuse;
constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;

Status check_field(std::string_view prefix, std::string_view field, int32_t value, int32_t limit) {
  if (value >= 1 && value <= limit) return {};
  return refuse(kInvalid, prefix, field, " is ", value, ": expected 1 to ", limit);
}

Status check_side(std::string_view prefix, std::string_view side, int32_t dim, KvFormat format) {
  if (static_cast<size_t>(format) >= kKvFormatNames.size())
    return refuse(kInvalid, prefix, side, "_format is ", static_cast<int>(format),
                  ": expected one of the ", kKvFormatNames.size(), " formats");
  const std::string field = std::string(side) + "_dim";
  if (Status s = check_field(prefix, field, dim, kernels::kMaxHeadDim); !s.ok()) return s;
  if (format == KvFormat::kNvfp4 && dim % kNvfp4GroupElements != 0)
    return refuse(kInvalid, prefix, field, " is ", dim, ": nvfp4 needs a multiple of ",
                  kNvfp4GroupElements);
  return {};
}

// Swizzled tiles are 4 tokens of all scale columns, and the columns are dealt out to 4 rows.
Status check_swizzle(const AttentionGeometry& geometry) {
  if (geometry.mla_row != MlaRow::kNone || geometry.v_format != KvFormat::kNvfp4)
    return refuse(
        kInvalid, "v_scale_order is swizzled: only nvfp4 values have scales, and these ",
        geometry.mla_row != MlaRow::kNone ? "are rows of " : "are ",
        geometry.mla_row != MlaRow::kNone ? name(geometry.mla_row) : name(geometry.v_format));
  if (geometry.v_dim % (4 * kNvfp4GroupElements) != 0)
    return refuse(kInvalid, "v_dim is ", geometry.v_dim, ": swizzled V scales need a multiple of ",
                  4 * kNvfp4GroupElements);
  if (geometry.block_tokens % 4 != 0)
    return refuse(kInvalid, "pages have ", geometry.block_tokens,
                  " tokens: swizzled V scales need a multiple of 4");
  return {};
}

struct Axis {
  int64_t stride = 0;
  int64_t count = 0;
};

// The axes of a region that have a second index, outermost first.
std::vector<Axis> axes_of(const PagedKv& kv, const PagedRows& rows) {
  std::vector<Axis> axes;
  for (const Axis axis : {Axis{rows.page_stride_bytes, kv.num_pages},
                          Axis{rows.head_stride_bytes, kv.geometry.num_kv_heads},
                          Axis{rows.token_stride_bytes, kv.geometry.block_tokens}})
    if (axis.count > 1) axes.push_back(axis);
  std::stable_sort(axes.begin(), axes.end(),
                   [](const Axis& a, const Axis& b) { return a.stride > b.stride; });
  return axes;
}

// Bytes from the first of the rows to behind the last.
CheckedInt64 span_bytes(const Axis* axes, size_t num_axes, int64_t row_bytes) {
  CheckedInt64 span = row_bytes;
  for (size_t i = 0; i < num_axes; ++i)
    span = span + CheckedInt64(axes[i].count - 1) * axes[i].stride;
  return span;
}

Status check_region(const PagedKv& kv, const PagedRegion& region, bool rows_may_overlap) {
  const std::vector<Axis> axes = axes_of(kv, region.rows);
  const PagedRows& rows = region.rows;
  const auto strides = [&rows] {
    std::ostringstream text;
    text << "strides of page, head and token [" << rows.page_stride_bytes << ", "
         << rows.head_stride_bytes << ", " << rows.token_stride_bytes << "] bytes";
    return text.str();
  };
  for (const Axis& axis : axes)
    if (axis.stride < 0)
      return refuse(kInvalid, region.name, ": ", strides(), ": expected none below 0");
  const CheckedInt64 span = span_bytes(axes.data(), axes.size(), region.row_bytes);
  int64_t end = 0;
  if (!span.fits || __builtin_add_overflow(reinterpret_cast<intptr_t>(rows.base), span.value, &end))
    return refuse(kInvalid, region.name, ": ", strides(), " with ", kv.num_pages,
                  " pages pass 2^63 bytes");
  if (rows.base == nullptr)
    return refuse(kInvalid, region.name, ": base is null with ", kv.num_pages, " pages");
  if (rows_may_overlap) return {};
  for (size_t i = 0; i < axes.size(); ++i)
    if (axes[i].stride <
        span_bytes(axes.data() + i + 1, axes.size() - i - 1, region.row_bytes).value)
      return refuse(kInvalid, region.name, ": ", strides(), " let rows of ", region.row_bytes,
                    " bytes overlap (", kv.num_pages, " pages, ", kv.geometry.num_kv_heads,
                    " heads, ", kv.geometry.block_tokens, " tokens)");
  return {};
}

struct Rows {
  const Axis* axes = nullptr;
  size_t num_axes = 0;
  int64_t row_bytes = 0;
  int64_t span() const { return span_bytes(axes, num_axes, row_bytes).value; }
  int64_t outer_stride() const { return num_axes == 0 ? 0 : axes[0].stride; }
  Rows inner() const { return {axes + 1, num_axes - 1, row_bytes}; }
};

// Whether rows of b, which begin `offset` bytes after those of a, may share bytes with rows of a.
// Never wrong when it says no. The larger of the outermost strides is taken off: the remainders of
// both repeat with it, so only the offset modulo the stride matters while neither is longer.
bool may_meet(const Rows& a, const Rows& b, int64_t offset) {
  if (offset >= a.span() || offset <= -b.span()) return false;
  const int64_t stride = std::max(a.outer_stride(), b.outer_stride());
  if (stride == 0) return true;
  const Rows a_inner = a.outer_stride() == stride ? a.inner() : a;
  const Rows b_inner = b.outer_stride() == stride ? b.inner() : b;
  if (a_inner.span() > stride || b_inner.span() > stride) return true;
  const int64_t inner = (offset % stride + stride) % stride;
  return may_meet(a_inner, b_inner, inner) || may_meet(a_inner, b_inner, inner - stride);
}

int64_t bytes_between(const std::byte* from, const std::byte* to) {
  return static_cast<int64_t>(reinterpret_cast<uintptr_t>(to) - reinterpret_cast<uintptr_t>(from));
}

Status check_apart(const PagedKv& kv, const PagedRegion& a, const PagedRegion& b) {
  if (a.row_bytes == 0 || b.row_bytes == 0) return {};
  const std::vector<Axis> a_axes = axes_of(kv, a.rows);
  const std::vector<Axis> b_axes = axes_of(kv, b.rows);
  const int64_t offset = bytes_between(a.rows.base, b.rows.base);
  if (!may_meet({a_axes.data(), a_axes.size(), a.row_bytes},
                {b_axes.data(), b_axes.size(), b.row_bytes}, offset))
    return {};
  return refuse(kInvalid, a.name, " and ", b.name, " overlap: ", b.name, " begins ", offset,
                " bytes after ", a.name);
}

}  // namespace

std::array<PagedRegion, 4> paged_regions(const PagedKv& kv, const PageLayout& pool_page) {
  const AttentionGeometry& g = kv.geometry;
  std::array<PagedRegion, 4> regions = {
      PagedRegion{"k_data", kv.k_data, row_data_bytes(g.k_format, g.k_dim),
                  pool_page.k_data_offset_bytes},
      PagedRegion{"k_scale", kv.k_scale, row_scale_bytes(g.k_format, g.k_dim),
                  pool_page.k_scale_offset_bytes},
      PagedRegion{"v_data", kv.v_data, row_data_bytes(g.v_format, g.v_dim),
                  pool_page.v_data_offset_bytes},
      PagedRegion{"v_scale", kv.v_scale, row_scale_bytes(g.v_format, g.v_dim),
                  pool_page.v_scale_offset_bytes, kv.v_scale_order == VScaleOrder::kSwizzled}};
  if (g.mla_row != MlaRow::kNone) {
    for (PagedRegion& region : regions) region.row_bytes = 0;
    regions[0].row_bytes = mla_row_bytes(g.mla_row);
  }
  return regions;
}

Status check_page_geometry(std::string_view prefix, const AttentionGeometry& geometry) {
  if (static_cast<size_t>(geometry.mla_row) >= kMlaRowNames.size())
    return refuse(kInvalid, prefix, "mla_row is ", static_cast<int>(geometry.mla_row),
                  ": expected one of the ", kMlaRowNames.size(), " row formats");
  if (Status s = check_field(prefix, "num_layers", geometry.num_layers, kernels::kMaxLayers);
      !s.ok())
    return s;
  if (Status s = check_field(prefix, "num_kv_heads", geometry.num_kv_heads, kernels::kMaxKvHeads);
      !s.ok())
    return s;
  if (Status s =
          check_field(prefix, "block_tokens", geometry.block_tokens, kernels::kMaxBlockTokens);
      !s.ok())
    return s;
  if (geometry.mla_row == MlaRow::kNone) {
    if (Status s = check_side(prefix, "k", geometry.k_dim, geometry.k_format); !s.ok()) return s;
    return check_side(prefix, "v", geometry.v_dim, geometry.v_format);
  }
  const AttentionGeometry mla =
      mla_geometry(geometry.num_layers, geometry.block_tokens, geometry.mla_row);
  if (geometry.num_kv_heads != mla.num_kv_heads || geometry.k_dim != mla.k_dim ||
      geometry.v_dim != mla.v_dim)
    return refuse(kInvalid, prefix, "num_kv_heads, k_dim and v_dim are ", geometry.num_kv_heads,
                  ", ", geometry.k_dim, " and ", geometry.v_dim, ": rows of ",
                  name(geometry.mla_row), " have ", mla.num_kv_heads, ", ", mla.k_dim, " and ",
                  mla.v_dim);
  return {};
}

Status check_paged_kv(const PagedKv& kv, bool rows_may_overlap) {
  if (Status s = check_page_geometry("paged.geometry.", kv.geometry); !s.ok()) return s;
  if (kv.geometry.num_layers != 1)
    return refuse(kInvalid, "paged.geometry.num_layers is ", kv.geometry.num_layers,
                  ": pages are of 1 layer");
  if (static_cast<size_t>(kv.v_scale_order) >= kVScaleOrderNames.size())
    return refuse(kInvalid, "v_scale_order is ", static_cast<int>(kv.v_scale_order),
                  ": expected 0 (linear) or 1 (swizzled)");
  if (kv.v_scale_order == VScaleOrder::kSwizzled)
    if (Status s = check_swizzle(kv.geometry); !s.ok()) return s;
  if (kv.num_pages < 0)
    return refuse(kInvalid, "num_pages is ", kv.num_pages, ": expected 0 or more");
  if (kv.num_pages == 0) return {};
  const auto regions = paged_regions(kv, page_layout(kv.geometry));
  for (const PagedRegion& region : regions)
    if (region.row_bytes > 0)
      if (Status s = check_region(kv, region, rows_may_overlap); !s.ok()) return s;
  if (rows_may_overlap) return {};
  for (size_t a = 0; a < regions.size(); ++a)
    for (size_t b = a + 1; b < regions.size(); ++b)
      if (Status s = check_apart(kv, regions[a], regions[b]); !s.ok()) return s;
  return {};
}

Status check_outside_pool(const PagedKv& kv, const std::byte* pool, int64_t block_stride_bytes,
                          int64_t num_blocks, const PageLayout& page) {
  if (pool == nullptr || kv.num_pages == 0 || num_blocks == 0) return {};
  const Axis blocks = {block_stride_bytes, num_blocks};
  const Rows pages = {&blocks, num_blocks > 1 ? size_t{1} : size_t{0}, page.page_bytes};
  for (const PagedRegion& region : paged_regions(kv, page)) {
    if (region.row_bytes == 0) continue;
    const std::vector<Axis> axes = axes_of(kv, region.rows);
    const int64_t offset = bytes_between(pool, region.rows.base);
    if (may_meet(pages, {axes.data(), axes.size(), region.row_bytes}, offset))
      return refuse(kInvalid, region.name, " begins ", offset,
                    " bytes after the pool's pages and overlaps them: expected other memory");
  }
  return {};
}

}  // namespace larder
