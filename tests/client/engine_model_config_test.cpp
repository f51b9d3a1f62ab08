#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include "client/examples/model_config.h"
#include "tests/client/engine_files.h"

using namespace larder;
using namespace larder::examples;
using larder::examples::test::TemporaryFolder;
using nlohmann::json;

namespace {

json good_config() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"hidden_size", 256},
          {"intermediate_size", 704},
          {"num_hidden_layers", 6},
          {"num_attention_heads", 4},
          {"num_key_value_heads", 2},
          {"max_position_embeddings", 2048}};
}

Status with(const char* field, const json& value) {
  json document = good_config();
  document[field] = value;
  return parse_model_config(document).status();
}

void check_refused(const Status& status, ErrorCode code, const std::string& part) {
  CHECK(status.code() == code);
  INFO(status.to_string());
  CHECK(status.message().find(part) != std::string::npos);
}

}  // namespace

TEST_CASE("the configuration of tiny-lm is read field by field") {
  const auto config = load_model_config(LARDER_TEST_DATA "/tiny-lm");
  REQUIRE(config.ok());
  CHECK(config->hidden_size == 256);
  CHECK(config->intermediate_size == 704);
  CHECK(config->num_layers == 6);
  CHECK(config->num_q_heads == 4);
  CHECK(config->num_kv_heads == 2);
  CHECK(config->head_dim == 64);
  CHECK(config->context_tokens == 2048);
  CHECK(config->rms_norm_epsilon == 1e-5f);
  CHECK(config->rope_theta == 10000.0f);
  CHECK(config->tied_embeddings);
  CHECK(config->end_tokens == std::vector<int32_t>{3});
}

TEST_CASE("fields that may be absent have the defaults of the Llama configuration") {
  json document = good_config();
  document.erase("num_key_value_heads");
  document["rope_scaling"] = nullptr;
  const auto config = parse_model_config(document);
  REQUIRE(config.ok());
  CHECK(config->num_kv_heads == 4);
  CHECK(config->head_dim == 64);
  CHECK(config->rms_norm_epsilon == 1e-6f);
  CHECK(config->rope_theta == 10000.0f);
  CHECK_FALSE(config->tied_embeddings);
  CHECK(config->end_tokens.empty());
}

TEST_CASE("several end tokens are kept") {
  json document = good_config();
  document["eos_token_id"] = {3, 0};
  const auto config = parse_model_config(document);
  REQUIRE(config.ok());
  CHECK(config->end_tokens == std::vector<int32_t>{3, 0});
}

TEST_CASE("a size that is missing, zero, negative, huge or no whole number is refused by name") {
  for (const char* field :
       {"hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads",
        "num_key_value_heads", "head_dim", "max_position_embeddings"}) {
    CAPTURE(field);
    for (const json& value : {json(0), json(-4), json(1e9), json(2.5), json("64"), json(true),
                              json(uint64_t{1} << 40), json::array({64})})
      check_refused(with(field, value), ErrorCode::kInvalidArgument, std::string(field) + " is ");
  }
  for (const char* field : {"hidden_size", "intermediate_size", "num_hidden_layers",
                            "num_attention_heads", "max_position_embeddings"}) {
    json document = good_config();
    document.erase(field);
    check_refused(parse_model_config(document).status(), ErrorCode::kInvalidArgument,
                  std::string(field) + " is missing");
  }
}

TEST_CASE("heads that do not divide are refused with both numbers") {
  check_refused(with("num_key_value_heads", 3), ErrorCode::kInvalidArgument,
                "num_attention_heads 4 is not a multiple of num_key_value_heads 3");
  check_refused(with("num_key_value_heads", 8), ErrorCode::kInvalidArgument, "not a multiple");
  check_refused(with("head_dim", 63), ErrorCode::kInvalidArgument, "head_dim is 63");
  check_refused(with("hidden_size", 258), ErrorCode::kInvalidArgument,
                "hidden_size 258 is not a multiple of num_attention_heads 4");
  check_refused(with("hidden_size", 1 << 20), ErrorCode::kInvalidArgument,
                "hidden_size / num_attention_heads is 262144");
}

TEST_CASE("numbers that are not finite and positive are refused") {
  for (const char* field : {"rms_norm_eps", "rope_theta"})
    for (const json& value : {json(0), json(-1e-5), json(1e39), json(1e-50), json("1e-5")})
      check_refused(with(field, value), ErrorCode::kInvalidArgument, std::string(field) + " is ");
}

TEST_CASE("what this engine does not compute is UNSUPPORTED, with what is supported") {
  const auto unsupported = ErrorCode::kUnsupported;
  check_refused(with("architectures", {"MistralForCausalLM"}), unsupported,
                "architectures names \"MistralForCausalLM\", supported is \"LlamaForCausalLM\"");
  check_refused(with("model_type", "qwen2"), unsupported, "model_type is \"qwen2\"");
  check_refused(with("hidden_act", "gelu"), unsupported, "hidden_act is \"gelu\"");
  check_refused(with("attention_bias", true), unsupported, "attention_bias is true");
  check_refused(with("mlp_bias", true), unsupported, "mlp_bias is true");
  check_refused(with("vocab_size", 32000), unsupported, "vocab_size is 32000, supported is 256");
  check_refused(with("rope_scaling", {{"factor", 2}}), unsupported, "rope_scaling is");
  check_refused(with("architectures", json::array()), ErrorCode::kInvalidArgument,
                "expected a list of one name");
  check_refused(with("architectures", 7), ErrorCode::kInvalidArgument, "architectures is 7");
}

TEST_CASE("end tokens outside the vocabulary and flags that are no flags are refused") {
  for (const json& value : {json(256), json(-1), json("3"), json::array({3, 300})})
    check_refused(with("eos_token_id", value), ErrorCode::kInvalidArgument, "eos_token_id is ");
  check_refused(with("tie_word_embeddings", 1), ErrorCode::kInvalidArgument,
                "tie_word_embeddings is 1");
}

TEST_CASE("a configuration that is missing, no JSON, no object or too large is refused") {
  const TemporaryFolder folder;
  CHECK(load_model_config(folder.path()).status().code() == ErrorCode::kNotFound);
  folder.write("config.json", "{\"hidden_size\": ");
  check_refused(load_model_config(folder.path()).status(), ErrorCode::kInvalidArgument,
                "is not JSON");
  folder.write("config.json", "[]");
  check_refused(load_model_config(folder.path()).status(), ErrorCode::kInvalidArgument,
                "not a JSON object");
  folder.write("config.json", std::string((1 << 20) + 1, ' '));
  check_refused(load_model_config(folder.path()).status(), ErrorCode::kInvalidArgument,
                "at most 1048576");
}
