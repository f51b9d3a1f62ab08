#include "client/examples/gpu_weights.h"

#include <initializer_list>
#include <span>

#include "client/examples/layer_math.h"

namespace larder::examples {
namespace {

template <typename Dense>
std::span<const float> values_of(const Dense& dense) {
  return {dense.data(), static_cast<size_t>(dense.size())};
}

DeviceArray<float> upload(std::initializer_list<std::span<const float>> parts) {
  int64_t size = 0;
  for (const auto& part : parts) size += static_cast<int64_t>(part.size());
  DeviceArray<float> array(size);
  int64_t first = 0;
  for (const auto& part : parts) {
    array.upload(first, part);
    first += static_cast<int64_t>(part.size());
  }
  return array;
}

}  // namespace

GpuWeights upload_weights(const Model& model) {
  const ModelConfig& config = model.config();
  const ModelWeights& weights = model.weights();
  GpuWeights result;
  result.embedding = upload({values_of(weights.embedding)});
  for (const LayerWeights& layer : weights.layers) {
    GpuLayerWeights& to = result.layers.emplace_back();
    to.attention_norm = upload({values_of(layer.attention_norm)});
    to.qkv = upload({values_of(layer.query), values_of(layer.key), values_of(layer.value)});
    to.attention_output = upload({values_of(layer.attention_output)});
    to.mlp_norm = upload({values_of(layer.mlp_norm)});
    to.gate_up = upload({values_of(layer.gate), values_of(layer.up)});
    to.down = upload({values_of(layer.down)});
  }
  result.final_norm = upload({values_of(weights.final_norm)});
  if (!config.tied_embeddings) result.output = upload({values_of(weights.output)});
  result.frequencies = upload({rope_frequencies(config.head_dim, config.rope_theta)});
  // Other streams do not wait for the default one.
  check_cuda(cudaStreamSynchronize(nullptr), "the copies of the weights");
  return result;
}

}  // namespace larder::examples
