#include "kernels/cpu/attend.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/formats.h"
#include "kernels/cpu/workspace.h"
#include "kernels/visible.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#include <hwy/contrib/math/math-inl.h>
#include "kernels/cpu/matrix-inl.h"
#include "kernels/cpu/rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

using cpu::kPadFloats;
using cpu::kTileKeys;
using cpu::kTileRows;
using cpu::round_up;
using cpu::Workspace;

// Query rows that are taken together: rows [begin, end) of one sequence and KV head, numbered
// token * group_size + head.
struct RowGroup {
  const AttendParams* params;
  int64_t sequence;
  int64_t kv_head;
  int64_t first_token;  // the sequence's first row in q and out
  int64_t group_size;   // q heads per KV head
  int64_t begin;
  int64_t end;

  KeyRange keys(int64_t row) const {
    return visible_keys(params->causal, params->window_left, params->q_lens[sequence],
                        params->seq_lens[sequence], row / group_size);
  }
  int64_t token(int64_t row) const { return first_token + row / group_size; }
  int64_t q_head(int64_t row) const { return kv_head * group_size + row % group_size; }
};

// Where a row of a [tokens, heads, dim] tensor begins. The stride of an axis of size 1 may be
// anything; it only meets index 0 here.
inline std::byte* tensor_row(const TensorView& view, int64_t token, int64_t head) {
  return static_cast<std::byte*>(view.data) +
         (token * view.strides[0] + head * view.strides[1]) * dtype_bytes(view.dtype);
}

inline int64_t dim_stride(const TensorView& view) {
  return view.shape[2] > 1 ? view.strides[2] : 1;
}

// nvfp4 values are kept without the tensor's scale until the end; bf16 has none.
inline float tensor_scale(KvFormat format, float scale) {
  return format == KvFormat::kNvfp4 ? scale : 1.0f;
}

// Decodes keys [begin, end) of the tile that starts at `tile`, and no other key.
void load_tile(const RowGroup& rows, int64_t tile, int64_t begin, int64_t end, Workspace& space) {
  const LayerView& layer = rows.params->layer;
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  const int32_t* blocks =
      rows.params->block_table + rows.sequence * rows.params->block_table_stride;
  const int64_t k_data_bytes = row_data_bytes(geometry.k_format, geometry.k_dim);
  const int64_t k_scale_bytes = row_scale_bytes(geometry.k_format, geometry.k_dim);
  const int64_t v_data_bytes = row_data_bytes(geometry.v_format, geometry.v_dim);
  const int64_t v_scale_bytes = row_scale_bytes(geometry.v_format, geometry.v_dim);
  for (int64_t key = begin; key < end; ++key) {
    const std::byte* block =
        layer.base + blocks[key / geometry.block_tokens] * layer.block_stride_bytes;
    const int64_t row = rows.kv_head * geometry.block_tokens + key % geometry.block_tokens;
    const int64_t lane = key - tile;
    decode_row(geometry.k_format, block + page.k_data_offset_bytes + row * k_data_bytes,
               block + page.k_scale_offset_bytes + row * k_scale_bytes, geometry.k_dim,
               space.k_rows + lane % 4 * space.k_width);
    decode_row(geometry.v_format, block + page.v_data_offset_bytes + row * v_data_bytes,
               block + page.v_scale_offset_bytes + row * v_scale_bytes, geometry.v_dim,
               space.v_tile + lane * space.v_width);
    // Lanes of keys outside [begin, end) get what is left in k_rows; they are masked.
    if (lane % 4 == 3 || key == end - 1)
      transpose_four_rows(space.k_rows, space.k_width, round_up(geometry.k_dim, 4),
                          space.k_tile + lane / 4 * 4, kTileKeys);
  }
}

