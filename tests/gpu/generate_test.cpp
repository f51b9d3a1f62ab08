// The real engine on pools in a GPU's memory: its model runs there in process, with and without a
// graph, and on the CPU on request.
#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/gpu.h"
#include "tests/support/node.h"

namespace larder::test {
namespace {

using nlohmann::json;

const std::string kModel = std::string(LARDER_TEST_DATA) + "/tiny-lm";
const std::vector<std::string> kFormats = {"bf16", "nvfp4"};

// A way to run the engine, and where its model is then.
struct Mode {
  std::string name;
  std::vector<std::string> options;
  bool model_on_gpu;
};
const std::vector<Mode> kModes = {
    {"in process, graph", {"--execution", "in-process"}, true},
    {"in process, no graph", {"--execution", "in-process", "--no-graph"}, true},
    {"on request", {"--execution", "on-request"}, false}};

// A node whose pools are where its larderd says.
Node node_on(const char* device) {
  ::setenv("LARDER_TEST_DEVICE", device, 1);
  return Node();
}

Output generate(const Node& node, const std::vector<std::vector<std::string>>& options) {
  std::vector<std::string> argv = {program("larder-generate"), "--model", kModel, "--socket",
                                   node.socket()};
  for (const auto& list : options) argv.insert(argv.end(), list.begin(), list.end());
  Output output = run(argv);
  INFO(output.stderr_text);
  REQUIRE(output.exit_code == 0);
  CHECK(output.stderr_text.find("no CUDA graph") == std::string::npos);
  return output;
}

json generate_json(const Node& node, std::vector<std::vector<std::string>> options) {
  options.push_back({"--json"});
  return json::parse(generate(node, options).stdout_text);
}

void check_places(const json& result, bool model_on_gpu) {
  const std::string pool_on = result["summary"]["pool_on"];
  CHECK(pool_on.starts_with("GPU-"));
  CHECK(result["summary"]["model_on"] == (model_on_gpu ? pool_on : "cpu"));
}

// Where the two best logits were once closer than 0.01, rounding may choose either; such texts
// agree in the first 20 new bytes at least.
void check_text(const std::string& text, const std::string& prompt, const json& expected) {
  const std::string wanted = expected["text"];
  const bool is_clear = expected["smallest_margin_logits"] >= 0.01;
  const size_t compared =
      is_clear ? std::min(wanted.size(), text.size()) : prompt.size() + size_t{20};
  CHECK(compared >= prompt.size() + 20);
  CHECK(text.substr(0, compared) == wanted.substr(0, compared));
}

json greedy_reference() { return json::parse(read_file(kModel + "/reference.json"))["greedy"]; }

TEST_CASE("on a GPU greedy text is the reference's, with and without a graph and on request") {
  if (!has_gpu()) return;
  const Node node = node_on("auto");
  const json greedy = greedy_reference();
  std::vector<std::string> prompts;
  for (const auto& [prompt, expected] : greedy.items())
    prompts.insert(prompts.end(), {"--prompt", prompt});
  for (const std::string& format : kFormats) {
    std::vector<json> texts;
    for (const Mode& mode : kModes) {
      INFO(format, ", ", mode.name);
      const json result = generate_json(
          node,
          {mode.options, {"--format", format, "--max-tokens", "160", "--no-prefix"}, prompts});
      check_places(result, mode.model_on_gpu);
      REQUIRE(result["texts"].size() == greedy.size());
      size_t index = 0;
      for (const auto& [prompt, expected] : greedy.items())
        check_text(result["texts"][index++]["text"], prompt, expected[format]);
      texts.push_back(result["texts"]);
    }
    // The same kernels with the same shapes, whoever launches them.
    CHECK(texts[0] == texts[1]);
  }
}

TEST_CASE("on a GPU a graph is made anew where sequences outgrow its block table") {
  if (!has_gpu()) return;
  const Node node = node_on("auto");
  const json greedy = greedy_reference();
  // More than 64 blocks of 2 tokens, after which the table's rows are twice as long.
  const std::string prompt = greedy.begin().key();
  for (const Mode& mode : kModes) {
    INFO(mode.name);
    const json result = generate_json(node, {mode.options,
                                             {"--format", "bf16", "--block-tokens", "2", "--pool",
                                              "small", "--max-tokens", "140"},
                                             {"--no-prefix", "--prompt", prompt}});
    CHECK(result["summary"]["blocks_used"] > 64);
    check_text(result["texts"][0]["text"], prompt, greedy[prompt]["bf16"]);
  }
}

TEST_CASE("one byte changed in a GPU's pool changes the text") {
  if (!has_gpu()) return;
  const Node node = node_on("auto");
  for (const std::string& format : kFormats) {
    for (const Mode& mode : kModes) {
      INFO(format, ", ", mode.name);
      const std::vector<std::string> options = {
          "--format",     format, "--prompt",   "To configure the server, ",
          "--max-tokens", "30",   "--no-prefix"};
      const std::string text = generate(node, {mode.options, options}).stdout_text;
      CHECK(text != generate(node, {mode.options, options, {"--poke"}}).stdout_text);
      CHECK(text == generate(node, {mode.options, options}).stdout_text);
    }
  }
}

TEST_CASE("a second engine starts from the prefix that the first one left in a GPU") {
  if (!has_gpu()) return;
  const Node node = node_on("auto");
  const std::vector<std::string> options = {
      "--format",     "bf16",
      "--prompt",     "The kernel allocates a page of memory when the page is completed. ",
      "--max-tokens", "20"};
  const json first = generate_json(node, {options});
  CHECK(first["texts"][0]["hit_tokens"] == 0);
  for (const Mode& mode : kModes) {
    INFO(mode.name);
    const json next = generate_json(node, {mode.options, options});
    CHECK(next["texts"][0]["hit_tokens"] == 64);  // of 66, in blocks of 16
    CHECK(next["texts"][0]["text"] == first["texts"][0]["text"]);
  }
}

TEST_CASE(
    "a text scores on a GPU as it does with the model on the CPU, and attends to the same rows") {
  if (!has_gpu()) return;
  const Node node = node_on("auto");
  const std::string text = kModel + "/reference.json";
  for (const std::string& format : kFormats) {
    const bool all = format == "bf16";  // queries and values too
    double bits[2];
    std::string rows[2];
    for (int i = 0; i < 2; ++i) {
      const Mode& mode = kModes[i == 0 ? 0 : 2];
      const std::string path = node.folder_file(format + std::to_string(i) + ".safetensors");
      const json result = generate_json(node, {mode.options,
                                               {"--format", format, "--score", text},
                                               {"--windows", "1"},
                                               {all ? "--dump-attention" : "--dump-keys", path}});
      check_places(result, mode.model_on_gpu);
      bits[i] = result["mean"];
      rows[i] = read_file(path);
    }
    INFO(format, ": ", bits[0], " for ", bits[1]);
    // Last bits that differ flip 4-bit codes (tests/e2e/fidelity_test.cpp).
    CHECK(std::abs(bits[0] / bits[1] - 1) < (format == "bf16" ? 0.001 : 0.005));
    REQUIRE(rows[0].size() == rows[1].size());
    // Layers, tokens, heads (of keys; of queries and values too), dims, bytes.
    CHECK(rows[0].size() > 6 * 2048 * (all ? 8 : 2) * 64 * 2);
    if (format == "nvfp4") continue;  // where keys follow the codes of the layers before
    size_t same = 0;
    for (size_t i = 0; i < rows[0].size(); ++i) same += rows[0][i] == rows[1][i];
    INFO(same, " of ", rows[0].size(), " bytes are the same");
    CHECK(same > rows[0].size() / 10 * 8);
  }
}

TEST_CASE("--device says whose memory the pool is, whatever larderd's default is") {
  if (!has_gpu()) return;
  const Node node = node_on("host");
  const std::vector<std::string> options = {"--prompt", "NAME\n    open - ", "--max-tokens", "20"};
  const auto summary = [&](const std::string& device) {
    std::vector<std::string> on = {"--pool", "p" + device};
    if (!device.empty()) on.insert(on.end(), {"--device", device});
    return generate_json(node, {options, on})["summary"];
  };
  const json automatic = summary("auto");
  const std::string gpu = automatic["pool_on"];
  CHECK(gpu.starts_with("GPU-"));
  CHECK(automatic["model_on"] == gpu);
  CHECK(summary(gpu)["pool_on"] == gpu);
  for (const char* device : {"", "host"}) {
    CHECK(summary(device)["pool_on"] == "host");
    CHECK(summary(device)["model_on"] == "cpu");
  }
  const Output refused = run({program("larder-generate"), "--model", kModel, "--socket",
                              node.socket(), "--prompt", "a", "--device", "gpu-seven"});
  CHECK(refused.exit_code == 1);
  CHECK(refused.stderr_text.find("gpu-seven") != std::string::npos);
}

}  // namespace
}  // namespace larder::test
