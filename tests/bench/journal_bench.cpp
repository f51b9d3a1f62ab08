// What it costs to write down a decision: one append to the journal, in memory that was touched
// before and in a fresh memfd (each page's first touch is in it), and the checksum alone. One core.
//
//   journal_bench --benchmark_min_time=0.3
#include <benchmark/benchmark.h>
#include <vector>

#include "allocator/crc32c.h"
#include "allocator/host_memory.h"
#include "allocator/journal.h"
#include "allocator/mapped_range.h"
#include "larder/check.h"

namespace larder {
namespace {

constexpr int64_t kMemoryBytes = int64_t{32} << 20;

std::span<std::byte> span_of(const SharedMapping& mapping) {
  return {mapping.data(), static_cast<size_t>(mapping.size_bytes())};
}

SharedMapping fresh_mapping() {
  const Segment segment = create_host_segment("larder-journal-bench", kMemoryBytes);
  return SharedMapping::map(segment.fd.get(), kMemoryBytes, true);
}

void check_contents(const SharedMapping& mapping, const Journal& journal) {
  const auto contents = read_journal(span_of(mapping));
  LARDER_CHECK(contents.ok() && contents->records.size() == journal.num_records());
}

// A journal that is full begins again; in warm memory that costs nothing, and the remains of the
// last round are overwritten in step.
void bench_append_warm(benchmark::State& state) {
  const std::vector<std::byte> payload(static_cast<size_t>(state.range(0)), std::byte{7});
  const SharedMapping mapping = fresh_mapping();
  Journal journal = Journal::start(span_of(mapping), 1, {});
  while (journal.append(payload)) continue;
  check_contents(mapping, journal);
  for (auto _ : state)
    if (!journal.append(payload)) journal = Journal::start(span_of(mapping), 1, {});
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

// Making the next memfd is not timed.
void bench_append_fresh(benchmark::State& state) {
  const std::vector<std::byte> payload(static_cast<size_t>(state.range(0)), std::byte{7});
  SharedMapping mapping = fresh_mapping();
  Journal journal = Journal::start(span_of(mapping), 1, {});
  for (auto _ : state) {
    if (journal.append(payload)) continue;
    state.PauseTiming();
    check_contents(mapping, journal);
    mapping = fresh_mapping();
    journal = Journal::start(span_of(mapping), 1, {});
    state.ResumeTiming();
  }
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

void bench_read(benchmark::State& state) {
  const std::vector<std::byte> payload(static_cast<size_t>(state.range(0)), std::byte{7});
  const SharedMapping mapping = fresh_mapping();
  Journal journal = Journal::start(span_of(mapping), 1, {});
  while (journal.append(payload)) continue;
  for (auto _ : state) {
    const auto contents = read_journal(span_of(mapping));
    LARDER_CHECK(contents.ok() && contents->records.size() == journal.num_records());
  }
  state.SetBytesProcessed(state.iterations() * kMemoryBytes);
}

void bench_crc32c(benchmark::State& state) {
  const std::vector<std::byte> bytes(static_cast<size_t>(state.range(0)), std::byte{7});
  const auto paths = crc32c_paths();
  const auto index = static_cast<size_t>(state.range(1));
  if (index >= paths.size()) return state.SkipWithError("this machine has no such path");
  for (auto _ : state) benchmark::DoNotOptimize(paths[index].compute(bytes, 0));
  state.SetLabel(paths[index].name);
  state.SetBytesProcessed(state.iterations() * state.range(0));
}

BENCHMARK(bench_append_warm)->Arg(40)->Arg(100)->Arg(1000);
BENCHMARK(bench_append_fresh)->Arg(40)->Arg(100)->Arg(1000);
BENCHMARK(bench_read)->Arg(100);
BENCHMARK(bench_crc32c)->ArgsProduct({{100, 1 << 20}, {0, 1}});

}  // namespace
}  // namespace larder

BENCHMARK_MAIN();