void load_queries(const RowGroup& rows, Workspace& space) {
  const TensorView& q = rows.params->q;
  for (int64_t row = rows.begin; row < rows.end; ++row)
    load_floats(q.dtype, tensor_row(q, rows.token(row), rows.q_head(row)), dim_stride(q),
                q.shape[2], space.q + (row - rows.begin) * space.k_width);
  const int64_t num_rows = rows.end - rows.begin;
  std::fill_n(space.out, num_rows * space.v_width, 0.0f);
  std::fill_n(space.max, num_rows, -std::numeric_limits<float>::infinity());
  std::fill_n(space.sum, num_rows, 0.0);
}

// Scales the logits of lanes [begin, end), makes the others -inf, and returns the largest.
inline float mask_logits(float* logits, int64_t begin, int64_t end, float scale) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const auto first = hn::Set(d, static_cast<float>(begin));
  const auto last = hn::Set(d, static_cast<float>(end));
  const auto minus_infinity = hn::Set(d, -std::numeric_limits<float>::infinity());
  auto largest = minus_infinity;
  for (int64_t lane = begin / lanes * lanes; lane < end; lane += lanes) {
    const auto index = hn::Iota(d, static_cast<float>(lane));
    const auto seen = hn::And(hn::Ge(index, first), hn::Lt(index, last));
    const auto logit = hn::Mul(hn::Load(d, logits + lane), hn::Set(d, scale));
    const auto masked = hn::IfThenElse(seen, logit, minus_infinity);
    hn::Store(masked, d, logits + lane);
    largest = hn::Max(largest, masked);
  }
  return hn::GetLane(hn::MaxOfLanes(d, largest));
}

// logits -> exp(logit - max), 0 where masked; returns their sum. A NaN logit stays NaN.
inline float exponentiate(float* logits, int64_t begin, int64_t end, float max) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  auto sum = hn::Zero(d);
  for (int64_t lane = begin / lanes * lanes; lane < end; lane += lanes) {
    const auto difference = hn::Sub(hn::Load(d, logits + lane), hn::Set(d, max));
    const auto weight = hn::IfThenElse(hn::IsNaN(difference), difference, hn::Exp(d, difference));
    hn::Store(weight, d, logits + lane);
    sum = hn::Add(sum, weight);
  }
  return hn::GetLane(hn::SumOfLanes(d, sum));
}

// Online softmax of one row over lanes [begin, end) of the tile.
void soften_row(int64_t row, int64_t begin, int64_t end, float scale, Workspace& space) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  float* logits = space.weights + row * kTileKeys;
  const float tile_max = mask_logits(logits, begin, end, scale);
  const float old_max = space.max[row];
  if (tile_max > old_max) {
    const float shrink = std::exp(old_max - tile_max);  // 0 before the first key
    space.max[row] = tile_max;
    space.sum[row] *= shrink;
    float* out = space.out + row * space.v_width;
    for (int64_t i = 0; i < space.v_width; ++i) out[i] *= shrink;
  }
  // While every logit is -inf, any finite base gives weights of 0; -inf - -inf would not.
  const float base = space.max[row] == kMinusInfinity ? 0.0f : space.max[row];
  space.sum[row] += exponentiate(logits, begin, end, base);
}

// Rows [first, last) of the group, which see the same lanes [begin, end) of the tile.
void attend_rows(int64_t first, int64_t last, int64_t begin, int64_t end, float scale,
                 const AttentionGeometry& geometry, Workspace& space) {
  const int64_t num_rows = last - first;
  const int64_t num_lanes = round_up(end, kPadFloats);
  float* weights = space.weights + first * kTileKeys;
  std::fill_n(weights, num_rows * kTileKeys, 0.0f);
  multiply_add({0, geometry.k_dim, space.q + first * space.k_width, space.k_width, space.k_tile,
                kTileKeys, weights, kTileKeys},
               num_rows, num_lanes);
  for (int64_t row = first; row < last; ++row) soften_row(row, begin, end, scale, space);
  multiply_add({begin, end, weights, kTileKeys, space.v_tile, space.v_width,
                space.out + first * space.v_width, space.v_width},
               num_rows, space.v_width);
}

