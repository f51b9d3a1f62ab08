// Sessions and blocks through real processes: who holds what, and what a death gives back.
#include <algorithm>
#include <filesystem>
#include <fstream>
#include <numeric>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>
#include <vector>

#include <doctest/doctest.h>

#include "client/control_connection.h"
#include "protocol/channel.h"
#include "protocol/limits.h"
#include "tests/support/node.h"
#include "tests/support/raw_session.h"

namespace larder::test {
namespace {

constexpr Execution kBoth[] = {Execution::kInProcess, Execution::kOnRequest};

PoolGroupStats stats_of(Pool& pool) {
  auto stats = pool.stats();
  REQUIRE(stats.ok());
  const PoolGroupStats& group = (*stats)[0];
  CHECK(group.capacity ==
        group.free + group.open + group.published + group.cached + group.quarantined);
  CHECK(group.physical_bytes == group.used_bytes + group.slack_bytes);
  return group;
}

std::vector<int32_t> tokens(int count, int first = 0) {
  std::vector<int32_t> result(static_cast<size_t>(count));
  std::iota(result.begin(), result.end(), first);
  return result;
}

TEST_CASE("stats add up, and a refused allocation takes nothing") {
  Node node;
  for (const Execution execution : kBoth) {
    Client client = node.connect();
    auto pool = client.open_pool(small_pool("p", execution));
    REQUIRE(pool.ok());
    CHECK(stats_of(*pool).free == 8);
    auto many = pool->allocate(9);
    REQUIRE(!many.ok());
    CHECK(many.status().code() == ErrorCode::kResourceExhausted);
    CHECK(many.status().message().find("9") != std::string::npos);
    CHECK(many.status().message().find("8") != std::string::npos);
    CHECK(stats_of(*pool).free == 8);
    auto all = pool->allocate(8);
    REQUIRE(all.ok());
    CHECK(stats_of(*pool).open == 8);
    // Two layers of 16 tokens, one head, dim 64: 2 * 2 * 16 * 36 bytes.
    CHECK(stats_of(*pool).used_bytes == 8 * 2304);
    CHECK(pool->release(*all).ok());
    CHECK(pool->release(*all).code() == ErrorCode::kStaleGeneration);
    CHECK(stats_of(*pool).free == 8);
  }
}

TEST_CASE("an existing pool is attached to, and a different description is refused by field") {
  Node node;
  Client first = node.connect();
  Client second = node.connect();
  PoolOptions options = small_pool("p", Execution::kInProcess);
  auto pool = first.open_pool(options);
  REQUIRE(pool.ok());
  CHECK(pool->created());
  auto same = second.open_pool(options);
  REQUIRE(same.ok());
  CHECK(!same->created());
  options.geometry.k_dim = 128;
  auto different = second.open_pool(options);
  REQUIRE(!different.ok());
  CHECK(different.status().code() == ErrorCode::kInvalidArgument);
  CHECK(different.status().message().find("k_dim") != std::string::npos);
  CHECK(different.status().message().find("64") != std::string::npos);
  CHECK(different.status().message().find("128") != std::string::npos);
}

TEST_CASE("pools that no kernel serves are refused with the field") {
  Node node;
  Client client = node.connect();
  const auto refused = [&](auto change, ErrorCode code, const char* word) {
    PoolOptions options = small_pool("bad", Execution::kOnRequest);
    change(options);
    auto pool = client.open_pool(options);
    REQUIRE(!pool.ok());
    INFO(pool.status().to_string());
    CHECK(pool.status().code() == code);
    CHECK(pool.status().message().find(word) != std::string::npos);
  };
  using O = PoolOptions;
  refused([](O& o) { o.geometry.k_dim = 100; }, ErrorCode::kInvalidArgument, "k_dim");
  refused([](O& o) { o.geometry.num_layers = 0; }, ErrorCode::kInvalidArgument, "num_layers");
  refused([](O& o) { o.k_scales = {1e-50}; }, ErrorCode::kInvalidArgument, "k_scale");
  refused([](O& o) { o.v_scales = {1, 2, 3}; }, ErrorCode::kInvalidArgument, "v_scales");
  refused([](O& o) { o.num_blocks = 0; }, ErrorCode::kInvalidArgument, "num_blocks");
  refused([](O& o) { o.num_blocks = 1 << 24; }, ErrorCode::kResourceExhausted, "available");
  refused([](O& o) { o.name = ""; }, ErrorCode::kInvalidArgument, "name");
  CHECK(node.ctl({"pools"}).empty());
}

TEST_CASE("a published prefix is found by another session and survives its publisher") {
  Node node;
  const std::vector<int32_t> text = tokens(40);
  std::vector<BlockHandle> published;
  {
    Client writer = node.connect();
    auto pool = writer.open_pool(small_pool("p", Execution::kInProcess));
    REQUIRE(pool.ok());
    Sequence sequence = pool->begin_sequence();
    REQUIRE(sequence.extend(40).ok());
    REQUIRE(sequence.publish(text).ok());
    published.assign(sequence.blocks().begin(), sequence.blocks().begin() + 2);
  }
  Client reader = node.connect();
  auto pool = reader.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  CHECK(stats_of(*pool).cached == 2);
  Sequence sequence = pool->begin_sequence();
  auto hit = sequence.adopt_prefix(text);
  REQUIRE(hit.ok());
  CHECK(*hit == 32);
  CHECK(std::vector(sequence.blocks().begin(), sequence.blocks().end()) == published);
  CHECK(stats_of(*pool).published == 2);
  // Exactly two full blocks: one token must stay to be computed.
  Sequence shorter = pool->begin_sequence();
  CHECK(shorter.adopt_prefix(std::span(text).first(32)).value() == 16);
  CHECK(pool->lookup(tokens(40, 7), false).value().hit_tokens == 0);
  CHECK(pool->lookup(text, false, "adapter").value().hit_tokens == 0);
}

TEST_CASE("the same text published twice is kept once") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kInProcess));
  REQUIRE(pool.ok());
  const std::vector<int32_t> text = tokens(16);
  Sequence first = pool->begin_sequence();
  Sequence second = pool->begin_sequence();
  REQUIRE(first.extend(16).ok());
  REQUIRE(second.extend(16).ok());
  REQUIRE(first.publish(text).ok());
  REQUIRE(second.publish(text).ok());
  CHECK(first.blocks()[0] == second.blocks()[0]);
  CHECK(stats_of(*pool).published == 1);
  CHECK(stats_of(*pool).free == 7);
  REQUIRE(first.end().ok());
  CHECK(stats_of(*pool).published == 1);
  REQUIRE(second.end().ok());
  CHECK(stats_of(*pool).cached == 1);
}

