#include "client/examples/cpu_runner.h"

#include "client/examples/layer_math.h"

namespace larder::examples {
namespace {

// x * weight^T, the product of a linear layer.
Matrix linear(const Matrix& x, const Matrix& weight) {
  Matrix out(x.rows(), weight.rows());
  out.noalias() = x * weight.transpose();
  return out;
}

// The attention part of a layer: its output before the residual connection.
Result<Matrix> attention(Pool& pool, Batch& batch, int32_t layer_index, const ModelConfig& config,
                         const LayerWeights& layer, const RopeTable& rope, const Matrix& x,
                         AttentionDump* dump) {
  const int64_t num_rows = batch.num_rows();
  const Matrix normed = rms_norm(x, layer.attention_norm, config.rms_norm_epsilon);
  Matrix query = linear(normed, layer.query);
  Matrix key = linear(normed, layer.key);
  const Matrix value = linear(normed, layer.value);
  apply_rope(rope, query);
  apply_rope(rope, key);

  auto key_bits = round_to_bf16(key);
  auto value_bits = round_to_bf16(value);
  if (dump != nullptr) {
    if (dump->keys_alone())
      dump->add(layer_index, {}, key_bits, {});
    else
      dump->add(layer_index, round_to_bf16(query), key_bits, value_bits);
  }
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

class CpuRunner final : public ModelRunner {
 public:
  using ModelRunner::ModelRunner;
  std::string place() const override { return "cpu"; }
  Result<Matrix> forward(Batch& batch, std::span<const int32_t> logit_rows,
                         AttentionDump* dump) override;
};

Result<Matrix> CpuRunner::forward(Batch& batch, std::span<const int32_t> logit_rows,
                                  AttentionDump* dump) {
  const ModelConfig& config = model().config();
  const ModelWeights& weights = model().weights();
  const auto tokens = batch.tokens();
  Matrix x(batch.num_rows(), config.hidden_size);
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const int32_t token = tokens[static_cast<size_t>(row)];
    LARDER_CHECK(token >= 0 && token < kByteVocabulary, token);
    x.row(row) = weights.embedding.row(token);
  }
  const RopeTable rope = make_rope_table(batch.positions(), config.head_dim, config.rope_theta);
  for (int32_t index = 0; index < config.num_layers; ++index) {
    const LayerWeights& layer = weights.layers[static_cast<size_t>(index)];
    const auto attended = attention(pool(), batch, index, config, layer, rope, x, dump);
    if (!attended) return attended.status();
    x += *attended;
    x += mlp(config, layer, x);
  }
  Matrix wanted(static_cast<Eigen::Index>(logit_rows.size()), x.cols());
  for (size_t i = 0; i < logit_rows.size(); ++i)
    wanted.row(static_cast<Eigen::Index>(i)) = x.row(logit_rows[i]);
  wanted = rms_norm(wanted, weights.final_norm, config.rms_norm_epsilon);
  return linear(wanted, config.tied_embeddings ? weights.embedding : weights.output);
}

}  // namespace

std::unique_ptr<ModelRunner> make_cpu_runner(const Model& model, Pool& pool) {
  return std::make_unique<CpuRunner>(model, pool);
}

}  // namespace larder::examples
