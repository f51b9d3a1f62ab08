#include "client/examples/model.h"

#include <bit>
#include <cstdio>

namespace larder::examples {
namespace {

// FNV-1a, 64 bits, over the float32 bit patterns.
class Fingerprint {
 public:
  template <typename Dense>
  void add(const Dense& values) {
    for (Eigen::Index i = 0; i < values.size(); ++i) add_word(values.data()[i]);
  }
  void add_word(float value) {
    state_ = (state_ ^ std::bit_cast<uint32_t>(value)) * 0x100000001b3u;
  }
  std::string text() const {
    char digits[17] = {};
    std::snprintf(digits, sizeof(digits), "%016llx", static_cast<unsigned long long>(state_));
    return digits;
  }

 private:
  uint64_t state_ = 0xcbf29ce484222325u;
};

std::string fingerprint(const ModelConfig& config, const ModelWeights& weights) {
  Fingerprint hash;
  hash.add_word(config.rms_norm_epsilon);
  hash.add_word(config.rope_theta);
  hash.add_word(static_cast<float>(config.num_q_heads));
  hash.add_word(static_cast<float>(config.num_kv_heads));
  hash.add(weights.embedding);
  for (const LayerWeights& layer : weights.layers) {
    hash.add(layer.attention_norm);
    hash.add(layer.query);
    hash.add(layer.key);
    hash.add(layer.value);
    hash.add(layer.attention_output);
    hash.add(layer.mlp_norm);
    hash.add(layer.gate);
    hash.add(layer.up);
    hash.add(layer.down);
  }
  return hash.text();
}

}  // namespace

Model::Model(const std::string& name, ModelConfig config, ModelWeights weights)
    : name_(name),
      revision_(name + "@" + fingerprint(config, weights)),
      config_(std::move(config)),
      weights_(std::move(weights)) {}

Result<Model> Model::load(const std::filesystem::path& directory) {
  auto config = load_model_config(directory);
  if (!config) return config.status();
  auto weights = load_weights(directory, *config);
  if (!weights) return weights.status();
  // A path that ends in "/" or "." has its name one level up.
  const auto normal = (std::filesystem::absolute(directory) / "").lexically_normal().parent_path();
  const std::string name = normal.filename().string();
  return Model(name.empty() ? "model" : name, std::move(*config), std::move(*weights));
}

AttentionGeometry Model::geometry(KvFormat k_format, KvFormat v_format,
                                  int32_t block_tokens) const {
  AttentionGeometry geometry;
  geometry.num_layers = config_.num_layers;
  geometry.num_kv_heads = config_.num_kv_heads;
  geometry.block_tokens = block_tokens;
  geometry.k_dim = config_.head_dim;
  geometry.v_dim = config_.head_dim;
  geometry.k_format = k_format;
  geometry.v_format = v_format;
  return geometry;
}

}  // namespace larder::examples
