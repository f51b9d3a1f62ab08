// attend for the formats, dims and blocks that most engines use: K and V alike in nvfp4, fp8_e4m3,
// bf16 or fp16, dims 64, 128 or 256. One launch; no plan on the host, since CTAs share the tiles
// out from lengths in device memory.
#include <algorithm>
#include <atomic>
#include <bit>
#include <cstdint>
#include <limits>
#include <random>
#include <type_traits>

#include "kernels/cpu/layer_scale.h"
#include "kernels/cpu/rotate.h"
#include "kernels/cuda/attend_decode_launch.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/refuse.h"

namespace larder::kernels::cuda {
namespace {

// A CTA per multiprocessor, of which no GPU has more. The workspace is laid out for so many.
constexpr int kMaxCtas = 256;
// What it costs a warp to begin a segment, in bytes that it might have read: ten tiles of nvfp4 at
// dim 128.
constexpr int64_t kBeginBytes = 23'040;
constexpr int32_t kPrefixTiles = 4;  // more, where what a prefix left is to be added
// Deterministic calls: a CTA takes 4096 tokens at a time, and a sequence has at most 32 pieces.
constexpr int32_t kPieceTiles = 256;
constexpr int32_t kMaxPieces = 32;
constexpr int32_t kMaxGivenPieces = 64;  // of num_splits
constexpr double kMaxPartsBytes = 512 << 20;
static_assert(kept_bytes(kMaxCtas, kMaxDecodeWarps) <= kAttendPlanBytes);
// The cap's tanh is off by some 2^-22 of it: logits by less than 1e-4 up to here.
constexpr float kMaxSoftCap = 128.0f;
// Products of scales that leave room for the powers of two of queries and codes.
constexpr float kMinFactor = 0x1p-64f;
constexpr float kMaxFactor = 0x1p64f;

Status not_tuned(std::string_view what) {
  return refuse(ErrorCode::kUnsupported, "tuned attention: ", what);
}

bool is_aligned(const void* address, size_t bytes) {
  return reinterpret_cast<uintptr_t>(address) % bytes == 0;
}

// Rows of contiguous elements that begin at multiples of `elements`. The stride of an axis with one
// entry may be anything.
bool has_rows_of(const TensorView& view, int64_t elements) {
  const auto fits = [&](size_t axis) {
    return view.shape[axis] <= 1 || view.strides[axis] % elements == 0;
  };
  return view.strides[2] == 1 && fits(0) && fits(1) &&
         is_aligned(view.data, static_cast<size_t>(elements) * dtype_bytes(view.dtype));
}

Status supports_layer(const LayerView& layer) {
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  if (geometry.mla_row != MlaRow::kNone) return not_tuned("no MLA rows");
  if (geometry.k_format != geometry.v_format || geometry.k_format == KvFormat::kFp8E5m2)
    return not_tuned("K and V are alike: nvfp4, fp8_e4m3, bf16 or fp16");
  if (geometry.k_dim != geometry.v_dim ||
      (geometry.k_dim != 64 && geometry.k_dim != 128 && geometry.k_dim != 256))
    return not_tuned("k_dim and v_dim are alike: 64, 128 or 256");
  const auto block_tokens = static_cast<unsigned>(geometry.block_tokens);
  if (!std::has_single_bit(block_tokens) || block_tokens < 16 || block_tokens > 128)
    return not_tuned("block_tokens is 16, 32, 64 or 128");
  if (!is_aligned(layer.base, 16) || layer.block_stride_bytes % 16 != 0 ||
      page.k_data_offset_bytes % 16 != 0 || page.v_data_offset_bytes % 16 != 0 ||
      page.k_scale_offset_bytes % 16 != 0 || page.v_scale_offset_bytes % 16 != 0)
    return not_tuned("pages and their regions begin at multiples of 16 bytes");
  if (layer.block_stride_bytes >= int64_t{1} << 32) return not_tuned("blocks are below 4 GiB");
  return {};
}

Status supports_tensors(const AttendParams& params) {
  const TensorView& q = params.q;
  const TensorView& out = params.output.out;
  const bool is_bf16_layer = params.layer.geometry.k_format == KvFormat::kBf16;
  if (q.dtype != Dtype::kBf16 && (q.dtype != Dtype::kFp16 || is_bf16_layer))
    return not_tuned("q is bf16, or fp16 unless keys are bf16");
  if (!has_rows_of(q, 8)) return not_tuned("rows of q begin at multiples of 16 bytes");
  if (out.dtype != Dtype::kBf16 && out.dtype != Dtype::kFp16 && out.dtype != Dtype::kFp32)
    return not_tuned("out is bf16, fp16 or fp32");
  if (!has_rows_of(out, 4)) return not_tuned("rows of out begin at multiples of four elements");
  if (q.shape[0] * q.shape[1] >= int64_t{1} << 30) return not_tuned("below 2^30 rows and heads");
  return {};
}

Status supports_options(const AttendParams& params) {
  const auto is_usual = [](float factor) { return factor >= kMinFactor && factor <= kMaxFactor; };
  if (params.alibi_slopes != nullptr) return not_tuned("no alibi_slopes");
  if (params.soft_cap != 0.0f && (params.soft_cap < kMinFactor || params.soft_cap > kMaxSoftCap))
    return not_tuned("soft_cap is 0, or 2^-64 to 128");
  if (!is_usual(params.scale * cpu::key_scale(params.layer)) ||
      !is_usual(cpu::value_scale(params.layer)))
    return not_tuned("scale * k_scale and v_scale are 2^-64 to 2^64");
  return {};
}

struct DecodeLayout {
  int columns = 8;  // of an instance
  int32_t begin_tiles = 0;
  int32_t piece_tiles = 0;
  int32_t max_pieces = 1;
  int64_t max_tokens = 0;
  int64_t lengths_bytes = 0;  // copies of the three arrays of lengths
  int64_t parts_bytes = 0;
  PrefixLayout prefix;
  double max_units = 0;     // tiles of the call and what segments cost, at most
  double wanted_bytes = 0;  // of parts, in floating point, which does not overflow

