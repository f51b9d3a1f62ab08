#include "client/examples/model.h"

#include <bit>
#include <cstdio>

#include "client/examples/layer_math.h"

namespace larder::examples {
namespace {

// x * weight^T, the product of a linear layer.
Matrix linear(const Matrix& x, const Matrix& weight) {
  Matrix out(x.rows(), weight.rows());
  out.noalias() = x * weight.transpose();
  return out;
}

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

// The attention part of a layer: its output before the residual connection.
Result<Matrix> attention(Pool& pool, Batch& batch, int32_t layer_index, const ModelConfig& config,
                         const LayerWeights& layer, const RopeTable& rope, const Matrix& x,
                         KeyDump* dump) {
  const int64_t num_rows = batch.num_rows();
  const Matrix normed = rms_norm(x, layer.attention_norm, config.rms_norm_epsilon);
  Matrix query = linear(normed, layer.query);
  Matrix key = linear(normed, layer.key);
  const Matrix value = linear(normed, layer.value);
  apply_rope(rope, query);
  apply_rope(rope, key);

  auto key_bits = round_to_bf16(key);
  auto value_bits = round_to_bf16(value);
  if (dump != nullptr) dump->add(layer_index, key_bits);
  const auto kv_view = [&](std::vector<uint16_t>& bits) {
    return dense_tensor(bits.data(), Dtype::kBf16, num_rows, config.num_kv_heads, config.head_dim);
  };
  if (Status status =
          pool.append(layer_index, kv_view(key_bits), kv_view(value_bits), batch.slots());
      !status.ok())
    return status;

  Matrix attended(num_rows, query.cols());
  const auto q_view = [&](Matrix& rows) {
    return dense_tensor(rows.data(), Dtype::kFp32, num_rows, config.num_q_heads, config.head_dim);
  };
  if (Status status = pool.attend(layer_index, batch.attend_batch(q_view(query), q_view(attended)));
      !status.ok())
    return status;
  return linear(attended, layer.attention_output);
}

Matrix mlp(const ModelConfig& config, const LayerWeights& layer, const Matrix& x) {
  const Matrix normed = rms_norm(x, layer.mlp_norm, config.rms_norm_epsilon);
  Matrix gate = linear(normed, layer.gate);
  swiglu(gate, linear(normed, layer.up));
  return linear(gate, layer.down);
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

Result<Matrix> Model::forward(Pool& pool, Batch& batch, std::span<const int32_t> logit_rows,
                              KeyDump* dump) const {
  const auto tokens = batch.tokens();
  Matrix x(batch.num_rows(), config_.hidden_size);
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const int32_t token = tokens[static_cast<size_t>(row)];
    LARDER_CHECK(token >= 0 && token < kByteVocabulary, token);
    x.row(row) = weights_.embedding.row(token);
  }
  const RopeTable rope = make_rope_table(batch.positions(), config_.head_dim, config_.rope_theta);
  for (int32_t index = 0; index < config_.num_layers; ++index) {
    const LayerWeights& layer = weights_.layers[static_cast<size_t>(index)];
    const auto attended = attention(pool, batch, index, config_, layer, rope, x, dump);
    if (!attended) return attended.status();
    x += *attended;
    x += mlp(config_, layer, x);
  }
  Matrix wanted(static_cast<Eigen::Index>(logit_rows.size()), x.cols());
  for (size_t i = 0; i < logit_rows.size(); ++i)
    wanted.row(static_cast<Eigen::Index>(i)) = x.row(logit_rows[i]);
  wanted = rms_norm(wanted, weights_.final_norm, config_.rms_norm_epsilon);
  return linear(wanted, config_.tied_embeddings ? weights_.embedding : weights_.output);
}

}  // namespace larder::examples
