// A Llama-style decoder in float32 whose keys and values live in a Larder pool and nowhere else:
// each layer appends its K (after rotary embedding) and V, rounded to bf16, and asks the pool for
// the attention. This is what it consists of; a ModelRunner (model_runner.h) runs it.
#pragma once

#include <filesystem>
#include <string>

#include "client/examples/weights.h"
#include "larder/kv_format.h"

namespace larder::examples {

class Model {
 public:
  static Result<Model> load(const std::filesystem::path& directory);
  // `name` is the name without its revision.
  Model(const std::string& name, ModelConfig config, ModelWeights weights);

  const ModelConfig& config() const { return config_; }
  const ModelWeights& weights() const { return weights_; }
  const std::string& name() const { return name_; }
  // Name and a fingerprint of the weights: part of every prefix key, so that blocks of one set of
  // weights are never taken for another's. The fingerprint detects accidents, not forgery.
  const std::string& revision() const { return revision_; }

  AttentionGeometry geometry(KvFormat k_format, KvFormat v_format, int32_t block_tokens) const;

 private:
  std::string name_;
  std::string revision_;
  ModelConfig config_;
  ModelWeights weights_;
};

}  // namespace larder::examples
