#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "client/examples/layer_math.h"
#include "client/examples/model.h"
#include "client/examples/score.h"
#include "tests/client/engine_files.h"

using namespace larder;
using namespace larder::examples;
using larder::examples::test::TemporaryFolder;
using larder::examples::test::zero_safetensors;
using larder::examples::test::ZeroTensor;

namespace {

Matrix one_row(std::initializer_list<float> values) {
  Matrix row(1, static_cast<Eigen::Index>(values.size()));
  std::copy(values.begin(), values.end(), row.data());
  return row;
}

void check_near(const Matrix& got, std::initializer_list<double> wanted, double tolerance) {
  REQUIRE(got.size() == static_cast<Eigen::Index>(wanted.size()));
  Eigen::Index i = 0;
  for (const double value : wanted) {
    CAPTURE(i);
    CHECK(std::abs(got.data()[i++] - value) <= tolerance * std::max(1.0, std::abs(value)));
  }
}

void check_refused(const Status& status, ErrorCode code, const std::string& part) {
  CHECK(status.code() == code);
  INFO(status.to_string());
  CHECK(status.message().find(part) != std::string::npos);
}

// The smallest model there is: one layer, one head of 16.
constexpr const char* kSmallConfig =
    R"({"architectures":["LlamaForCausalLM"],"hidden_size":16,"intermediate_size":8,
        "num_hidden_layers":1,"num_attention_heads":1,"max_position_embeddings":32})";

std::vector<ZeroTensor> small_tensors() {
  const std::string layer = "model.layers.0.";
  return {{"model.embed_tokens.weight", {256, 16}},
          {"model.norm.weight", {16}},
          {"lm_head.weight", {256, 16}},
          {layer + "input_layernorm.weight", {16}},
          {layer + "self_attn.q_proj.weight", {16, 16}},
          {layer + "self_attn.k_proj.weight", {16, 16}},
          {layer + "self_attn.v_proj.weight", {16, 16}},
          {layer + "self_attn.o_proj.weight", {16, 16}},
          {layer + "post_attention_layernorm.weight", {16}},
          {layer + "mlp.gate_proj.weight", {8, 16}},
          {layer + "mlp.up_proj.weight", {8, 16}},
          {layer + "mlp.down_proj.weight", {16, 8}}};
}

}  // namespace

// The expected values of the next four cases were computed in float64 with numpy.

TEST_CASE("rms_norm divides each row by its root mean square") {
  Matrix x(2, 4);
  x << 1, -2, 3, 0.5f, 1e-3f, 2e-3f, 0, -1e-3f;
  RowVector weight(4);
  weight << 1, 0.5f, 2, -1.5f;
  check_near(rms_norm(x, weight, 1e-5f),
             {0.5298121992304703, -0.5298121992304703, 3.1788731953828218, -0.3973591494228527,
              0.29488391230979427, 0.29488391230979427, 0.0, 0.4423258684646914},
             1e-6);
}

TEST_CASE("apply_rope rotates element i with element i + head_dim / 2, in every head") {
  const std::vector<int32_t> positions = {0, 1, 7, 2047};
  Matrix x(4, 16);
  for (Eigen::Index row = 0; row < 4; ++row)
    x.row(row) << 1, 2, 3, 4, -5, 6, 0.25f, -0.5f, 1, 2, 3, 4, -5, 6, 0.25f, -0.5f;
  apply_rope(make_rope_table(positions, 8, 10000.0f), x);
  CHECK(x.leftCols(8) == x.rightCols(8));
  check_near(x.row(0).head(8), {1, 2, 3, 4, -5, 6, 0.25, -0.5}, 0);
  check_near(x.row(1).head(8),
             {4.747657229907622, 1.3910078306750826, 2.9973500429164543, 4.000497999916833,
              -1.8600405445328023, 6.169691824961811, 0.27998700010666633, -0.49599975066668744},
             1e-6);
  check_near(x.row(2).head(8),
             {4.03883524793725, -2.33562174885717, 2.9751672889254555, 4.003401971816903,
              -3.112524672997734, 5.877488498182313, 0.4592162920759182, -0.4719879787161272},
             2e-6);
  // Angles are computed in float32, so a far position is a little off the exact rotation.
  check_near(x.row(3).head(8),
             {-4.591881301329292, 1.0994560395170592, -0.39857402506487616, -1.3892633380010393,
              -2.216895602977824, -6.228257895846114, 2.983896571019777, 3.7841706327392544},
             1e-4);
}

TEST_CASE("swiglu multiplies silu of the gate with up") {
  Matrix gate = one_row({0, 1, -1, 5, -20, 30});
  swiglu(gate, one_row({3, 2, 2, -1, 4, 0.5f}));
  check_near(gate,
             {0.0, 1.4621171572600098, -0.5378828427399902, -4.966535745378576,
              -1.648922894552163e-07, 14.999999999998598},
             1e-6);
}

TEST_CASE("bf16 rounding goes to the nearest even and keeps infinities and NaN") {
  CHECK(bf16_bits(1.0f) == 0x3f80);
  CHECK(bf16_bits(1.00390625f) == 0x3f80);  // a tie: 1 + 2^-8
  CHECK(bf16_bits(1.01171875f) == 0x3f82);  // a tie: 1 + 3 * 2^-8
  CHECK(bf16_bits(1.00390637f) == 0x3f81);  // just above the tie
  CHECK(bf16_bits(-0.0f) == 0x8000);
  CHECK(bf16_bits(std::numeric_limits<float>::max()) == 0x7f80);
  CHECK(bf16_bits(-std::numeric_limits<float>::infinity()) == 0xff80);
  CHECK(bf16_bits(std::numeric_limits<float>::signaling_NaN()) >= 0x7fc0);
}

