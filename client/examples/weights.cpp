#include "client/examples/weights.h"

#include <algorithm>
#include <array>
#include <map>
#include <span>
#include <string>

#include <nlohmann/json.hpp>

#include "client/safetensors.h"

namespace larder::examples {
namespace {

constexpr int64_t kMaxIndexBytes = int64_t{16} << 20;
constexpr size_t kMaxShardNameBytes = 200;

// Reads named tensors from whichever shard holds them.
class TensorSource {
 public:
  static Result<TensorSource> open(const std::filesystem::path& model_directory);

  Status read(const std::string& name, Matrix& out, int64_t rows, int64_t columns) const {
    const std::array<int64_t, 2> shape = {rows, columns};
    return read_shape(name, shape, out, rows, columns);
  }
  Status read(const std::string& name, RowVector& out, int64_t columns) const {
    const std::array<int64_t, 1> shape = {columns};
    return read_shape(name, shape, out, 1, columns);
  }

 private:
  Status open_shards(const std::filesystem::path& model_directory, const nlohmann::json& index);
  Result<const SafetensorsFile*> shard_of(const std::string& name) const;

  template <typename Dense>
  Status read_shape(const std::string& name, std::span<const int64_t> shape, Dense& out,
                    int64_t rows, int64_t columns) const {
    const auto shard = shard_of(name);
    if (!shard) return shard.status();
    const SafetensorsEntry& entry = (*shard)->tensors().at(name);
    if (!std::equal(shape.begin(), shape.end(), entry.shape.begin(), entry.shape.end()))
      return Status(ErrorCode::kInvalidArgument, (*shard)->path() + ": \"" + name +
                                                     "\" has shape " + shape_text(entry.shape) +
                                                     ", config.json asks for " + shape_text(shape));
    out.resize(rows, columns);
    return (*shard)->read(name, shape, {out.data(), static_cast<size_t>(out.size())});
  }

  std::map<std::string, SafetensorsFile> shards_;  // by file name
  std::map<std::string, std::string> weight_map_;  // tensor -> file name; empty: one file
  std::string index_path_;
};

// A shard lies in the model's folder itself. Links there are followed: model caches are made of
// them.
bool plain_file_name(const std::string& name) {
  return !name.empty() && name.size() <= kMaxShardNameBytes && name != "." && name != ".." &&
         name.find('/') == std::string::npos && name.find('\0') == std::string::npos;
}

Status TensorSource::open_shards(const std::filesystem::path& model_directory,
                                 const nlohmann::json& index) {
  const auto refuse = [this](const std::string& sentence) {
    return Status(ErrorCode::kInvalidArgument, index_path_ + ": " + sentence);
  };
  if (!index.is_object() || !index.contains("weight_map") || !index["weight_map"].is_object())
    return refuse("weight_map is not an object of tensor names and file names");
  for (const auto& [tensor, file] : index["weight_map"].items()) {
    if (!file.is_string() || !plain_file_name(file.get_ref<const std::string&>()))
      return refuse("weight_map sends a tensor to " + file.dump(-1, ' ', true).substr(0, 120) +
                    ", expected the name of a file in the same folder");
    const auto& name = file.get_ref<const std::string&>();
    weight_map_.emplace(tensor, name);
    if (shards_.contains(name)) continue;
    if (shards_.size() == kMaxShards)
      return refuse("weight_map names more than " + std::to_string(kMaxShards) + " files");
    auto shard = SafetensorsFile::open(model_directory / name);
    if (!shard) return shard.status();
    shards_.emplace(name, std::move(*shard));
  }
  if (shards_.empty()) return refuse("weight_map is empty");
  return {};
}

Result<TensorSource> TensorSource::open(const std::filesystem::path& model_directory) {
  TensorSource source;
  auto single = SafetensorsFile::open(model_directory / "model.safetensors");
  if (single) {
    source.shards_.emplace("model.safetensors", std::move(*single));
    return source;
  }
  if (single.status().code() != ErrorCode::kNotFound) return single.status();
  const auto index_path = model_directory / "model.safetensors.index.json";
  source.index_path_ = index_path.string();
  const auto index = read_json_file(index_path, kMaxIndexBytes);
  if (!index && index.status().code() == ErrorCode::kNotFound)
    return Status(ErrorCode::kNotFound, model_directory.string() +
                                            " has neither model.safetensors nor "
                                            "model.safetensors.index.json");
  if (!index) return index.status();
  if (Status status = source.open_shards(model_directory, *index); !status.ok()) return status;
  return source;
}

Result<const SafetensorsFile*> TensorSource::shard_of(const std::string& name) const {
  const SafetensorsFile* shard = &shards_.begin()->second;
  if (!weight_map_.empty()) {
    const auto found = weight_map_.find(name);
    if (found == weight_map_.end())
      return Status(ErrorCode::kNotFound, index_path_ + ": weight_map has no \"" + name + "\"");
    shard = &shards_.at(found->second);
  }
  if (!shard->tensors().contains(name))
    return Status(ErrorCode::kNotFound, shard->path() + ": there is no tensor \"" + name + "\"");
  return shard;
}

Status load_layer(const TensorSource& source, const ModelConfig& config, int32_t layer,
                  LayerWeights& out) {
  const std::string prefix = "model.layers." + std::to_string(layer) + ".";
  const int64_t hidden = config.hidden_size;
  const int64_t query_width = int64_t{config.num_q_heads} * config.head_dim;
  const int64_t kv_width = int64_t{config.num_kv_heads} * config.head_dim;
  Status status;
  const auto matrix = [&](const char* name, Matrix& to, int64_t rows, int64_t columns) {
    if (status.ok()) status = source.read(prefix + name + ".weight", to, rows, columns);
  };
  const auto vector = [&](const char* name, RowVector& to) {
    if (status.ok()) status = source.read(prefix + name + ".weight", to, hidden);
  };
  vector("input_layernorm", out.attention_norm);
  matrix("self_attn.q_proj", out.query, query_width, hidden);
  matrix("self_attn.k_proj", out.key, kv_width, hidden);
  matrix("self_attn.v_proj", out.value, kv_width, hidden);
  matrix("self_attn.o_proj", out.attention_output, hidden, query_width);
  vector("post_attention_layernorm", out.mlp_norm);
  matrix("mlp.gate_proj", out.gate, config.intermediate_size, hidden);
  matrix("mlp.up_proj", out.up, config.intermediate_size, hidden);
  matrix("mlp.down_proj", out.down, hidden, config.intermediate_size);
  return status;
}

}  // namespace

Result<ModelWeights> load_weights(const std::filesystem::path& model_directory,
                                  const ModelConfig& config) {
  const auto source = TensorSource::open(model_directory);
  if (!source) return source.status();
  ModelWeights weights;
  Status status = source->read("model.embed_tokens.weight", weights.embedding, kByteVocabulary,
                               config.hidden_size);
  if (status.ok())
    status = source->read("model.norm.weight", weights.final_norm, config.hidden_size);
  if (status.ok() && !config.tied_embeddings)
    status = source->read("lm_head.weight", weights.output, kByteVocabulary, config.hidden_size);
  weights.layers.resize(static_cast<size_t>(config.num_layers));
  for (int32_t layer = 0; layer < config.num_layers && status.ok(); ++layer)
    status = load_layer(*source, config, layer, weights.layers[static_cast<size_t>(layer)]);
  if (!status.ok()) return status;
  return weights;
}

}  // namespace larder::examples