TEST_CASE("tenants do not see each other") {
  TemporaryFolder folder;
  const std::string path = folder.file("larderd.toml");
  std::ofstream(path)
      << "[[tenants]]\nname = \"a\"\ntoken = \"secret\"\n[[tenants]]\nname = \"b\"\n";
  Node node({"--config", path});
  const auto refused = [&](const char* tenant, const char* token) {
    auto client = Client::connect({.socket_path = node.socket(), .tenant = tenant, .token = token});
    REQUIRE(!client.ok());
    CHECK(client.status().code() == ErrorCode::kPermissionDenied);
  };
  refused("a", "wrong");
  refused("a", "");
  refused("c", "");
  Client a = node.connect({.tenant = "a", .token = "secret"});
  Client b = node.connect({.tenant = "b"});
  auto pool_a = a.open_pool(small_pool("p", Execution::kInProcess));
  auto pool_b = b.open_pool(small_pool("p", Execution::kInProcess));
  REQUIRE(pool_a.ok());
  REQUIRE(pool_b.ok());
  CHECK(pool_b->created());
  Sequence sequence = pool_a->begin_sequence();
  REQUIRE(sequence.extend(16).ok());
  REQUIRE(sequence.publish(tokens(16)).ok());
  CHECK(pool_a->lookup(tokens(16), false).value().hit_tokens == 16);
  CHECK(pool_b->lookup(tokens(16), false).value().hit_tokens == 0);
}

// How far a client gets before it is killed.
enum class Stage { kConnected, kAttached, kAllocated, kAppended, kPublished };

