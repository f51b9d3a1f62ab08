// Tiles of decoded keys and rows of queries for softmax-inl.h, once per vector target of Highway.

#if defined(LARDER_KERNELS_CPU_TILES_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_TILES_INL_H_
#undef LARDER_KERNELS_CPU_TILES_INL_H_
#else
#define LARDER_KERNELS_CPU_TILES_INL_H_
#endif

#include <cstddef>
#include <cstdint>

#include "kernels/cpu/matrix-inl.h"
#include "kernels/cpu/mla-inl.h"
#include "kernels/cpu/output-inl.h"
#include "kernels/cpu/rotate-inl.h"
#include "kernels/cpu/rows-inl.h"
#include "kernels/cpu/workspace.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

// Row `local` of the workspace is q of (token, head).
inline void load_query(const TensorView& q, int64_t token, int64_t head, int64_t local,
                       cpu::Workspace& space) {
  load_floats(q.dtype, view_row(q, token, head), view_stride(q), q.shape[2],
              space.q + local * space.k_width);
}

// The lanes around `lane`, four together, from rows of floats to k_tile. Lanes that hold no key get
// what is left in those rows; they are masked.
inline void transpose_lanes(const float* rows, int64_t stride, int64_t lane, int64_t k_dim,
                            cpu::Workspace& space) {
  transpose_four_rows(rows, stride, cpu::round_up(k_dim, 4), space.k_tile + lane / 4 * 4,
                      cpu::kTileKeys);
}

// One key of an MLA layer; its row's first values are V. `is_last`: no key follows in this tile.
inline void load_mla_key(const LayerView& layer, int64_t block, int64_t offset, int64_t lane,
                         bool is_last, cpu::Workspace& space) {
  const MlaRow format = layer.geometry.mla_row;
  decode_mla_row(format,
                 layer.base + block * layer.block_stride_bytes + offset * mla_row_bytes(format),
                 space.v_tile + lane * space.v_stride);
  if (lane % 4 == 3 || is_last)
    transpose_lanes(space.v_tile + lane / 4 * 4 * space.v_stride, space.v_stride, lane, kMlaKeyDim,
                    space);
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
