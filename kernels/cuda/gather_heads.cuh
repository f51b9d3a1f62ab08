// The work of a CTA on output rows of K or V: some heads of each, eight elements per thread.
#pragma once

#include <cstdint>

#include "kernels/cuda/gather_call.cuh"
#include "kernels/cuda/gather_eight.cuh"
#include "kernels/cuda/gather_tokens.cuh"

namespace larder::kernels::cuda {

inline constexpr int kHeadThreadsLog2 = 8;
inline constexpr int kHeadThreads = 1 << kHeadThreadsLog2;
static_assert(kHeadThreads >= kReporters + kMaxRows);

// Loads of a thread that are in flight together: of 4 bytes twice as many as of more.
template <KvFormat kFormat, bool kTransforms>
constexpr int kBatchLog2 = kFormat == KvFormat::kNvfp4 && !kTransforms ? 3 : 2;

// How the threads of a CTA share out a side: dim / 8 neighbours have a row of a head, and the CTA
// as many rows, and heads, at once as it has room for.
struct Shares {
  int eights_log2;  // of a row
  int rows_log2;
  int heads_log2;
  int heads;
};
__host__ __device__ inline Shares shares_of(int dim_log2, int cta_rows_log2) {
  const int eights_log2 = dim_log2 - 3;
  const int rows_log2 = eights_log2 > kHeadThreadsLog2 - cta_rows_log2
                            ? kHeadThreadsLog2 - eights_log2
                            : cta_rows_log2;
  const int heads_log2 = kHeadThreadsLog2 - eights_log2 - rows_log2;
  return {eights_log2, rows_log2, heads_log2, 1 << heads_log2};
}

// A row of a CTA: where its part of head 0 begins.
struct alignas(16) HeadRow {
  const uint8_t* data;  // or nullptr: nothing
  const uint8_t* scale;
  uint8_t* out;
};
__device__ inline HeadRow head_row_of(const GatherSide& side, const GatherRun& run) {
  if (run.count == 0) return {};
  return {run.page + side.data_offset_bytes + run.token * side.data_bytes,
          run.page + side.scale_offset_bytes + run.token * side.scale_bytes,
          out_row(side.out, run.row, 0)};
}

// Where the eight elements of a thread are. A batch takes them from one row and consecutive heads,
// or from one head and further rows: `data_step` or `rows_step` is 0.
struct Items {
  const HeadRow* row;  // of the first
  uint32_t present;    // a bit each
  uint32_t data;       // bytes from the row's part of head 0 on
  uint32_t scale;
  int64_t out;
  const float* offsets;  // or nullptr
  int rows_step;
  uint32_t data_step;
  uint32_t scale_step;
  int64_t out_step;
  int offset_step;

