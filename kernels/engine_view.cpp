#include "kernels/engine_view.h"

#include <sstream>

#include "kernels/paged_kv_check.h"
#include "kernels/refuse.h"

namespace larder {
namespace {

using kernels::refuse;
constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;

void write_list(std::ostringstream& text, const std::vector<int64_t>& values) {
  text << '[';
  for (size_t i = 0; i < values.size(); ++i) text << (i == 0 ? "" : ", ") << values[i];
  text << ']';
}

}  // namespace

std::string describe(const ByteView& view) {
  std::ostringstream text;
  text << "shape ";
  write_list(text, view.shape);
  text << " with strides ";
  write_list(text, view.strides_bytes);
  text << " bytes";
  return text.str();
}

Result<std::vector<int64_t>> canonical_strides(const std::vector<int64_t>& shape,
                                               const std::vector<int64_t>& strides) {
  if (shape.size() != strides.size())
    return refuse(kInvalid, "strides has ", strides.size(), " axes: shape has ", shape.size());
  std::vector<int64_t> canonical = strides;
  CheckedInt64 dense = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    if (shape[i] < 0)
      return refuse(kInvalid, "shape[", i, "] is ", shape[i], ": expected 0 or more");
    if (shape[i] == 1) {
      if (!dense.fits)
        return refuse(kInvalid, "shape[", i + 1, "] is ", shape[i + 1], " with stride ",
                      canonical[i + 1], ": their product passes 2^63");
      canonical[i] = dense.value;
    }
    dense = CheckedInt64(canonical[i]) * shape[i];
  }
  return canonical;
}

Result<ByteView> byte_view(void* data, std::vector<int64_t> shape, std::vector<int64_t> strides,
                           int64_t element_bytes) {
  ByteView view = {static_cast<std::byte*>(data), std::move(shape), std::move(strides)};
  if (element_bytes < 1)
    return refuse(kInvalid, "element_bytes is ", element_bytes, ": expected 1 or more");
  if (view.shape.empty() || view.strides_bytes.size() != view.shape.size())
    return refuse(kInvalid, "strides has ", view.strides_bytes.size(), " axes: shape has ",
                  view.shape.size(), ", and 1 or more are expected");
  if (view.shape.back() != 1 && view.strides_bytes.back() != 1)
    return refuse(kInvalid, "the last stride is ", view.strides_bytes.back(),
                  ": the elements of a row must be contiguous");
  const CheckedInt64 content = CheckedInt64(view.shape.back()) * element_bytes;
  bool fits = content.fits;
  view.shape.back() = content.value;
  view.strides_bytes.back() = 1;
  for (size_t i = 0; i + 1 < view.shape.size(); ++i) {
    if (view.shape[i] == 1) {
      view.strides_bytes[i] = 0;  // it means nothing, and must not overflow
      continue;
    }
    const CheckedInt64 stride = CheckedInt64(view.strides_bytes[i]) * element_bytes;
    fits = fits && stride.fits;
    view.strides_bytes[i] = stride.value;
  }
  if (!fits)
    return refuse(kInvalid, "shape and strides in elements of ", element_bytes,
                  " bytes pass 2^63 bytes");
  return view;
}

Result<ByteView> canonical_view(std::string_view field, const ByteView& view, size_t rank,
                                std::string_view axes) {
  if (view.shape.size() != rank)
    return refuse(kInvalid, field, " has ", describe(view), ": expected ", axes);
  auto strides = canonical_strides(view.shape, view.strides_bytes);
  if (!strides) return refuse(kInvalid, field, ": ", strides.status().message());
  for (size_t i = 0; i < rank; ++i)
    if (view.shape[i] > 1 && view.strides_bytes[i] < 0)
      return refuse(kInvalid, field, " has ", describe(view), ": expected no stride below 0");
  if (strides->back() != 1)
    return refuse(kInvalid, field, " has ", describe(view),
                  ": the bytes of a row must be contiguous (last stride 1)");
  if (view.data == nullptr && view.shape[0] > 0)
    return refuse(kInvalid, field, ": data is null with ", view.shape[0], " pages");
  return ByteView{view.data, view.shape, std::move(strides).value()};
}

std::byte* address(std::byte* base, CheckedInt64 offset) {
  const CheckedInt64 sum = CheckedInt64(reinterpret_cast<intptr_t>(base)) + offset;
  return base == nullptr || !sum.fits ? nullptr : base + offset.value;
}

Status check_engine_geometry(const AttentionGeometry& geometry) {
  if (Status s = check_page_geometry("geometry.", geometry); !s.ok()) return s;
  if (geometry.mla_row != MlaRow::kNone)
    return refuse(kInvalid, "geometry.mla_row is ", name(geometry.mla_row),
                  ": MLA rows have no heads, see mla_view");
  return {};
}

Status check_page_order(PageOrder order) {
  if (static_cast<size_t>(order) < kPageOrderNames.size()) return {};
  return refuse(kInvalid, "order is ", static_cast<int>(order), ": expected 0 (NHD) or 1 (HND)");
}

PagedKv empty_pages(const AttentionGeometry& geometry, int64_t num_pages, VScaleOrder order) {
  PagedKv kv;
  kv.geometry = geometry;
  kv.geometry.num_layers = 1;
  kv.num_pages = num_pages;
  kv.v_scale_order = order;
  return kv;
}

Result<PagedKv> checked_pages(const PagedKv& kv) {
  if (Status s = check_paged_kv(kv, false); !s.ok()) return s;
  return kv;
}

}  // namespace larder
