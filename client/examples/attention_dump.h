// What attention works on, in bf16, of a text that is scored: keys as they are appended (after
// rotary embedding) for `larderctl calibrate`, or queries, keys and values.
#pragma once

#include <cstdint>
#include <filesystem>
#include <span>
#include <vector>

#include "client/examples/model_config.h"

namespace larder::examples {

class AttentionDump {
 public:
  AttentionDump(const ModelConfig& config, bool keys_alone);
  bool keys_alone() const { return keys_alone_; }
  // Rows of one layer; those of all layers come in the same order. Queries after rotary embedding,
  // and values; both empty with keys alone.
  void add(int32_t layer, std::span<const uint16_t> queries, std::span<const uint16_t> keys,
           std::span<const uint16_t> values);
  // A safetensors file with tensors "k.LAYER" and, unless keys alone, "q.LAYER" and "v.LAYER": bf16
  // [tokens, heads, head_dim]. Throws SystemError.
  void write(const std::filesystem::path& path) const;

 private:
  struct Layer {
    std::vector<uint16_t> queries, keys, values;
  };

  int64_t num_q_heads_;
  int64_t num_kv_heads_;
  int64_t head_dim_;
  bool keys_alone_;
  std::vector<Layer> layers_;
};

}  // namespace larder::examples
