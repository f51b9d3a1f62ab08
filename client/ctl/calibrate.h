// larderctl calibrate: the mean key of every layer and KV head, for pools that store keys centred.
#pragma once

#include <cstdint>
#include <filesystem>

#include "larder/status.h"

namespace larder::ctl {

// What was written.
struct Calibration {
  int64_t num_layers = 0;
  int64_t num_kv_heads = 0;
  int64_t k_dim = 0;
  int64_t num_tokens = 0;
};

// Reads tensors "k.0", "k.1", ... of shape [tokens, kv_heads, k_dim] (bf16, fp16 or float32; keys
// as the engine appends them, so after RoPE) and writes the float32 tensor "key_offset" [layers,
// kv_heads, k_dim]: means over the tokens, in double. Other tensors of the dump are not looked at.
// `num_kv_heads`, `num_layers`: what the dump must have; 0: whatever it has. A refusal writes
// nothing.
Result<Calibration> calibrate(const std::filesystem::path& dump,
                              const std::filesystem::path& offsets, int64_t num_kv_heads = 0,
                              int64_t num_layers = 0);

}  // namespace larder::ctl
