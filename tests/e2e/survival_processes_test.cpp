// Executor and keeper die, a second larderd knocks, the configuration changes: what goes on.
#include <atomic>
#include <filesystem>
#include <set>
#include <thread>

#include "tests/e2e/survival.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

// Appends and attends on request until told to end, and compares every answer with the first.
void attend_until_told(const Node& node, const Talk& talk) {
  Client client = must(Client::connect({.socket_path = node.socket(), .name = "attending"}));
  Pool pool = must(client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kNvfp4, 32)));
  Sequence sequence = pool.begin_sequence();
  must(sequence.extend(100));
  std::vector<float> rows(100 * 64);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 41) - 20.0f;
  const TensorView view = dense_tensor(rows.data(), Dtype::kFp32, 100, 1, 64);
  std::vector<float> first(100 * 64);
  std::vector<float> out(100 * 64);
  must(sequence.append(0, view, view));
  must(sequence.attend(0, view, dense_tensor(first.data(), Dtype::kFp32, 100, 1, 64)));
  talk.say("ready");
  int64_t calls = 0;
  while (::recv(talk.fd(), out.data(), 1, MSG_DONTWAIT) < 0) {
    must(sequence.append(0, view, view));
    std::fill(out.begin(), out.end(), -1.0f);
    must(sequence.attend(0, view, dense_tensor(out.data(), Dtype::kFp32, 100, 1, 64)));
    if (out != first)
      throw std::runtime_error("attention differs in call " + std::to_string(calls));
    ++calls;
  }
  talk.say(std::to_string(calls));
}

pid_t await_executor_other_than(const Node& node, pid_t before) {
  pid_t pid = 0;
  REQUIRE(eventually([&] {
    const auto status = node.ctl({"status"});
    pid = status["executor_pid"].get<pid_t>();
    return status["ready"] == true && pid != 0 && pid != before;
  }));
  return pid;
}

TEST_CASE("an executor killed under load costs no call and changes no answer") {
  Node node;
  Child client([&](const Talk& talk) { attend_until_told(node, talk); });
  REQUIRE(client.hear() == "ready");
  pid_t executor = node.executor_pid();
  for (int round = 0; round < 8; ++round) {
    ::kill(executor, SIGKILL);
    executor = await_executor_other_than(node, executor);
  }
  client.say("end");
  CHECK(std::stoll(client.hear()) > 0);
  CHECK(client.wait() == 0);
  CHECK(node.ctl({"status"})["executor_restarts"] == 8);
}

TEST_CASE("a call under which three executors die is answered UNAVAILABLE, and others go on") {
  Node node;
  Client client = node.connect({.deadline = 120s});
  // Attention that takes far longer than an executor is let live: 2^35 products.
  constexpr int kTokens = 16384;
  Pool pool =
      must(client.open_pool(small_pool("p", Execution::kOnRequest, KvFormat::kBf16, kTokens / 16)));
  Sequence sequence = pool.begin_sequence();
  must(sequence.extend(kTokens));
  std::vector<float> rows(size_t{kTokens} * 64, 1.0f);
  const TensorView many = dense_tensor(rows.data(), Dtype::kFp32, kTokens, 1, 64);
  must(sequence.append(0, many, many));
  std::atomic<bool> answered = false;
  std::thread killer([&] {
    while (!answered) {
      const Output text =
          run({program("larderctl"), "--socket", node.socket(), "--format", "json", "status"});
      const auto status = nlohmann::json::parse(text.stdout_text, nullptr, false);
      if (!status.is_object() || !status.contains("executor_pid")) continue;
      const auto executor = status["executor_pid"].get<pid_t>();
      if (executor != 0 && status["ready"] == true && !answered) ::kill(executor, SIGKILL);
    }
  });
  std::vector<float> out(rows.size());
  const Status status =
      sequence.attend(0, many, dense_tensor(out.data(), Dtype::kFp32, kTokens, 1, 64));
  answered = true;
  killer.join();
  INFO(status.to_string());
  CHECK(status.code() == ErrorCode::kUnavailable);
  CHECK(status.message().find("died 3 times") != std::string::npos);
  CHECK(node.ctl({"status"})["executor_restarts"] >= 3);
  // The same session, with a call that is not so long.
  const TensorView one = dense_tensor(rows.data(), Dtype::kFp32, 1, 1, 64);
  const Status next = sequence.attend(0, one, dense_tensor(out.data(), Dtype::kFp32, 1, 1, 64));
  CHECK_MESSAGE(next.ok(), next.to_string());
  CHECK(out[0] == 1.0f);
}

