#include "client/examples/key_dump.h"

#include <string>

#include "client/safetensors_writer.h"

namespace larder::examples {

KeyDump::KeyDump(int32_t num_layers, int32_t num_kv_heads, int32_t head_dim)
    : num_kv_heads_(num_kv_heads), head_dim_(head_dim), layers_(static_cast<size_t>(num_layers)) {}

void KeyDump::add(int32_t layer, std::span<const uint16_t> bf16_keys) {
  auto& keys = layers_.at(static_cast<size_t>(layer));
  keys.insert(keys.end(), bf16_keys.begin(), bf16_keys.end());
}

void KeyDump::write(const std::filesystem::path& path) const {
  std::vector<TensorToWrite> tensors;
  for (size_t layer = 0; layer < layers_.size(); ++layer) {
    const auto tokens = static_cast<int64_t>(layers_[layer].size()) / (num_kv_heads_ * head_dim_);
    tensors.push_back({"k." + std::to_string(layer),
                       Dtype::kBf16,
                       {tokens, num_kv_heads_, head_dim_},
                       std::as_bytes(std::span(layers_[layer]))});
  }
  write_safetensors(path, tensors);
}

}  // namespace larder::examples
