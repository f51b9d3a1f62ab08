// Acceptance cases about blocks that need calls under way, threads or many rounds
// (tests/cases/README.md has the table).
#include <atomic>
#include <barrier>
#include <csignal>
#include <thread>

#include <doctest/doctest.h>

#include "tests/support/raw_session.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

constexpr int64_t kDim = 64;

auto soon() { return std::chrono::steady_clock::now() + 10s; }

// A process that is stopped while this lives.
class Stopped {
 public:
  explicit Stopped(pid_t pid) : pid_(pid) {
    ::kill(pid_, SIGSTOP);
    const std::string path = "/proc/" + std::to_string(pid_) + "/stat";
    REQUIRE(eventually([&] { return read_file(path).find(") T ") != std::string::npos; }));
  }
  ~Stopped() { ::kill(pid_, SIGCONT); }
  Stopped(const Stopped&) = delete;
  Stopped& operator=(const Stopped&) = delete;

 private:
  pid_t pid_;
};

pid_t executor_of(const Node& node) { return node.ctl({"status"})["executor_pid"].get<pid_t>(); }

// A pool of 8 blocks of one bf16 token, and all of them.
struct TinyPool {
  explicit TinyPool(ControlConnection& control)
      : id(control.call_for<protocol::PoolOpened>(protocol::OpenPool{raw_pool("bf16", 1, 1)})
               .value()
               .pool),
        blocks(control.call_for<protocol::Blocks>(protocol::Allocate{id, 0, 8}).value().blocks) {}
  static PoolOptions options() {
    PoolOptions same = small_pool("p", Execution::kOnRequest, KvFormat::kBf16);
    same.geometry.num_layers = same.geometry.block_tokens = 1;
    return same;
  }
  uint64_t id;
  std::vector<protocol::Block> blocks;
};

// An append of sevens to one slot, put into the ring and not waited for.
void queue_append(RawSession& raw, uint64_t pool, int64_t slot) {
  REQUIRE(raw.ring.start(soon()).ok());
  const std::vector<float> sevens(kDim, 7.0f);
  protocol::Submission append;
  append.op = static_cast<uint32_t>(protocol::Op::kAppend);
  append.pool = pool;
  append.first.dtype = static_cast<uint32_t>(Dtype::kFp32);
  append.first.offset_bytes = raw.ring.stage(sevens.data(), sevens.size()).value().offset_bytes;
  append.first.shape = {1, 1, kDim};
  append.first.strides = {kDim, kDim, 1};
  append.second = append.first;
  append.slots = raw.ring.stage(&slot, 1).value();
  CHECK(raw.ring.run(append, std::chrono::steady_clock::now()).code() ==
        ErrorCode::kDeadlineExceeded);
}

TEST_CASE("case 41: a released block is nobody's before what was queued for it has run") {
  Node node;
  RawSession raw(node);
  const TinyPool tiny(raw.control);
  Client other = node.connect();
  auto pool = other.open_pool(TinyPool::options());
  REQUIRE(pool.ok());
  const protocol::Block& block = tiny.blocks[3];
  protocol::Request release{1000, 0, protocol::Release{tiny.id, 0, {block}}};
  {
    const Stopped stopped(executor_of(node));
    queue_append(raw, tiny.id, block.id);
    REQUIRE(raw.control.send(release, soon()).ok());
    // An answer to a later request: larderd has seen the release.
    protocol::Request status{1001, 0, protocol::GetStatus{}};
    REQUIRE(raw.control.send(status, soon()).ok());
    REQUIRE(raw.control.receive(1001, soon()).ok());
    const auto none = pool->allocate(1);
    REQUIRE(!none.ok());
    CHECK(none.status().code() == ErrorCode::kResourceExhausted);
  }
  // The release was answered first, or is now; its answer may have been read past.
  REQUIRE(eventually([&] { return pool->stats().value().at(0).free == 1; }));
  const auto taken = pool->allocate(1);
  REQUIRE(taken.ok());
  CHECK(taken->at(0).id == block.id);
  CHECK(taken->at(0).generation != block.generation);
  std::vector<float> threes(kDim, 3.0f);
  const TensorView rows = dense_tensor(threes.data(), Dtype::kFp32, 1, 1, kDim);
  const std::vector<int64_t> slots = {block.id};
  REQUIRE(pool->append(0, rows, rows, slots).ok());
  std::vector<float> k(kDim), v(kDim);
  REQUIRE(pool->read(0, dense_tensor(k.data(), Dtype::kFp32, 1, 1, kDim),
                     dense_tensor(v.data(), Dtype::kFp32, 1, 1, kDim), slots)
              .ok());
  CHECK(k == threes);
  CHECK(v == threes);
}

