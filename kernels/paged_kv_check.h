// Private to kernels: the regions of a PagedKv, and whether it can be one.
#pragma once

#include <array>
#include <string_view>

#include "larder/paged_kv.h"
#include "larder/status.h"

namespace larder {

struct PagedRegion {
  std::string_view name;  // "k_data"
  PagedRows rows;
  int64_t row_bytes = 0;          // 0: the geometry has no such region
  int64_t page_offset_bytes = 0;  // of the region in a page of the pool
  bool swizzled = false;
};

// In the order of a page. The geometry must have passed check_page_geometry; `pool_page` is the
// layout of the pool's pages, which may hold another number of tokens.
std::array<PagedRegion, 4> paged_regions(const PagedKv& kv, const PageLayout& pool_page);

// INVALID_ARGUMENT for a geometry whose page has no bytes that can be worked out. `prefix` is put
// before the field's name. Says nothing about which kernels serve the formats.
Status check_page_geometry(std::string_view prefix, const AttentionGeometry& geometry);

// INVALID_ARGUMENT unless the geometry is possible, every stride is at least 0, every region that
// the geometry has lies at a base and within 63 bits, swizzled scales can be, and, unless
// `rows_may_overlap`, no two rows share a byte. Rows of one region must nest: sorted by stride,
// each axis steps over all of the one before. Rows of two regions must be provably apart: disjoint
// ranges, or strides that repeat together at an offset that keeps them apart.
Status check_paged_kv(const PagedKv& kv, bool rows_may_overlap);

// INVALID_ARGUMENT unless no row shares a byte, provably as above, with the pages at `pool`. The kv
// has passed check_paged_kv. A null pool is not mapped here, and nothing can be said.
Status check_outside_pool(const PagedKv& kv, const std::byte* pool, int64_t block_stride_bytes,
                          int64_t num_blocks, const PageLayout& page);

}  // namespace larder
