// The real engine on a real model: text, scores, and where its keys and values live.
#include <algorithm>

#include <doctest/doctest.h>

#include "client/safetensors.h"
#include "tests/support/node.h"

namespace larder::test {
namespace {

const std::string kModel = std::string(LARDER_TEST_DATA) + "/tiny-lm";
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
constexpr bool kSlow = true;
#else
constexpr bool kSlow = false;
#endif

nlohmann::json reference() { return nlohmann::json::parse(read_file(kModel + "/reference.json")); }

Output generate(const Node& node, std::vector<std::string> options) {
  std::vector<std::string> argv = {program("larder-generate"), "--model", kModel, "--socket",
                                   node.socket()};
  argv.insert(argv.end(), options.begin(), options.end());
  Output output = run(argv);
  INFO(output.stderr_text);
  REQUIRE(output.exit_code == 0);
  return output;
}

TEST_CASE("greedy text is the reference's, in both formats and both executions") {
  Node node;
  const nlohmann::json greedy = reference()["greedy"];
  const size_t new_tokens = kSlow ? 40 : 160;
  for (const std::string format : {"bf16", "nvfp4"}) {
    std::vector<std::string> texts[2];
    for (int i = 0; i < 2; ++i) {
      std::vector<std::string> options = {"--format",
                                          format,
                                          "--json",
                                          "--max-tokens",
                                          std::to_string(new_tokens),
                                          "--execution",
                                          i == 0 ? "in-process" : "on-request"};
      for (const auto& [prompt, expected] : greedy.items()) {
        options.push_back("--prompt");
        options.push_back(prompt);
      }
      const auto result = nlohmann::json::parse(generate(node, options).stdout_text);
      for (const auto& generation : result["texts"]) texts[i].push_back(generation["text"]);
    }
    CHECK(texts[0] == texts[1]);
    size_t index = 0;
    for (const auto& [prompt, expected] : greedy.items()) {
      const std::string wanted = expected[format]["text"];
      const std::string& text = texts[0].at(index++);
      const size_t compared = std::min(wanted.size(), text.size());
      INFO(format, ": ", text);
      // Where the two best logits were once closer than this, rounding may choose either; these
      // texts agree at least that far.
      if (expected[format]["smallest_margin_logits"] >= 0.01) {
        CHECK(text.substr(0, compared) == wanted.substr(0, compared));
      } else {
        CHECK(text.substr(0, prompt.size() + 20) == wanted.substr(0, prompt.size() + 20));
      }
    }
  }
}

TEST_CASE("one byte changed in the pool changes the text, in both formats and executions") {
  Node node;
  for (const std::string format : {"bf16", "nvfp4"}) {
    for (const std::string execution : {"in-process", "on-request"}) {
      const std::vector<std::string> options = {
          "--format",     format, "--execution", execution, "--prompt", "To configure the server, ",
          "--max-tokens", "30",   "--no-prefix"};
      std::vector<std::string> poked = options;
      poked.push_back("--poke");
      CHECK(generate(node, options).stdout_text != generate(node, poked).stdout_text);
      CHECK(generate(node, options).stdout_text == generate(node, options).stdout_text);
    }
  }
}

TEST_CASE("a second engine starts from the first one's prefix and says the same") {
  Node node;
  const std::vector<std::string> options = {
      "--json", "--max-tokens", "20", "--prompt",
      "The kernel allocates a page of memory when the page is completed. "};
  const auto first = nlohmann::json::parse(generate(node, options).stdout_text);
  const auto second = nlohmann::json::parse(generate(node, options).stdout_text);
  CHECK(first["texts"][0]["hit_tokens"] == 0);
  CHECK(second["texts"][0]["hit_tokens"] == 64);  // of 66, in blocks of 16
  CHECK(first["texts"][0]["text"] == second["texts"][0]["text"]);
  // 2048 tokens of 2 heads of 64 + 64 values of 2 bytes.
  CHECK(first["summary"]["gather_rows_per_sequence"] == 2048);
  CHECK(first["summary"]["gather_scratch_bytes"] == 1'048'576);
  // Both ran in process; on request the daemon counts, once per layer.
  std::vector<std::string> on_request = options;
  on_request.insert(on_request.end(), {"--execution", "on-request"});
  const auto third = nlohmann::json::parse(generate(node, on_request).stdout_text);
  CHECK(eventually([&] {
    return node.ctl({"pools"})[0]["appended_tokens_total"] ==
           6 * third["summary"]["appended_tokens"].get<int>();
  }));
  CHECK(second["summary"]["appended_tokens"] ==
        first["summary"]["appended_tokens"].get<int>() - 64);
}

TEST_CASE("the program of the README runs and prints what it says") {
  Node node;
  ::setenv("LARDER_SOCKET", node.socket().c_str(), 1);
  const Output output = run({program("readme_example")});
  ::unsetenv("LARDER_SOCKET");
  CHECK(output.exit_code == 0);
  CHECK(output.stdout_text == "OK, out[0] = 3\n");
}

TEST_CASE("a scored text's keys can be written out, alone or with its queries and values") {
  Node node;
  const std::string paths[2] = {node.folder_file("keys"), node.folder_file("attention")};
  const std::string flags[2] = {"--dump-keys", "--dump-attention"};
  for (int i = 0; i < 2; ++i)
    (void)generate(node, {"--format", "bf16", "--score", kModel + "/reference.json", "--windows",
                          "1", flags[i], paths[i]});
  const auto keys = SafetensorsFile::open(paths[0]);
  const auto attention = SafetensorsFile::open(paths[1]);
  REQUIRE(keys.ok());
  REQUIRE(attention.ok());
  CHECK(keys->tensors().size() == 6);
  CHECK(attention->tensors().size() == 18);
  const std::vector<int64_t> kv_shape = {2048, 2, 64};
  for (int layer = 0; layer < 6; ++layer) {
    const std::string number = std::to_string(layer);
    CHECK(attention->tensors().at("q." + number).shape == std::vector<int64_t>{2048, 4, 64});
    CHECK(attention->tensors().at("v." + number).shape == kv_shape);
    std::vector<float> values[2] = {std::vector<float>(2048 * 2 * 64),
                                    std::vector<float>(2048 * 2 * 64)};
    CHECK(keys->read("k." + number, kv_shape, values[0]).ok());
    CHECK(attention->read("k." + number, kv_shape, values[1]).ok());
    CHECK(values[0] == values[1]);
  }
  for (const std::vector<std::string>& options :
       {std::vector<std::string>{"--prompt", "a", "--dump-attention", paths[1]},
        {"--score", "x", "--dump-attention", paths[1], "--dump-keys", paths[0]}}) {
    std::vector<std::string> argv = {program("larder-generate"), "--model", kModel};
    argv.insert(argv.end(), options.begin(), options.end());
    const Output output = run(argv);
    CHECK(output.exit_code == 2);
    CHECK(output.stderr_text.find("--dump-attention") != std::string::npos);
  }
}

TEST_CASE("a pool that is too small is refused with the numbers") {
  Node node;
  const Output output =
      run({program("larder-generate"), "--model", kModel, "--socket", node.socket(), "--num-blocks",
           "2", "--prompt", "a prompt that is longer than two blocks of sixteen tokens"});
  CHECK(output.exit_code == 1);
  CHECK(output.stderr_text.find("RESOURCE_EXHAUSTED") != std::string::npos);
}

}  // namespace
}  // namespace larder::test
