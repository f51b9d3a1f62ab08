#include "larder/kv_format.h"

#include "larder/check.h"

namespace larder {

std::optional<KvFormat> parse_kv_format(std::string_view text) {
  for (size_t i = 0; i < kKvFormatNames.size(); ++i)
    if (kKvFormatNames[i] == text) return static_cast<KvFormat>(i);
  return std::nullopt;
}

int64_t row_data_bytes(KvFormat format, int64_t dim) {
  switch (format) {
    case KvFormat::kBf16:
    case KvFormat::kFp16:
      return 2 * dim;
    case KvFormat::kFp8E4m3:
    case KvFormat::kFp8E5m2:
      return dim;
    case KvFormat::kNvfp4:
      return dim / 2;
  }
  LARDER_CHECK(false, "format is", static_cast<int>(format));
}

int64_t row_scale_bytes(KvFormat format, int64_t dim) {
  return format == KvFormat::kNvfp4 ? dim / kNvfp4GroupElements : 0;
}

PageLayout page_layout(const AttentionGeometry& geometry) {
  const int64_t rows = int64_t{geometry.num_kv_heads} * geometry.block_tokens;
  PageLayout page;
  if (geometry.mla_row != MlaRow::kNone) {
    page.page_bytes = rows * mla_row_bytes(geometry.mla_row);
    page.k_scale_offset_bytes = page.v_data_offset_bytes = page.v_scale_offset_bytes =
        page.page_bytes;
    return page;
  }
  page.k_scale_offset_bytes = rows * row_data_bytes(geometry.k_format, geometry.k_dim);
  page.v_data_offset_bytes =
      page.k_scale_offset_bytes + rows * row_scale_bytes(geometry.k_format, geometry.k_dim);
  page.v_scale_offset_bytes =
      page.v_data_offset_bytes + rows * row_data_bytes(geometry.v_format, geometry.v_dim);
  page.page_bytes =
      page.v_scale_offset_bytes + rows * row_scale_bytes(geometry.v_format, geometry.v_dim);
  return page;
}

}  // namespace larder
