// What a decision costs: the three requests of a block's life (allocate, publish, release), each
// with its record in a journal in memory, on a pool of a million blocks, once with free blocks and
// once full of cached ones, so that every allocation evicts. Then a checkpoint of such a pool. One
// core; the rate of the first two is in events.
//
//   state_machine_bench --benchmark_min_time=0.5
#include <algorithm>
#include <benchmark/benchmark.h>
#include <vector>

#include "allocator/host_memory.h"
#include "allocator/journal.h"
#include "allocator/mapped_range.h"
#include "allocator/state_machine.h"
#include "larder/check.h"

namespace larder {
namespace {

constexpr int64_t kBlocksPerSegment = 1024;
constexpr int64_t kNumSegments = 1000;
constexpr int64_t kNumBlocks = kNumSegments * kBlocksPerSegment;
constexpr int32_t kBlockTokens = 16;
constexpr SessionId kSession{1};
constexpr PoolId kPool{1};
constexpr int64_t kJournalBytes = int64_t{256} << 20;

// A machine with the pool, and everything that it decides in a journal that begins again when full.
class Machine {
 public:
  Machine() : journal_(Journal::start(memory(), 1, {})) {
    apply(Configure{int64_t{1} << 40, 1, {{"a", "salt"}}});
    apply(OpenSession{kSession, "a", Role::kAppend});
    PoolSpec spec{
        "pool", "model@1", {{"k_format", "nvfp4"}}, {{"main", 2048, kNumBlocks, kBlockTokens}}};
    spec.groups[0].segment_bytes = 2048 * kBlocksPerSegment;
    for (const Effect& effect : apply(OpenPool{next(), kSession, spec}))
      if (const auto* create = std::get_if<CreateSegment>(&effect))
        apply(SegmentCreated{create->segment, {}});
    LARDER_CHECK(machine.pool_stats().at(0).groups.at(0).free == kNumBlocks);
  }

  Effects apply(Event event) {
    Effects effects = machine.apply(std::move(event), ++now_us_);
    if (const auto record = machine.record(); !record.empty() && !journal_.append(record)) {
      journal_ = Journal::start(memory(), 1, {});
      LARDER_CHECK(journal_.append(record));
    }
    return effects;
  }
  template <typename Body>
  Body ask(Event event) {
    Effects effects = apply(std::move(event));
    return std::get<Body>(std::move(std::get<Reply>(effects.back()).body));
  }
  uint64_t next() { return ++last_request_; }
  // As a client that waits for each answer: those before it have arrived.
  uint64_t answered() const { return last_request_; }

  // One prefix of so many blocks that nobody else has, published and released.
  void cache(int64_t blocks) {
    std::vector<int32_t> tokens(static_cast<size_t>(blocks) * kBlockTokens, 7);
    tokens[0] = ++last_prefix_;
    std::vector<BlockRef> refs =
        ask<BlocksAllocated>(Allocate{next(), kSession, kPool, 0, blocks, 0, answered()}).blocks;
    ask<BlocksPublished>(
        Publish{next(), kSession, kPool, "", std::move(tokens), refs, {}, 0, answered()});
    ask<Done>(Release{next(), kSession, kPool, 0, std::move(refs), answered()});
  }
  void fill() {
    while (machine.pool_stats().at(0).groups.at(0).free > 0) cache(64);
    LARDER_CHECK(machine.pool_stats().at(0).groups.at(0).cached == kNumBlocks);
  }

  StateMachine machine;

 private:
  std::span<std::byte> memory() {
    return {mapping_.data(), static_cast<size_t>(mapping_.size_bytes())};
  }

  const Segment segment_ = create_host_segment("larder-machine-bench", kJournalBytes);
  const SharedMapping mapping_ = SharedMapping::map(segment_.fd.get(), kJournalBytes, true);
  Journal journal_;
  int64_t now_us_ = 0;
  uint64_t last_request_ = 0;
  int32_t last_prefix_ = 0;
};

void bench_events(benchmark::State& state, bool full) {
  Machine machine;
  if (full) machine.fill();
  for (auto _ : state) machine.cache(1);
  state.SetItemsProcessed(state.iterations() * 3);
  const PoolStats stats = machine.machine.pool_stats().at(0);
  LARDER_CHECK(!full || stats.evicted_blocks_total >= static_cast<uint64_t>(state.iterations()));
}

// A refusal of a full pool whose blocks are all in use: what a client that polls costs.
void bench_refusal(benchmark::State& state) {
  Machine machine;
  machine.ask<BlocksAllocated>(Allocate{machine.next(), kSession, kPool, 0, kNumBlocks});
  for (auto _ : state)
    (void)machine.ask<Status>(Allocate{machine.next(), kSession, kPool, 0, kNumBlocks});
  state.SetItemsProcessed(state.iterations());
}

// A lookup of 64 blocks that changes nothing.
void bench_lookup(benchmark::State& state) {
  Machine machine;
  machine.cache(64);
  std::vector<int32_t> tokens(64 * kBlockTokens, 7);
  tokens[0] = 1;
  for (auto _ : state) {
    const auto found =
        machine.ask<PrefixFound>(Lookup{machine.next(), kSession, kPool, "", tokens, {}, false});
    LARDER_CHECK(found.hit_tokens == 64 * kBlockTokens);
  }
  state.SetItemsProcessed(state.iterations());
}

void bench_save(benchmark::State& state) {
  Machine machine;
  machine.fill();
  ByteWriter out;
  for (auto _ : state) {
    out.clear();
    machine.machine.save(out);
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(out.bytes().size()));
}

void bench_load(benchmark::State& state) {
  Machine machine;
  machine.fill();
  ByteWriter out;
  machine.machine.save(out);
  for (auto _ : state) {
    StateMachine loaded;
    const Status status = loaded.load(out.bytes());
    LARDER_CHECK(status.ok(), status.to_string());
    state.PauseTiming();
    ByteWriter again;
    loaded.save(again);
    LARDER_CHECK(std::ranges::equal(again.bytes(), out.bytes()));
    state.ResumeTiming();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(out.bytes().size()));
}

BENCHMARK_CAPTURE(bench_events, free_blocks, false);
BENCHMARK_CAPTURE(bench_events, full, true);
BENCHMARK(bench_refusal);
BENCHMARK(bench_lookup);
BENCHMARK(bench_save)->Unit(benchmark::kMillisecond);
BENCHMARK(bench_load)->Unit(benchmark::kMillisecond);

}  // namespace
}  // namespace larder

BENCHMARK_MAIN();
