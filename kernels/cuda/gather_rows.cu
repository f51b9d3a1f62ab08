// gather for the common shapes: bf16 or fp16 rows of a power of two of elements, and MLA rows, to
// aligned outputs. The bits are those of kernels/cpu/gather.cpp. Compiled with -fmad=false.
#include <algorithm>

#include "kernels/cuda/gather_call.cuh"
#include "kernels/cuda/gather_heads.cuh"
#include "kernels/cuda/gather_mla.cuh"
#include "kernels/cuda/gather_tokens.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/units.cuh"

namespace larder::kernels::cuda {
namespace {

constexpr int kMinDim = 16;
constexpr int kMaxDim = 512;
constexpr int kMaxRotatedDim = kWarp * kEight;  // a row within a warp
constexpr int64_t kMaxPageBytes = int64_t{1} << 31;
// On 132 SMs: as many CTAs as have room at once several times over, before a CTA gets more rows,
// and four per SM, up to which small calls are split by heads.
constexpr int64_t kEnoughCtas = 2048;
constexpr int64_t kEnoughMlaCtas = 1024;
constexpr int64_t kSplitCtas = 528;

// How CTAs share out the rows: blockIdx.y counts the sides, then each side's parts.
struct Parts {
  int rows_log2;
  int64_t num_groups;  // of 2^rows_log2 rows
  int first_side;
  int num_sides;
  int part_heads;
  int num_parts;  // of a side
};

template <bool kTransforms>
__device__ inline void gather_side(const GatherCall& call, const GatherSide& side, Dtype dtype,
                                   const HeadRow* rows, int rows_log2, int first_head,
                                   int end_head) {
  switch (side.format) {
    case KvFormat::kBf16:
      return gather_heads<KvFormat::kBf16, kTransforms>(call, side, dtype, rows, rows_log2,
                                                        first_head, end_head);
    case KvFormat::kFp16:
      return gather_heads<KvFormat::kFp16, kTransforms>(call, side, dtype, rows, rows_log2,
                                                        first_head, end_head);
    case KvFormat::kFp8E4m3:
      return gather_heads<KvFormat::kFp8E4m3, kTransforms>(call, side, dtype, rows, rows_log2,
                                                           first_head, end_head);
    case KvFormat::kFp8E5m2:
      return gather_heads<KvFormat::kFp8E5m2, kTransforms>(call, side, dtype, rows, rows_log2,
                                                           first_head, end_head);
    case KvFormat::kNvfp4:
      return gather_heads<KvFormat::kNvfp4, kTransforms>(call, side, dtype, rows, rows_log2,
                                                         first_head, end_head);
  }
}

// Grid: x a CTA per 16 to 64 output rows, up to 2^20, which then take every 2^20th; y K and V, and
// parts of the heads. Block: 256 threads; the first look up a row each, then every thread has eight
// elements of a row and head, four or eight loads at a time. Moves the stored bytes of a token in
// and 4 * heads * dim bytes out, 512 bytes side by side per warp and store; bound by memory.
template <bool kTransforms>
__global__ void __launch_bounds__(kHeadThreads, kTransforms ? 3 : 5)
    gather_rows_kernel(const __grid_constant__ GatherCall call, const __grid_constant__ Parts parts,
                       PointOfUse use) {
  __shared__ PackedRows packed;
  __shared__ HeadRow rows[kMaxRows];
  const int num_rows = 1 << parts.rows_log2;
  if (blockIdx.y > 0) use.faults = nullptr;
  const int first_head = static_cast<int>(blockIdx.y) / parts.num_sides * parts.part_heads;
  const int end_head = min(first_head + parts.part_heads, call.num_kv_heads);
  const GatherSide& side =
      call.sides[parts.first_side + static_cast<int>(blockIdx.y) % parts.num_sides];
  for (int64_t group = blockIdx.x; group < parts.num_groups; group += gridDim.x) {
    const GatherRun run = find_row(call, use, group * num_rows, num_rows, packed);
    if (static_cast<int>(threadIdx.x) < num_rows) rows[threadIdx.x] = head_row_of(side, run);
    __syncthreads();
    // Bf16 in copies of its own; transforms would take too long to compile twice.
    if (!kTransforms && side.out.dtype == Dtype::kBf16)
      gather_side<kTransforms>(call, side, Dtype::kBf16, rows, parts.rows_log2, first_head,
                               end_head);
    else
      gather_side<kTransforms>(call, side, kTransforms ? side.out.dtype : Dtype::kFp16, rows,
                               parts.rows_log2, first_head, end_head);
    __syncthreads();
  }
}

// Grid: a CTA per 16 to 64 output rows, up to 2^20, which then take every 2^20th. Block: 288
// threads; the first look up a row each, then 72 threads have a row, each of them eight elements of
// it and of every fourth row more. Moves a stored row in and 1,152 bytes (FP8 staging: 576) out per
// token; bound by memory.
template <MlaRow kRow, bool kStages>
__global__ void __launch_bounds__(kMlaThreads, 4)
    gather_mla_rows_kernel(const __grid_constant__ GatherCall call, int rows_log2,
                           int64_t num_groups, PointOfUse use) {
  __shared__ PackedRows packed;
  __shared__ MlaSource rows[kMaxRows];
  const int num_rows = 1 << rows_log2;
  for (int64_t group = blockIdx.x; group < num_groups; group += gridDim.x) {
    const GatherRun run = find_row(call, use, group * num_rows, num_rows, packed);
    if (static_cast<int>(threadIdx.x) < num_rows)
      rows[threadIdx.x] = mla_source_of(call.sides[0], run);
    __syncthreads();
    gather_mla<kRow, kStages>(call, rows, num_rows);
    __syncthreads();
  }
}

template <MlaRow kRow>
auto mla_kernel(Dtype out) {
  return out == Dtype::kFp8E4m3 ? gather_mla_rows_kernel<kRow, true>
                                : gather_mla_rows_kernel<kRow, false>;
}
auto mla_kernel(MlaRow row, Dtype out) {
  switch (row) {
    case MlaRow::kNvfp4Ds:
      return mla_kernel<MlaRow::kNvfp4Ds>(out);
    case MlaRow::kFp8Ds:
      return mla_kernel<MlaRow::kFp8Ds>(out);
    case MlaRow::kFp8:
      return mla_kernel<MlaRow::kFp8>(out);
    case MlaRow::kBf16:
    case MlaRow::kNone:
      break;
  }
  return mla_kernel<MlaRow::kBf16>(out);
}

bool is_multiple(int64_t value, int64_t of) { return value % of == 0; }
bool is_aligned(const void* address, int64_t to) {
  return reinterpret_cast<uintptr_t>(address) % static_cast<uintptr_t>(to) == 0;
}

// Stores of eight elements at a time; the stride of an axis of one element is never used.
bool serves_output(const TensorView& out, bool may_stage) {
  const bool stages = may_stage && out.dtype == Dtype::kFp8E4m3;
  if (out.dtype != Dtype::kBf16 && out.dtype != Dtype::kFp16 && !stages) return false;
  return out.strides[2] == 1 && is_aligned(out.data, kEight * dtype_bytes(out.dtype)) &&
         (out.shape[0] == 1 || is_multiple(out.strides[0], kEight)) &&
         (out.shape[1] == 1 || is_multiple(out.strides[1], kEight));
}

bool serves_pages(const LayerView& layer, int64_t offset_bytes, int64_t bytes) {
  return is_aligned(layer.base, bytes) && is_multiple(layer.block_stride_bytes, bytes) &&
         is_multiple(offset_bytes, bytes);
}

bool serves_side(const LayerView& layer, const TensorView& out, KvFormat format, int32_t dim,
                 int64_t data_offset_bytes) {
  if (out.shape[0] == 0) return true;
  return dim >= kMinDim && dim <= kMaxDim && (dim & (dim - 1)) == 0 &&
         layer.page.page_bytes <= kMaxPageBytes &&
         serves_pages(layer, data_offset_bytes, eight_bytes(format)) && serves_output(out, false);
}

bool serves_keys(const LayerView& layer, const TensorView& out) {
  if (out.shape[0] == 0) return true;
  return (!is_rotated(layer.key_transform) || layer.geometry.k_dim <= kMaxRotatedDim) &&
         (!is_centred(layer.key_transform) || is_aligned(layer.key_offset, 16));
}

bool serves(const GatherParams& params) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  if (gathers_nothing(params)) return false;
  if (params.rows_per_sequence == 0 && params.num_seqs > kMaxPackedSequences) return false;
  if (geometry.mla_row != MlaRow::kNone)
    return serves_pages(layer, 0, 16) && serves_output(params.k_out, true);
  return serves_side(layer, params.k_out, geometry.k_format, geometry.k_dim,
                     layer.page.k_data_offset_bytes) &&
         serves_side(layer, params.v_out, geometry.v_format, geometry.v_dim,
                     layer.page.v_data_offset_bytes) &&
         serves_keys(layer, params.k_out);
}

Parts parts_of(const GatherCall& call) {
  const bool wants_k = call.sides[0].out.data != nullptr;
  const bool wants_v = call.sides[1].out.data != nullptr;
  const int num_sides = wants_k && wants_v ? 2 : 1;
  const int rows_log2 = rows_log2_of(call, num_sides, kEnoughCtas);
  const int64_t num_groups = num_row_groups(call, rows_log2);
  int at_once = 1;  // heads
  for (const GatherSide& side : call.sides)
    if (side.out.data != nullptr)
      at_once = std::max(at_once, shares_of(31 - __builtin_clz(side.dim), rows_log2).heads);
  const int64_t steps = (call.num_kv_heads + at_once - 1) / at_once;
  const int64_t wanted =
      std::clamp<int64_t>(kSplitCtas / std::min(kSplitCtas, num_groups * num_sides), 1, steps);
  const int part_heads = static_cast<int>((steps + wanted - 1) / wanted) * at_once;
  return {rows_log2, num_groups, wants_k ? 0 : 1,
          num_sides, part_heads, (call.num_kv_heads + part_heads - 1) / part_heads};
}

}  // namespace