TEST_CASE("after larderd's death its executor is gone before the next one starts") {
  Node node;
  const pid_t before = node.executor_pid();
  for (int round = 0; round < 3; ++round) {
    const pid_t executor = node.executor_pid();
    node.replace_larderd(SIGKILL);
    // Nobody may have collected it yet.
    const std::string stat = read_file("/proc/" + std::to_string(executor) + "/stat");
    CHECK((stat.empty() || stat.find(") Z ") != std::string::npos));
    CHECK(node.executor_pid() != executor);
  }
  CHECK(node.executor_pid() != before);
  CHECK(node.ctl({"status"})["executor_restarts"] == 0);
}

std::set<std::string> sockets_of(pid_t pid) {
  std::set<std::string> sockets;
  for (const auto& entry :
       std::filesystem::directory_iterator("/proc/" + std::to_string(pid) + "/fd")) {
    const std::string target = std::filesystem::read_symlink(entry.path()).string();
    if (target.starts_with("socket:")) sockets.insert(target);
  }
  return sockets;
}

TEST_CASE("the next larderd gets the port of a killed one, since no executor has it too") {
  Node node;
  const auto sockets = sockets_of(node.larderd().pid());
  CHECK(sockets.size() >= 4);  // clients', executor's, keeper's, HTTP's
  const auto of_executor = sockets_of(node.executor_pid());
  CHECK(of_executor.size() == 1);
  for (const std::string& socket : of_executor) CHECK(!sockets.contains(socket));
  const uint16_t port = node.http_port();
  node.set_options({"--http-port", std::to_string(port)});
  node.replace_larderd(SIGKILL);
  CHECK(node.http_port() == port);
}

TEST_CASE("a new keeper is given everything again: larderd may die right after") {
  Node node;
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kInProcess)));
  const auto before = must(pool.allocate(2));
  fill_blocks(pool, before, 1);
  for (int round = 0; round < 3; ++round) {
    node.keeper().signal(SIGKILL);
    REQUIRE(node.keeper().wait_exit(20s).has_value());
    CHECK(eventually([&] {
      const std::string page = node.http("/readyz");
      return page.find(" 503 ") != std::string::npos &&
             page.find("the keeper is gone") != std::string::npos;
    }));
    // What is there is served, and what is decided now is not lost either.
    const auto during = must(pool.allocate(1));
    fill_blocks(pool, during, 2);
    const auto sums = checksums(pool, before);
    const auto sums_during = checksums(pool, during);
    const auto refused = client.open_pool(small_pool("q", Execution::kOnRequest));
    REQUIRE(!refused.ok());
    CHECK(refused.status().code() == ErrorCode::kUnavailable);
    CHECK(refused.status().message().find("keeper") != std::string::npos);
    node.start_keeper();
    CHECK(eventually([&] { return node.http("/readyz").find("200 OK") != std::string::npos; }));
    const auto pools = pools_of(node);
    const auto sessions = sessions_of(node);
    node.replace_larderd(SIGKILL);
    CHECK(eventually([&] { return client.resumes() == static_cast<uint64_t>(round) + 1; }));
    CHECK(pools_of(node) == pools);
    CHECK(sessions_of(node) == sessions);
    CHECK(checksums(pool, before) == sums);
    CHECK(checksums(pool, during) == sums_during);
    must(pool.release(during));
  }
  const auto made = client.open_pool(small_pool("q", Execution::kOnRequest));
  CHECK_MESSAGE(made.ok(), made.status().to_string());
}