void attend_tile(const RowGroup& rows, int64_t tile, float scale, Workspace& space) {
  const AttentionGeometry& geometry = rows.params->layer.geometry;
  const auto lanes_of = [&](int64_t row) {
    const KeyRange keys = rows.keys(row);
    return KeyRange{std::clamp<int64_t>(keys.begin - tile, 0, kTileKeys),
                    std::clamp<int64_t>(keys.end - tile, 0, kTileKeys)};
  };
  for (int64_t row = rows.begin; row < rows.end;) {
    const KeyRange lanes = lanes_of(row);
    int64_t next = row + 1;
    while (next < rows.end && lanes_of(next) == lanes) ++next;
    if (lanes.begin < lanes.end)
      attend_rows(row - rows.begin, next - rows.begin, lanes.begin, lanes.end, scale, geometry,
                  space);
    row = next;
  }
}

void store_rows(const RowGroup& rows, Workspace& space) {
  const AttendParams& params = *rows.params;
  const LayerView& layer = params.layer;
  const float v_scale = tensor_scale(layer.geometry.v_format, layer.v_scale);
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t local = row - rows.begin;
    float* out = space.out + local * space.v_width;
    const double sum = space.sum[local];
    const bool empty = sum == 0.0;  // no key, or none with a logit above -inf
    const auto factor = static_cast<float>(v_scale / sum);
    for (int64_t i = 0; i < layer.geometry.v_dim; ++i) out[i] = empty ? 0.0f : out[i] * factor;
    const int64_t token = rows.token(row);
    const int64_t head = rows.q_head(row);
    store_floats(params.out.dtype, out, dim_stride(params.out), layer.geometry.v_dim,
                 tensor_row(params.out, token, head));
    if (params.lse == nullptr) continue;
    params.lse[token * params.q.shape[1] + head] =
        empty ? -std::numeric_limits<float>::infinity()
              : static_cast<float>(space.max[local] + std::log(sum));
  }
}

void attend_group(const RowGroup& rows, Workspace& space) {
  const LayerView& layer = rows.params->layer;
  const float scale = rows.params->scale * tensor_scale(layer.geometry.k_format, layer.k_scale);
  // Later rows see keys at least as late, and begin no earlier.
  const int64_t begin = rows.keys(rows.begin).begin;
  const int64_t end = rows.keys(rows.end - 1).end;
  load_queries(rows, space);
  for (int64_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
    load_tile(rows, tile, std::max(begin, tile), std::min(end, tile + kTileKeys), space);
    attend_tile(rows, tile, scale, space);
  }
  store_rows(rows, space);
}

void attend_on_target(const AttendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const int64_t group_size = params.q.shape[1] / geometry.num_kv_heads;
  int64_t max_rows = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence)
    max_rows = std::max(max_rows, params.q_lens[sequence] * group_size);
  max_rows = std::min(max_rows, kTileRows);
  if (max_rows == 0) return;
  Workspace space(geometry, max_rows);
  int64_t first_token = 0;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    const int64_t num_rows = params.q_lens[sequence] * group_size;
    for (int64_t kv_head = 0; kv_head < geometry.num_kv_heads; ++kv_head)
      for (int64_t row = 0; row < num_rows; row += kTileRows)
        attend_group({&params, sequence, kv_head, first_token, group_size, row,
                      std::min(row + kTileRows, num_rows)},
                     space);
    first_token += params.q_lens[sequence];
  }
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace larder::kernels {

HWY_EXPORT(attend_on_target);

namespace cpu {

Status supports_attend(const AttendParams& params) {
  return supports_formats(params.layer.geometry);
}

void attend(const AttendParams& params) { HWY_DYNAMIC_DISPATCH(attend_on_target)(params); }

}  // namespace cpu
}  // namespace larder::kernels
#endif
