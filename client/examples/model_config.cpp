#include "client/examples/model_config.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>

#include <nlohmann/json.hpp>

#include "client/file_reader.h"

namespace larder::examples {
namespace {

using nlohmann::json;

constexpr int64_t kMaxConfigBytes = 1 << 20;
constexpr size_t kMaxEndTokens = 16;
constexpr size_t kMaxQuotedBytes = 120;

// The value as the message shows it, on one short line.
std::string shown(const json& value) {
  const std::string text = value.dump(-1, ' ', true);
  return text.size() <= kMaxQuotedBytes ? text : text.substr(0, kMaxQuotedBytes) + "...";
}

// Empty for anything but a whole number from min to max.
std::optional<int32_t> whole_number(const json& value, int32_t min, int32_t max) {
  if (!value.is_number_integer()) return std::nullopt;
  if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(max))
    return std::nullopt;
  const auto number = value.get<int64_t>();
  if (number < min || number > max) return std::nullopt;
  return static_cast<int32_t>(number);
}

// Reads fields and remembers the first refusal; the fields after it read as their fallbacks.
class FieldReader {
 public:
  explicit FieldReader(const json& document) : document_(document) {}

  const Status& status() const { return status_; }

  void refuse(ErrorCode code, const std::string& sentence) {
    if (status_.ok()) status_ = Status(code, "config.json: " + sentence);
  }

  // A field that is missing or null is empty.
  const json* find(const char* name) const {
    const auto found = document_.find(name);
    return found == document_.end() || found->is_null() ? nullptr : &*found;
  }

  // 1 .. max. Without a fallback the field must be there.
  int32_t size(const char* name, int32_t max, std::optional<int32_t> fallback = std::nullopt) {
    const json* value = find(name);
    if (!value) {
      if (!fallback) refuse(ErrorCode::kInvalidArgument, std::string(name) + " is missing");
      return fallback.value_or(1);
    }
    const auto number = whole_number(*value, 1, max);
    if (!number)
      refuse(ErrorCode::kInvalidArgument, std::string(name) + " is " + shown(*value) +
                                              ", expected a whole number from 1 to " +
                                              std::to_string(max));
    return number.value_or(fallback.value_or(1));
  }

  // Finite and above 0, also once it is a float.
  float positive(const char* name, float fallback) {
    const json* value = find(name);
    if (!value) return fallback;
    const double number = value->is_number() ? value->get<double>() : 0;
    if (!(number >= std::numeric_limits<float>::min() &&
          number <= std::numeric_limits<float>::max())) {
      refuse(ErrorCode::kInvalidArgument,
             std::string(name) + " is " + shown(*value) + ", expected a finite number above 0");
      return fallback;
    }
    return static_cast<float>(number);
  }

  bool flag(const char* name, bool fallback) {
    const json* value = find(name);
    if (!value) return fallback;
    if (value->is_boolean()) return value->get<bool>();
    refuse(ErrorCode::kInvalidArgument,
           std::string(name) + " is " + shown(*value) + ", expected true or false");
    return fallback;
  }

  // Refuses a field that is there with another value than the one that is served.
  void require(const char* name, const json& served) {
    const json* value = find(name);
    if (value && *value != served)
      refuse(ErrorCode::kUnsupported,
             std::string(name) + " is " + shown(*value) + ", supported is " + shown(served));
  }