TEST_CASE("a second larderd is refused while the first lives, and let in when it is killed") {
  Node node;
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kInProcess)));
  must(pool.allocate(3));
  const ConfigFile config("shutdown_grace_ms = 0\n");
  const std::vector<std::string> second = {program("larderd"),
                                           "--config",
                                           config.path(),
                                           "--socket",
                                           node.folder_file("second.sock"),
                                           "--keeper",
                                           node.keeper_socket(),
                                           "--http-port",
                                           "-1"};
  const Output refused = run(second);
  CHECK(refused.exit_code == 1);
  INFO(refused.stderr_text);
  CHECK(refused.stderr_text.find("BUSY") != std::string::npos);
  CHECK(refused.stderr_text.find("belongs to another larderd") != std::string::npos);
  CHECK(node.http("/readyz").find("200 OK") != std::string::npos);
  // One that waits is let in by the death of the first. Its socket is another one, so only the next
  // on the old path is found by the client.
  Process waiting(second, node.folder_file("second.log"));
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(20s).has_value());
  REQUIRE(eventually([&] {
    return run({program("larderctl"), "--socket", node.folder_file("second.sock"), "status"})
               .exit_code == 0;
  }));
  waiting.signal(SIGKILL);
  REQUIRE(waiting.wait_exit(20s).has_value());
  node.start_larderd();
  node.await_ready();
  CHECK(eventually([&] { return client.resumes() == 1; }));
  CHECK(group_of(node, "p")["open"] == 3);
}

TEST_CASE("a restart may change memory and quotas and add a tenant") {
  const ConfigFile config("memory_bytes = 67108864\n[[tenants]]\nname = \"default\"\n");
  Node node(config.options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(small_pool("p", Execution::kInProcess, KvFormat::kBf16, 1024)));
  const auto blocks = must(pool.allocate(10));
  fill_blocks(pool, blocks, 3);
  const auto sums = checksums(pool, blocks);
  const int64_t physical = node.ctl({"status"})["physical_bytes"].get<int64_t>();
  REQUIRE(physical >= 1024 * 8192);
  // More memory, and another tenant with a guarantee.
  config.write(
      "memory_bytes = 134217728\n[[tenants]]\nname = \"default\"\n"
      "[[tenants]]\nname = \"b\"\nguaranteed_bytes = 67108864\n");
  node.replace_larderd(SIGKILL);
  CHECK(node.ctl({"status"})["memory_bytes"] == 134217728);
  CHECK(checksums(pool, blocks) == sums);
  Client b = node.connect({.tenant = "b"});
  Pool of_b = must(b.open_pool(small_pool("p", Execution::kInProcess)));
  CHECK(of_b.created());
  // Less than what is there: it stays, and nothing new is made.
  config.write(
      "memory_bytes = 4194304\n[[tenants]]\nname = \"default\"\n[[tenants]]\nname = \"b\"\n");
  node.replace_larderd(SIGKILL);
  CHECK(node.ctl({"status"})["memory_bytes"] == 4194304);
  CHECK(node.ctl({"status"})["ready"] == true);
  CHECK(checksums(pool, blocks) == sums);
  CHECK(must(pool.allocate(1)).size() == 1);
  const auto refused = client.open_pool(small_pool("q", Execution::kOnRequest));
  REQUIRE(!refused.ok());
  CHECK(refused.status().code() == ErrorCode::kResourceExhausted);
  // A tenant that is not named any more: its sessions and blocks stay, new sessions are refused.
  config.write("memory_bytes = 134217728\n[[tenants]]\nname = \"default\"\n");
  node.replace_larderd(SIGKILL);
  CHECK(must(of_b.allocate(1)).size() == 1);
  const auto unknown = Client::connect({.socket_path = node.socket(), .tenant = "b"});
  REQUIRE(!unknown.ok());
  CHECK(unknown.status().code() == ErrorCode::kPermissionDenied);
}

}  // namespace
}  // namespace larder::test
