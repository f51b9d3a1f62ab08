// What the gather kernels share: a call as they take it, which tokens of a sequence it is about,
// where they lie, and what is reported of figures that do not fit.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/codes.cuh"
#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/stored.cuh"
#include "kernels/params.h"

namespace larder::kernels::cuda {

// Rows of an output tensor, strides in elements.
struct GatherOut {
  uint8_t* data;  // nullptr: not wanted
  Dtype dtype;
  int64_t row_stride;
  int64_t head_stride;
  int64_t stride;
};

// K or V: where its rows lie and what is undone before they go out.
struct GatherSide {
  GatherOut out;
  KvFormat format;
  int dim;
  int64_t data_offset_bytes;   // of the region in a page
  int64_t scale_offset_bytes;  // of the region in a page
  int64_t data_bytes;          // of a row
  int64_t scale_bytes;         // of a row
  float scale;                 // what is left to multiply with; 1: nothing
  const float* key_offset;     // [num_kv_heads, dim], or nullptr
  bool rotated;
  bool keeps_bits;  // a NaN's payload survives
};

struct GatherCall {
  const uint8_t* base;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int block_tokens;
  int num_kv_heads;
  MlaRow mla_row;      // then the first side is the whole row
  bool copies_rope;    // into the FP8 staging: its bytes would not change
  float staged_scale;  // values are multiplied with it before they become staging bytes
  GatherSide sides[2];
  const int64_t* slots;  // or nullptr, and the rest counts
  const int32_t* block_table;
  const int32_t* seq_lens;
  const int32_t* first_tokens;  // or nullptr: 0
  int64_t num_slots;
  int64_t num_seqs;
  int64_t block_table_stride;
  int64_t rows_per_sequence;  // 0: sequences follow each other without gaps
  int64_t table_tokens;       // that a row of the block table holds, at most 2^31 - 1
  int64_t window;             // tokens that a sequence may have in the outputs
  int64_t out_rows;           // that every output has
};

// Consecutive tokens of one block, and the output row of the first.
struct GatherRun {
  const uint8_t* page;
  int64_t row;
  int token;  // within the block
  int count;
};

__device__ inline GatherRun run_of_slot(const GatherCall& call, const PointOfUse& use, int64_t i) {
  const int64_t slot = load_once(call.slots + i);
  if (slot < 0) return {};
  const int64_t block = slot / call.block_tokens;
  if (!use.may_use(block, call.num_blocks, false, slot)) return {};
  return {call.base + block * call.block_stride_bytes, i,
          static_cast<int>(slot % call.block_tokens), 1};
}

// What a sequence is said to be: nobody has checked it.
struct NamedSequence {
  int64_t len;
  int64_t first_token;
};
__device__ inline NamedSequence named_sequence(const GatherCall& call, int64_t sequence) {
  return {load_once(call.seq_lens + sequence),
          call.first_tokens == nullptr ? 0 : load_once(call.first_tokens + sequence)};
}

// Tokens of it that go out, as far as its row of the block table and its window hold them.
struct KeptTokens {
  int64_t first;  // position in the sequence
  int64_t count;
};
__device__ inline KeptTokens kept_tokens(const GatherCall& call, const NamedSequence& named) {
  const int64_t len = max(int64_t{0}, min(named.len, call.table_tokens));
  const int64_t first = max(int64_t{0}, min(named.first_token, len));
  return {first, min(len - first, call.window)};
}

// For one thread per sequence: reports a length that is cut, also by the outputs' rows from
// `first_row` on, or else a first token that is: one fault at most.
__device__ inline void report_cuts(const GatherCall& call, const PointOfUse& use,
                                   const NamedSequence& named, int64_t first_row) {
  const KeptTokens kept = kept_tokens(call, named);
  const int64_t written = min(kept.count, max(int64_t{0}, call.out_rows - first_row));
  if (kept.first + written != named.len)
    use.report(named.len);
  else if (kept.first != named.first_token)
    use.report(named.first_token);
}

// A stored value as a float, with the bits of a NaN that the CPU gives it.
__device__ inline float decoded(KvFormat format, const uint8_t* data, const uint8_t* scales,
                                int i) {
  const float value = stored_value(format, data, scales, i);
  return format == KvFormat::kNvfp4 && isnan(value) ? __uint_as_float(0x7FC00000u) : value;
}
__device__ inline float decoded_mla(MlaRow format, const uint8_t* row, int i) {
  if (format == MlaRow::kFp8Ds && i < kMlaLatentDim)
    return product(e4m3_value(row[i]), load_f32(row + 512 + 4 * (i >> 7)));
  const float value = stored_mla_value(format, row, i);
  return format == MlaRow::kNvfp4Ds && isnan(value) ? __uint_as_float(0x7FC00000u) : value;
}

__device__ inline uint8_t* out_row(const GatherOut& out, int64_t row, int head) {
  const int64_t bytes = out.dtype == Dtype::kFp32 ? 4 : out.dtype == Dtype::kFp8E4m3 ? 1 : 2;
  return out.data + (row * out.row_stride + head * out.head_stride) * bytes;
}

// Element i of a row that is not rotated, from the row's first byte and first scale byte.
// `offsets`: of the row's elements, or nullptr.
__device__ inline void write_element(const GatherSide& side, const uint8_t* data,
                                     const uint8_t* scales, const float* offsets, uint8_t* target,
                                     int i) {
  float value = decoded(side.format, data, scales, i);
  if (side.scale != 1.0f) value = product(value, side.scale);
  if (offsets != nullptr) value = sum(value, offsets[i]);
  store_value(side.out.dtype, target, i * side.out.stride, value);
}

__device__ inline uint8_t staged(const GatherCall& call, const uint8_t* row, int i) {
  if (call.mla_row == MlaRow::kFp8) return row[i];
  if (call.copies_rope && i >= kMlaLatentDim) return row[256 + i - kMlaLatentDim];
  return e4m3_bits(__fmul_rn(decoded_mla(call.mla_row, row, i), call.staged_scale));
}

// Element i of an MLA row.
__device__ inline void write_mla_element(const GatherCall& call, const uint8_t* row,
                                         uint8_t* target, int i) {
  const GatherSide& side = call.sides[0];
  if (side.out.dtype == Dtype::kFp8E4m3) {
    target[i * side.out.stride] = staged(call, row, i);
    return;
  }
  const float value = decoded_mla(call.mla_row, row, i);
  store_value(side.out.dtype, target, i * side.out.stride,
              side.scale != 1.0f ? product(value, side.scale) : value);
}

inline GatherSide gather_side(const TensorView& view, KvFormat format, int64_t dim,
                              int64_t data_offset_bytes, int64_t scale_offset_bytes, float scale) {
  const int64_t stride = view.shape[2] > 1 ? view.strides[2] : 1;
  const bool is_wanted = view.shape[0] > 0;
  const bool is_16_bit = format == KvFormat::kBf16 || format == KvFormat::kFp16;
  const bool keeps_bits =
      stride == 1 && ((format == KvFormat::kBf16 && view.dtype == Dtype::kBf16) ||
                      (format == KvFormat::kFp16 && view.dtype == Dtype::kFp16));
  return {{is_wanted ? static_cast<uint8_t*>(view.data) : nullptr, view.dtype, view.strides[0],
           view.strides[1], stride},
          format,
          static_cast<int>(dim),
          data_offset_bytes,
          scale_offset_bytes,
          row_data_bytes(format, dim),
          row_scale_bytes(format, dim),
          is_16_bit ? 1.0f : scale,
          nullptr,
          false,
          keeps_bits};
}

inline void set_mla(const GatherParams& params, GatherCall& call) {
  const LayerView& layer = params.layer;
  GatherSide& side = call.sides[0];
  side.data_bytes = mla_row_bytes(call.mla_row);
  side.scale = call.mla_row == MlaRow::kFp8 ? layer.k_scale : 1.0f;
  side.keeps_bits =
      call.mla_row == MlaRow::kBf16 && params.k_out.dtype == Dtype::kBf16 && side.out.stride == 1;
  call.staged_scale = 1.0f / layer.k_scale;
  call.copies_rope = call.mla_row == MlaRow::kNvfp4Ds && call.staged_scale == 1.0f;
}

inline void set_sequences(const GatherParams& params, GatherCall& call) {
  constexpr int64_t kMaxLen = std::numeric_limits<int32_t>::max();
  call.block_table = params.block_table;
  call.seq_lens = params.seq_lens;
  call.first_tokens = params.first_tokens;
  call.num_seqs = params.num_seqs;
  call.block_table_stride = params.block_table_stride;
  call.rows_per_sequence = params.rows_per_sequence;
  call.table_tokens =
      std::min(std::min(params.block_table_stride, kMaxLen) * call.block_tokens, kMaxLen);
  call.window = params.rows_per_sequence > 0 ? params.rows_per_sequence : kMaxLen;
}

inline GatherCall gather_call(const GatherParams& params) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  GatherCall call = {};
  call.base = reinterpret_cast<const uint8_t*>(layer.base);
  call.block_stride_bytes = layer.block_stride_bytes;
  call.num_blocks = layer.num_blocks;
  call.block_tokens = geometry.block_tokens;
  call.num_kv_heads = geometry.num_kv_heads;
  call.mla_row = geometry.mla_row;
  call.sides[0] = gather_side(params.k_out, geometry.k_format, geometry.k_dim,
                              page.k_data_offset_bytes, page.k_scale_offset_bytes, layer.k_scale);
  call.sides[1] = gather_side(params.v_out, geometry.v_format, geometry.v_dim,
                              page.v_data_offset_bytes, page.v_scale_offset_bytes, layer.v_scale);
  if (is_centred(layer.key_transform)) call.sides[0].key_offset = layer.key_offset;
  call.sides[0].rotated = is_rotated(layer.key_transform);
  if (layer.key_transform != KeyTransform::kNone) call.sides[0].keeps_bits = false;
  if (call.mla_row != MlaRow::kNone) set_mla(params, call);
  call.out_rows = std::numeric_limits<int64_t>::max();
  for (const TensorView* view : {&params.k_out, &params.v_out})
    if (view->shape[0] > 0) call.out_rows = std::min(call.out_rows, view->shape[0]);
  call.slots = params.num_slots > 0 ? params.slots : nullptr;
  call.num_slots = params.num_slots;
  set_sequences(params, call);
  return call;
}

// Nothing to do: no tokens are named, or nobody wants them.
inline bool gathers_nothing(const GatherParams& params) {
  return (params.num_slots == 0 && params.num_seqs == 0) ||
         (params.k_out.shape[0] == 0 && params.v_out.shape[0] == 0);
}

}  // namespace larder::kernels::cuda
