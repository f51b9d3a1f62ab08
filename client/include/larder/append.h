// What an append takes beside rows of K and V.
#pragma once

#include <cstdint>

#include "larder/rope.h"
#include "larder/tensor.h"

namespace larder {

// Of Pool::append.
struct AppendOptions {
  // Turns the keys on their way, in process; on request it is UNSUPPORTED. Positions are in host
  // memory; tables too, or in a GPU pool in memory of its GPU.
  Rope rope = {};
};

// Where rows go, with everything in device memory (Pool::append_in_stream). A row whose position
// cannot be is left out.
struct DeviceAppendBatch {
  // Either of the two: block id * block_tokens + offset; negative: the row is skipped.
  const int64_t* slots = nullptr;    // [num_slots]
  const int32_t* slots32 = nullptr;  // [num_slots]
  int64_t num_slots = 0;
  Rope rope = {};
};

// One layer's rows for Pool::append_layers_in_stream.
struct LayerRows {
  int32_t layer = 0;
  TensorView k;  // [num_rows, num_kv_heads, k_dim]
  TensorView v;  // [num_rows, num_kv_heads, v_dim]
};

}  // namespace larder
