// A model's weights in device memory, in float32. Matrices of one input stand one after another, so
// that one product serves them all.
#pragma once

#include <cstdint>
#include <vector>

#include "client/examples/gpu_memory.h"
#include "client/examples/model.h"

namespace larder::examples {

struct GpuLayerWeights {
  DeviceArray<float> attention_norm;  // [hidden_size]
  DeviceArray<float> qkv;             // [(num_q_heads + 2 * num_kv_heads) * head_dim, hidden_size]
  DeviceArray<float> attention_output;  // [hidden_size, num_q_heads * head_dim]
  DeviceArray<float> mlp_norm;          // [hidden_size]
  DeviceArray<float> gate_up;           // [2 * intermediate_size, hidden_size]
  DeviceArray<float> down;              // [hidden_size, intermediate_size]
};

struct GpuWeights {
  DeviceArray<float> embedding;  // [256, hidden_size]
  std::vector<GpuLayerWeights> layers;
  DeviceArray<float> final_norm;   // [hidden_size]
  DeviceArray<float> output;       // [256, hidden_size]; empty when the embeddings are tied
  DeviceArray<float> frequencies;  // [head_dim / 2], of the rotary embedding

  const float* logits() const { return output.size() == 0 ? embedding.data() : output.data(); }
};

// Complete when it returns. Throws GpuError.
GpuWeights upload_weights(const Model& model);

}  // namespace larder::examples
