// Processes that fault, die and fork on a GPU: who notices, and what is lost.
#include <chrono>
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/gpu/gpu_node.h"

namespace larder::test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// An engine process with a pipe to it and one from it.
class Engine {
 public:
  Engine(const Node& node, const std::string& mode,
         const std::vector<std::pair<std::string, std::string>>& environment = {}) {
    int to[2], from[2];
    REQUIRE(::pipe2(to, O_CLOEXEC) == 0);
    REQUIRE(::pipe2(from, O_CLOEXEC) == 0);
    const std::string socket = node.socket();
    pid_ = ::fork();
    if (pid_ == 0) {
      ::dup2(to[0], 0);
      ::dup2(from[1], 1);
      for (const auto& [name, value] : environment) ::setenv(name.c_str(), value.c_str(), 1);
      ::execl(LARDER_GPU_ENGINE, LARDER_GPU_ENGINE, socket.c_str(), mode.c_str(), nullptr);
      ::_exit(127);
    }
    ::close(to[0]);
    ::close(from[1]);
    input_ = to[1];
    output_ = ::fdopen(from[0], "r");
  }
  ~Engine() {
    kill();
    if (child_ > 0) ::kill(child_, SIGKILL);
    ::close(input_);
    std::fclose(output_);
  }
  std::string line() {
    char text[512] = {};
    return std::fgets(text, sizeof text, output_) == nullptr ? "" : text;
  }
  // The block that it writes; -1 with the reason in `refusal` if it did not get so far.
  int await_ready(std::string* refusal = nullptr) {
    const std::string said = line();
    int block = -1, child = 0;
    if (std::sscanf(said.c_str(), "ready %d %d", &block, &child) == 2) child_ = child;
    if (block < 0 && refusal != nullptr) *refusal = said;
    return block;
  }
  void poke() { REQUIRE(::write(input_, "\n", 1) == 1); }
  void kill() {
    if (pid_ <= 0) return;
    ::kill(pid_, SIGKILL);
    (void)wait();
  }
  int wait() {
    int status = 0;
    ::waitpid(pid_, &status, 0);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
  }
  pid_t pid() const { return pid_; }
  pid_t child() const { return child_; }

 private:
  pid_t pid_ = 0, child_ = 0;
  int input_ = -1;
  FILE* output_ = nullptr;
};

int64_t quarantined(const Node& node) {
  int64_t sum = 0;
  for (const auto& pool : node.ctl({"pools"}))
    for (const auto& group : pool["groups"]) sum += group["quarantined"].get<int64_t>();
  return sum;
}

// A published block with known bytes, and its checksum.
struct Published {
  explicit Published(Pool& pool) {
    const std::vector<BlockHandle> blocks = must(pool.allocate(1));
    std::vector<std::byte> bytes(static_cast<size_t>(pool.page_bytes()));
    for (size_t i = 0; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(i * 7 >> 2);
    must(pool.write_pages(0, {&blocks[0].id, 1}, bytes));
    id = must(pool.publish(std::vector<int32_t>(16, 5), blocks))[0].block.id;
    checksum = must(pool.checksum({&id, 1}))[0];
  }
  int32_t id;
  uint64_t checksum;
};

TEST_CASE("a kernel's fault ends the process that made it and nobody else") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(byte_pool("shared", 64, Execution::kOnRequest)));
  node.await_ready();
  const Published published(pool);
  const pid_t executor = node.executor_pid();
  Engine bystander(node, "hold"), culprit(node, "fault");
  REQUIRE(bystander.await_ready() >= 0);
  REQUIRE(culprit.await_ready() >= 0);
  culprit.poke();
  CHECK(culprit.line().find("fault cudaErrorIllegalAddress") == 0);
  CHECK(culprit.wait() == 3);
  CHECK(node.executor_pid() == executor);
  CHECK(must(pool.checksum({&published.id, 1}))[0] == published.checksum);
  CHECK(::kill(bystander.pid(), 0) == 0);
  CHECK(eventually([&] { return quarantined(node) == 0; }));
}

TEST_CASE("an engine killed while its kernel writes: its block is free soon, and quiet by then") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(byte_pool("shared", 64, Execution::kOnRequest)));
  node.await_ready();
  for (int round = 0; round < 3; ++round) {
    Engine engine(node, "write");
    const int block = engine.await_ready();
    REQUIRE(block >= 0);
    pass_time(100);
    const auto begin = std::chrono::steady_clock::now();
    engine.kill();
    REQUIRE(eventually([&] { return quarantined(node) == 0; }));
    const auto took = std::chrono::steady_clock::now() - begin;
    MESSAGE("reusable after ", std::chrono::duration_cast<milliseconds>(took).count(), " ms");
    const std::vector<BlockHandle> all = must(pool.allocate(64));
    const int32_t id = block;
    must(pool.scrub({&id, 1}));
    const uint64_t zeros = must(pool.checksum({&id, 1}))[0];
    pass_time(200);
    CHECK(must(pool.checksum({&id, 1}))[0] == zeros);
    must(pool.release(all));
  }
}

