// Stored rows of K and V as attention reads them: one type per format, so that the loops over
// elements are compiled per format and nothing else is.
#pragma once

#include <cstdint>

#include "kernels/cuda/stored.cuh"
#include "kernels/params.h"

namespace larder::kernels::cuda {

// Where the bytes of a layer's keys and values lie.
struct LayerRows {
  const uint8_t* base = nullptr;
  int64_t block_stride_bytes = 0;
  int64_t num_blocks = 0;
  int32_t block_tokens = 1;
  int32_t num_kv_heads = 1;
  int32_t k_dim = 0;
  int32_t v_dim = 0;
  KvFormat k_format = KvFormat::kBf16;
  KvFormat v_format = KvFormat::kBf16;
  MlaRow mla_row = MlaRow::kNone;
  PageLayout page;
  int32_t k_data_bytes = 0;  // of a row
  int32_t k_scale_bytes = 0;
  int32_t v_data_bytes = 0;
  int32_t v_scale_bytes = 0;
};

inline LayerRows layer_rows(const LayerView& layer) {
  const AttentionGeometry& geometry = layer.geometry;
  LayerRows rows;
  rows.base = reinterpret_cast<const uint8_t*>(layer.base);
  rows.block_stride_bytes = layer.block_stride_bytes;
  rows.num_blocks = layer.num_blocks;
  rows.block_tokens = geometry.block_tokens;
  rows.num_kv_heads = geometry.num_kv_heads;
  rows.k_dim = geometry.k_dim;
  rows.v_dim = geometry.v_dim;
  rows.k_format = geometry.k_format;
  rows.v_format = geometry.v_format;
  rows.mla_row = geometry.mla_row;
  rows.page = layer.page;
  if (geometry.mla_row != MlaRow::kNone) {  // values are the beginning of the keys
    rows.k_data_bytes = rows.v_data_bytes = static_cast<int32_t>(mla_row_bytes(geometry.mla_row));
    rows.page.v_data_offset_bytes = 0;
    return rows;
  }
  const auto data = [](KvFormat format, int32_t dim) {
    return static_cast<int32_t>(row_data_bytes(format, dim));
  };
  const auto scales = [](KvFormat format, int32_t dim) {
    return static_cast<int32_t>(row_scale_bytes(format, dim));
  };
  rows.k_data_bytes = data(geometry.k_format, geometry.k_dim);
  rows.k_scale_bytes = scales(geometry.k_format, geometry.k_dim);
  rows.v_data_bytes = data(geometry.v_format, geometry.v_dim);
  rows.v_scale_bytes = scales(geometry.v_format, geometry.v_dim);
  return rows;
}

// One token and head: its first data byte and, of nvfp4, its first scale byte.
struct StoredRow {
  const uint8_t* data;
  const uint8_t* scales;
};

template <KvFormat kFormat>
struct PagedFormat {
  static __device__ float value(StoredRow row, int i) {
    return stored_value(kFormat, row.data, row.scales, i);
  }
};
template <MlaRow kFormat>
struct MlaFormat {
  static __device__ float value(StoredRow row, int i) {
    return stored_mla_value(kFormat, row.data, i);
  }
};

// Calls visit with an object of the format's type.
template <typename Visit>
__device__ void with_format(MlaRow mla_row, KvFormat format, const Visit& visit) {
  switch (mla_row) {
    case MlaRow::kNvfp4Ds:
      return visit(MlaFormat<MlaRow::kNvfp4Ds>{});
    case MlaRow::kFp8Ds:
      return visit(MlaFormat<MlaRow::kFp8Ds>{});
    case MlaRow::kFp8:
      return visit(MlaFormat<MlaRow::kFp8>{});
    case MlaRow::kBf16:
      return visit(MlaFormat<MlaRow::kBf16>{});
    case MlaRow::kNone:
      break;
  }
  switch (format) {
    case KvFormat::kBf16:
      return visit(PagedFormat<KvFormat::kBf16>{});
    case KvFormat::kFp16:
      return visit(PagedFormat<KvFormat::kFp16>{});
    case KvFormat::kFp8E4m3:
      return visit(PagedFormat<KvFormat::kFp8E4m3>{});
    case KvFormat::kFp8E5m2:
      return visit(PagedFormat<KvFormat::kFp8E5m2>{});
    case KvFormat::kNvfp4:
      return visit(PagedFormat<KvFormat::kNvfp4>{});
  }
}

}  // namespace larder::kernels::cuda
