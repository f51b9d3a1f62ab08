// larderd, keeper and executor as processes: start, stop, death, leftovers.
#include <filesystem>
#include <fstream>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <doctest/doctest.h>

#include "tests/support/node.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

std::string executable_of(int64_t pid) {
  return std::filesystem::read_symlink("/proc/" + std::to_string(pid) + "/exe").filename();
}

TEST_CASE("a node is three processes of three executables") {
  Node node;
  const auto status = node.ctl({"status"});
  CHECK(status["pid"] == node.larderd().pid());
  CHECK(status["keeper_pid"] == node.keeper().pid());
  CHECK(executable_of(status["pid"]) == "larderd");
  CHECK(executable_of(status["executor_pid"]) == "larder-executor");
  CHECK(executable_of(status["keeper_pid"]) == "larder-keeper");
  CHECK(status["ready"] == true);
}

TEST_CASE("the socket has mode 0660 under any umask") {
  for (const mode_t mask : {mode_t{0}, mode_t{077}}) {
    const mode_t before = ::umask(mask);
    Node node;
    ::umask(before);
    struct stat info {};
    REQUIRE(::stat(node.socket().c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0660);
    // Whoever speaks to the keeper gets every tenant's memory.
    REQUIRE(::stat(node.keeper_socket().c_str(), &info) == 0);
    CHECK((info.st_mode & 0777) == 0600);
  }
}

TEST_CASE("SIGTERM ends an idle larderd with 0, and its files are gone") {
  Node node;
  const auto executor_pid = node.ctl({"status"})["executor_pid"].get<pid_t>();
  node.larderd().signal(SIGTERM);
  CHECK(node.larderd().wait_exit(20s) == 0);
  CHECK(::access(node.socket().c_str(), F_OK) != 0);
  CHECK(::access((node.socket() + ".lock").c_str(), F_OK) != 0);
  CHECK(::kill(executor_pid, 0) != 0);
}

TEST_CASE("SIGTERM with a client: readyz fails, livez does not, the client's end ends it") {
  Node node({"--log-level", "info"});
  std::optional<Client> client(node.connect());
  node.larderd().signal(SIGTERM);
  CHECK(eventually([&] { return node.http("/readyz").find(" 503 ") != std::string::npos; }));
  CHECK(node.http("/livez").find(" 200 ") != std::string::npos);
  auto late = Client::connect({.socket_path = node.socket()});
  REQUIRE(!late.ok());
  CHECK(late.status().code() == ErrorCode::kShuttingDown);
  client.reset();
  CHECK(node.larderd().wait_exit(20s) == 0);
}

TEST_CASE("after SIGKILL of larderd a new one goes on with what the keeper has") {
  Node node;
  {
    Client client = node.connect({.deadline = 2s});  // how long it waits for larderd
    auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
    REQUIRE(pool.ok());
    CHECK(node.ctl({"status"})["keeper_segments"] == 1);
    node.larderd().signal(SIGKILL);
    REQUIRE(node.larderd().wait_exit(20s) == 128 + SIGKILL);
    auto gone = pool->allocate(1);
    REQUIRE(!gone.ok());
    CHECK(gone.status().code() == ErrorCode::kUnavailable);
  }
  CHECK(::access(node.socket().c_str(), F_OK) == 0);  // the stale file
  node.start_larderd();
  node.await_ready();
  CHECK(node.ctl({"status"})["keeper_segments"] == 1);
  const auto pools = node.ctl({"pools"});
  REQUIRE(pools.size() == 1);
  CHECK(pools[0]["name"] == "p");
}

TEST_CASE("of many starters at one path exactly one serves") {
  Node node;
  std::vector<Process> others;
  for (int i = 0; i < 5; ++i)
    others.emplace_back(
        std::vector<std::string>{program("larderd"), "--socket", node.socket(), "--keeper",
                                 node.keeper_socket(), "--http-port", "-1"},
        node.folder_file("others.log"));
  for (Process& other : others) CHECK(other.wait_exit(20s) == 1);
  CHECK(node.ctl({"status"})["pid"] == node.larderd().pid());
}

TEST_CASE("what is no socket is left alone") {
  Node node;
  const std::string path = node.folder_file("file");
  std::ofstream(path) << "precious";
  const Output output = run({program("larder-keeper"), "--socket", path});
  CHECK(output.exit_code == 1);
  CHECK(output.stderr_text.find("not a socket") != std::string::npos);
  CHECK(read_file(path) == "precious");
}

TEST_CASE("a wrong configuration is refused with the key and the value") {
  TemporaryFolder folder;
  const std::string path = folder.file("larderd.toml");
  const std::pair<const char*, const char*> cases[] = {
      {"memory_bytes = -5", "memory_bytes is -5"},
      {"memory_bytes = \"much\"", "memory_bytes"},
      {"http_port = 70000", "http_port is 70000"},
      {"http_address = \"0.0.0.0\"", "http_address is 0.0.0.0"},
      {"colour = \"red\"", "colour is not a key"},
      {"log_level = \"loud\"", "log_level is loud"},
      {"tenants = []", "tenants is empty"},
      {"[[tenants]]\nname = \"a\"\n[[tenants]]\nname = \"a\"", "appears twice"},
      {"[[tenants]]\nname = \"a\"\nsecret = 1", "tenants.secret"},
      {"memory_bytes = ", "line 1"},
  };
  for (const auto& wrong : cases) {
    std::ofstream(path, std::ios::trunc) << wrong.first << "\n";
    const Output output = run({program("larderd"), "--config", path});
    CHECK(output.exit_code == 1);
    INFO(wrong.first, " gave ", output.stderr_text);
    CHECK(output.stderr_text.find(wrong.second) != std::string::npos);
  }
  const Output missing = run({program("larderd"), "--config", folder.file("none.toml")});
  CHECK(missing.exit_code == 1);
  CHECK(missing.stderr_text.find("NOT_FOUND") != std::string::npos);
}

TEST_CASE("the sample configuration is a valid one") {
  TemporaryFolder folder;
  Process keeper({program("larder-keeper"), "--socket", folder.file("k.sock")}, folder.file("log"));
  REQUIRE(eventually([&] { return listens(folder.file("k.sock")); }));
  Process larderd(
      {program("larderd"), "--config", std::string(LARDER_TEST_DATA) + "/../../deploy/larderd.toml",
       "--socket", folder.file("l.sock"), "--keeper", folder.file("k.sock"), "--http-port", "-1"},
      folder.file("log"));
  CHECK(eventually([&] { return listens(folder.file("l.sock")); }));
  larderd.signal(SIGTERM);
  CHECK(larderd.wait_exit(20s) == 0);
}

TEST_CASE("larderd without a keeper says so and ends") {
  TemporaryFolder folder;
  const Output output = run({program("larderd"), "--socket", folder.file("l.sock"), "--keeper",
                             folder.file("none.sock"), "--http-port", "-1"});
  CHECK(output.exit_code == 1);
  CHECK(output.stderr_text.find("UNAVAILABLE") != std::string::npos);
  CHECK(output.stderr_text.find("none.sock") != std::string::npos);
}

TEST_CASE("larderd names the port that somebody else has, and ends") {
  const Node other;
  TemporaryFolder folder;
  Process keeper({program("larder-keeper"), "--socket", folder.file("k.sock")}, folder.file("log"));
  REQUIRE(eventually([&] { return listens(folder.file("k.sock")); }));
  const std::string port = std::to_string(other.http_port());
  const Output output = run({program("larderd"), "--socket", folder.file("l.sock"), "--keeper",
                             folder.file("k.sock"), "--device", "host", "--http-port", port});
  CHECK(output.exit_code == 1);
  INFO(output.stderr_text);
  CHECK(output.stderr_text.find("127.0.0.1:" + port + ": Address already in use") !=
        std::string::npos);
  CHECK(output.stderr_text.find("asio") == std::string::npos);
}

TEST_CASE("without its keeper larderd is not ready and makes no pool, but serves what is there") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  node.keeper().signal(SIGKILL);
  REQUIRE(node.keeper().wait_exit(20s).has_value());
  CHECK(node.http("/readyz").find("the keeper is gone") != std::string::npos);
  auto second = client.open_pool(small_pool("q", Execution::kOnRequest));
  REQUIRE(!second.ok());
  CHECK(second.status().code() == ErrorCode::kUnavailable);
  CHECK(pool->allocate(1).ok());
  CHECK(node.ctl({"pools"}).size() == 1);
  // A new keeper is given everything again.
  node.start_keeper();
  node.await_ready();
  CHECK(node.ctl({"status"})["keeper_segments"] == 1);
  CHECK(client.open_pool(small_pool("q", Execution::kOnRequest)).ok());
}

TEST_CASE("metrics name every state of a pool from the first scrape on") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("a \"quoted\" name", Execution::kOnRequest));
  REQUIRE(pool.ok());
  auto blocks = pool->allocate(3);
  REQUIRE(blocks.ok());
  (void)pool->allocate(100);  // refused: 5 are left
  const std::string text = node.http("/metrics");
  const std::string labels = R"({tenant="default",pool="a \"quoted\" name",)";
  CHECK(text.find("larder_pool_blocks" + labels + "state=\"open\"} 3") != std::string::npos);
  CHECK(text.find("larder_pool_blocks" + labels + "state=\"free\"} 5") != std::string::npos);
  CHECK(text.find("larder_refusals_total{reason=\"RESOURCE_EXHAUSTED\"} 1") != std::string::npos);
  CHECK(text.find("larder_refusals_total{reason=\"INTERNAL\"} 0") != std::string::npos);
  CHECK(text.find("larder_requests_total{op=\"allocate\"} 2") != std::string::npos);
  CHECK(node.http("/nothing").find(" 404 ") != std::string::npos);
}

}  // namespace
}  // namespace larder::test
