// Attention of query rows over one decoded tile of keys, once per vector target of Highway: logits
// with their options, online softmax, sums of V. Shared by attend and sparse_mla.

#if defined(LARDER_KERNELS_CPU_SOFTMAX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_SOFTMAX_INL_H_
#undef LARDER_KERNELS_CPU_SOFTMAX_INL_H_
#else
#define LARDER_KERNELS_CPU_SOFTMAX_INL_H_
#endif

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include "kernels/cpu/matrix-inl.h"
#include "kernels/cpu/output-inl.h"
#include "kernels/cpu/rows-inl.h"
#include "kernels/cpu/workspace.h"
#include "larder/context_shard.h"

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

using cpu::kPadFloats;
using cpu::kTileKeys;
using cpu::kTileRows;
using cpu::round_up;
using cpu::Workspace;

// From a product q.k to a logit: scale, then shift, soft cap and slope where they are on.
struct LogitRule {
  float scale = 1.0f;
  float soft_cap = 0.0f;    // 0: none
  bool shifted = false;     // adds Workspace::shift
  bool sloped = false;      // adds Workspace::slope * (key - Workspace::position)
  ContextShard shard = {};  // which keys of the sequence the cached ones are

  bool is_plain() const { return soft_cap == 0.0f && !shifted && !sloped; }
};

// The keys of a tile that a row sees: bit i is key tile + i.
static_assert(kTileKeys == 64);
using Seen = uint64_t;

inline Seen seen_range(int64_t begin, int64_t end) {
  if (begin >= end) return 0;
  return (~Seen{0} >> (kTileKeys - (end - begin))) << begin;
}
inline int64_t seen_begin(Seen seen) { return std::countr_zero(seen); }
inline int64_t seen_end(Seen seen) { return kTileKeys - std::countl_zero(seen); }
inline bool has_holes(Seen seen) { return seen != seen_range(seen_begin(seen), seen_end(seen)); }

// cap * tanh(logit / cap). From 10 on tanh is 1 in float. A NaN stays one.
template <class D, class V = hn::Vec<D> >
HWY_INLINE V cap_logit(D d, V logit, float cap) {
  const auto ratio = hn::Div(logit, hn::Set(d, cap));
  const auto bounded = hn::Min(hn::Max(ratio, hn::Set(d, -10.0f)), hn::Set(d, 10.0f));
  return hn::IfThenElse(hn::IsNaN(ratio), ratio, hn::Mul(hn::Set(d, cap), hn::Tanh(d, bounded)));
}

// From `position` to the keys whose places in the cache are `key` and those after it.
HWY_INLINE hn::Vec<Floats> distances(const ContextShard& shard, int64_t key, int64_t position) {
  const Floats d;
  if (shard.num_ranks == 1) return hn::Iota(d, static_cast<float>(key - position));
  HWY_ALIGN float values[kPadFloats];
  for (int64_t i = 0; i < static_cast<int64_t>(hn::Lanes(d)); ++i)
    values[i] = static_cast<float>(global_token(shard, key + i) - position);
  return hn::Load(d, values);
}

