// The CPU kernels against what they are judged by: append against memcpy of its input, gather
// against memcpy of its output, attend against plain bf16 attention written with Eigen. One core,
// every result used.
//
//   kernels_bench --benchmark_min_time=0.3
//
// attend shapes: 8 KV heads, 32 query heads, dim 128, blocks of 16 tokens in shuffled order.
#include <algorithm>
#include <benchmark/benchmark.h>
#include <cmath>
#include <cstring>
#include <numeric>
#include <random>
#include <vector>

#include <Eigen/Core>

#include "kernels/kernel_table.h"

namespace larder::kernels {
namespace {

constexpr int64_t kKvHeads = 8;
constexpr int64_t kQueryHeads = 32;
constexpr int64_t kDim = 128;
constexpr int32_t kBlockTokens = 16;

using Bf16 = Eigen::bfloat16;

std::vector<Bf16> normal_values(int64_t count) {
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  std::vector<Bf16> values(static_cast<size_t>(count));
  for (Bf16& x : values) x = Bf16(normal(engine));
  return values;
}

struct Cache {
  Cache(KvFormat format, int64_t num_tokens, Encoder encoder = Encoder::kReference,
        KeyTransform key_transform = KeyTransform::kNone)
      : key_offset(kKvHeads * kDim, 0.25f) {
    layer.geometry = {1, kKvHeads, kBlockTokens, kDim, kDim, format, format};
    layer.encoder = encoder;
    layer.key_transform = key_transform;
    layer.key_offset = key_offset.data();
    layer.page = page_layout(layer.geometry);
    layer.block_stride_bytes = layer.page.page_bytes;
    layer.num_blocks = (num_tokens + kBlockTokens - 1) / kBlockTokens;
    bytes.resize(static_cast<size_t>(layer.num_blocks * layer.block_stride_bytes));
    layer.base = bytes.data();
    table.resize(static_cast<size_t>(layer.num_blocks));
    std::iota(table.begin(), table.end(), 0);
    std::shuffle(table.begin(), table.end(), std::mt19937(2));
    for (int64_t token = 0; token < num_tokens; ++token)
      slots.push_back(int64_t{table[static_cast<size_t>(token / kBlockTokens)]} * kBlockTokens +
                      token % kBlockTokens);
    input = normal_values(num_tokens * kKvHeads * kDim);
    append();
  }

  void append() {
    AppendParams params;
    params.layer = layer;
    const auto rows = static_cast<int64_t>(slots.size());
    params.k = dense_tensor(input.data(), Dtype::kBf16, rows, kKvHeads, kDim);
    params.v = params.k;
    params.slots = slots.data();
    params.num_slots = rows;
    if (!run_append(params).ok()) std::abort();
  }

