#include "kernels/cpu/sparse_mla.h"

#include <algorithm>
#include <cstdint>

#include "kernels/cpu/formats.h"
#include "kernels/cpu/layer_scale.h"
#include "kernels/cpu/workspace.h"
#include "kernels/visible.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/sparse_mla.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#include "kernels/cpu/softmax-inl.h"
#include "kernels/cpu/tiles-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

// Heads [first_head, last_head) of one query row.
void attend_heads(const SparseMlaParams& params, int64_t row, int64_t first_head, int64_t last_head,
                  Workspace& space) {
  const LayerView& layer = params.layer;
  const int64_t block_tokens = layer.geometry.block_tokens;
  const int64_t num_heads = last_head - first_head;
  const LogitRule rule = {.scale = params.scale * cpu::key_scale(layer)};
  for (int64_t head = first_head; head < last_head; ++head)
    load_query(params.q, row, head, head - first_head, space);
  space.begin(num_heads);
  int64_t taken = 0;  // entries that counted: whole tiles but for the last
  for (int64_t entry = 0; entry < params.top_k;) {
    // The next entries that count, up to a tile of them.
    int64_t slots[kTileKeys];
    int64_t count = 0;
    for (; entry < params.top_k && count < kTileKeys; ++entry) {
      slots[count] = sparse_mla_slot(params, row, entry);
      if (slots[count] >= 0) ++count;
    }
    if (count == 0) break;
    if (taken > 0 && taken % cpu::kStretchKeys == 0) space.end_part(num_heads);
    taken += count;
    for (int64_t lane = 0; lane < count; ++lane)
      load_mla_key(layer, slots[lane] / block_tokens, slots[lane] % block_tokens, lane,
                   lane == count - 1, space);
    attend_rows(0, num_heads, seen_range(0, count), rule, 0, layer.geometry, space);
  }
  space.finish(num_heads);
  for (int64_t head = first_head; head < last_head; ++head)
    store_row(params.output, row, head, head - first_head, cpu::value_scale(layer), params.sinks,
              kMlaLatentDim, space);
}

void sparse_mla_on_target(const SparseMlaParams& params) {
  const auto& [num_rows, num_heads, dim] = params.q.shape;
  if (num_rows == 0) return;
  Workspace space(params.layer.geometry, std::min(num_heads, kTileRows),
                  params.top_k > cpu::kStretchKeys);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t head = 0; head < num_heads; head += kTileRows)
      attend_heads(params, row, head, std::min(head + kTileRows, num_heads), space);
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace larder::kernels {

HWY_EXPORT(sparse_mla_on_target);

namespace cpu {

Status supports_sparse_mla(const SparseMlaParams& params) {
  if (params.layer.geometry.mla_row == MlaRow::kNone)
    return {ErrorCode::kUnsupported, "mla_row is none: sparse_mla reads MLA rows"};
  return supports_formats(params.layer.geometry);
}

void sparse_mla(const SparseMlaParams& params) {
  HWY_DYNAMIC_DISPATCH(sparse_mla_on_target)(params);
}

}  // namespace cpu
}  // namespace larder::kernels
#endif
