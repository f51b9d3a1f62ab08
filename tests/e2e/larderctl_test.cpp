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

// Blocks of 65,536 bytes, 32 in a segment of 2 MiB.
PoolOptions growing_pool() {
  PoolOptions options = small_pool("g", Execution::kInProcess, KvFormat::kBf16, 32);
  options.geometry = {1, 8, 16, 128, 128, KvFormat::kBf16, KvFormat::kBf16};
  options.max_blocks = 128;
  options.segment_bytes = int64_t{2} << 20;
  return options;
}

TEST_CASE("a pool is resized and evicted by whoever operates the node") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(growing_pool());
  REQUIRE(pool.ok());
  const auto grown = node.ctl({"resize", "g", "96"});
  CHECK(grown["blocks_before"] == 32);
  CHECK(grown["blocks_after"] == 96);
  CHECK(grown["bytes_after"] == 6 << 20);
  const auto blocks = pool->allocate(3).value();
  REQUIRE(pool->publish(std::vector<int32_t>(48, 1), blocks).ok());
  REQUIRE(pool->release(blocks).ok());
  CHECK(node.ctl({"pools"})[0]["groups"][0]["evictable"] == 3);
  const auto evicted = node.ctl({"evict", "g", "2"});
  CHECK(evicted["blocks_before"] == 3);
  CHECK(evicted["blocks_after"] == 1);
  CHECK(node.ctl({"resize", "g", "64", "--group", "attention"})["blocks_after"] == 64);
  CHECK(eventually([&] { return node.ctl({"sessions"})[0]["pending_unmap_bytes"] == 0; }));
  const auto group = node.ctl({"pools"})[0]["groups"][0];
  CHECK(group["capacity"] == 64);
  CHECK(group["max_blocks"] == 128);
  CHECK(group["leaving_bytes"] == 0);
  const Output text = ctl(node.socket(), {"resize", "g", "1"});
  CHECK(text.stdout_text == "64 blocks before, 32 after; 4.0 MiB before, 2.0 MiB after\n");
  const Output unknown = ctl(node.socket(), {"resize", "g", "1", "--group", "window"});
  CHECK(unknown.exit_code == 1);
  CHECK(unknown.stderr_text.find("its groups are attention") != std::string::npos);
  CHECK(ctl(node.socket(), {"resize", "none", "1"}).exit_code == 1);
  CHECK(ctl(node.socket(), {"resize", "g", "many"}).exit_code == 2);
  CHECK(ctl(node.socket(), {"evict", "g"}).exit_code == 2);
}

TEST_CASE("quotas are set and shown") {
  Node node({"--memory-bytes", "1GiB"});
  Client client = node.connect();
  auto pool = client.open_pool(growing_pool());
  REQUIRE(pool.ok());
  CHECK(node.ctl({"quota", "default", "4MiB", "6MiB"}).empty());
  const auto tenants = node.ctl({"tenants"});
  REQUIRE(tenants.size() == 1);
  CHECK(tenants[0]["name"] == "default");
  CHECK(tenants[0]["guaranteed_bytes"] == 4 << 20);
  CHECK(tenants[0]["maximum_bytes"] == 6 << 20);
  CHECK(tenants[0]["used_bytes"] == 2 << 20);
  CHECK(tenants[0]["leaving_bytes"] == 0);
  CHECK(ctl(node.socket(), {"resize", "g", "128"}).exit_code == 1);
  CHECK(node.ctl({"resize", "g", "96"})["bytes_after"] == 6 << 20);
  const Output text = ctl(node.socket(), {"tenants"});
  CHECK(text.stdout_text.find("default  4.0 MiB     6.0 MiB  6.0 MiB") != std::string::npos);
  const Output much = ctl(node.socket(), {"quota", "default", "2GiB", "0"});
  CHECK(much.exit_code == 1);
  CHECK(much.stderr_text.find("RESOURCE_EXHAUSTED") != std::string::npos);
  CHECK(ctl(node.socket(), {"quota", "nobody", "0", "0"}).exit_code == 1);
  CHECK(ctl(node.socket(), {"quota", "default", "0"}).exit_code == 2);
}

TEST_CASE("what a restart found is shown, and who is not back yet") {
  Node node;
  Client client = node.connect({.name = "an engine"});
  auto pool = client.open_pool(small_pool("kv", Execution::kInProcess));
  REQUIRE(pool.ok());
  const auto before = node.ctl({"status"});
  CHECK(before["recovered_pools"] == 0);
  CHECK(before["journal_bytes"] > 0);
  CHECK(before["not_ready"] == "");
  CHECK(before["cache_id"] == client.cache_id());
  CHECK(before["boot_id"] == client.boot_id());
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(std::chrono::seconds(20)).has_value());
  node.start_larderd();
  node.await_ready();
  REQUIRE(pool->allocate(1).ok());
  const auto after = node.ctl({"status"});
  CHECK(after["recovered_pools"] == 1);
  CHECK(after["recovered_sessions"] == 1);
  CHECK(after["cache_id"] == before["cache_id"]);
  CHECK(after["boot_id"] != before["boot_id"]);
  const auto sessions = node.ctl({"sessions"});
  CHECK(sessions[0]["client_name"] == "an engine");
  CHECK(sessions[0]["absent"] == false);
  CHECK(sessions[0]["fence"] == "pidfd");
  const Output text = ctl(node.socket(), {"status"});
  CHECK(text.stdout_text.find("1 pools and 1 sessions recovered") != std::string::npos);
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
  CHECK(stale.stderr_text.find("not running") != std::string::npos);
  CHECK(stale.stderr_text.find("stale socket") != std::string::npos);
  CHECK(stale.stdout_text.empty());  // no figures of the past

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
