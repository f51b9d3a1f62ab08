#include "larder/paged_kv.h"

namespace larder {

PagedKv dense_pages(std::byte* base, const AttentionGeometry& geometry, int64_t num_pages,
                    PageOrder order, VScaleOrder v_scale_order) {
  const PageLayout page = page_layout(geometry);
  // The size of a region is known from where the next one begins, whatever its format.
  const int64_t rows = int64_t{geometry.num_kv_heads} * geometry.block_tokens;
  const auto region = [&](int64_t begin_bytes, int64_t end_bytes) {
    if (begin_bytes == end_bytes) return PagedRows{};
    const int64_t row_bytes = (end_bytes - begin_bytes) / rows;
    PagedRows result = {base == nullptr ? nullptr : base + begin_bytes, page.page_bytes,
                        geometry.block_tokens * row_bytes, row_bytes};
    if (order == PageOrder::kNhd) {
      result.head_stride_bytes = row_bytes;
      result.token_stride_bytes = geometry.num_kv_heads * row_bytes;
    }
    return result;
  };
  PagedKv kv;
  kv.k_data = region(page.k_data_offset_bytes, page.k_scale_offset_bytes);
  kv.k_scale = region(page.k_scale_offset_bytes, page.v_data_offset_bytes);
  kv.v_data = region(page.v_data_offset_bytes, page.v_scale_offset_bytes);
  kv.v_scale = region(page.v_scale_offset_bytes, page.page_bytes);
  kv.geometry = geometry;
  kv.geometry.num_layers = 1;
  kv.num_pages = num_pages;
  kv.v_scale_order = v_scale_order;
  return kv;
}

}  // namespace larder