// Of a session that ends while the executor has its copy: the two blocks stay away until the copy
// is done, by this executor or the next one.
void end_with_copy(bool kill_executor) {
  Node node;
  Client other = node.connect();
  auto pool = other.open_pool(TinyPool::options());
  REQUIRE(pool.ok());
  const pid_t executor = executor_of(node);
  {
    const Stopped stopped(executor);
    {
      // Without an arena: a copy waits for no calls in a ring.
      protocol::Connect hello;
      hello.tenant = "default";
      hello.role = "append";
      auto control = ControlConnection::connect(node.socket(), hello, 10s).value();
      const TinyPool tiny(control);
      protocol::Request copy{1000, 0,
                             protocol::Copy{tiny.id, 0, {tiny.blocks[0]}, {tiny.blocks[1]}}};
      REQUIRE(control.send(copy, soon()).ok());
    }
    REQUIRE(eventually([&] { return pool->stats().value().at(0).open == 0; }));
    CHECK(pool->stats().value().at(0).free == 6);
    CHECK(pool->stats().value().at(0).quarantined == 2);
    CHECK(pool->allocate(7).status().code() == ErrorCode::kResourceExhausted);
    if (kill_executor) ::kill(executor, SIGKILL);
  }
  CHECK(eventually([&] { return pool->stats().value().at(0).free == 8; }));
  CHECK(pool->stats().value().at(0).quarantined == 0);
  CHECK(pool->allocate(8).ok());
  CHECK(node.ctl({"status"})["pid"] == node.larderd().pid());
}

TEST_CASE("case 42: a copy whose session is gone ends late, and leaks nothing") {
  end_with_copy(false);
}

TEST_CASE("case 42: the same when the executor dies under it") { end_with_copy(true); }

TEST_CASE("case 43: a thousand lookups that nobody fetches pin nothing") {
  Node node;
  Client client = node.connect();
  auto pool = client.open_pool(small_pool("p", Execution::kOnRequest));
  REQUIRE(pool.ok());
  const std::vector<int32_t> tokens(48, 5);
  const auto blocks = pool->allocate(3).value();
  REQUIRE(pool->publish(tokens, blocks).ok());
  REQUIRE(pool->release(blocks).ok());
  for (int i = 0; i < 1000; ++i) REQUIRE(pool->lookup(tokens, false).value().hit_tokens == 48);
  CHECK(pool->stats().value().at(0).evictable == 3);
  for (int i = 0; i < 1000; ++i) {
    const Prefix held = pool->lookup(tokens).value();
    REQUIRE(held.blocks.size() == 3);
  }
  CHECK(pool->stats().value().at(0).evictable == 0);
  for (int i = 0; i < 1000; ++i) REQUIRE(pool->release(blocks).ok());
  CHECK(pool->release(blocks).code() == ErrorCode::kNotFound);
  CHECK(pool->stats().value().at(0).evictable == 3);
  CHECK(pool->allocate(8).ok());
}

TEST_CASE("case 64: of eight clients that ask at the same moment for a fifth, five get it") {
  Node node;
  for (int round = 0; round < 20; ++round) {
    constexpr int kClients = 8;
    std::barrier together(kClients);
    std::atomic<int> served = 0;
    std::atomic<int> refused = 0;
    std::barrier done(kClients);
    std::vector<std::thread> threads;
    for (int i = 0; i < kClients; ++i)
      threads.emplace_back([&] {
        auto client = Client::connect({.socket_path = node.socket(), .arena_bytes = 0});
        if (!client.ok()) return together.arrive_and_drop(), done.arrive_and_drop();
        auto pool =
            client->open_pool(small_pool("p", Execution::kInProcess, KvFormat::kNvfp4, 100));
        together.arrive_and_wait();
        const auto blocks = pool->allocate(20);
        if (blocks.ok() && blocks->size() == 20) ++served;
        if (!blocks.ok() && blocks.status().code() == ErrorCode::kResourceExhausted) ++refused;
        done.arrive_and_wait();  // all have asked before anybody's blocks come free
      });
    for (std::thread& thread : threads) thread.join();
    CHECK(served == 5);
    CHECK(refused == 3);
  }
}

}  // namespace
}  // namespace larder::test