// Products -> logits of one row, -inf in the holes of what it sees. `tile` is the key of lane 0.
inline void shape_logits(float* logits, Seen seen, const LogitRule& rule, int64_t row, int64_t tile,
                         const Workspace& space) {
  const Floats d;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  for (int64_t lane = seen_begin(seen) / lanes * lanes; lane < seen_end(seen); lane += lanes) {
    auto logit = hn::Mul(hn::Load(d, logits + lane), hn::Set(d, rule.scale));
    if (rule.shifted) logit = hn::Add(logit, hn::Set(d, space.shift[row]));
    if (rule.soft_cap > 0.0f) logit = cap_logit(d, logit, rule.soft_cap);
    if (rule.sloped) {
      const auto distance = distances(rule.shard, tile + lane, space.position[row]);
      logit = hn::Add(logit, hn::Mul(hn::Set(d, space.slope[row]), distance));
    }
    hn::Store(logit, d, logits + lane);
  }
  for (Seen holes = seen_range(seen_begin(seen), seen_end(seen)) & ~seen; holes != 0;
       holes &= holes - 1)
    logits[std::countr_zero(holes)] = -std::numeric_limits<float>::infinity();
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

// Online softmax of one row over the keys that it sees in the tile.
inline void soften_row(int64_t row, Seen seen, const LogitRule& rule, int64_t tile,
                       Workspace& space) {
  constexpr float kMinusInfinity = -std::numeric_limits<float>::infinity();
  cpu::Softmax<float>& state = space.state;
  float* logits = space.weights + row * kTileKeys;
  const int64_t begin = seen_begin(seen);
  const int64_t end = seen_end(seen);
  const bool shaped = !rule.is_plain() || has_holes(seen);
  if (shaped) shape_logits(logits, seen, rule, row, tile, space);
  const float tile_max = mask_logits(logits, begin, end, shaped ? 1.0f : rule.scale);
  const float old_max = state.max[row];
  if (tile_max > old_max) {
    const float shrink = std::exp(old_max - tile_max);  // 0 before the first key
    state.max[row] = tile_max;
    state.sum[row] *= shrink;
    float* out = state.out + row * space.v_width;
    for (int64_t i = 0; i < space.v_width; ++i) out[i] *= shrink;
  }
  // While every logit is -inf, any finite base gives weights of 0; -inf - -inf would not.
  const float base = state.max[row] == kMinusInfinity ? 0.0f : state.max[row];
  state.sum[row] += exponentiate(logits, begin, end, base);
}

// Rows [first, last), which see the same keys of the tile, at least one.
inline void attend_rows(int64_t first, int64_t last, Seen seen, const LogitRule& rule, int64_t tile,
                        const AttentionGeometry& geometry, Workspace& space) {
  const int64_t num_rows = last - first;
  float* weights = space.weights + first * kTileKeys;
  std::fill_n(weights, num_rows * kTileKeys, 0.0f);
  multiply_add({0, geometry.k_dim, space.q + first * space.k_width, space.k_width, space.k_tile,
                kTileKeys, weights, kTileKeys},
               num_rows, round_up(seen_end(seen), kPadFloats));
  for (int64_t row = first; row < last; ++row) soften_row(row, seen, rule, tile, space);
  // A key that is not seen is skipped: a weight of 0 would not keep out a NaN or an infinity.
  for (int64_t begin = seen_begin(seen), end; begin < seen_end(seen); begin = end) {
    end = begin + std::countr_one(seen >> begin);
    multiply_add({begin, end, weights, kTileKeys, space.v_tile, space.v_stride,
                  space.state.out + first * space.v_width, space.v_width},
                 num_rows, space.v_width);
    if (end < kTileKeys && seen >> end != 0) end += std::countr_zero(seen >> end);
  }
}

// Row `local` of the workspace as stored results: (row, head) of the output. `sinks`: [heads] or
// nullptr. A row without a key, or with no logit above -inf, is zeros, whatever its sink.
inline void store_row(const AttentionOutput& output, int64_t row, int64_t head, int64_t local,
                      float v_scale, const float* sinks, int64_t v_dim, Workspace& space) {
  const double sum = space.state.sum[local];
  const bool empty = sum == 0.0;
  const double lse =
      empty ? cpu::kNoKeys : space.state.max[local] + std::log(sum) + space.lse_shift[local];
  const double kept = sinks == nullptr || empty ? 1.0 : cpu::sink_factor(lse, sinks[head]);
  const auto factor = static_cast<float>(v_scale / sum * kept);
  float* out = space.state.out + local * space.v_width;
  // A sink that outweighs every key hides infinities too.
  const bool is_zero = empty || kept == 0.0;
  for (int64_t i = 0; i < v_dim; ++i) out[i] = is_zero ? 0.0f : out[i] * factor;
  store_output(output, row, head, out, v_dim);
  store_lse(output, row, head, lse, sinks);
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
