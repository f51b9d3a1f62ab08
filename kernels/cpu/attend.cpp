#include "kernels/cpu/attend.h"

#include <algorithm>
#include <cstdint>
#include <utility>

#include "kernels/cpu/formats.h"
#include "kernels/cpu/layer_scale.h"
#include "kernels/cpu/workspace.h"
#include "kernels/visible.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attend.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/tiles-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

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

  int64_t token(int64_t row) const { return row / group_size; }  // within the sequence's rows
  int64_t q_head(int64_t row) const { return kv_head * group_size + row % group_size; }
  const int32_t* blocks() const {
    return params->block_table + sequence * params->block_table_stride;
  }
  KeyRange keys(int64_t row) const { return visible_keys(*params, sequence, token(row)); }

  Seen seen(int64_t row, int64_t tile) const {
    const KeyRange range = keys(row);
    const int64_t first = std::clamp<int64_t>(range.begin - tile, 0, kTileKeys);
    const int64_t last = std::clamp<int64_t>(range.end - tile, 0, kTileKeys);
    if (first >= last || params->mask == nullptr) return seen_range(first, last);
    return mask_bits(*params, sequence, token(row), tile + first, tile + last) << first;
  }
};

// Decodes keys [begin, end) of the tile that starts at `tile`, and no other key.
void load_paged_tile(const RowGroup& rows, int64_t tile, int64_t begin, int64_t end,
                     Workspace& space) {
  const LayerView& layer = rows.params->layer;
  const AttentionGeometry& geometry = layer.geometry;
  const PageLayout& page = layer.page;
  const int32_t* blocks = rows.blocks();
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
               space.v_tile + lane * space.v_stride);
    if (lane % 4 == 3 || key == end - 1)
      transpose_lanes(space.k_rows, space.k_width, lane, geometry.k_dim, space);
  }
}

void load_mla_tile(const RowGroup& rows, int64_t tile, int64_t begin, int64_t end,
                   Workspace& space) {
  const LayerView& layer = rows.params->layer;
  const int64_t block_tokens = layer.geometry.block_tokens;
  for (int64_t key = begin; key < end; ++key)
    load_mla_key(layer, rows.blocks()[key / block_tokens], key % block_tokens, key - tile,
                 key == end - 1, space);
}

// What centring took from every logit of the row: scale * q.c, c being the offset of the KV head.
float centring_shift(const RowGroup& rows, const float* q) {
  const LayerView& layer = rows.params->layer;
  const float* offset = layer.key_offset + rows.kv_head * layer.geometry.k_dim;
  double sum = 0.0;
  for (int64_t i = 0; i < layer.geometry.k_dim; ++i) sum += double{q[i]} * offset[i];
  return static_cast<float>(rows.params->scale * sum);
}

void load_queries(const RowGroup& rows, Workspace& space) {
  const AttendParams& params = *rows.params;
  const KeyTransform transform = params.layer.key_transform;
  for (int64_t row = rows.begin; row < rows.end; ++row) {
    const int64_t local = row - rows.begin;
    float* q = space.q + local * space.k_width;
    load_query(params.q, rows.first_token + rows.token(row), rows.q_head(row), local, space);
    if (is_centred(transform)) space.shift[local] = centring_shift(rows, q);
    if (is_rotated(transform)) rotate_row(q, params.layer.geometry.k_dim);
    if (params.alibi_slopes != nullptr) {
      // Distances count from the row's position, so that they are small where they matter; what
      // that takes from every logit comes back in the LSE.
      const int64_t before = int64_t{params.seq_lens[rows.sequence]} - params.q_lens[rows.sequence];
      space.slope[local] = params.alibi_slopes[rows.q_head(row)];
      space.position[local] = before + rows.token(row);
      space.lse_shift[local] = double{space.slope[local]} * static_cast<double>(before);
    }
  }
}

