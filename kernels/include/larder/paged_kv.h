// PagedKv: one layer of an engine's own paged KV cache, in canonical form.
//
// Whatever the engine calls its layout, what is left of it is four regions (K data, K scales, V
// data, V scales), each with a base address and strides. The functions that recognise other
// libraries' layouts by name, or refuse them, are in larder/engine_layouts.h. Only bytes are
// described: keys of a pool with a key transform are exchanged as they are stored, and tensor
// scales travel beside the pages.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string_view>

#include "larder/kv_format.h"

namespace larder {

// The order of V scale bytes. Swizzled: the 4-token x S tiles that readers on SM100 want (S = scale
// columns; S % 4 == 0, block_tokens % 4 == 0). K scales are linear everywhere.
enum class VScaleOrder : uint8_t { kLinear = 0, kSwizzled = 1 };
inline constexpr std::array<std::string_view, 2> kVScaleOrderNames = {"linear", "swizzled"};
constexpr std::string_view name(VScaleOrder value) {
  return kVScaleOrderNames[static_cast<size_t>(value)];
}

// Order of tokens and heads inside a page.
enum class PageOrder : uint8_t { kNhd = 0, kHnd = 1 };
inline constexpr std::array<std::string_view, 2> kPageOrderNames = {"NHD", "HND"};
constexpr std::string_view name(PageOrder value) {
  return kPageOrderNames[static_cast<size_t>(value)];
}

// The row of (page p, head h, token t) lies at base + p * page + h * head + t * token, in bytes,
// and its own bytes are contiguous.
struct PagedRows {
  std::byte* base = nullptr;
  int64_t page_stride_bytes = 0;
  int64_t head_stride_bytes = 0;
  int64_t token_stride_bytes = 0;
  bool operator==(const PagedRows&) const = default;
};

// MLA rows are the K data. Regions without bytes (scales of formats that have none) are not used.
struct PagedKv {
  PagedRows k_data;
  PagedRows k_scale;
  PagedRows v_data;
  PagedRows v_scale;           // where swizzled: the strides of the same region if it were linear
  AttentionGeometry geometry;  // block_tokens: tokens of one page; num_layers: 1
  int64_t num_pages = 0;
  VScaleOrder v_scale_order = VScaleOrder::kLinear;
};

// Pages without gaps, one after another, each K data, K scales, V data, V scales in `order`.
PagedKv dense_pages(std::byte* base, const AttentionGeometry& geometry, int64_t num_pages,
                    PageOrder order, VScaleOrder v_scale_order = VScaleOrder::kLinear);

}  // namespace larder