// The portable row serves the rest, also calls for nothing.
Status supports_gather_rows(const GatherParams& params) {
  if (serves(params)) return {};
  return {
      ErrorCode::kUnsupported,
      "cuda_gather_rows takes bf16 and fp16 outputs (of MLA rows FP8 staging too) in aligned "
      "groups of eight elements, dims that are powers of two from 16 to 512 (rotated: 256), pages "
      "of up to 2 GiB, and "
      "up to 4096 sequences that follow each other without gaps"};
}

Status gather_rows(const GatherParams& params, const Target& target) {
  GatherCall call = gather_call(params);
  set_single_window(call);
  const PointOfUse use = point_of_use(target);
  if (call.mla_row != MlaRow::kNone) {
    const int rows_log2 = rows_log2_of(call, 1, kEnoughMlaCtas);
    const int64_t num_groups = num_row_groups(call, rows_log2);
    const auto kernel = mla_kernel(call.mla_row, call.sides[0].out.dtype);
    kernel<<<grid_of(num_groups), kMlaThreads, 0, stream_of(target)>>>(call, rows_log2, num_groups,
                                                                       use);
    return launched("gather of MLA rows");
  }
  const Parts parts = parts_of(call);
  const dim3 grid(grid_of(parts.num_groups),
                  static_cast<unsigned>(parts.num_sides * parts.num_parts));
  const bool has_transforms =
      call.sides[0].out.data != nullptr && params.layer.key_transform != KeyTransform::kNone;
  const auto kernel = has_transforms ? gather_rows_kernel<true> : gather_rows_kernel<false>;
  kernel<<<grid, kHeadThreads, 0, stream_of(target)>>>(call, parts, use);
  return launched("gather of rows");
}

}  // namespace larder::kernels::cuda