  __device__ const uint8_t* data_at(int i) const {
    return row[i * rows_step].data + (data + i * data_step);
  }
  __device__ const uint8_t* scale_at(int i) const {
    return row[i * rows_step].scale + (scale + i * scale_step);
  }
  __device__ uint8_t* out_at(int i) const { return row[i * rows_step].out + (out + i * out_step); }
  __device__ const float* offsets_at(int i) const {
    return offsets == nullptr ? nullptr : offsets + i * offset_step;
  }
  __device__ bool exists(int i) const { return (present >> i & 1u) != 0; }
};

// All lanes of the warp.
template <KvFormat kFormat>
__device__ inline void write_rotated(const GatherSide& side, Dtype dtype, const StoredEight& stored,
                                     float factor, const float* offsets, uint8_t* out,
                                     bool is_used) {
  Eight eight = decode_eight<kFormat>(stored);
  if (any_nan<kFormat>(stored)) put_nans<kFormat>(stored, eight);
  if (side.scale != 1.0f) multiply_eight(eight, side.scale);
  rotate_eight(eight, side.dim, factor, static_cast<int>(threadIdx.x) % kWarp);
  if (!is_used) return;
  const Eight sums = offsets != nullptr ? sum_of(eight, offsets) : eight;
  if (!any_nan(sums)) {
    put(out, halves_of(sums, dtype));
    return;
  }
#pragma unroll
  for (int i = 0; i < kEight; ++i) {
    const float value = isnan(eight.values[i]) ? __uint_as_float(0x7FC00000u) : eight.values[i];
    store_value(dtype, out, i, offsets != nullptr ? sum(value, offsets[i]) : value);
  }
}

// False if nothing is written since a NaN may be among them.
template <KvFormat kFormat>
__device__ inline bool write_eight(const GatherSide& side, Dtype dtype, const StoredEight& stored,
                                   const float* offsets, uint8_t* out) {
  if constexpr (eight_bytes(kFormat) == 16) {
    if (side.keeps_bits) {
      put(out, uint4{stored.words[0], stored.words[1], stored.words[2], stored.words[3]});
      return true;
    }
  }
  if (any_nan<kFormat>(stored)) return false;
  if (side.scale == 1.0f && offsets == nullptr && write_exactly<kFormat>(stored, dtype, out))
    return true;
  Eight eight = decode_eight<kFormat>(stored);
  // The scale is finite and > 0, makes no NaN of a number, and is 1 for 16-bit formats.
  if constexpr (eight_bytes(kFormat) < 16) multiply_eight(eight, side.scale);
  if (offsets != nullptr) {
    eight = sum_of(eight, offsets);
    if (any_nan(eight)) return false;
  }
  put(out, halves_of(eight, dtype));
  return true;
}

__device__ inline uint32_t first_present(const HeadRow& row, int count) {
  return count <= 0 || row.data == nullptr ? 0 : (1u << count) - 1u;
}
__device__ inline uint32_t rows_present(const Items& items, int count) {
  uint32_t present = 0;
#pragma unroll 1
  for (int i = 0; i < count; ++i)
    if (items.row[i * items.rows_step].data != nullptr) present |= 1u << i;
  return present;
}

// The items of a batch. All lanes of the warp.
template <KvFormat kFormat, bool kTransforms>
__device__ inline void gather_batch(const GatherSide& side, Dtype dtype, const Items& items,
                                    float factor) {
  constexpr int kBatch = 1 << kBatchLog2<kFormat, kTransforms>;
  StoredEight stored[kBatch];
#pragma unroll
  for (int i = 0; i < kBatch; ++i)
    stored[i] =
        items.exists(i) ? load_eight<kFormat>(items.data_at(i), items.scale_at(i)) : StoredEight{};
  asm volatile("" ::: "memory");  // rows are read again rather than kept in registers
  uint32_t left = 0;              // a bit each: those with a NaN
#pragma unroll
  for (int i = 0; i < kBatch; ++i) {
    const bool exists = items.exists(i);
    const float* offsets = kTransforms ? items.offsets_at(i) : nullptr;
    if (kTransforms && side.rotated)
      write_rotated<kFormat>(side, dtype, stored[i], factor, offsets, items.out_at(i), exists);
    else if (exists && !write_eight<kFormat>(side, dtype, stored[i], offsets, items.out_at(i)))
      left |= 1u << i;
  }
#pragma unroll 1
  for (; left != 0; left &= left - 1) {
    const int i = __ffs(static_cast<int>(left)) - 1;
#pragma unroll 1
    for (int e = 0; e < kEight; ++e)
      write_element(side, items.data_at(i), items.scale_at(i), items.offsets_at(i), items.out_at(i),
                    e);
  }
}

// Rows that the CTA has at once are a pass, heads a step. The same number of batches for all
// threads, who exchange values.
template <KvFormat kFormat, bool kTransforms>
__device__ inline void gather_heads(const GatherCall& call, const GatherSide& side, Dtype dtype,
                                    const HeadRow* rows /* [2^cta_rows_log2] */, int cta_rows_log2,
                                    int first_head, int end_head) {
  constexpr int kBatch = 1 << kBatchLog2<kFormat, kTransforms>;
  const Shares shares = shares_of(31 - __clz(side.dim), cta_rows_log2);
  const int thread = static_cast<int>(threadIdx.x);
  const int eight = thread & ((1 << shares.eights_log2) - 1);
  const int row = (thread >> shares.eights_log2) & ((1 << shares.rows_log2) - 1);
  const int begin_head = first_head + (thread >> (shares.eights_log2 + shares.rows_log2));
  const int num_passes = 1 << (cta_rows_log2 - shares.rows_log2);
  const int num_steps = (end_head - first_head + shares.heads - 1) >> shares.heads_log2;
  const bool by_heads = num_steps >= num_passes;
  const int passes_at_once = by_heads ? 1 : kBatch;
  const int steps_at_once = by_heads ? kBatch : 1;
  const auto data_bytes = static_cast<uint32_t>(call.block_tokens * side.data_bytes);
  const auto scale_bytes = static_cast<uint32_t>(call.block_tokens * side.scale_bytes);
  const int64_t out_bytes = 2 * side.out.head_stride;
  const float factor = kTransforms ? rotation_factor(side.dim) : 1.0f;
  Items items = {};
  items.rows_step = by_heads ? 0 : 1 << shares.rows_log2;
  items.data_step = by_heads ? data_bytes << shares.heads_log2 : 0;
  items.scale_step = by_heads ? scale_bytes << shares.heads_log2 : 0;
  items.out_step = by_heads ? out_bytes << shares.heads_log2 : 0;
  items.offset_step = by_heads ? side.dim << shares.heads_log2 : 0;
  // Else the compiler works it out anew for every item.
  asm volatile("" : "+l"(items.out_step));
#pragma unroll 1
  for (int pass = 0; pass < num_passes; pass += passes_at_once)
#pragma unroll 1
    for (int step = 0; step < num_steps; step += steps_at_once) {
      const int head = begin_head + (step << shares.heads_log2);
      const int heads_left = (end_head - head + shares.heads - 1) >> shares.heads_log2;
      items.row = rows + (pass << shares.rows_log2) + row;
      items.present =
          by_heads ? first_present(items.row[0], min(heads_left, kBatch))
                   : rows_present(items, heads_left > 0 ? min(num_passes - pass, kBatch) : 0);
      items.data = static_cast<uint32_t>(head) * data_bytes + eight * eight_bytes(kFormat);
      items.scale = static_cast<uint32_t>(head) * scale_bytes + eight / 2;
      items.out = head * out_bytes + 2 * kEight * eight;
      if (kTransforms && side.key_offset != nullptr)
        items.offsets = side.key_offset + int64_t{head} * side.dim + eight * kEight;
      gather_batch<kFormat, kTransforms>(side, dtype, items, factor);
    }
}

}  // namespace larder::kernels::cuda