void attend_tile(const RowGroup& rows, int64_t tile, KeyRange part, const LogitRule& rule,
                 Workspace& space) {
  const Seen in_part = seen_range(std::clamp<int64_t>(part.begin - tile, 0, kTileKeys),
                                  std::clamp<int64_t>(part.end - tile, 0, kTileKeys));
  for (int64_t row = rows.begin; row < rows.end;) {
    const Seen seen = rows.seen(row, tile) & in_part;
    int64_t next = row + 1;
    while (next < rows.end && (rows.seen(next, tile) & in_part) == seen) ++next;
    if (seen != 0)
      attend_rows(row - rows.begin, next - rows.begin, seen, rule, tile,
                  rows.params->layer.geometry, space);
    row = next;
  }
}

// Adds the keys of `part` to the rows' state, in stretches.
void attend_part(const RowGroup& rows, KeyRange part, const LogitRule& rule, Workspace& space) {
  static_assert(cpu::kStretchKeys % kTileKeys == 0);
  const bool is_mla = rows.params->layer.geometry.mla_row != MlaRow::kNone;
  const auto load_tile = is_mla ? load_mla_tile : load_paged_tile;
  for (int64_t tile = part.begin / kTileKeys * kTileKeys; tile < part.end; tile += kTileKeys) {
    if (tile % cpu::kStretchKeys == 0 && tile > part.begin) space.end_part(rows.end - rows.begin);
    load_tile(rows, tile, std::max(part.begin, tile), std::min(part.end, tile + kTileKeys), space);
    attend_tile(rows, tile, part, rule, space);
  }
}

// num_splits parts of equal length (the last ones shorter or empty) of the keys that the sequence's
// rows see, taken one by one and merged; `keys` are those of the rows here.
void attend_in_parts(const RowGroup& rows, KeyRange keys, const LogitRule& rule, Workspace& space) {
  const KeyRange all = touched_keys(*rows.params, rows.sequence);
  const int64_t num_splits = rows.params->num_splits;
  const int64_t part_keys = (all.end - all.begin + num_splits - 1) / num_splits;
  for (int64_t begin = all.begin; begin < all.end; begin += part_keys) {
    const KeyRange part = {std::max(begin, keys.begin), std::min(begin + part_keys, keys.end)};
    if (part.begin >= part.end) continue;
    attend_part(rows, part, rule, space);
    space.end_part(rows.end - rows.begin);
  }
}

void attend_group(const RowGroup& rows, Workspace& space) {
  const AttendParams& params = *rows.params;
  const LayerView& layer = params.layer;
  const LogitRule rule = {params.scale * cpu::key_scale(layer), params.soft_cap,
                          is_centred(layer.key_transform), params.alibi_slopes != nullptr,
                          params.shard};
  // Later rows see keys at least as late, and begin no earlier.
  const KeyRange keys = {rows.keys(rows.begin).begin, rows.keys(rows.end - 1).end};
  load_queries(rows, space);
  space.begin(rows.end - rows.begin);
  if (params.num_splits > 1)
    attend_in_parts(rows, keys, rule, space);
  else
    attend_part(rows, keys, rule, space);
  space.finish(rows.end - rows.begin);
  for (int64_t row = rows.begin; row < rows.end; ++row)
    store_row(params.output, rows.first_token + rows.token(row), rows.q_head(row), row - rows.begin,
              cpu::value_scale(layer), params.sinks, layer.geometry.v_dim, space);
}

void attend_on_target(const AttendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const int64_t group_size = params.q.shape[1] / geometry.num_kv_heads;
  int64_t max_rows = 0;
  bool in_parts = params.num_splits > 1;
  for (int64_t sequence = 0; sequence < params.num_seqs; ++sequence) {
    max_rows = std::max(max_rows, params.q_lens[sequence] * group_size);
    in_parts = in_parts || cached_keys(params, sequence) > cpu::kStretchKeys;
  }
  max_rows = std::min(max_rows, kTileRows);
  if (max_rows == 0) return;
  Workspace space(geometry, max_rows, in_parts);
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
