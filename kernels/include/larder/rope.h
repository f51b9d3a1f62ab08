// Rotary position embedding of keys (MLA: of the rope part) on their way into the cache.
#pragma once

#include <cstdint>

#include "larder/kv_format.h"

namespace larder {

// The first `dim` values of a row turn in pairs: (x, y) becomes (x * cos - y * sin, y * cos + x *
// sin) in float, each operation rounded, and the results are rounded to k's dtype: the bytes in the
// cache are those of a separate rotation in place that is followed by append. Before key
// transforms. A NaN that a rotation gives is the positive quiet one; values past `dim` keep their
// bits. Rows that append skips are not looked at, nor are their positions.
struct Rope {
  int32_t dim = 0;           // even, at most k_dim (MLA: 64) and kMaxRopeDim; 0: no rotation, and
                             // the rest is not looked at
  bool interleaved = false;  // pairs (2i, 2i + 1) instead of (i, i + dim / 2)
  // Either of the two, >= 0; with tables both may be nullptr: row i then has row i of the tables.
  const int64_t* positions = nullptr;    // [num_slots]
  const int32_t* positions32 = nullptr;  // [num_slots]
  // Either: pair i of position p turns by p * theta^(-2i / dim), in float64; sine and cosine are
  // rounded to float. theta > 1.
  double theta = 10000.0;
  // Or, if not nullptr: rows of dim / 2 values each, of position p in row p. A position past the
  // tables is refused, or its row left out and a fault reported where positions are device memory.
  const void* cos = nullptr;         // [table_rows, dim / 2]
  const void* sin = nullptr;         // [table_rows, dim / 2]
  Dtype table_dtype = Dtype::kFp32;  // bf16, fp16 or fp32
  int64_t table_stride = 0;          // elements from one row to the next; at least dim / 2
  int64_t table_rows = 0;
};

inline constexpr int32_t kMaxRopeDim = 256;

}  // namespace larder
