// The memory that attend works in: one allocation per call.
#pragma once

#include <algorithm>
#include <cstdint>
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

struct Workspace {
  // max_rows: the most query rows that are taken together, at most kTileRows.
  Workspace(const AttentionGeometry& geometry, int64_t max_rows)
      : k_width(round_up(geometry.k_dim, kPadFloats)),
        v_width(round_up(geometry.v_dim, kPadFloats)),
        memory(hwy::AllocateAligned<float>(
            static_cast<size_t>(kTileKeys * (k_width + v_width) + 4 * k_width +
                                max_rows * (k_width + v_width + kTileKeys)))) {
    LARDER_CHECK(memory != nullptr, "no memory for attend with dims", k_width, v_width);
    float* next = memory.get();
    const auto take = [&next](int64_t count) { return std::exchange(next, next + count); };
    k_tile = take(k_width * kTileKeys);
    k_rows = take(4 * k_width);
    v_tile = take(kTileKeys * v_width);
    q = take(max_rows * k_width);
    weights = take(max_rows * kTileKeys);
    out = take(max_rows * v_width);
    // Lanes of keys that no row sees are computed and then masked: any value will do there, but
    // not uninitialised memory. So are the columns past v_dim. The rest is written before it is
    // read.
    std::fill(k_tile, q, 0.0f);
  }

  int64_t k_width;  // k_dim and v_dim, padded
  int64_t v_width;
  hwy::AlignedFreeUniquePtr<float[]> memory;
  float* k_tile;          // [k_width, kTileKeys]: transposed, so that lanes are keys
  float* k_rows;          // [4, k_width]: four decoded K rows on their way into k_tile
  float* v_tile;          // [kTileKeys, v_width]
  float* q;               // [max_rows, k_width]
  float* weights;         // [max_rows, kTileKeys]: logits, then exp(logit - max)
  float* out;             // [max_rows, v_width]: sum of weight * V so far
  float max[kTileRows];   // largest logit so far; -inf before the first
  double sum[kTileRows];  // sum of exp(logit - max) so far
};

}  // namespace larder::kernels::cpu
