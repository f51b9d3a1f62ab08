// larderd dies while calls are under way: each is done once, and none is lost.
#include <atomic>
#include <set>
#include <thread>

#include "tests/e2e/survival.h"

namespace larder::test {
namespace {

using namespace std::chrono_literals;

constexpr int kRestarts = 8;
constexpr int64_t kNumBlocks = 64;

using Work = void (*)(Client&, const std::atomic<bool>& ended, std::atomic<int64_t>& calls);

// One client on a thread of its own, at work until told to end. What goes wrong is kept: doctest's
// assertions are the test thread's.
class Worker {
 public:
  Worker(const Node& node, const std::string& name, Work work)
      : thread_([this, socket = node.socket(), name, work] {
          try {
            Client client =
                must(Client::connect({.socket_path = socket, .name = name, .deadline = 60s}));
            work(client, ended_, calls_);
          } catch (const std::exception& error) {
            error_ = error.what();
          }
        }) {}
  void end() {
    ended_ = true;
    if (thread_.joinable()) thread_.join();
  }
  ~Worker() { end(); }
  const std::string& error() const { return error_; }
  int64_t calls() const { return calls_; }

 private:
  std::atomic<bool> ended_ = false;
  std::atomic<int64_t> calls_ = 0;
  std::string error_;  // of a thread that has ended
  std::thread thread_;
};

PoolOptions shared_pool(Execution execution) {
  return small_pool("p", execution, KvFormat::kNvfp4, kNumBlocks);
}

// Allocates, publishes and releases; no block may be given out twice, and what is published is
// found. Ends with nothing held.
void turn_over(Client& client, const std::atomic<bool>& ended, std::atomic<int64_t>& calls) {
  Pool pool = must(client.open_pool(shared_pool(Execution::kInProcess)));
  std::set<int32_t> held;
  std::vector<std::vector<BlockHandle>> groups;
  for (int round = 0; !ended; ++round) {
    auto blocks = must(pool.allocate(3));
    for (const BlockHandle& block : blocks)
      if (!held.insert(block.id).second)
        throw std::runtime_error("block " + std::to_string(block.id) + " was given out twice");
    fill_blocks(pool, blocks, static_cast<uint32_t>(round));
    const auto sums = checksums(pool, blocks);
    const auto text = text_tokens(16, static_cast<int32_t>(client.session_id()) * 1000000 + round);
    const auto published = must(pool.publish(text, std::span(blocks).first(1)));
    if (published[0].block != blocks[0]) throw std::runtime_error("another block has the key");
    if (must(pool.lookup(text, false)).blocks != std::vector<BlockHandle>{blocks[0]})
      throw std::runtime_error("what was published is not found");
    if (checksums(pool, blocks) != sums) throw std::runtime_error("bytes have changed");
    groups.push_back(std::move(blocks));
    if (groups.size() > 4) {
      must(pool.release(groups.front()));
      for (const BlockHandle& block : groups.front()) held.erase(block.id);
      groups.erase(groups.begin());
    }
    calls += 4;
  }
  for (const auto& blocks : groups) must(pool.release(blocks));
}

// Appends and attends through the executor, and compares with the first answer.
void attend(Client& client, const std::atomic<bool>& ended, std::atomic<int64_t>& calls) {
  Pool pool = must(client.open_pool(shared_pool(Execution::kOnRequest)));
  Sequence sequence = pool.begin_sequence();
  must(sequence.extend(100));
  std::vector<float> rows(100 * 64);
  for (size_t i = 0; i < rows.size(); ++i) rows[i] = static_cast<float>(i % 41) - 20.0f;
  const TensorView view = dense_tensor(rows.data(), Dtype::kFp32, 100, 1, 64);
  std::vector<float> first;
  while (!ended || first.empty()) {
    must(sequence.append(0, view, view));
    std::vector<float> out(rows.size(), -1.0f);
    must(sequence.attend(0, view, dense_tensor(out.data(), Dtype::kFp32, 100, 1, 64)));
    if (first.empty()) first = out;
    if (out != first) throw std::runtime_error("attention differs");
    calls += 2;
  }
}

// Copies a block into another, which then has its bytes.
void copy(Client& client, const std::atomic<bool>& ended, std::atomic<int64_t>& calls) {
  Pool pool = must(client.open_pool(shared_pool(Execution::kInProcess)));
  const auto blocks = must(pool.allocate(4));
  const auto from = std::span(blocks).first(2);
  const auto to = std::span(blocks).last(2);
  for (uint32_t round = 0; !ended; ++round) {
    fill_blocks(pool, {from.begin(), from.end()}, round);
    must(pool.copy(from, to));
    if (checksums(pool, {from.begin(), from.end()}) != checksums(pool, {to.begin(), to.end()}))
      throw std::runtime_error("the copy differs");
    calls += 1;
  }
  must(pool.release(blocks));
}

// Opens and closes pools of its own, which come and go.
void open_and_close(Client& client, const std::atomic<bool>& ended, std::atomic<int64_t>& calls) {
  while (!ended) {
    Pool pool = must(client.open_pool(small_pool("own", Execution::kInProcess)));
    must(pool.allocate(2));
    calls += 2;
  }
}

TEST_CASE("calls that are under way when larderd dies are done, and done once") {
  const ConfigFile config("shutdown_grace_ms = 50\nlog_level = \"info\"\n");
  Node node(config.options());
  Client watcher = node.connect();
  Pool pool = must(watcher.open_pool(shared_pool(Execution::kInProcess)));
  std::vector<std::unique_ptr<Worker>> workers;
  for (const auto& [name, work] : {std::pair<const char*, Work>("turning over", turn_over),
                                   {"turning over too", turn_over},
                                   {"attending", attend},
                                   {"copying", copy},
                                   {"opening", open_and_close}})
    workers.push_back(std::make_unique<Worker>(node, name, work));
  std::vector<int64_t> calls(workers.size(), 0);
  for (int round = 0; round < kRestarts; ++round) {
    // Everybody has got on since the last death.
    for (size_t i = 0; i < workers.size(); ++i) {
      REQUIRE(eventually([&] { return workers[i]->calls() > calls[i]; }, 60s));
      calls[i] = workers[i]->calls();
    }
    // With a drain now and then.
    node.replace_larderd(round % 4 == 3 ? SIGTERM : SIGKILL);
    if (round % 2 == 1) ::kill(node.executor_pid(), SIGKILL);
  }
  for (auto& worker : workers) {
    worker->end();
    CHECK_MESSAGE(worker->error().empty(), worker->error());
  }
  CHECK(eventually([&] { return sessions_of(node).size() == 1; }));
  const auto group = group_of(node, "p");
  CHECK(group["open"] == 0);
  CHECK(group["published"] == 0);
  CHECK(group["quarantined"] == 0);
  CHECK(group["free"].get<int64_t>() + group["cached"].get<int64_t>() == kNumBlocks);
  CHECK(must(pool.allocate(kNumBlocks)).size() == kNumBlocks);
}

TEST_CASE("a call made while larderd is down waits for it, and one deadline is all it waits") {
  Node node;
  Client client = node.connect({.deadline = 30s});
  Client hasty = node.connect({.deadline = 50ms});
  Pool pool = must(client.open_pool(shared_pool(Execution::kInProcess)));
  Pool hasty_pool = must(hasty.open_pool(shared_pool(Execution::kInProcess)));
  node.larderd().signal(SIGKILL);
  REQUIRE(node.larderd().wait_exit(20s).has_value());
  const auto late = hasty_pool.allocate(1);
  REQUIRE(!late.ok());
  CHECK(late.status().code() == ErrorCode::kUnavailable);
  std::thread starter([&] { node.start_larderd(); });
  const auto blocks = pool.allocate(2);
  starter.join();
  CHECK_MESSAGE(blocks.ok(), blocks.status().to_string());
  node.await_ready();
  CHECK(eventually([&] { return hasty.resumes() == 1; }));
  // The hasty call was given up before larderd could see it.
  CHECK(group_of(node, "p")["open"] == 2);
  CHECK(hasty_pool.allocate(1).ok());
}

}  // namespace
}  // namespace larder::test