  int64_t own_bytes() const { return lengths_bytes + parts_bytes; }
  int64_t total() const { return own_bytes() + prefix.total_bytes; }
};

int64_t round_up(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// From shapes alone, so that a captured launch serves other lengths.
DecodeLayout decode_layout(const AttendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const int64_t num_rows = params.q.shape[0];
  const int64_t group = params.q.shape[1] / geometry.num_kv_heads;
  const int64_t rows_of_sequence = params.deterministic ? 1
                                                        : (num_rows + params.num_seqs - 1) /
                                                              std::max<int64_t>(params.num_seqs, 1);
  DecodeLayout layout;
  layout.columns = rows_of_sequence * group > 8 && geometry.k_dim < 256 ? 16 : 8;
  layout.max_tokens = std::numeric_limits<int32_t>::max() - 64;
  if (params.block_table_stride <= layout.max_tokens / geometry.block_tokens)
    layout.max_tokens = params.block_table_stride * geometry.block_tokens;
  const double column_tiles =
      static_cast<double>(num_rows) * static_cast<double>(group) / layout.columns +
      static_cast<double>(params.num_seqs) + 2;
  const int64_t tiles = layout.max_tokens / kTileTokens + 1;
  const int64_t row_bytes = row_data_bytes(geometry.k_format, geometry.k_dim) +
                            row_scale_bytes(geometry.k_format, geometry.k_dim);
  layout.begin_tiles =
      static_cast<int32_t>(std::max<int64_t>(kBeginBytes / (2 * kTileTokens * row_bytes), 1));
  layout.prefix = prefix_layout(params);
  if (layout.prefix.is_used) layout.begin_tiles += kPrefixTiles;
  layout.max_units =
      column_tiles * geometry.num_kv_heads * (static_cast<double>(tiles) + layout.begin_tiles);
  double slots = 2 * kMaxCtas;
  if (params.deterministic || params.num_splits > 0) {
    const bool is_given = params.num_splits > 0;
    layout.begin_tiles = 0;
    layout.piece_tiles = is_given ? 1 : kPieceTiles;
    layout.max_pieces = is_given ? std::min(params.num_splits, kMaxGivenPieces) : kMaxPieces;
    const int64_t pieces = std::min<int64_t>(layout.max_pieces, tiles / layout.piece_tiles + 1);
    slots = column_tiles * geometry.num_kv_heads * static_cast<double>(pieces);
  }
  layout.wanted_bytes = slots * part_bytes(layout.columns, geometry.v_dim);
  if (layout.wanted_bytes > kMaxPartsBytes) return layout;
  layout.lengths_bytes = round_up(params.num_seqs * 16);
  layout.parts_bytes = round_up(static_cast<int64_t>(layout.wanted_bytes));
  return layout;
}

DecodeLayer decode_layer(const LayerView& layer) {
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  DecodeLayer made = {};
  made.base = reinterpret_cast<const uint8_t*>(layer.base);
  made.num_blocks = layer.num_blocks;
  made.block_stride_bytes = static_cast<uint32_t>(layer.block_stride_bytes);
  made.keys_offset_bytes = static_cast<uint32_t>(page.k_data_offset_bytes);
  made.key_scales_offset_bytes = static_cast<uint32_t>(page.k_scale_offset_bytes);
  made.values_offset_bytes = page.v_data_offset_bytes - page.k_data_offset_bytes;
  made.value_scales_offset_bytes = page.v_scale_offset_bytes - page.k_scale_offset_bytes;
  const auto in_head = [&](int64_t row_bytes) {
    return static_cast<uint32_t>(row_bytes * geometry.block_tokens);
  };
  made.head_bytes = in_head(row_data_bytes(geometry.k_format, geometry.k_dim));
  made.head_scale_bytes = in_head(row_scale_bytes(geometry.k_format, geometry.k_dim));
  made.block_shift = std::countr_zero(static_cast<unsigned>(geometry.block_tokens / kTileTokens));
  made.block_mask = static_cast<uint32_t>(geometry.block_tokens / kTileTokens) - 1;
  return made;
}

// Of no other call of this process, and no number that memory is likely to hold, such as that of a
// process which had the memory before and was killed.
uint64_t next_stamp() {
  static std::atomic<uint64_t> count{uint64_t{std::random_device{}()} << 32 |
                                     std::random_device{}()};
  uint64_t mixed = (count.fetch_add(1, std::memory_order_relaxed) + 1) * 0x9E3779B97F4A7C15ull;
  mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9ull;
  return (mixed ^ mixed >> 27) | 1;  // not what zeros have, in marks either
}

// Lengths that somebody else may change meanwhile are read from a copy: CTAs wait for each other,
// and read what others have left, by what they say.
Status copy_lengths(const Target& target, AttendParams& params) {
  std::byte* memory = target.workspace;
  const auto copy = [&](auto*& array) -> Status {
    if (params.num_seqs == 0) return {};
    const auto bytes = static_cast<size_t>(params.num_seqs) * sizeof(*array);
    const void* from = array;
    array = reinterpret_cast<std::remove_reference_t<decltype(array)>>(memory);
    std::byte* to = memory;
    memory += bytes;
    return to_status("cudaMemcpyAsync",
                     cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(target)));
  };
  if (params.mask != nullptr)
    if (Status s = copy(params.mask_offsets); !s.ok()) return s;
  if (Status s = copy(params.q_lens); !s.ok()) return s;
  return copy(params.seq_lens);
}

DecodeCall decode_call(const AttendParams& params, const DecodeLayout& layout,
                       const Target& target) {
  const LayerView& layer = params.layer;
  const auto stride = [&](size_t axis) {
    return params.q.shape[axis] > 1 ? params.q.strides[axis] : 0;
  };
  DecodeCall call = {};
  call.layer = decode_layer(layer);
  call.q_lens = params.q_lens;
  call.seq_lens = params.seq_lens;
  call.block_table = params.block_table;
  call.mask = params.mask;
  call.mask_offsets = params.mask_offsets;
  call.mask_bytes = params.mask_bytes;
  call.block_table_stride = params.block_table_stride;
  call.num_rows = static_cast<int32_t>(params.q.shape[0]);
  call.max_tokens = static_cast<int32_t>(layout.max_tokens);
  call.q = params.q.data;
  call.q_row_stride = stride(0);
  call.q_head_stride = stride(1);
  call.output = OutputView(params.output);
  call.sinks = params.sinks;
  call.key_offset = is_centred(layer.key_transform) ? layer.key_offset : nullptr;
  call.shard = Shard(params.shard);
  call.num_seqs = static_cast<int32_t>(params.num_seqs);
  call.num_kv_heads = layer.geometry.num_kv_heads;
  call.group = static_cast<int32_t>(params.q.shape[1] / layer.geometry.num_kv_heads);
  call.group_inverse = static_cast<uint32_t>(
      std::min<uint64_t>((uint64_t{1} << 32) / static_cast<uint64_t>(call.group), 0xFFFFFFFFu));
  call.window_left = params.window_left;
  call.piece_tiles = layout.piece_tiles;
  call.max_pieces = layout.max_pieces;
  call.begin_tiles = layout.begin_tiles;
  call.scale = params.scale;
  call.logit_factor = params.scale * cpu::key_scale(layer) * kLog2E;
  call.value_factor = cpu::value_scale(layer);
  call.base2_cap = params.soft_cap * kLog2E;
  call.is_causal = params.causal && params.mask == nullptr;
  call.is_q_bf16 = params.q.dtype == Dtype::kBf16;
  call.is_rotated = is_rotated(layer.key_transform);
  call.rotation_factor = rotation_factor(rotation_dim(layer.geometry.k_dim));
  call.use = point_of_use(target);
  call.stamp = next_stamp();
  for (int i = 0; i < 4; ++i)
    call.marks[i] = static_cast<uint32_t>(call.stamp >> kMarkBits * i) & kMarkMask;
  call.parts = reinterpret_cast<uint8_t*>(target.workspace + layout.lengths_bytes);
  return call;
}

// Of everything that a plan follows from, beside the lengths.
uint64_t plan_key(const DecodeCall& call, const DecodeInstance& instance, int num_ctas,
                  const AttendParams& params, const PrefixLayout& prefix) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const int32_t prefix_tokens = prefix.is_used ? params.shared_prefix_tokens : 0;
  const auto of = [](auto value) { return static_cast<uint64_t>(value); };
  uint64_t key = 0x4C61726465720002;  // "Larder", and the plan's own form
  for (const uint64_t value :
       {of(geometry.k_format),       of(geometry.k_dim),    of(geometry.block_tokens),
        of(instance.columns),        of(instance.warps),    of(num_ctas),
        of(call.num_seqs),           of(call.num_rows),     of(call.max_tokens),
        of(call.block_table_stride), of(call.num_kv_heads), of(call.group),
        of(call.window_left),        of(call.is_causal),    of(call.begin_tiles),
        of(call.shard.num_ranks),    of(call.shard.rank),   of(call.shard.interleave),
        of(prefix_tokens),           of(prefix.tile_pairs)}) {
    key = (key ^ value) * 0x9E3779B97F4A7C15;
    key ^= key >> 29;
  }
  return key | 1;
}

// The memory is nullptr where the call plans for itself alone.
SharedPlan shared_plan(const AttendParams& params, const Target& target, const DecodeLayout& layout,
                       const DecodeCall& call, const DecodeInstance& instance, int num_ctas) {
  const int64_t prefix_at = round_up(kept_bytes(num_ctas, instance.warps));
  // Memory that the caller of a request names is not looked at.
  if (params.plan.memory == nullptr || target.rights != nullptr || layout.piece_tiles > 0 ||
      params.mask != nullptr || prefix_at + layout.prefix.kept_bytes > kAttendPlanBytes)
    return {};
  return {reinterpret_cast<uint8_t*>(params.plan.memory),
          plan_key(call, instance, num_ctas, params, layout.prefix),
          static_cast<int32_t>(prefix_at), params.plan.is_made};
}

DecodeInstance instance_for(KvFormat format, const DecodeDevice& device, int dim, int columns) {
  switch (format) {
    case KvFormat::kFp8E4m3:
      return fp8_instance(device, dim, columns);
    case KvFormat::kBf16:
      return bf16_instance(device, dim, columns);
    case KvFormat::kFp16:
      return fp16_instance(device, dim, columns);
    default:
      return nvfp4_instance(device, dim, columns);
  }
}

Status find_device(DecodeDevice& device) {
  int current = 0;
  if (Status s = to_status("cudaGetDevice", cudaGetDevice(&current)); !s.ok()) return s;
  if (Status s = to_status("cudaDevAttrMultiProcessorCount",
                           cudaDeviceGetAttribute(&device.num_multiprocessors,
                                                  cudaDevAttrMultiProcessorCount, current));
      !s.ok())
    return s;
  return to_status("cudaDevAttrMaxSharedMemoryPerBlockOptin",
                   cudaDeviceGetAttribute(&device.shared_bytes,
                                          cudaDevAttrMaxSharedMemoryPerBlockOptin, current));
}

}  // namespace

