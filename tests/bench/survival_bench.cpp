// What survival costs, with real processes: restart to ready, a killed engine's blocks free again,
// and block operations over the socket with their journal.
//
//   survival_bench [PART...] > survival.json; tests/bench/survival_table.py survival.json
//
// Raw figures go to stdout as JSON, everything in microseconds. Nothing is asserted about time.
#include <algorithm>
#include <chrono>
#include <cstdio>
#include <fcntl.h>
#include <functional>
#include <memory>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "larder/check.h"
#include "larder/client.h"
#include "tests/bench/bench_node.h"

namespace larder::test {
namespace {

Client connect(const Daemons& daemons) {
  return must(Client::connect({.socket_path = daemons.socket(), .name = "bench"}));
}

// Blocks of 2 KiB: 1 layer, 1 KV head, dim 32, 16 tokens, bf16.
PoolOptions pool_of(int64_t num_blocks, Execution execution) {
  PoolOptions options;
  options.name = "bench";
  options.model = "bench";
  options.geometry = {1, 1, 16, 32, 32, KvFormat::kBf16, KvFormat::kBf16};
  options.num_blocks = num_blocks;
  options.execution = execution;
  return options;
}

std::vector<int32_t> text(int64_t number, size_t num_blocks) {
  std::vector<int32_t> tokens(num_blocks * 16);
  for (size_t i = 0; i < tokens.size(); ++i)
    tokens[i] = static_cast<int32_t>(number * 1'000'003 + static_cast<int64_t>(i)) & 0x3fffffff;
  return tokens;
}

// 1,000 segments of 2 MiB; half of a million blocks cached, the other half open in a session that
// is resumed each time.
json bench_restart() {
  constexpr int64_t kNumBlocks = 1'024'000;
  constexpr size_t kPerText = 2048;
  constexpr int kRestarts = 15;
  Daemons daemons;
  Client client = connect(daemons);
  PoolOptions options = pool_of(kNumBlocks, Execution::kOnRequest);
  options.max_blocks = kNumBlocks + 1024;
  options.segment_bytes = int64_t{2} << 20;
  Pool pool = must(client.open_pool(options));
  for (int64_t i = 0; i < kNumBlocks / 2 / static_cast<int64_t>(kPerText); ++i) {
    const auto blocks = must(pool.allocate(kPerText));
    must(pool.publish(text(i, kPerText), blocks).status());
    must(pool.release(blocks));
  }
  const auto open = must(pool.allocate(kNumBlocks / 2));
  std::vector<double> times;
  for (int i = 0; i < kRestarts; ++i) {
    daemons.kill_larderd();
    times.push_back(daemons.start_larderd());
    const auto stats = must(pool.stats())[0];
    LARDER_CHECK(stats.open == kNumBlocks / 2 && stats.cached == kNumBlocks / 2, stats.open,
                 stats.cached);
  }
  json result = show(times);
  result["blocks"] = kNumBlocks;
  result["segments"] = kNumBlocks / 1024;
  return result;
}

json bench_restart_empty() {
  Daemons daemons;
  std::vector<double> times;
  for (int i = 0; i < 15; ++i) {
    daemons.kill_larderd();
    times.push_back(daemons.start_larderd());
  }
  return show(times);
}

// Allocate, publish and release `batch` blocks, again and again.
json bench_operations(int64_t batch, int rounds, bool publishes) {
  Daemons daemons;
  Client client = connect(daemons);
  Pool pool = must(client.open_pool(pool_of(65'536, Execution::kOnRequest)));
  std::vector<double> allocate, publish, release, all;
  for (int i = 0; i < rounds; ++i) {
    const auto tokens = text(i, static_cast<size_t>(batch));
    const auto start = Clock::now();
    const auto blocks = must(pool.allocate(batch));
    allocate.push_back(us_since(start));
    if (publishes) {
      const auto publish_start = Clock::now();
      must(pool.publish(tokens, blocks).status());
      publish.push_back(us_since(publish_start));
    }
    const auto release_start = Clock::now();
    must(pool.release(blocks));
    release.push_back(us_since(release_start));
    all.push_back(us_since(start));
  }
  json result = {{"batch", batch},
                 {"allocate", show(allocate)},
                 {"release", show(release)},
                 {"all", show(all)}};
  if (publishes) result["publish"] = show(publish);
  double sum_us = 0;
  for (const double time : all) sum_us += time;
  result["blocks_per_s"] = static_cast<double>(batch) * rounds / sum_us * 1e6;
  return result;
}

// From the kill of an engine that has all blocks open and mapped to an allocation of all of them by
// another session.
json bench_fence(Execution execution) {
  constexpr int64_t kNumBlocks = 1024;
  constexpr int kKills = 100;
  Daemons daemons;
  Client watcher = connect(daemons);
  Pool pool = must(watcher.open_pool(pool_of(kNumBlocks, Execution::kOnRequest)));
  std::vector<double> times;
  for (int i = 0; i < kKills; ++i) {
    int ready[2];
    LARDER_CHECK(::pipe2(ready, O_CLOEXEC) == 0);
    const pid_t engine = ::fork();
    if (engine == 0) {
      Client client = connect(daemons);
      Pool its_pool = must(client.open_pool(pool_of(kNumBlocks, execution)));
      (void)must(its_pool.allocate(kNumBlocks));
      (void)!::write(ready[1], "x", 1);
      while (true) ::pause();
    }
    ::close(ready[1]);
    char byte = 0;
    LARDER_CHECK(::read(ready[0], &byte, 1) == 1);
    ::close(ready[0]);
    const auto start = Clock::now();
    ::kill(engine, SIGKILL);
    auto blocks = pool.allocate(kNumBlocks);
    while (!blocks.ok()) blocks = pool.allocate(kNumBlocks);
    times.push_back(us_since(start));
    must(pool.release(*blocks));
    ::waitpid(engine, nullptr, 0);
  }
  return show(times);
}

// All parts, or those that are named.
int measure(const std::vector<std::string>& wanted) {
  const std::pair<const char*, std::function<json()>> parts[] = {
      {"restart", bench_restart},
      {"restart_empty", bench_restart_empty},
      {"one_block", [] { return bench_operations(1, 5000, true); }},
      {"batch", [] { return bench_operations(256, 1000, true); }},
      {"batch_without_publish", [] { return bench_operations(256, 2000, false); }},
      {"fence_in_process", [] { return bench_fence(Execution::kInProcess); }},
      {"fence_on_request", [] { return bench_fence(Execution::kOnRequest); }},
  };
  json result = {{"conditions", conditions()}};
  for (const auto& [name, part] : parts)
    if (wanted.empty() || std::find(wanted.begin(), wanted.end(), name) != wanted.end())
      result[name] = part();
  result["conditions"]["load_1min_after"] = conditions()["load_1min"];
  std::puts(result.dump(1).c_str());
  return 0;
}

}  // namespace
}  // namespace larder::test

int main(int argc, char** argv) {
  try {
    return larder::test::measure({argv + 1, argv + argc});
  } catch (const std::exception& error) {
    std::fprintf(stderr, "survival_bench: %s\n", error.what());
    return 1;
  }
}
