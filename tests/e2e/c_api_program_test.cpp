// liblarder.so as a C program sees it: what c_api_program.c and the README's program print, and
// what the library exports.
#include <cstdint>
#include <cstdio>
#include <set>
#include <sstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/node.h"

namespace larder::test {
namespace {

Output run_on(const Node& node, std::vector<std::string> argv) {
  argv.insert(argv.begin(), {"/usr/bin/env", "LARDER_SOCKET=" + node.socket()});
  return run(argv);
}

// Two nvfp4 pages of 16 tokens of K = 1.5 and V = 3 (even tokens) or 6 (odd): every element is E2M1
// 6.0, code 7; the e4m3 scales are 1/4 = 0x28, 1/2 = 0x30 and 1 = 0x38.
uint64_t hash_of_two_pages() {
  std::vector<uint8_t> page(512, 0x77);
  page.insert(page.end(), 64, 0x28);
  page.insert(page.end(), 512, 0x77);
  for (int token = 0; token < 16; ++token) page.insert(page.end(), 4, token % 2 == 0 ? 0x30 : 0x38);
  uint64_t hash = 14695981039346656037u;
  for (int i = 0; i < 2; ++i)
    for (const uint8_t byte : page) hash = (hash ^ byte) * 1099511628211u;
  return hash;
}

TEST_CASE("a C99 program gets the values, the bytes and the refusals of the C++ API") {
  Node node;
  char hash[17];
  std::snprintf(hash, sizeof hash, "%016llx", static_cast<unsigned long long>(hash_of_two_pages()));
  for (const std::string execution : {"in_process", "on_request"}) {
    const Output output = run_on(node, {LARDER_C_PROGRAM, execution});
    INFO(output.stdout_text, output.stderr_text);
    CHECK(output.exit_code == 0);
    std::istringstream lines(output.stdout_text);
    const auto line = [&] {
      std::string text;
      std::getline(lines, text);
      return text;
    };
    // (16 * 3 + 16 * 6) / 32 and (17 * 3 + 16 * 6) / 33; ln 32 and ln 33.
    CHECK(line() == "attend: 4.500000 4.454545 lse 3.465736 3.496508");
    CHECK(line() == "read: k 1.5 v 6 3");
    CHECK(line() == "pages: 1152 bytes hash " + std::string(hash));
    CHECK(line() == "lookup: 2 blocks 32 tokens");
    CHECK(line().find("too many blocks: RESOURCE_EXHAUSTED: ") == 0);
    CHECK(line().find("layer: INVALID_ARGUMENT: layer is 2") == 0);
    CHECK(line() == "null: INVALID_ARGUMENT: pool is NULL");
    CHECK(line() == "causal: INVALID_ARGUMENT: causal is 2, expected 0 or 1");
    CHECK(line() == "done");
  }
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 1; }));  // larderctl's own
}

TEST_CASE("the C program of the client's README prints its value, or why it cannot") {
  const std::string readme = LARDER_C_README_PROGRAM;
  {
    Node node;
    const Output output = run_on(node, {readme});
    CHECK(output.stdout_text == "OK, out[0] = 3\n");
    CHECK(output.exit_code == 0);
  }
  const Output output = run({"/usr/bin/env", "LARDER_SOCKET=/nonexistent/socket", readme});
  CHECK(output.stdout_text.find("UNAVAILABLE: ") == 0);
  CHECK(output.stdout_text.find("/nonexistent/socket") != std::string::npos);
  CHECK(output.exit_code == 1);
}

TEST_CASE("liblarder.so exports the functions of the header and nothing else") {
  const Output names = run({"/usr/bin/nm", "-D", "--defined-only", "--format=posix", LARDER_SO});
  REQUIRE(names.exit_code == 0);
  std::set<std::string> exported;
  std::istringstream lines(names.stdout_text);
  for (std::string line; std::getline(lines, line);) {
    const std::string name = line.substr(0, line.find_first_of(" @"));
    if (name != "LARDER_0") exported.insert(name);  // the version itself
  }
  const std::string header = read_file(LARDER_HEADER);
  std::set<std::string> declared;
  std::istringstream text(header);
  for (std::string line; std::getline(text, line);) {
    const size_t open = line.find('(');
    if (line.empty() || line.rfind("//", 0) == 0 || line[0] == ' ' || open == std::string::npos)
      continue;
    const size_t start = line.find_last_of(" *", open) + 1;
    declared.insert(line.substr(start, open - start));
  }
  CHECK(declared.size() > 50);
  CHECK(declared.count("larder_pool_append") == 1);
  CHECK(exported == declared);

  const Output dynamic = run({"/usr/bin/readelf", "-d", LARDER_SO});
  CHECK(dynamic.stdout_text.find("Library soname: [liblarder.so.0]") != std::string::npos);
}

}  // namespace
}  // namespace larder::test
