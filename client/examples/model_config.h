// config.json of a Llama-style decoder, in the names that Hugging Face gives the fields.
//
// Served: byte vocabulary (256 tokens), grouped query attention, plain rotary embedding, SwiGLU, no
// biases. A field that asks for anything else is refused, never ignored.
#pragma once

#include <cstdint>
#include <filesystem>
#include <vector>

#include <nlohmann/json_fwd.hpp>

#include "larder/status.h"

namespace larder::examples {

inline constexpr int32_t kByteVocabulary = 256;
// The largest sizes that are taken from a file.
inline constexpr int32_t kMaxWidth = 1 << 20;
inline constexpr int32_t kMaxModelLayers = 1024;
inline constexpr int32_t kMaxModelHeads = 4096;
inline constexpr int32_t kMaxModelHeadDim = 1024;
inline constexpr int32_t kMaxContextTokens = 1 << 24;  // positions stay exact in float32

struct ModelConfig {
  int32_t hidden_size = 0;
  int32_t intermediate_size = 0;
  int32_t num_layers = 0;
  int32_t num_q_heads = 0;
  int32_t num_kv_heads = 0;  // divides num_q_heads
  int32_t head_dim = 0;      // even
  int32_t context_tokens = 0;
  float rms_norm_epsilon = 0;
  float rope_theta = 0;
  bool tied_embeddings = false;     // the output matrix is the embedding
  std::vector<int32_t> end_tokens;  // generation stops after one of these
};

// INVALID_ARGUMENT or UNSUPPORTED, with the field and the numbers.
Result<ModelConfig> parse_model_config(const nlohmann::json& document);
Result<ModelConfig> load_model_config(const std::filesystem::path& model_directory);

}  // namespace larder::examples
