// larderctl: what it shows, its exit codes, and that nothing makes it hang.
#include <chrono>
#include <cstring>
#include <signal.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/support/node.h"

namespace larder::test {
namespace {

Output ctl(const std::string& socket, std::vector<std::string> command) {
  std::vector<std::string> argv = {program("larderctl"), "--socket", socket};
  argv.insert(argv.end(), command.begin(), command.end());
  return run(argv);
}

TEST_CASE("status, pools, sessions and capabilities in both formats") {
  Node node;
  Client client = node.connect({.name = "an engine"});
  auto pool = client.open_pool(small_pool("kv", Execution::kInProcess));
  REQUIRE(pool.ok());
  auto blocks = pool->allocate(3);
  REQUIRE(blocks.ok());
  const auto pools = node.ctl({"pools"});
  REQUIRE(pools.size() == 1);
  CHECK(pools[0]["name"] == "kv");
  CHECK(pools[0]["identity"]["k_format"] == "nvfp4");
  CHECK(pools[0]["groups"][0]["open"] == 3);
  CHECK(pools[0]["groups"][0]["free"] == 5);
  const auto sessions = node.ctl({"sessions"});
  REQUIRE(sessions.size() == 2);
  CHECK(sessions[0]["client_name"] == "an engine");
  CHECK(sessions[0]["pid"] == ::getpid());
  CHECK(sessions[0]["open_blocks"] == 3);
  CHECK(sessions[0]["mapped"] == true);
  CHECK(sessions[1]["client_name"] == "larderctl");
  bool attends_nvfp4 = false;
  for (const auto& row : node.ctl({"capabilities"}))
    attends_nvfp4 = attends_nvfp4 || (row["op"] == "attend" && row["k_format"] == "nvfp4" &&
                                      row["v_format"] == "nvfp4" && row["dim_multiple"] == 16);
  CHECK(attends_nvfp4);
  for (const char* command : {"status", "pools", "sessions", "capabilities"}) {
    const Output text = ctl(node.socket(), {command});
    CHECK(text.exit_code == 0);
    CHECK(!text.stdout_text.empty());
    CHECK(text.stderr_text.empty());
  }
  CHECK(ctl(node.socket(), {"pools"}).stdout_text.find("nvfp4") != std::string::npos);
}

TEST_CASE("exit codes: 1 refused, 2 usage, 3 nobody answers") {
  Node node;
  CHECK(ctl(node.socket(), {"destroy-pool", "none"}).exit_code == 1);
  CHECK(ctl(node.socket(), {"--tenant", "nobody", "status"}).exit_code == 1);
  CHECK(ctl(node.socket(), {}).exit_code == 2);
  CHECK(ctl(node.socket(), {"frobnicate"}).exit_code == 2);
  CHECK(ctl(node.socket(), {"--format", "xml", "status"}).exit_code == 2);
  const Output missing = ctl(node.folder_file("none.sock"), {"status"});
  CHECK(missing.exit_code == 3);
  CHECK(missing.stderr_text.find("not running") != std::string::npos);
  CHECK(missing.stdout_text.empty());
  const Output json = ctl(node.folder_file("none.sock"), {"--format", "json", "status"});
  CHECK(nlohmann::json::parse(json.stdout_text)["error"]["code"] == "UNAVAILABLE");
  CHECK(ctl("/" + std::string(200, 'x'), {"status"}).exit_code == 1);  // path too long
}

TEST_CASE("a stale socket and a silent daemon end within the deadline") {
  Node node;
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(std::chrono::seconds(20)).has_value());
  const Output stale = ctl(node.socket(), {"status"});
  CHECK(stale.exit_code == 3);
  CHECK(stale.stderr_text.find("stale") != std::string::npos);

  // Somebody who listens and never answers.
  const std::string path = node.folder_file("silent.sock");
  const int listener = ::socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
  sockaddr_un address{};
  address.sun_family = AF_UNIX;
  std::strncpy(address.sun_path, path.c_str(), sizeof address.sun_path - 1);
  REQUIRE(::bind(listener, reinterpret_cast<const sockaddr*>(&address), sizeof address) == 0);
  REQUIRE(::listen(listener, 1) == 0);
  const auto started = std::chrono::steady_clock::now();
  const Output silent = ctl(path, {"--deadline-ms", "300", "status"});
  CHECK(silent.exit_code == 3);
  CHECK(silent.stderr_text.find("DEADLINE_EXCEEDED") != std::string::npos);
  CHECK(std::chrono::steady_clock::now() - started < std::chrono::seconds(30));
  ::close(listener);
}

}  // namespace
}  // namespace larder::test