  LayerView layer;
  std::vector<float> key_offset;
  std::vector<std::byte> bytes;
  std::vector<int32_t> table;
  std::vector<int64_t> slots;
  std::vector<Bf16> input;  // [tokens, kKvHeads, kDim], for K and for V
};

void set_input_rate(benchmark::State& state, const Cache& cache) {
  state.SetBytesProcessed(state.iterations() *
                          static_cast<int64_t>(2 * cache.input.size() * sizeof(Bf16)));
}

void bench_append(benchmark::State& state, KvFormat format, Encoder encoder,
                  KeyTransform key_transform) {
  Cache cache(format, state.range(0), encoder, key_transform);
  for (auto _ : state) {
    cache.append();
    benchmark::ClobberMemory();
  }
  set_input_rate(state, cache);
}

void bench_gather(benchmark::State& state, KvFormat format, Dtype dtype,
                  KeyTransform key_transform) {
  Cache cache(format, state.range(0), Encoder::kReference, key_transform);
  const auto rows = static_cast<int64_t>(cache.slots.size());
  const auto seq_len = static_cast<int32_t>(rows);
  const auto side_bytes = static_cast<size_t>(rows * kKvHeads * kDim * dtype_bytes(dtype));
  std::vector<std::byte> out(2 * side_bytes);
  GatherParams params;
  params.layer = cache.layer;
  params.k_out = dense_tensor(out.data(), dtype, rows, kKvHeads, kDim);
  params.v_out = dense_tensor(out.data() + side_bytes, dtype, rows, kKvHeads, kDim);
  params.block_table = cache.table.data();
  params.seq_lens = &seq_len;
  params.num_seqs = 1;
  params.block_table_stride = cache.layer.num_blocks;
  for (auto _ : state) {
    if (!run_gather(params).ok()) std::abort();
    benchmark::ClobberMemory();
  }
  state.SetBytesProcessed(state.iterations() * static_cast<int64_t>(out.size()));
}

void bench_memcpy(benchmark::State& state) {
  const Cache cache(KvFormat::kBf16, state.range(0));
  std::vector<Bf16> target(2 * cache.input.size());
  for (auto _ : state) {
    for (int side = 0; side < 2; ++side)
      std::memcpy(target.data() + static_cast<size_t>(side) * cache.input.size(),
                  cache.input.data(), cache.input.size() * sizeof(Bf16));
    benchmark::ClobberMemory();
  }
  set_input_rate(state, cache);
}

// Multiplications and additions of both products, causal rows counted by the keys they see.
double attention_flops(int64_t q_len, int64_t seq_len) {
  double keys = 0;
  for (int64_t row = 0; row < q_len; ++row) keys += static_cast<double>(seq_len - q_len + row + 1);
  return keys * static_cast<double>(kQueryHeads * 4 * kDim);
}

void set_flop_rate(benchmark::State& state) {
  state.counters["flop/s"] = benchmark::Counter(
      attention_flops(state.range(0), state.range(1)) * static_cast<double>(state.iterations()),
      benchmark::Counter::kIsRate);
}

using Change = void (*)(AttendParams& params);

void bench_attend(benchmark::State& state, KvFormat format, Change change = nullptr) {
  const auto q_len = static_cast<int32_t>(state.range(0));
  const auto seq_len = static_cast<int32_t>(state.range(1));
  Cache cache(format, seq_len);
  std::vector<Bf16> q = normal_values(q_len * kQueryHeads * kDim);
  std::vector<Bf16> out(q.size());
  AttendParams params;
  params.layer = cache.layer;
  params.q = dense_tensor(q.data(), Dtype::kBf16, q_len, kQueryHeads, kDim);
  params.output.out = dense_tensor(out.data(), Dtype::kBf16, q_len, kQueryHeads, kDim);
  params.q_lens = &q_len;
  params.seq_lens = &seq_len;
  params.num_seqs = 1;
  params.block_table = cache.table.data();
  params.block_table_stride = cache.layer.num_blocks;
  params.scale = 1.0f / std::sqrt(static_cast<float>(kDim));
  if (change != nullptr) change(params);
  for (auto _ : state) {
    if (!run_attend(params).ok()) std::abort();
    benchmark::ClobberMemory();
  }
  set_flop_rate(state);
}

void with_soft_cap(AttendParams& params) { params.soft_cap = 30.0f; }
void in_four_splits(AttendParams& params) { params.num_splits = 4; }
void rotated(AttendParams& params) { params.layer.key_transform = KeyTransform::kRotated; }

// Dense bf16 K and V per head, widened to float for Eigen's products; no paging, no blocks.
void bench_eigen(benchmark::State& state) {
  using Floats = Eigen::Matrix<float, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  using Halves = Eigen::Matrix<Bf16, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;
  const int64_t q_len = state.range(0);
  const int64_t seq_len = state.range(1);
  const int64_t rows = q_len * (kQueryHeads / kKvHeads);
  const std::vector<Bf16> cache = normal_values(kKvHeads * seq_len * kDim);
  const std::vector<Bf16> queries = normal_values(kKvHeads * rows * kDim);
  Halves out(rows, kDim);
  for (auto _ : state) {
    for (int64_t head = 0; head < kKvHeads; ++head) {
      const Floats kv =
          Eigen::Map<const Halves>(cache.data() + head * seq_len * kDim, seq_len, kDim)
              .cast<float>();
      const Floats q =
          Eigen::Map<const Halves>(queries.data() + head * rows * kDim, rows, kDim).cast<float>();
      Floats weights = (q * kv.transpose()) / std::sqrt(static_cast<float>(kDim));
      for (int64_t row = 0; row < rows; ++row) {
        const int64_t seen = seq_len - q_len + row / (kQueryHeads / kKvHeads) + 1;
        auto visible = weights.row(row).head(seen);
        visible = (visible.array() - visible.maxCoeff()).exp();
        visible /= visible.sum();
        weights.row(row).tail(seq_len - seen).setZero();
      }
      const Floats result = weights * kv;
      out = result.cast<Bf16>();
      benchmark::DoNotOptimize(out.data());
    }
    benchmark::ClobberMemory();
  }
  set_flop_rate(state);
}

void row_sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgName("tokens")->Arg(64)->Arg(1024)->Arg(16384)->Unit(benchmark::kMicrosecond);
}

void attend_sizes(benchmark::internal::Benchmark* bench) {
  bench->ArgNames({"q_len", "seq_len"});
  bench->Args({1, 128})->Args({1, 4096})->Args({512, 512})->Args({512, 4096});
  bench->Unit(benchmark::kMicrosecond);
}

constexpr Encoder kReference = Encoder::kReference;
constexpr KeyTransform kNone = KeyTransform::kNone;
constexpr KeyTransform kCentredRotated = KeyTransform::kCentredRotated;

BENCHMARK(bench_memcpy)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, bf16, KvFormat::kBf16, kReference, kNone)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, fp16, KvFormat::kFp16, kReference, kNone)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, fp8_e4m3, KvFormat::kFp8E4m3, kReference, kNone)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, fp8_e5m2, KvFormat::kFp8E5m2, kReference, kNone)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, nvfp4, KvFormat::kNvfp4, kReference, kNone)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, nvfp4_centred_rotated, KvFormat::kNvfp4, kReference,
                  kCentredRotated)
    ->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, four_over_six, KvFormat::kNvfp4, Encoder::kFourOverSix, kNone)
    ->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_append, best_scale, KvFormat::kNvfp4, Encoder::kBestScale, kNone)
    ->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_gather, bf16, KvFormat::kBf16, Dtype::kBf16, kNone)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_gather, fp8_e4m3, KvFormat::kFp8E4m3, Dtype::kBf16, kNone)
    ->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_gather, nvfp4, KvFormat::kNvfp4, Dtype::kBf16, kNone)->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_gather, nvfp4_fp32, KvFormat::kNvfp4, Dtype::kFp32, kNone)
    ->Apply(row_sizes);
BENCHMARK_CAPTURE(bench_gather, nvfp4_centred_rotated, KvFormat::kNvfp4, Dtype::kBf16,
                  kCentredRotated)
    ->Apply(row_sizes);
BENCHMARK(bench_eigen)->Apply(attend_sizes);
BENCHMARK_CAPTURE(bench_attend, bf16, KvFormat::kBf16)->Apply(attend_sizes);
BENCHMARK_CAPTURE(bench_attend, fp8_e4m3, KvFormat::kFp8E4m3)->Apply(attend_sizes);
BENCHMARK_CAPTURE(bench_attend, nvfp4, KvFormat::kNvfp4)->Apply(attend_sizes);
BENCHMARK_CAPTURE(bench_attend, bf16_soft_cap, KvFormat::kBf16, with_soft_cap)->Apply(attend_sizes);
BENCHMARK_CAPTURE(bench_attend, bf16_4_splits, KvFormat::kBf16, in_four_splits)
    ->Apply(attend_sizes);
BENCHMARK_CAPTURE(bench_attend, nvfp4_rotated, KvFormat::kNvfp4, rotated)->Apply(attend_sizes);

}  // namespace
}  // namespace larder::kernels

BENCHMARK_MAIN();
