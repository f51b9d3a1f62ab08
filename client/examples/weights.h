// The weights of a model folder: model.safetensors, or the shards that
// model.safetensors.index.json names.
#pragma once

#include <filesystem>
#include <vector>

#include <Eigen/Core>

#include "client/examples/model_config.h"
#include "larder/status.h"

namespace larder::examples {

// Row-major, like the files and like TensorView.
using Matrix = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
using RowVector = Eigen::RowVectorXf;

inline constexpr size_t kMaxShards = 256;

// A projection has shape [outputs, inputs].
struct LayerWeights {
  RowVector attention_norm;  // [hidden_size]
  Matrix query;              // [num_q_heads * head_dim, hidden_size]
  Matrix key;                // [num_kv_heads * head_dim, hidden_size]
  Matrix value;              // [num_kv_heads * head_dim, hidden_size]
  Matrix attention_output;   // [hidden_size, num_q_heads * head_dim]
  RowVector mlp_norm;        // [hidden_size]
  Matrix gate;               // [intermediate_size, hidden_size]
  Matrix up;                 // [intermediate_size, hidden_size]
  Matrix down;               // [hidden_size, intermediate_size]
};

struct ModelWeights {
  Matrix embedding;  // [256, hidden_size]
  std::vector<LayerWeights> layers;
  RowVector final_norm;  // [hidden_size]
  Matrix output;         // [256, hidden_size]; empty when the embeddings are tied
};

// A tensor that is missing or has another shape than the configuration gives it is refused before
// memory is taken for it. Tensors that the model does not use are not read.
Result<ModelWeights> load_weights(const std::filesystem::path& model_directory,
                                  const ModelConfig& config);

}  // namespace larder::examples
