// The tensor scales that attention applies on reading a layer: that of K becomes part of the
// logits' scale, that of V part of the output. MLA rows hold K and V in one, so they share one.
#pragma once

#include "kernels/cpu/formats.h"
#include "kernels/params.h"

namespace larder::kernels::cpu {

inline float key_scale(const LayerView& layer) {
  const AttentionGeometry& geometry = layer.geometry;
  return geometry.mla_row != MlaRow::kNone ? tensor_scale(geometry.mla_row, layer.k_scale)
                                           : tensor_scale(geometry.k_format, layer.k_scale);
}

inline float value_scale(const LayerView& layer) {
  const AttentionGeometry& geometry = layer.geometry;
  return geometry.mla_row != MlaRow::kNone ? tensor_scale(geometry.mla_row, layer.k_scale)
                                           : tensor_scale(geometry.v_format, layer.v_scale);
}

}  // namespace larder::kernels::cpu