 private:
  const json& document_;
  Status status_;
};

void check_architecture(FieldReader& fields) {
  const json served = "LlamaForCausalLM";
  const json* list = fields.find("architectures");
  if (!list || !list->is_array() || list->size() != 1)
    fields.refuse(
        ErrorCode::kInvalidArgument,
        "architectures is " + (list ? shown(*list) : "missing") + ", expected a list of one name");
  else if ((*list)[0] != served)
    fields.refuse(ErrorCode::kUnsupported,
                  "architectures names " + shown((*list)[0]) + ", supported is " + shown(served));
  fields.require("model_type", "llama");
  fields.require("hidden_act", "silu");
  fields.require("attention_bias", false);
  fields.require("mlp_bias", false);
  fields.require("vocab_size", kByteVocabulary);
  if (const json* scaling = fields.find("rope_scaling"))
    fields.refuse(ErrorCode::kUnsupported,
                  "rope_scaling is " + shown(*scaling) + ", supported is null");
}

std::vector<int32_t> read_end_tokens(FieldReader& fields) {
  const json* value = fields.find("eos_token_id");
  if (!value) return {};
  const json list = value->is_array() ? *value : json::array({*value});
  std::vector<int32_t> tokens;
  for (const json& token : list) {
    const auto number = whole_number(token, 0, kByteVocabulary - 1);
    if (!number || list.size() > kMaxEndTokens) {
      fields.refuse(ErrorCode::kInvalidArgument,
                    "eos_token_id is " + shown(*value) + ", expected at most " +
                        std::to_string(kMaxEndTokens) + " tokens from 0 to 255");
      return {};
    }
    tokens.push_back(*number);
  }
  return tokens;
}

void check_heads(FieldReader& fields, const ModelConfig& config) {
  if (config.num_q_heads % config.num_kv_heads != 0)
    fields.refuse(ErrorCode::kInvalidArgument, "num_attention_heads " +
                                                   std::to_string(config.num_q_heads) +
                                                   " is not a multiple of num_key_value_heads " +
                                                   std::to_string(config.num_kv_heads));
  if (config.head_dim % 2 != 0)
    fields.refuse(ErrorCode::kInvalidArgument, "head_dim is " + std::to_string(config.head_dim) +
                                                   ", rotary embedding needs an even number");
}

int32_t read_head_dim(FieldReader& fields, const ModelConfig& config) {
  if (fields.find("head_dim")) return fields.size("head_dim", kMaxModelHeadDim);
  if (config.hidden_size % config.num_q_heads != 0)
    fields.refuse(ErrorCode::kInvalidArgument, "head_dim is missing and hidden_size " +
                                                   std::to_string(config.hidden_size) +
                                                   " is not a multiple of num_attention_heads " +
                                                   std::to_string(config.num_q_heads));
  const int32_t head_dim = config.hidden_size / config.num_q_heads;
  if (head_dim < 1 || head_dim > kMaxModelHeadDim)
    fields.refuse(ErrorCode::kInvalidArgument,
                  "head_dim is missing and hidden_size / num_attention_heads is " +
                      std::to_string(head_dim) + ", expected 1 to " +
                      std::to_string(kMaxModelHeadDim));
  return head_dim;
}

}  // namespace

Result<ModelConfig> parse_model_config(const json& document) {
  if (!document.is_object())
    return Status(ErrorCode::kInvalidArgument, "config.json: the document is not a JSON object");
  FieldReader fields(document);
  check_architecture(fields);
  ModelConfig config;
  config.hidden_size = fields.size("hidden_size", kMaxWidth);
  config.intermediate_size = fields.size("intermediate_size", kMaxWidth);
  config.num_layers = fields.size("num_hidden_layers", kMaxModelLayers);
  config.num_q_heads = fields.size("num_attention_heads", kMaxModelHeads);
  config.num_kv_heads = fields.size("num_key_value_heads", kMaxModelHeads, config.num_q_heads);
  config.head_dim = read_head_dim(fields, config);
  config.context_tokens = fields.size("max_position_embeddings", kMaxContextTokens);
  config.rms_norm_epsilon = fields.positive("rms_norm_eps", 1e-6f);
  config.rope_theta = fields.positive("rope_theta", 10000.0f);
  config.tied_embeddings = fields.flag("tie_word_embeddings", false);
  config.end_tokens = read_end_tokens(fields);
  check_heads(fields, config);
  if (!fields.status().ok()) return fields.status();
  return config;
}

Result<ModelConfig> load_model_config(const std::filesystem::path& model_directory) {
  const auto document = read_json_file(model_directory / "config.json", kMaxConfigBytes);
  if (!document) return document.status();
  return parse_model_config(*document);
}

}  // namespace larder::examples
