// The kernels that move bytes against memcpy of the same bytes: copy, scrub, checksum, and convert
// into pages of both orders. One core; one layer of 8 KV heads of 128 dims in nvfp4, blocks of 16
// tokens, once within a cache and once past all of them.
//
//   blocks_bench --benchmark_min_time=0.3
#include <benchmark/benchmark.h>
#include <cstring>
#include <numeric>
#include <vector>

#include "kernels/kernel_table.h"
#include "larder/check.h"

namespace larder::kernels {
namespace {

struct Blocks {
  explicit Blocks(int64_t num_blocks)
      : geometry{1, 8, 16, 128, 128, KvFormat::kNvfp4, KvFormat::kNvfp4},
        page(page_layout(geometry)),
        bytes(static_cast<size_t>(num_blocks * page.page_bytes), std::byte{1}),
        other(bytes.size(), std::byte{2}),
        ids(static_cast<size_t>(num_blocks)) {
    std::iota(ids.begin(), ids.end(), 0);
    view = {bytes.data(), page.page_bytes, page.page_bytes, page.page_bytes, 1, num_blocks};
  }
  AttentionGeometry geometry;
  PageLayout page;
  std::vector<std::byte> bytes;
  std::vector<std::byte> other;
  std::vector<int32_t> ids;
  BlocksView view;
};

// Runs `call` over and over: rate of `size_bytes`, which is what one call takes in.
template <typename Call>
void measure(benchmark::State& state, size_t size_bytes, const Call& call) {
  for (auto _ : state) {
    const Status status = call();
    LARDER_CHECK(status.ok(), status.to_string());
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(size_bytes));
}

void bench_memcpy(benchmark::State& state) {
  Blocks blocks(state.range(0));
  measure(state, blocks.bytes.size(), [&] {
    std::memcpy(blocks.other.data(), blocks.bytes.data(), blocks.bytes.size());
    return Status();
  });
}

// Half of the blocks into the other half.
void bench_copy(benchmark::State& state) {
  Blocks blocks(state.range(0));
  const int64_t count = state.range(0) / 2;
  const CopyParams params = {blocks.view, blocks.ids.data(), blocks.ids.data() + count, count};
  measure(state, blocks.bytes.size() / 2, [&] { return run_copy(params); });
}

void bench_scrub(benchmark::State& state) {
  Blocks blocks(state.range(0));
  const ScrubParams params = {blocks.view, blocks.ids.data(), state.range(0)};
  measure(state, blocks.bytes.size(), [&] { return run_scrub(params); });
}

void bench_checksum(benchmark::State& state) {
  Blocks blocks(state.range(0));
  std::vector<uint64_t> checksums(blocks.ids.size());
  const ChecksumParams params = {blocks.view, blocks.ids.data(), state.range(0), checksums.data()};
  measure(state, blocks.bytes.size(), [&] { return run_checksum(params); });
}

void bench_convert(benchmark::State& state, PageOrder order, VScaleOrder v_order,
                   int32_t page_tokens) {
  Blocks blocks(state.range(0));
  ConvertParams params;
  params.layer = {blocks.bytes.data(), blocks.page.page_bytes, state.range(0), blocks.geometry,
                  blocks.page};
  params.blocks = blocks.ids.data();
  params.num_blocks = state.range(0);
  AttentionGeometry pages = blocks.geometry;
  pages.block_tokens = page_tokens;
  params.paged =
      dense_pages(blocks.other.data(), pages, state.range(0) * 16 / page_tokens, order, v_order);
  measure(state, blocks.bytes.size(), [&] { return run_convert(params); });
}

BENCHMARK(bench_memcpy)->Arg(8)->Arg(4096);
BENCHMARK(bench_copy)->Arg(8)->Arg(4096);
BENCHMARK(bench_scrub)->Arg(8)->Arg(4096);
BENCHMARK(bench_checksum)->Arg(8)->Arg(4096);
BENCHMARK_CAPTURE(bench_convert, hnd_16, PageOrder::kHnd, VScaleOrder::kLinear, 16)
    ->Arg(8)
    ->Arg(4096);
BENCHMARK_CAPTURE(bench_convert, hnd_32, PageOrder::kHnd, VScaleOrder::kLinear, 32)
    ->Arg(8)
    ->Arg(4096);
BENCHMARK_CAPTURE(bench_convert, nhd_16, PageOrder::kNhd, VScaleOrder::kLinear, 16)
    ->Arg(8)
    ->Arg(4096);
BENCHMARK_CAPTURE(bench_convert, hnd_16_swizzled, PageOrder::kHnd, VScaleOrder::kSwizzled, 16)
    ->Arg(8)
    ->Arg(4096);

}  // namespace
}  // namespace larder::kernels

BENCHMARK_MAIN();