TEST_CASE("tiny-lm loads, and its name carries a fingerprint of the weights") {
  const auto model = Model::load(LARDER_TEST_DATA "/tiny-lm/");
  REQUIRE(model.ok());
  CHECK(model->name() == "tiny-lm");
  CHECK(model->revision().size() == std::string("tiny-lm@").size() + 16);
  const auto geometry = model->geometry(KvFormat::kBf16, KvFormat::kNvfp4, 16);
  CHECK(geometry.num_layers == 6);
  CHECK(geometry.num_kv_heads == 2);
  CHECK(geometry.block_tokens == 16);
  CHECK(geometry.k_dim == 64);
  CHECK(geometry.v_dim == 64);
  CHECK(geometry.k_format == KvFormat::kBf16);
  CHECK(geometry.v_format == KvFormat::kNvfp4);
}

TEST_CASE("one changed weight is another revision") {
  const auto weights = [](float value) {
    ModelWeights made;
    made.embedding = Matrix::Zero(256, 4);
    made.embedding(17, 3) = value;
    return made;
  };
  const Model first("m", ModelConfig{}, weights(1));
  CHECK(first.revision() == Model("m", ModelConfig{}, weights(1)).revision());
  CHECK(first.revision() != Model("m", ModelConfig{}, weights(2)).revision());
}

TEST_CASE("a model in one file and the same model in shards load alike") {
  const TemporaryFolder folder;
  folder.write("config.json", kSmallConfig);
  const auto tensors = small_tensors();
  folder.write("one.safetensors", zero_safetensors({tensors.begin(), tensors.begin() + 5}));
  folder.write("two.safetensors", zero_safetensors({tensors.begin() + 5, tensors.end()}));
  std::string map;
  for (size_t i = 0; i < tensors.size(); ++i)
    map += (i == 0 ? "\"" : ",\"") + tensors[i].name + "\":\"" +
           (i < 5 ? "one.safetensors\"" : "two.safetensors\"");
  folder.write("model.safetensors.index.json", "{\"weight_map\":{" + map + "}}");
  const auto sharded = Model::load(folder.path());
  REQUIRE_MESSAGE(sharded.ok(), sharded.status().to_string());
  folder.write("model.safetensors", zero_safetensors(tensors));
  const auto single = Model::load(folder.path());
  REQUIRE_MESSAGE(single.ok(), single.status().to_string());
  CHECK(sharded->revision() == single->revision());
}

TEST_CASE("a tensor that is missing or has another shape is refused by name") {
  const auto load = [](const std::vector<ZeroTensor>& tensors) {
    const TemporaryFolder folder;
    folder.write("config.json", kSmallConfig);
    folder.write("model.safetensors", zero_safetensors(tensors));
    return Model::load(folder.path()).status();
  };
  CHECK(load(small_tensors()).ok());
  for (size_t i = 0; i < small_tensors().size(); ++i) {
    auto tensors = small_tensors();
    const std::string name = tensors[i].name;
    tensors[i].shape[0] += 1;
    check_refused(load(tensors), ErrorCode::kInvalidArgument, "\"" + name + "\" has shape [");
    tensors.erase(tensors.begin() + static_cast<std::ptrdiff_t>(i));
    check_refused(load(tensors), ErrorCode::kNotFound, "no tensor \"" + name + "\"");
  }
}

TEST_CASE("a wrong index of shards is refused") {
  const TemporaryFolder folder;
  folder.write("config.json", kSmallConfig);
  const auto load = [&](const std::string& index) {
    folder.write("model.safetensors.index.json", index);
    return Model::load(folder.path()).status();
  };
  check_refused(Model::load(folder.path()).status(), ErrorCode::kNotFound, "has neither");
  const auto invalid = ErrorCode::kInvalidArgument;
  check_refused(load("{"), invalid, "is not JSON");
  check_refused(load("[]"), invalid, "weight_map is not an object");
  check_refused(load(R"({"weight_map":[]})"), invalid, "weight_map is not an object");
  check_refused(load(R"({"weight_map":{}})"), invalid, "weight_map is empty");
  check_refused(load(R"({"weight_map":{"a":"none.safetensors"}})"), ErrorCode::kNotFound,
                "none.safetensors does not exist");
  for (const char* file :
       {"\"../x\"", "\"/etc/passwd\"", "\"..\"", "\".\"", "\"\"", "7", "\"a/b\"", "\"a\\u0000b\""})
    check_refused(load(R"({"weight_map":{"a":)" + std::string(file) + "}}"), invalid,
                  "expected the name of a file in the same folder");
  folder.write("one.safetensors", zero_safetensors({{"other", {1}}}));
  check_refused(load(R"({"weight_map":{"model.embed_tokens.weight":"one.safetensors"}})"),
                ErrorCode::kNotFound, "no tensor \"model.embed_tokens.weight\"");
  check_refused(load(R"({"weight_map":{"other":"one.safetensors"}})"), ErrorCode::kNotFound,
                "weight_map has no \"model.embed_tokens.weight\"");
}

TEST_CASE("windows of a text share one byte and must all be there") {
  const TemporaryFolder folder;
  const auto path = folder.write("text", "abcdefghi");
  CHECK(read_windows(path, 0, 2, 4).value() == "abcdefghi");
  CHECK(read_windows(path, 0, 1, 4).value() == "abcde");
  CHECK(read_windows(path, 1, 1, 4).value() == "efghi");
  check_refused(read_windows(path, 0, 3, 4).status(), ErrorCode::kInvalidArgument,
                "has 9 bytes, 2 windows of 4 tokens; windows 0 to 2 were asked for");
  check_refused(read_windows(folder.write("empty", ""), 0, 1, 4).status(),
                ErrorCode::kInvalidArgument, "0 windows");
}