[[noreturn]] void live_until(Stage stage, const std::string& socket, Execution execution,
                             int ready_pipe) {
  auto client = Client::connect({.socket_path = socket, .name = "victim"});
  std::optional<Pool> pool;
  std::optional<Sequence> sequence;
  if (stage >= Stage::kAttached) pool = client->open_pool(small_pool("p", execution)).value();
  if (stage >= Stage::kAllocated) {
    sequence = pool->begin_sequence();
    if (!sequence->extend(40).ok()) ::_exit(3);
  }
  if (stage >= Stage::kAppended) {
    std::vector<float> kv(40 * 64, 1.0f);
    const TensorView view = dense_tensor(kv.data(), Dtype::kFp32, 40, 1, 64);
    if (!sequence->append(0, view, view).ok()) ::_exit(4);
  }
  if (stage >= Stage::kPublished && !sequence->publish(tokens(40)).ok()) ::_exit(5);
  if (::write(ready_pipe, "x", 1) != 1) ::_exit(6);
  while (true) ::pause();
}

TEST_CASE("a client that is killed at any stage gives back what it held") {
  Node node;
  Client observer = node.connect();
  auto pool = observer.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  for (const Execution execution : kBoth) {
    for (const Stage stage : {Stage::kConnected, Stage::kAttached, Stage::kAllocated,
                              Stage::kAppended, Stage::kPublished}) {
      int ready[2];
      REQUIRE(::pipe(ready) == 0);
      const pid_t victim = ::fork();
      if (victim == 0) live_until(stage, node.socket(), execution, ready[1]);
      ::close(ready[1]);  // so that a victim that dies early ends the read
      char byte = 0;
      REQUIRE(::read(ready[0], &byte, 1) == 1);
      if (stage >= Stage::kAllocated) CHECK(stats_of(*pool).free < 8);
      ::kill(victim, SIGKILL);
      ::waitpid(victim, nullptr, 0);
      ::close(ready[0]);
      const int64_t kept = stage == Stage::kPublished ? 2 : 0;
      CHECK(eventually([&] {
        const PoolGroupStats stats = stats_of(*pool);
        return stats.open == 0 && stats.published == 0 && stats.quarantined == 0 &&
               stats.free >= 8 - 2 && stats.cached >= kept;
      }));
      CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 2; }));  // and larderctl's
    }
  }
  // What was published can still be evicted for others.
  CHECK(pool->allocate(8).ok());
}

TEST_CASE("open blocks stay quarantined while the process that mapped them lives") {
  Node node;
  Client observer = node.connect();
  auto pool = observer.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  int ready[2];
  int go[2];
  REQUIRE(::pipe(ready) == 0);
  REQUIRE(::pipe(go) == 0);
  const pid_t writer = ::fork();
  if (writer == 0) {
    // Not the client library, which would resume its session.
    RawSession raw(node);
    auto mine =
        raw.control.call_for<protocol::PoolOpened>(protocol::OpenPool{raw_pool("nvfp4", 2, 16)});
    if (!mine || !raw.control.call(protocol::OpenSegments{mine->pool, 0, 0, 1}).ok()) ::_exit(2);
    if (!raw.control.call(protocol::Allocate{mine->pool, 0, 3}).ok()) ::_exit(3);
    // The connection goes without a goodbye, the process and its mapping stay.
    for (int fd = 3; fd < 64; ++fd)
      if (fd != ready[1] && fd != go[0]) ::close(fd);
    if (::write(ready[1], "x", 1) != 1) ::_exit(4);
    char byte = 0;
    ::_exit(::read(go[0], &byte, 1) == 1 ? 0 : 5);
  }
  char byte = 0;
  REQUIRE(::read(ready[0], &byte, 1) == 1);
  CHECK(eventually([&] { return stats_of(*pool).quarantined == 3; }));
  CHECK(stats_of(*pool).free == 5);
  const auto sessions = node.ctl({"sessions"});
  CHECK(std::count_if(sessions.begin(), sessions.end(),
                      [](const auto& session) { return session["closing"] == true; }) == 1);
  REQUIRE(::write(go[1], "x", 1) == 1);
  ::waitpid(writer, nullptr, 0);
  CHECK(eventually([&] { return stats_of(*pool).free == 8; }));
  for (const int fd : {ready[0], ready[1], go[0], go[1]}) ::close(fd);
}