// See kernels.h. Everything but the data is looked at.
Status supports_attend_decode(const AttendParams& params) {
  if (Status s = supports_layer(params.layer); !s.ok()) return s;
  if (Status s = supports_tensors(params); !s.ok()) return s;
  if (params.layer.geometry.k_format == KvFormat::kBf16 && is_rotated(params.layer.key_transform))
    return not_tuned("bf16 keys are not rotated");
  if (Status s = supports_options(params); !s.ok()) return s;
  if (params.num_seqs >= int64_t{1} << 30) return not_tuned("below 2^30 sequences");
  const DecodeLayout layout = decode_layout(params);
  if (layout.max_units >= 0x1p31) return not_tuned("below 2^31 tiles, with what segments cost");
  if (layout.wanted_bytes > kMaxPartsBytes)
    return not_tuned("partial results take at most 512 MiB");
  return {};
}

int64_t attend_decode_workspace_bytes(const AttendParams& params) {
  return decode_layout(params).total();
}

Status attend_decode(const AttendParams& given, const Target& target) {
  if (given.q.shape[0] == 0) return leave_no_plan(given, target);
  AttendParams params = given;
  const DecodeLayout layout = decode_layout(params);
  DecodeDevice device;
  if (Status s = find_device(device); !s.ok()) return s;
  const AttentionGeometry& geometry = params.layer.geometry;
  const DecodeInstance instance =
      instance_for(geometry.k_format, device, geometry.k_dim, layout.columns);
  if (target.rights != nullptr)
    if (Status s = copy_lengths(target, params); !s.ok()) return s;
  DecodeCall call = decode_call(params, layout, target);
  const int num_ctas = std::min(device.num_multiprocessors, kMaxCtas);
  if (layout.piece_tiles == 0 && params.num_seqs > 0) {
    const int64_t column_tiles =
        (params.q.shape[0] / params.num_seqs * call.group + instance.columns - 1) /
        instance.columns;
    const int64_t segments = params.num_seqs * call.num_kv_heads * column_tiles;
    if (params.q.shape[0] % params.num_seqs == 0 && segments < std::numeric_limits<int32_t>::max())
      call.num_segments = static_cast<int32_t>(segments);
    if (call.num_segments > 0) call.whole_ctas = whole_ctas_of(segments, num_ctas);
  }
  call.shared = shared_plan(params, target, layout, call, instance, num_ctas);
  if (call.shared.memory == nullptr)
    if (Status s = leave_no_plan(params, target); !s.ok()) return s;
  if (layout.prefix.is_used) {
    std::byte* memory = target.workspace + layout.own_bytes();
    if (Status s = attend_prefix(params, target, layout.prefix, memory, call.shared, &call.prefix);
        !s.ok())
      return s;
  }
  return instance.launch(call, instance, num_ctas, stream_of(target));
}

}  // namespace larder::kernels::cuda
