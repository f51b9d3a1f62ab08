// A block as equal stretches of contiguous bytes, at most one per layer.
#pragma once

#include "kernels/params.h"

namespace larder::kernels::cpu {

struct Stretches {
  int64_t bytes = 0;
  int64_t count = 0;
  int64_t stride_bytes = 0;
};

inline Stretches stretches_of(const BlocksView& view) {
  if (view.num_layers == 1 || view.layer_stride_bytes == view.layer_bytes)
    return {view.num_layers * view.layer_bytes, 1, 0};
  return {view.layer_bytes, view.num_layers, view.layer_stride_bytes};
}

inline std::byte* block_of(const BlocksView& view, int32_t block) {
  return view.base + int64_t{block} * view.block_stride_bytes;
}

}  // namespace larder::kernels::cpu
