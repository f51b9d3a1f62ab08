// Separate and stacked K and V tensors, and rows of MLA layers.
#include "kernels/engine_view.h"
#include "kernels/kernel_table.h"
#include "kernels/refuse.h"

namespace larder {
namespace {

using kernels::refuse;
constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;

struct Expected {
  PageOrder order = PageOrder::kNhd;
  int64_t heads = 0;
  int64_t tokens = 0;
  int64_t first() const { return order == PageOrder::kNhd ? tokens : heads; }
  int64_t second() const { return order == PageOrder::kNhd ? heads : tokens; }
};

// One region from a tensor of four axes. `num_pages` below 0 is set by the first tensor.
Status set_region(std::string_view field, const ByteView& view, const Expected& expected,
                  int64_t row_bytes, int64_t& num_pages, PagedRows& rows) {
  if (row_bytes == 0) {
    if (view.shape.empty() && view.data == nullptr) return {};
    return refuse(kInvalid, field, " has ", describe(view),
                  ": expected no tensor, as the format has no block scales");
  }
  const auto canonical =
      canonical_view(field, view, 4,
                     expected.order == PageOrder::kNhd ? "[pages, tokens, heads, bytes]"
                                                       : "[pages, heads, tokens, bytes]");
  if (!canonical) return canonical.status();
  const std::vector<int64_t>& shape = canonical->shape;
  if (num_pages < 0) num_pages = shape[0];
  if (shape[0] != num_pages || shape[1] != expected.first() || shape[2] != expected.second() ||
      shape[3] != row_bytes)
    return refuse(kInvalid, field, " has ", describe(view), ": expected [", num_pages, ", ",
                  expected.first(), ", ", expected.second(), ", ", row_bytes, "] in order ",
                  name(expected.order));
  const std::vector<int64_t>& strides = canonical->strides_bytes;
  rows = expected.order == PageOrder::kNhd
             ? PagedRows{canonical->data, strides[0], strides[2], strides[1]}
             : PagedRows{canonical->data, strides[0], strides[1], strides[2]};
  return {};
}

// The K or V half of a stacked tensor.
ByteView half(const ByteView& stacked, int64_t index) {
  const auto& shape = stacked.shape;
  const auto& strides = stacked.strides_bytes;
  return {address(stacked.data, CheckedInt64(strides[1]) * index),
          {shape[0], shape[2], shape[3], shape[4]},
          {strides[0], strides[2], strides[3], strides[4]}};
}

Result<ByteView> canonical_stack(std::string_view field, const ByteView& view, PageOrder order) {
  auto canonical = canonical_view(field, view, 5,
                                  order == PageOrder::kNhd ? "[pages, 2, tokens, heads, bytes]"
                                                           : "[pages, 2, heads, tokens, bytes]");
  if (canonical && canonical->shape[1] != 2)
    return refuse(kInvalid, field, " has ", describe(view), ": expected 2 (K and V) on axis 1");
  return canonical;
}

}  // namespace

Result<PagedKv> flashinfer_pair(const FlashinferPair& tensors, PageOrder order,
                                const AttentionGeometry& geometry, VScaleOrder v_scale_order) {
  if (Status s = check_engine_geometry(geometry); !s.ok()) return s;
  if (Status s = check_page_order(order); !s.ok()) return s;
  const AttentionGeometry& g = geometry;
  const Expected expected = {order, g.num_kv_heads, g.block_tokens};
  PagedKv kv = empty_pages(g, -1, v_scale_order);
  if (Status s = set_region("k", tensors.k, expected, row_data_bytes(g.k_format, g.k_dim),
                            kv.num_pages, kv.k_data);
      !s.ok())
    return s;
  if (Status s = set_region("v", tensors.v, expected, row_data_bytes(g.v_format, g.v_dim),
                            kv.num_pages, kv.v_data);
      !s.ok())
    return s;
  if (Status s = set_region("k_scale", tensors.k_scale, expected,
                            row_scale_bytes(g.k_format, g.k_dim), kv.num_pages, kv.k_scale);
      !s.ok())
    return s;
  if (Status s = set_region("v_scale", tensors.v_scale, expected,
                            row_scale_bytes(g.v_format, g.v_dim), kv.num_pages, kv.v_scale);
      !s.ok())
    return s;
  return checked_pages(kv);
}

Result<PagedKv> flashinfer_stacked(const ByteView& kv, const ByteView& kv_scale, PageOrder order,
                                   const AttentionGeometry& geometry, VScaleOrder v_scale_order) {
  if (Status s = check_engine_geometry(geometry); !s.ok()) return s;
  if (Status s = check_page_order(order); !s.ok()) return s;
  if (geometry.k_format != geometry.v_format || geometry.k_dim != geometry.v_dim)
    return refuse(ErrorCode::kUnsupported, "K is ", name(geometry.k_format), " of ", geometry.k_dim,
                  " dims and V ", name(geometry.v_format), " of ", geometry.v_dim,
                  ": stacked tensors hold one format and dim; use separate tensors");
  const auto stack = canonical_stack("kv", kv, order);
  if (!stack) return stack.status();
  FlashinferPair pair = {half(*stack, 0), half(*stack, 1), {}, {}};
  if (row_scale_bytes(geometry.k_format, geometry.k_dim) > 0) {
    const auto scales = canonical_stack("kv_scale", kv_scale, order);
    if (!scales) return scales.status();
    pair.k_scale = half(*scales, 0);
    pair.v_scale = half(*scales, 1);
  } else {
    pair.k_scale = kv_scale;  // refused unless it is no tensor
  }
  return flashinfer_pair(pair, order, geometry, v_scale_order);
}

Result<PagedKv> mla_view(const ByteView& view, MlaRow row) {
  if (row == MlaRow::kNone || static_cast<size_t>(row) >= kMlaRowNames.size())
    return refuse(kInvalid, "row is ", static_cast<int>(row), ": expected one of 1 to ",
                  kMlaRowNames.size() - 1);
  const auto canonical = canonical_view("view", view, 3, "[blocks, tokens, row bytes]");
  if (!canonical) return canonical.status();
  const std::vector<int64_t>& shape = canonical->shape;
  constexpr int64_t kMaxTokens = kernels::kMaxBlockTokens;
  if (shape[1] < 1 || shape[1] > kMaxTokens)
    return refuse(kInvalid, "view has ", describe(view), ": expected 1 to ", kMaxTokens,
                  " tokens per block");
  if (shape[2] != mla_row_bytes(row))
    return refuse(kInvalid, "view has ", describe(view), ": a row of ", name(row), " has ",
                  mla_row_bytes(row), " bytes");
  PagedKv kv = empty_pages(mla_geometry(1, static_cast<int32_t>(shape[1]), row), shape[0],
                           VScaleOrder::kLinear);
  const std::vector<int64_t>& strides = canonical->strides_bytes;
  kv.k_data = {canonical->data, strides[0], strides[1] * shape[1], strides[1]};
  return checked_pages(kv);
}

}  // namespace larder
