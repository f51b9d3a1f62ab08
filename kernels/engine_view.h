// Private to kernels: what the functions of larder/engine_layouts.h share.
#pragma once

#include <string>
#include <string_view>

#include "kernels/checked_int64.h"
#include "larder/engine_layouts.h"

namespace larder {

// "shape [2, 4, 16, 36] with strides [2304, 576, 36, 1] bytes".
std::string describe(const ByteView& view);

// The view with canonical strides; INVALID_ARGUMENT unless it has `rank` axes, sizes and strides of
// at least 0, content that is contiguous, and memory. `axes` names the expected axes.
Result<ByteView> canonical_view(std::string_view field, const ByteView& view, size_t rank,
                                std::string_view axes);

// base + offset, or nullptr if that address cannot be. Null stays null.
std::byte* address(std::byte* base, CheckedInt64 offset);

// The geometry of one layer for an engine's cache, or why it has none.
Status check_engine_geometry(const AttentionGeometry& geometry);

Status check_page_order(PageOrder order);

// A PagedKv with no rows yet.
PagedKv empty_pages(const AttentionGeometry& geometry, int64_t num_pages, VScaleOrder order);

// The same PagedKv, or why it cannot be one.
Result<PagedKv> checked_pages(const PagedKv& kv);

}  // namespace larder
