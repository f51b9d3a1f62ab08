// The key offsets of centred pools, as `larderctl calibrate` writes them.
#pragma once

#include <string>
#include <vector>

#include "larder/kv_format.h"
#include "larder/status.h"

namespace larder {

// PoolOptions::key_offsets from the tensor "key_offset", float32 [num_layers, num_kv_heads, k_dim],
// of a safetensors file. NOT_FOUND without the file or the tensor; INVALID_ARGUMENT for another
// shape than the geometry's and for values that are not finite. Any thread.
Result<std::vector<float>> read_key_offsets(const std::string& path,
                                            const AttentionGeometry& geometry);

}  // namespace larder
