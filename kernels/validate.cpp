// The checks of append and attend calls. All arithmetic on values from a call is in 64 bits and
// cannot overflow: lengths are int32, and products of shapes and strides are checked.
#include <cmath>
#include <cstdint>
#include <limits>

#include "kernels/kernel_table.h"
#include "kernels/refuse.h"
#include "kernels/visible.h"

namespace larder::kernels {
namespace {

constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;

bool is_aligned(const void* pointer, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(pointer) % static_cast<uintptr_t>(bytes) == 0;
}

Status validate_layer(const LayerView& layer) {
  if (Status s = validate_geometry(layer.geometry, layer.encoder); !s.ok()) return s;
  if (Status s = validate_scale("k_scale", layer.k_scale); !s.ok()) return s;
  if (Status s = validate_scale("v_scale", layer.v_scale); !s.ok()) return s;
  if (layer.page != page_layout(layer.geometry))
    return refuse(kInvalid, "page is not the layout of the geometry: it has ",
                  layer.page.page_bytes, " bytes, the geometry's ",
                  page_layout(layer.geometry).page_bytes);
  if (layer.num_blocks < 0) return refuse(kInvalid, "num_blocks is ", layer.num_blocks);
  if (layer.block_stride_bytes < layer.page.page_bytes)
    return refuse(kInvalid, "block_stride_bytes is ", layer.block_stride_bytes, ": a page has ",
                  layer.page.page_bytes);
  int64_t unused = 0;
  if (__builtin_mul_overflow(layer.num_blocks, layer.block_stride_bytes, &unused) ||
      __builtin_mul_overflow(layer.num_blocks, int64_t{layer.geometry.block_tokens}, &unused))
    return refuse(kInvalid, "num_blocks is ", layer.num_blocks, ": the pool passes 2^63 bytes");
  return {};
}

// `num_heads` <= 0 leaves the number of heads to the caller.
Status validate_tensor(std::string_view field, const TensorView& view, int64_t num_heads,
                       int64_t dim) {
  if (static_cast<size_t>(view.dtype) >= kDtypeNames.size())
    return refuse(kInvalid, field, ": dtype is ", static_cast<int>(view.dtype),
                  ", which is none of bf16, fp16, fp32");
  const int64_t heads = num_heads > 0 ? num_heads : view.shape[1];
  if (view.shape[0] < 0 || view.shape[1] != heads || view.shape[2] != dim)
    return refuse(kInvalid, field, " is [", view.shape[0], ", ", view.shape[1], ", ", view.shape[2],
                  "]: expected [rows, ", heads, ", ", dim, "]");
  const auto extent = tensor_extent_bytes(view);
  if (!extent)
    return refuse(kInvalid, field, ": strides [", view.strides[0], ", ", view.strides[1], ", ",
                  view.strides[2], "] with ", view.shape[0], " rows pass 2^63 bytes");
  if (extent->begin == extent->end) return {};
  if (view.data == nullptr)
    return refuse(kInvalid, field, ": data is null with ", view.shape[0], " rows");
  if (!is_aligned(view.data, dtype_bytes(view.dtype)))
    return refuse(kInvalid, field, ": data is not aligned to the ", dtype_bytes(view.dtype),
                  " bytes of ", name(view.dtype));
  return {};
}

Status validate_query_tensors(const AttendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const int64_t num_q_heads = params.q.shape[1];
  if (num_q_heads < 1 || num_q_heads > kMaxQueryHeads || num_q_heads % geometry.num_kv_heads != 0)
    return refuse(kInvalid, "q has ", num_q_heads, " heads: expected a multiple of num_kv_heads ",
                  geometry.num_kv_heads, " up to ", kMaxQueryHeads);
  if (Status s = validate_tensor("q", params.q, num_q_heads, geometry.k_dim); !s.ok()) return s;
  if (Status s = validate_tensor("out", params.out, num_q_heads, geometry.v_dim); !s.ok()) return s;
  if (params.out.shape[0] != params.q.shape[0])
    return refuse(kInvalid, "out has ", params.out.shape[0], " rows: q has ", params.q.shape[0]);
  // Rows on top of each other are no use, and would let a small call ask for endless work.
  for (size_t axis = 0; axis < 3; ++axis)
    if (params.out.shape[axis] > 1 && params.out.strides[axis] == 0)
      return refuse(kInvalid, "out: the stride of axis ", axis, " is 0 with size ",
                    params.out.shape[axis]);
  if (!is_aligned(params.lse, alignof(float)))
    return refuse(kInvalid, "lse is not aligned to 4 bytes");
  return {};
}

Status validate_attend_fields(const AttendParams& params) {
  if (!std::isfinite(params.scale)) return refuse(kInvalid, "scale is ", params.scale);
  if (params.window_left < -1) return refuse(kInvalid, "window_left is ", params.window_left);
  if (params.num_seqs < 0) return refuse(kInvalid, "num_seqs is ", params.num_seqs);
  if (params.block_table_stride < 0)
    return refuse(kInvalid, "block_table_stride is ", params.block_table_stride);
  if (params.num_seqs == 0) return {};
  if (params.q_lens == nullptr)
    return refuse(kInvalid, "q_lens is null with ", params.num_seqs, " sequences");
  if (params.seq_lens == nullptr)
    return refuse(kInvalid, "seq_lens is null with ", params.num_seqs, " sequences");
  int64_t unused = 0;
  if (__builtin_mul_overflow(params.num_seqs, params.block_table_stride, &unused))
    return refuse(kInvalid, "block_table_stride is ", params.block_table_stride, " with ",
                  params.num_seqs, " sequences: the table passes 2^63 entries");
  return {};
}

Status validate_sequence(const AttendParams& params, int64_t sequence) {
  const int64_t q_len = params.q_lens[sequence];
  const int64_t seq_len = params.seq_lens[sequence];
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  if (q_len < 0) return refuse(kInvalid, "q_lens[", sequence, "] is ", q_len);
  if (seq_len < 0) return refuse(kInvalid, "seq_lens[", sequence, "] is ", seq_len);
  const int64_t num_blocks = (seq_len + block_tokens - 1) / block_tokens;
  if (num_blocks > params.block_table_stride)
    return refuse(kInvalid, "seq_lens[", sequence, "] is ", seq_len, ": its block_table row has ",
                  params.block_table_stride, " blocks of ", block_tokens, " tokens");
  const KeyRange keys = touched_keys(params.causal, params.window_left, q_len, seq_len);
  if (keys.begin >= keys.end) return {};
  if (params.block_table == nullptr)
    return refuse(kInvalid, "block_table is null with seq_lens[", sequence, "] ", seq_len);
  const int32_t* row = params.block_table + sequence * params.block_table_stride;
  for (int64_t i = keys.begin / block_tokens; i < num_blocks; ++i)
    if (row[i] < 0 || row[i] >= params.layer.num_blocks)
      return refuse(kInvalid, "block_table[", sequence, ", ", i, "] is ", row[i], ": the pool has ",
                    params.layer.num_blocks, " blocks");
  return {};
}

}  // namespace

Status validate_scale(std::string_view field, double value) {
  // A double beyond the floats must not be converted: that is undefined, not infinite.
  const double limit = std::numeric_limits<float>::max();
  if (value > 0 && value <= limit && std::isnormal(static_cast<float>(value))) return {};
  return refuse(kInvalid, field, " is ", value, ": expected a float > 0, from ",
                std::numeric_limits<float>::min(), " to ", limit);
}

Status validate_append(const AppendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  if (Status s = validate_layer(params.layer); !s.ok()) return s;
  if (Status s = validate_tensor("k", params.k, geometry.num_kv_heads, geometry.k_dim); !s.ok())
    return s;
  if (Status s = validate_tensor("v", params.v, geometry.num_kv_heads, geometry.v_dim); !s.ok())
    return s;
  if (params.v.shape[0] != params.k.shape[0])
    return refuse(kInvalid, "v has ", params.v.shape[0], " rows: k has ", params.k.shape[0]);
  if (params.num_slots < 0 || params.num_slots > params.k.shape[0])
    return refuse(kInvalid, "num_slots is ", params.num_slots, ": k has ", params.k.shape[0],
                  " rows");
  if (params.num_slots > 0 && params.slots == nullptr)
    return refuse(kInvalid, "slots is null with num_slots ", params.num_slots);
  const int64_t pool_slots = params.layer.num_blocks * geometry.block_tokens;
  for (int64_t i = 0; i < params.num_slots; ++i)
    if (params.slots[i] >= pool_slots)
      return refuse(kInvalid, "slots[", i, "] is ", params.slots[i], ": the pool has ", pool_slots,
                    " slots (", params.layer.num_blocks, " blocks of ", geometry.block_tokens,
                    " tokens)");
  return {};
}

Status validate_attend(const AttendParams& params) {
  if (Status s = validate_layer(params.layer); !s.ok()) return s;
  if (Status s = validate_query_tensors(params); !s.ok()) return s;
  if (Status s = validate_attend_fields(params); !s.ok()) return s;
  int64_t num_rows = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    if (Status s = validate_sequence(params, sequence); !s.ok()) return s;
    num_rows += params.q_lens[sequence];
    // Also what keeps the sum from overflowing.
    if (num_rows > params.q.shape[0]) break;
  }
  if (num_rows != params.q.shape[0])
    return refuse(kInvalid, "q has ", params.q.shape[0], " rows: q_lens add up to ", num_rows,
                  num_rows > params.q.shape[0] ? " and more" : "");
  return {};
}

}  // namespace larder::kernels
