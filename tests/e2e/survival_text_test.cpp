// The engine of client/examples over restarts: its text, its published blocks, and what it tells.
#include <regex>
#include <sstream>

#include "tests/e2e/survival.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

const std::string kModel = std::string(LARDER_TEST_DATA) + "/tiny-lm";
const std::string kPrompt = "The kernel allocates a page of memory when ";

std::vector<std::string> generate(const Node& node, std::vector<std::string> options) {
  std::vector<std::string> argv = {program("larder-generate"),
                                   "--model",
                                   kModel,
                                   "--socket",
                                   node.socket(),
                                   "--pool",
                                   "text",
                                   "--prompt",
                                   kPrompt,
                                   "--max-tokens",
                                   "60"};
  argv.insert(argv.end(), options.begin(), options.end());
  return argv;
}

int64_t figure(const std::string& summary, const std::string& name) {
  std::smatch match;
  REQUIRE(std::regex_search(summary, match, std::regex(name + "=([0-9]+)")));
  return std::stoll(match[1]);
}

TEST_CASE("text goes on in mid-sentence over two deaths of larderd and one of the executor") {
  Node node;
  const Output calm = run(generate(node, {"--no-prefix"}));
  REQUIRE(calm.exit_code == 0);
  CHECK(figure(calm.stderr_text, "resumes") == 0);
  for (const std::string execution : {"in-process", "on-request"}) {
    const std::string path = node.folder_file("text-" + execution);
    Process engine(generate(node, {"--no-prefix", "--execution", execution, "--pause-ms", "10"}),
                   path);
    const auto await_bytes = [&](size_t count) {
      REQUIRE(eventually([&] { return read_file(path).size() >= kPrompt.size() + count; }, 60s));
    };
    await_bytes(10);
    node.replace_larderd(SIGKILL);
    await_bytes(25);
    ::kill(node.executor_pid(), SIGKILL);
    await_bytes(40);
    node.replace_larderd(SIGKILL);
    CHECK(engine.wait_exit(60s) == 0);
    const std::string output = read_file(path);
    const size_t summary = output.rfind("larder-generate: ");
    REQUIRE(summary != std::string::npos);
    CHECK(output.substr(0, summary) == calm.stdout_text);
    const std::string line = output.substr(summary);
    CHECK(figure(line, "appended_tokens") == figure(calm.stderr_text, "appended_tokens"));
    CHECK(figure(line, "resumes") == 2);
    // 59 steps with a pause before each.
    CHECK(figure(line, "decode_ms") >= 590);
    CHECK(figure(line, "longest_stall_ms") <= figure(line, "decode_ms"));
  }
}

TEST_CASE("--checksum shows the published blocks of a prompt, which a restart leaves as they are") {
  Node node;
  const auto checksum = [&] { return run(generate(node, {"--checksum"})); };
  Output none = checksum();
  CHECK(none.exit_code == 0);
  CHECK(none.stdout_text.empty());
  REQUIRE(run(generate(node, {})).exit_code == 0);
  const Output before = checksum();
  CHECK(before.exit_code == 0);
  // 43 bytes of prompt: two whole blocks of 16, each of 6 layers, 2 KV heads, 2 * 16 * 36 bytes.
  CHECK(figure(before.stderr_text, "blocks") == 2);
  CHECK(figure(before.stderr_text, "bytes") == 2 * 6 * 2 * 2 * 16 * 36);
  CHECK(std::regex_match(before.stdout_text, std::regex("([0-9]+ [0-9a-f]{16}\n){2}")));
  node.replace_larderd(SIGKILL);
  CHECK(checksum().stdout_text == before.stdout_text);
  CHECK(group_of(node, "text")["published"] == 0);
  for (const char* other : {"--poke", "--json"})
    CHECK(run(generate(node, {"--checksum", other})).exit_code == 2);
  CHECK(run(generate(node, {"--checksum", "--prompt", "another"})).exit_code == 2);
}

}  // namespace
}  // namespace larder::test
