#include "client/examples/attention_dump.h"

#include <string>

#include "client/safetensors_writer.h"

namespace larder::examples {

AttentionDump::AttentionDump(const ModelConfig& config, bool keys_alone)
    : num_q_heads_(config.num_q_heads),
      num_kv_heads_(config.num_kv_heads),
      head_dim_(config.head_dim),
      keys_alone_(keys_alone),
      layers_(static_cast<size_t>(config.num_layers)) {}

void AttentionDump::add(int32_t layer, std::span<const uint16_t> queries,
                        std::span<const uint16_t> keys, std::span<const uint16_t> values) {
  Layer& rows = layers_.at(static_cast<size_t>(layer));
  rows.queries.insert(rows.queries.end(), queries.begin(), queries.end());
  rows.keys.insert(rows.keys.end(), keys.begin(), keys.end());
  rows.values.insert(rows.values.end(), values.begin(), values.end());
}

void AttentionDump::write(const std::filesystem::path& path) const {
  std::vector<TensorToWrite> tensors;
  const auto add_tensor = [&](const char* name, size_t layer, const std::vector<uint16_t>& rows,
                              int64_t num_heads) {
    const auto tokens = static_cast<int64_t>(rows.size()) / (num_heads * head_dim_);
    tensors.push_back({name + std::to_string(layer),
                       Dtype::kBf16,
                       {tokens, num_heads, head_dim_},
                       std::as_bytes(std::span(rows))});
  };
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    add_tensor("k.", layer, layers_[layer].keys, num_kv_heads_);
    if (keys_alone_) continue;
    add_tensor("q.", layer, layers_[layer].queries, num_q_heads_);
    add_tensor("v.", layer, layers_[layer].values, num_kv_heads_);
  }
  write_safetensors(path, tensors);
}

}  // namespace larder::examples
