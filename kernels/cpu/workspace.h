// The memory that attend and sparse_mla work in: one allocation per call.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <utility>

#include <hwy/aligned_allocator.h>

#include "kernels/cpu/attend.h"
#include "larder/check.h"
#include "larder/kv_format.h"

namespace larder::kernels::cpu {

// Widest vector of any target, in floats: the rows of every area are multiples of it.
inline constexpr int64_t kPadFloats = 16;

constexpr int64_t round_up(int64_t value, int64_t multiple) {
  return (value + multiple - 1) / multiple * multiple;
}

// Online softmax of up to kTileRows rows over the keys so far.
template <typename Sum>
struct Softmax {
  Sum* out = nullptr;     // [max_rows, v_width]: sum of weight * V
  float max[kTileRows];   // largest logit; -inf before the first
  double sum[kTileRows];  // sum of exp(logit - max)
};

struct Workspace {
  // max_rows: the most query rows that are taken together, at most kTileRows. in_parts: keys may be
  // taken in parts whose states are added up (`total`).
  Workspace(const AttentionGeometry& geometry, int64_t max_rows, bool in_parts)
      : k_width(round_up(geometry.k_dim, kPadFloats)),
        v_width(round_up(geometry.v_dim, kPadFloats)),
        v_stride(geometry.mla_row == MlaRow::kNone ? v_width : k_width) {
    memory = hwy::AllocateAligned<float>(
        static_cast<size_t>(kTileKeys * (k_width + v_stride) + 4 * k_width +
                            max_rows * (k_width + kTileKeys + v_width)));
    LARDER_CHECK(memory != nullptr, "no memory for attend with dims", k_width, v_width);
    float* next = memory.get();
    const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
    k_tile = take(k_width * kTileKeys);
    k_rows = take(4 * k_width);
    v_tile = take(kTileKeys * v_stride);
    q = take(max_rows * k_width);
    weights = take(max_rows * kTileKeys);
    state.out = take(max_rows * v_width);
    if (in_parts) {
      total_memory = hwy::AllocateAligned<double>(static_cast<size_t>(max_rows * v_width));
      LARDER_CHECK(total_memory != nullptr, "no memory for attend with dims", k_width, v_width);
      total.out = total_memory.get();
    }
    // Lanes of keys that no row sees are computed and then masked: any value will do there, but
    // not uninitialised memory. So are the columns past v_dim. The rest is written before it is
    // read.
    std::fill(k_tile, q, 0.0f);
  }

  // Before the first key of a part.
  void begin_part(int64_t num_rows) {
    std::fill_n(state.out, num_rows * v_width, 0.0f);
    std::fill_n(state.max, num_rows, -std::numeric_limits<float>::infinity());
    std::fill_n(state.sum, num_rows, 0.0);
  }

  // Before the first part.
  void begin(int64_t num_rows) {
    has_total = false;
    begin_part(num_rows);
  }

  // Adds the part's state to the total. A part in which a row sees nothing does not count, and one
  // that counts alone is passed on as it is. A NaN stays.
  void end_part(int64_t num_rows) {
    if (!has_total) {
      std::fill_n(total.out, num_rows * v_width, 0.0);
      std::fill_n(total.sum, num_rows, 0.0);
      has_total = true;
    }
    for (int64_t row = 0; row < num_rows; ++row) {
      if (state.sum[row] == 0.0) continue;
      const bool is_first = total.sum[row] == 0.0;
      const float max = is_first ? state.max[row] : std::max(total.max[row], state.max[row]);
      const double keep = is_first ? 0.0 : std::exp(double{total.max[row]} - max);
      const double weight = is_first ? 1.0 : std::exp(double{state.max[row]} - max);
      const float* from = state.out + row * v_width;
      double* to = total.out + row * v_width;
      for (int64_t i = 0; i < v_width; ++i) to[i] = to[i] * keep + from[i] * weight;
      total.sum[row] = total.sum[row] * keep + state.sum[row] * weight;
      total.max[row] = max;
    }
    begin_part(num_rows);
  }

  // After the last part: the state of all keys, in `state`.
  void finish(int64_t num_rows) {
    if (!has_total) return;
    end_part(num_rows);
    for (int64_t row = 0; row < num_rows; ++row) {
      if (total.sum[row] == 0.0) continue;
      for (int64_t i = 0; i < v_width; ++i)
        state.out[row * v_width + i] = static_cast<float>(total.out[row * v_width + i]);
      state.max[row] = total.max[row];
      state.sum[row] = total.sum[row];
    }
  }

  int64_t k_width;  // k_dim and v_dim, padded
  int64_t v_width;
  int64_t v_stride;  // floats from one row of v_tile to the next
  hwy::AlignedFreeUniquePtr<float[]> memory;
  float* k_tile;         // [k_width, kTileKeys]: transposed, so that lanes are keys
  float* k_rows;         // [4, k_width]: four decoded K rows on their way into k_tile; not with MLA
  float* v_tile;         // [kTileKeys, v_stride]; MLA: whole rows, which begin with V
  float* q;              // [max_rows, k_width]
  float* weights;        // [max_rows, kTileKeys]: logits, then exp(logit - max)
  Softmax<float> state;  // of the present part of the keys
  hwy::AlignedFreeUniquePtr<double[]> total_memory;
  Softmax<double> total;   // of the parts before it
  bool has_total = false;  // there were any
  // Of each row, where LogitRule asks for them: what is added to its logits; the ALiBi slope; the
  // row's position in its sequence.
  float shift[kTileRows];
  float slope[kTileRows];
  int64_t position[kTileRows];
  double lse_shift[kTileRows] = {};  // what all logits of a row lack
};

}  // namespace larder::kernels::cpu