TEST_CASE("a forked child keeps the kernel writing: the block stays out of use until it is gone") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(byte_pool("shared", 64, Execution::kOnRequest)));
  node.await_ready();
  Engine engine(node, "fork");
  REQUIRE(engine.await_ready() >= 0);
  REQUIRE(engine.child() > 0);
  engine.kill();
  pass_time(1500);
  CHECK(quarantined(node) == 1);
  CHECK(must(pool.stats())[0].free == 63);
  ::kill(engine.child(), SIGKILL);
  CHECK(eventually([&] { return quarantined(node) == 0; }));
}

TEST_CASE("the executor killed again and again: readyz tells, livez stays, nothing is lost") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(byte_pool("shared", 64, Execution::kOnRequest)));
  node.await_ready();
  const Published published(pool);
  for (int round = 0; round < 4; ++round) {
    ::kill(node.executor_pid(), SIGKILL);
    CHECK(eventually([&] { return node.http("/readyz").find("503") != std::string::npos; }));
    CHECK(node.http("/livez").find("200") != std::string::npos);
    CHECK(must(pool.checksum({&published.id, 1}))[0] == published.checksum);
    node.await_ready();
  }
  CHECK(node.ctl({"status"})["executor_restarts"].get<int>() == 4);  // none that was not asked for
}

TEST_CASE("livez fails when the executor cannot come up any more") {
  if (!has_gpu()) return;
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(byte_pool("shared", 4, Execution::kOnRequest)));
  node.await_ready();
  node.set_options(gpu_options());
  ::setenv("CUDA_VISIBLE_DEVICES", "", 1);  // of the larderd that comes now, and its executors
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(seconds(30)).has_value());
  node.start_larderd();
  CHECK(eventually([&] { return node.http("/livez").find("503") != std::string::npos; },
                   seconds(60)));
  ::unsetenv("CUDA_VISIBLE_DEVICES");
  node.replace_larderd(SIGKILL);
  CHECK(node.http("/livez").find("200") != std::string::npos);
}

// A control daemon of our own for MPS; its server serves whoever has its pipe folder.
class Mps {
 public:
  Mps() {
    ::setenv("CUDA_MPS_PIPE_DIRECTORY", folder_.file("pipe").c_str(), 1);
    ::setenv("CUDA_MPS_LOG_DIRECTORY", folder_.file("log").c_str(), 1);
    ::mkdir(folder_.file("pipe").c_str(), 0700);
    ::mkdir(folder_.file("log").c_str(), 0700);
    started_ = run({"/bin/sh", "-c", find() + " -d"}).exit_code == 0;
  }
  ~Mps() {
    if (started_) (void)run({"/bin/sh", "-c", "echo quit -t 5 | " + find()});
    ::unsetenv("CUDA_MPS_PIPE_DIRECTORY");
    ::unsetenv("CUDA_MPS_LOG_DIRECTORY");
  }
  bool started() const { return started_; }
  std::string clients() const {
    return run({"/bin/sh", "-c",
                "for s in $(echo get_server_list | " + find() + "); do echo get_client_list $s | " +
                    find() + "; done"})
        .stdout_text;
  }
  std::string pipe() const { return folder_.file("pipe"); }

 private:
  // In PATH, or where the driver's programs are.
  static std::string find() {
    return "PATH=$PATH:/usr/local/nvidia/bin:/usr/bin nvidia-cuda-mps-control";
  }
  TemporaryFolder folder_;
  bool started_ = false;
};

TEST_CASE("under MPS larderd is no client; a fault ends all clients, and the cache survives it") {
  if (!has_gpu()) return;
  // Our own process has no part in it: its context was made before.
  REQUIRE(cudaFree(nullptr) == cudaSuccess);
  Mps mps;
  REQUIRE_MESSAGE(mps.started(), "nvidia-cuda-mps-control could not be started");
  Node node(gpu_options());
  Client client = node.connect();
  Pool pool = must(client.open_pool(byte_pool("shared", 64, Execution::kOnRequest)));
  node.await_ready();
  const Published published(pool);
  const std::string clients = mps.clients();
  INFO(clients);
  CHECK(clients.find(std::to_string(node.executor_pid())) != std::string::npos);
  CHECK(clients.find(std::to_string(node.larderd().pid())) == std::string::npos);
  const pid_t executor = node.executor_pid();
  {
    Engine bystander(node, "write"), culprit(node, "fault");
    REQUIRE(bystander.await_ready() >= 0);
    REQUIRE(culprit.await_ready() >= 0);
    culprit.poke();
    MESSAGE("the culprit: ", culprit.line());
    (void)culprit.wait();
    // The executor's context is dead too: it ends, and another comes once the last client has left.
    CHECK_FALSE(pool.checksum({&published.id, 1}).status().code() == ErrorCode::kInvalidArgument);
    bystander.kill();
  }
  const auto begin = std::chrono::steady_clock::now();
  CHECK(eventually([&] { return node.http("/readyz").find("200") != std::string::npos; },
                   seconds(60)));
  MESSAGE(
      "ready again after ",
      std::chrono::duration_cast<milliseconds>(std::chrono::steady_clock::now() - begin).count(),
      " ms");
  CHECK(must(pool.checksum({&published.id, 1}))[0] == published.checksum);
  CHECK(node.executor_pid() != executor);
}

}  // namespace
}  // namespace larder::test
