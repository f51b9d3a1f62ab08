// Keys as they are appended (after rotary embedding, in bf16), collected for `larderctl calibrate`.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

namespace larder::examples {

class KeyDump {
 public:
  KeyDump(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim);
  // Keys [rows, num_kv_heads, head_dim] of one layer; rows of all layers come in the same order.
  void add(int32_t layer, std::span<const uint16_t> bf16_keys);
  // A safetensors file with a tensor "k.LAYER", bf16 [tokens, num_kv_heads, head_dim], per layer.
  // Throws SystemError.
  void write(const std::filesystem::path& path) const;

 private:
  int64_t num_kv_heads_;
  int64_t head_dim_;
  std::vector<std::vector<uint16_t>> layers_;
};

}  // namespace larder::examples