TEST_CASE("attaching and detaching many times leaks no descriptor") {
  Node node;
  const auto count_fds = [](pid_t pid) {
    const std::string path = "/proc/" + std::to_string(pid) + "/fd";
    return std::distance(std::filesystem::directory_iterator(path),
                         std::filesystem::directory_iterator());
  };
  const auto executor = node.ctl({"status"})["executor_pid"].get<pid_t>();
  const auto attach = [&] {
    Client client = node.connect();
    auto pool = client.open_pool(small_pool("p", Execution::kInProcess));
    CHECK(pool.ok());
  };
  attach();
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 1; }));
  const auto daemon_fds = count_fds(node.larderd().pid());
  const auto executor_fds = count_fds(executor);
  for (int i = 0; i < 100; ++i) attach();
  CHECK(eventually([&] {
    // The count before may have had the connection of the last larderctl in it.
    return count_fds(node.larderd().pid()) <= daemon_fds && count_fds(executor) <= executor_fds;
  }));
}

TEST_CASE("a process whose sessions end without open blocks is not watched for ever") {
  Node node;
  for (int i = 0; i < 50; ++i) {
    protocol::Connect hello;
    hello.tenant = "default";
    hello.role = "append";
    auto control =
        ControlConnection::connect(node.socket(), hello, std::chrono::seconds(10)).value();
    Client other = node.connect();
    auto pool = other.open_pool(small_pool("p", Execution::kInProcess));
    REQUIRE(pool.ok());
    auto opened = control.call(protocol::OpenSegments{1, 0, 0, 1});
    CHECK(!opened.ok());  // not open in that session
  }
  CHECK(eventually([&] { return node.ctl({"sessions"}).size() == 1; }));
}

TEST_CASE("a client that does not read its segments gets no more of them") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kInProcess));
  REQUIRE(pool.ok());
  auto socket = protocol::connect_before(
                    node.socket(), std::chrono::steady_clock::now() + std::chrono::seconds(10))
                    .value();
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
  protocol::Connect hello;
  hello.min_version = hello.max_version = protocol::kMaxVersion;
  hello.tenant = "default";
  hello.role = "append";
  uint64_t last_request = 0;
  const auto send = [&](protocol::RequestBody body) {
    const auto bytes = protocol::encode(protocol::Request{++last_request, 0, std::move(body)});
    REQUIRE(protocol::send_before(socket.get(), bytes, {}, deadline).ok());
  };
  const auto receive = [&] {
    return protocol::decode_reply(protocol::receive_before(socket.get(), deadline).value().bytes)
        .value();
  };
  send(hello);
  receive();
  send(protocol::OpenPool{raw_pool("nvfp4", 2, 16)});
  const uint64_t id = std::get<protocol::PoolOpened>(receive().body).pool;
  for (int i = 0; i < 100; ++i) send(protocol::OpenSegments{id, 0, 0, 1});
  int granted = 0;
  int busy = 0;
  for (int i = 0; i < 100; ++i) {
    const auto reply = receive();
    if (const auto* status = std::get_if<Status>(&reply.body)) {
      CHECK(status->code() == ErrorCode::kBusy);
      ++busy;
    } else {
      ++granted;
    }
  }
  CHECK(granted > 0);
  CHECK(granted + busy == 100);
}

TEST_CASE("a pool is destroyed by an admin once nobody has it open") {
  Node node;
  {
    Client client = node.connect();
    auto pool = client.open_pool(small_pool("p", Execution::kInProcess));
    REQUIRE(pool.ok());
    const Output busy = run({program("larderctl"), "--socket", node.socket(), "destroy-pool", "p"});
    CHECK(busy.exit_code == 1);
    CHECK(busy.stderr_text.find("BUSY") != std::string::npos);
  }
  node.ctl({"destroy-pool", "p"});
  CHECK(node.ctl({"pools"}).empty());
  const auto status = node.ctl({"status"});
  CHECK(status["physical_bytes"] == 0);
  CHECK(status["keeper_segments"] == 0);
}

}  // namespace
}  // namespace larder::test
