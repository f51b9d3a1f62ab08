// gather on any GPU: tokens of one layer, dequantised, into dense or strided tensors. The bits are
// those of kernels/cpu/gather.cpp. Compiled with -fmad=false.
#include <limits>

#include "kernels/cuda/encode.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/stored.cuh"
#include "kernels/cuda/units.cuh"

namespace larder::kernels::cuda {
namespace {

constexpr int kWarps = 4;
constexpr int kChunkTokens = 16;  // of one block, for a CTA

// Rows of an output tensor, strides in elements.
struct Out {
  uint8_t* data;  // nullptr: not wanted
  Dtype dtype;
  int64_t row_stride;
  int64_t head_stride;
  int64_t stride;
};

// K or V: where its rows lie and what is undone before they go out.
struct Side {
  Out out;
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

struct Call {
  const uint8_t* base;
  int64_t block_stride_bytes;
  int64_t num_blocks;
  int block_tokens;
  int num_kv_heads;
  MlaRow mla_row;      // then the first side is the whole row
  bool copies_rope;    // into the FP8 staging: its bytes would not change
  float staged_scale;  // values are multiplied with it before they become staging bytes
  Side sides[2];
  const int64_t* slots;  // or nullptr, and the rest counts
  const int32_t* block_table;
  const int32_t* seq_lens;
  int64_t block_table_stride;
  int64_t rows_per_sequence;
  int64_t longest;     // that a row of the block table and a window hold, in tokens
  int64_t out_rows;    // that every output has
  int64_t num_items;   // slots, or num_seqs * seq_chunks
  int64_t seq_chunks;  // chunks of a sequence as long as can be
  int chunks_per_block;
};

// Consecutive tokens of one block, and the output row of the first.
struct Run {
  const uint8_t* page;
  int64_t row;
  int token;  // within the block
  int count;
};

struct Shared {
  float values[kWarps][kRowFloats];
  int64_t seq_len;  // as it is named, of the item's sequence
  unsigned long long first_row;
  Run run;
};

// A stored value as a float, with the bits of a NaN that the CPU gives it.
__device__ float decoded(const Side& side, const uint8_t* data, const uint8_t* scales, int i) {
  const float value = stored_value(side.format, data, scales, i);
  return side.format == KvFormat::kNvfp4 && isnan(value) ? __uint_as_float(0x7FC00000u) : value;
}
__device__ float decoded_mla(MlaRow format, const uint8_t* row, int i) {
  if (format == MlaRow::kFp8Ds && i < kMlaLatentDim)
    return product(e4m3_value(row[i]), load_f32(row + 512 + 4 * (i >> 7)));
  const float value = stored_mla_value(format, row, i);
  return format == MlaRow::kNvfp4Ds && isnan(value) ? __uint_as_float(0x7FC00000u) : value;
}

__device__ uint8_t* out_row(const Out& out, int64_t row, int head) {
  const int64_t bytes = out.dtype == Dtype::kFp32 ? 4 : out.dtype == Dtype::kFp8E4m3 ? 1 : 2;
  return out.data + (row * out.row_stride + head * out.head_stride) * bytes;
}

__device__ void gather_row(const Call& call, const Side& side, const Run& run, int i, int head,
                           float* values, int lane) {
  const int64_t source_row = int64_t{head} * call.block_tokens + run.token + i;
  const uint8_t* data = run.page + side.data_offset_bytes + source_row * side.data_bytes;
  const uint8_t* scales = run.page + side.scale_offset_bytes + source_row * side.scale_bytes;
  uint8_t* target = out_row(side.out, run.row + i, head);
  if (side.keeps_bits) {
    for (int e = lane; e < side.dim; e += kWarp)
      reinterpret_cast<uint16_t*>(target)[e] = load_u16(data + 2 * e);
    return;
  }
  if (side.rotated) {
    for (int e = lane; e < side.dim; e += kWarp) {
      const float value = decoded(side, data, scales, e);
      values[place(e)] = side.scale != 1.0f ? product(value, side.scale) : value;
    }
    __syncwarp();
    rotate(values, side.dim, lane);
  }
  for (int e = lane; e < side.dim; e += kWarp) {
    float value = side.rotated ? values[place(e)] : decoded(side, data, scales, e);
    if (!side.rotated && side.scale != 1.0f) value = product(value, side.scale);
    if (side.key_offset != nullptr)
      value = sum(value, side.key_offset[int64_t{head} * side.dim + e]);
    store_value(side.out.dtype, target, e * side.out.stride, value);
  }
  __syncwarp();  // before the values of the next row
}

__device__ uint8_t staged(const Call& call, const uint8_t* row, int i) {
  if (call.mla_row == MlaRow::kFp8) return row[i];
  if (call.copies_rope && i >= kMlaLatentDim) return row[256 + i - kMlaLatentDim];
  return e4m3_bits(__fmul_rn(decoded_mla(call.mla_row, row, i), call.staged_scale));
}

__device__ void gather_mla_row(const Call& call, const Run& run, int i, int lane) {
  const Side& side = call.sides[0];
  const uint8_t* row = run.page + (run.token + i) * side.data_bytes;
  uint8_t* target = out_row(side.out, run.row + i, 0);
  for (int e = lane; e < kMlaKeyDim; e += kWarp) {
    if (side.out.dtype == Dtype::kFp8E4m3) {
      target[e * side.out.stride] = staged(call, row, e);
    } else if (side.keeps_bits) {
      reinterpret_cast<uint16_t*>(target)[e] = load_u16(row + 2 * e);
    } else {
      const float value = decoded_mla(call.mla_row, row, e);
      store_value(side.out.dtype, target, e * side.out.stride,
                  side.scale != 1.0f ? product(value, side.scale) : value);
    }
  }
}

__device__ Run run_of_slot(const Call& call, const PointOfUse& use, int64_t i) {
  const int64_t slot = load_once(call.slots + i);
  if (slot < 0) return {};
  const int64_t block = slot / call.block_tokens;
  if (!use.may_use(block, call.num_blocks, false, slot)) return {};
  return {call.base + block * call.block_stride_bytes, i,
          static_cast<int>(slot % call.block_tokens), 1};
}

// What a sequence's row of the block table and its window of the output hold of a length.
__device__ int64_t cut_length(const Call& call, int64_t seq_len) {
  return max(int64_t{0}, min(seq_len, call.longest));
}

// All threads of the CTA: the output row of the sequence's first token, in shared.first_row.
__device__ void find_first_row(const Call& call, int64_t sequence, Shared& shared) {
  if (threadIdx.x == 0)
    shared.first_row = static_cast<unsigned long long>(sequence * call.rows_per_sequence);
  if (call.rows_per_sequence > 0) return;
  __syncthreads();
  unsigned long long rows = 0;
  for (int64_t before = threadIdx.x; before < sequence; before += blockDim.x)
    rows += static_cast<unsigned long long>(cut_length(call, load_once(call.seq_lens + before)));
  if (rows > 0) atomicAdd(&shared.first_row, rows);
  __syncthreads();
}

// One thread. A sequence's first chunk reports its length, a block's first chunk the block.
__device__ Run run_of_chunk(const Call& call, PointOfUse use, int64_t sequence, int64_t chunk,
                            int64_t named_len, int64_t first_row) {
  const int64_t held = max(int64_t{0}, call.out_rows - first_row);
  const int64_t seq_len = min(cut_length(call, named_len), held);
  if (chunk == 0 && seq_len != named_len) use.report(named_len);
  const int64_t entry = chunk / call.chunks_per_block;
  const int part = static_cast<int>(chunk % call.chunks_per_block);
  const int token = part * kChunkTokens;
  const int64_t position = entry * call.block_tokens + token;
  if (position >= seq_len) return {};
  if (part > 0) use.faults = nullptr;
  const int64_t block = load_once(call.block_table + sequence * call.block_table_stride + entry);
  if (!use.may_use(block, call.num_blocks, false, block)) return {};
  const int64_t count =
      min(int64_t{min(kChunkTokens, call.block_tokens - token)}, seq_len - position);
  return {call.base + block * call.block_stride_bytes, first_row + position, token,
          static_cast<int>(count)};
}

// All threads of the CTA; shared.run is there after the next __syncthreads.
__device__ void find_chunk(const Call& call, const PointOfUse& use, int64_t item, Shared& shared) {
  const int64_t sequence = item / call.seq_chunks;
  const int64_t chunk = item % call.seq_chunks;
  // One thread reads the length, so that all take the same way to the barriers.
  if (threadIdx.x == 0) shared.seq_len = load_once(call.seq_lens + sequence);
  __syncthreads();
  const int64_t seq_len = shared.seq_len;
  const int64_t begin = chunk / call.chunks_per_block * call.block_tokens;
  const bool is_used = chunk == 0 || begin < cut_length(call, seq_len);
  if (is_used) find_first_row(call, sequence, shared);
  if (threadIdx.x == 0)
    shared.run = is_used ? run_of_chunk(call, use, sequence, chunk, seq_len,
                                        static_cast<int64_t>(shared.first_row))
                         : Run{};
}

// Grid: a CTA per slot, or per 16 tokens of a block-table entry (of as many entries as a sequence
// can use: CTAs past its length leave at once), up to 2^20 CTAs, which then take every 2^20th.
// Block: 4 warps, each of which has one head's K or V of a token (or a whole MLA row) at a time.
// Moves the stored bytes of a token in and 2 * heads * dim * element bytes out; bound by the width
// of its loads (an element per lane) and, where lengths are prefix sums, by O(num_seqs) reads per
// CTA.
__global__ void __launch_bounds__(kWarps* kWarp)
    gather_kernel(const __grid_constant__ Call call, const PointOfUse use) {
  __shared__ Shared shared;
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    if (call.slots != nullptr) {
      if (threadIdx.x == 0) shared.run = run_of_slot(call, use, item);
    } else {
      find_chunk(call, use, item, shared);
    }
    __syncthreads();
    const Run run = shared.run;
    const int rows = call.mla_row != MlaRow::kNone ? run.count : run.count * 2 * call.num_kv_heads;
    for (int r = warp; r < rows; r += kWarps) {
      if (call.mla_row != MlaRow::kNone) {
        gather_mla_row(call, run, r, lane);
        continue;
      }
      // Tokens of one head one after another, as they lie in the page.
      const int head = r / run.count % call.num_kv_heads;
      const Side& side = call.sides[r / run.count / call.num_kv_heads];
      if (side.out.data != nullptr)
        gather_row(call, side, run, r % run.count, head, shared.values[warp], lane);
    }
    __syncthreads();
  }
}

Side side_of(const TensorView& view, KvFormat format, int64_t dim, int64_t data_offset_bytes,
             int64_t scale_offset_bytes, float scale) {
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

void set_mla(const GatherParams& params, Call& call) {
  const LayerView& layer = params.layer;
  Side& side = call.sides[0];
  side.data_bytes = mla_row_bytes(call.mla_row);
  side.scale = call.mla_row == MlaRow::kFp8 ? layer.k_scale : 1.0f;
  side.keeps_bits =
      call.mla_row == MlaRow::kBf16 && params.k_out.dtype == Dtype::kBf16 && side.out.stride == 1;
  call.staged_scale = 1.0f / layer.k_scale;
  call.copies_rope = call.mla_row == MlaRow::kNvfp4Ds && call.staged_scale == 1.0f;
}

// A sequence has at least one chunk, so that its length is looked at, and no more than the longest
// that can be written has.
void set_sequences(const GatherParams& params, Call& call) {
  constexpr int64_t kMaxLen = std::numeric_limits<int32_t>::max();
  const int64_t block_tokens = call.block_tokens;
  call.longest = std::min(params.block_table_stride, kMaxLen) * block_tokens;
  if (params.rows_per_sequence > 0) call.longest = std::min(call.longest, params.rows_per_sequence);
  const int64_t written = std::min({call.longest, call.out_rows, kMaxLen});
  const int64_t entries = (written + block_tokens - 1) / block_tokens;
  call.chunks_per_block = static_cast<int>((block_tokens + kChunkTokens - 1) / kChunkTokens);
  call.seq_chunks = std::max<int64_t>(entries * call.chunks_per_block, 1);
  call.num_items = params.num_seqs * call.seq_chunks;
}

Call call_of(const GatherParams& params) {
  const LayerView& layer = params.layer;
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  Call call = {};
  call.base = reinterpret_cast<const uint8_t*>(layer.base);
  call.block_stride_bytes = layer.block_stride_bytes;
  call.num_blocks = layer.num_blocks;
  call.block_tokens = geometry.block_tokens;
  call.num_kv_heads = geometry.num_kv_heads;
  call.mla_row = geometry.mla_row;
  call.sides[0] = side_of(params.k_out, geometry.k_format, geometry.k_dim, page.k_data_offset_bytes,
                          page.k_scale_offset_bytes, layer.k_scale);
  call.sides[1] = side_of(params.v_out, geometry.v_format, geometry.v_dim, page.v_data_offset_bytes,
                          page.v_scale_offset_bytes, layer.v_scale);
  if (is_centred(layer.key_transform)) call.sides[0].key_offset = layer.key_offset;
  call.sides[0].rotated = is_rotated(layer.key_transform);
  if (layer.key_transform != KeyTransform::kNone) call.sides[0].keeps_bits = false;
  if (call.mla_row != MlaRow::kNone) set_mla(params, call);
  call.out_rows = std::numeric_limits<int64_t>::max();
  for (const TensorView* view : {&params.k_out, &params.v_out})
    if (view->shape[0] > 0) call.out_rows = std::min(call.out_rows, view->shape[0]);
  call.block_table = params.block_table;
  call.seq_lens = params.seq_lens;
  call.block_table_stride = params.block_table_stride;
  call.rows_per_sequence = params.rows_per_sequence;
  if (params.num_slots > 0) {
    call.slots = params.slots;
    call.num_items = params.num_slots;
  } else {
    set_sequences(params, call);
  }
  return call;
}

}  // namespace

// Whatever passes validate_gather.
Status supports_gather(const GatherParams&) { return {}; }

Status gather(const GatherParams& params, const Target& target) {
  if (params.num_slots == 0 && params.num_seqs == 0) return {};
  if (params.k_out.shape[0] == 0 && params.v_out.shape[0] == 0) return {};
  const Call call = call_of(params);
  gather_kernel<<<grid_of(call.num_items), kWarps * kWarp, 0, stream_of(target)>>>(
      call, point_of_use(target));
  return launched("gather");
}

}  // namespace larder::kernels::cuda
