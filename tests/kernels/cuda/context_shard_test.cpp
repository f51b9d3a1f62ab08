// attend on a GPU over one rank's share of a context.
#include <doctest/doctest.h>

#include "kernels/cuda/short_table.h"
#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

constexpr int32_t kInterleaves[] = {1, 3, 16, 48};

ContextShard random_shard(std::mt19937_64& engine) {
  const auto num_ranks = static_cast<int32_t>(1 + engine() % 5);
  return {num_ranks, static_cast<int32_t>(engine() % static_cast<uint64_t>(num_ranks)),
          kInterleaves[engine() % 4]};
}

TEST_CASE("of a host table, the entries of the shard's tokens are copied") {
  // Of 100 tokens rank 1 of 4 has 16 to 31 and 80 to 95; of 70 tokens it has 16 to 31.
  const std::vector<int32_t> table = {7, 8, 5, -1};
  const std::vector<int32_t> seq_lens = {100, 70};
  const auto two = kernels::cuda::short_table(table.data(), 2, seq_lens.data(), 2, 16, {4, 1, 16});
  CHECK(two.stride == 2);
  CHECK(two.entries == std::vector<int32_t>{7, 8, 5, 0});
  const auto none = kernels::cuda::short_table(table.data(), 2, seq_lens.data(), 2, 16, {9, 8, 16});
  CHECK(none.stride == 0);
}

// Formats, dims and blocks of any kind, of MLA rows, or of the kind that the tuned row takes.
AttentionGeometry random_geometry(int round, std::mt19937_64& engine) {
  const int32_t block_tokens = pick<int32_t>(engine, {1, 16, 64});
  if (round % 4 == 3) return mla_geometry(1, block_tokens, static_cast<MlaRow>(1 + engine() % 4));
  if (round % 2 == 1)
    return decode_geometry(kDecodeFormats[engine() % 4], 2, std::max(block_tokens, 16), 64);
  const auto format = [&] { return static_cast<KvFormat>(engine() % 5); };
  return {1, 2, block_tokens, 96, 64, format(), format()};
}

TEST_CASE("random shards, with every option that is about places, give the CPU's result") {
  if (!has_gpu()) return;
  auto engine = random_engine(7510);
  CAPTURE(seed());
  for (int round = 0; round < 120; ++round) {
    const AttentionGeometry geometry = random_geometry(round, engine);
    std::vector<Lengths> lengths;
    for (size_t s = 1 + engine() % 4; s-- > 0;)
      lengths.push_back({static_cast<int32_t>(engine() % 3 == 0 ? engine() % 40 : 1 + engine() % 5),
                         static_cast<int32_t>(engine() % 700)});
    AttendCase one(geometry, geometry.num_kv_heads == 1 ? 16 : 6, lengths, engine, 0,
                   random_shard(engine));
    const auto maybe = [&] { return engine() % 3 == 0; };
    one.params.causal = !maybe();
    if (maybe()) one.params.window_left = static_cast<int32_t>(engine() % 300);
    if (maybe()) one.set_random_mask(engine);
    if (maybe())
      one.set_alibi(engine);
    else if (maybe())
      one.params.soft_cap = 2.0f;
    if (maybe()) one.params.num_splits = static_cast<int32_t>(1 + engine() % 8);
    one.params.deterministic = maybe();
    one.params.partial = maybe();
    if (!one.params.partial && maybe()) one.set_sinks(engine);
    one.check("round " + std::to_string(round));
  }
}

// Of the portable row alone, and of every row.
const AttentionGeometry kGeometries[] = {
    {1, 2, 16, 96, 64, KvFormat::kFp8E4m3, KvFormat::kNvfp4},
    {1, 2, 16, 64, 64, KvFormat::kFp8E4m3, KvFormat::kFp8E4m3}};

TEST_CASE("a shard with more than 65,536 ranks, or none of its tokens yet") {
  if (!has_gpu()) return;
  auto engine = random_engine(7511);
  CAPTURE(seed());
  for (const ContextShard& shard : {ContextShard{2147483647, 2147483646, 1},
                                    {2147483647, 3, 1},
                                    {1, 0, 2147483647},
                                    {2, 1, 1073741823},
                                    {65537, 20, 32767},
                                    {70000, 2, 5}})
    for (const AttentionGeometry& geometry : kGeometries)
      AttendCase(geometry, 4, {{1, 50}, {4, 30}, {3, 2}}, engine, 0, shard).check("shard");
}

TEST_CASE("wild lengths and tables of shards touch nothing outside") {
  if (!has_gpu()) return;
  auto engine = random_engine(7513);
  CAPTURE(seed());
  for (int round = 0; round < 60; ++round) {
    std::vector<Lengths> lengths;
    for (size_t s = 1 + engine() % 6; s-- > 0;)
      lengths.push_back({static_cast<int32_t>(engine() % 5), static_cast<int32_t>(engine() % 400)});
    AttendCase one(kGeometries[round % 2], 4, lengths, engine, 0, random_shard(engine));
    if (engine() % 2 == 0) one.set_random_mask(engine);
    if (engine() % 4 == 0) one.set_alibi(engine);
    if (engine() % 2 == 0) one.params.window_left = static_cast<int32_t>(engine() % 300);
    one.params.deterministic = engine() % 2 == 0;
    for (std::vector<int32_t>* values : {&one.q_lens, &one.seq_lens, &one.table})
      for (int32_t& value : *values) {
        if (engine() % 4 == 0) value = static_cast<int32_t>(engine());
        if (engine() % 16 == 0) value = 2147483647;
      }
    one.run_cuda();  // reads all guards
    const cudaError_t error = cudaDeviceSynchronize();
    REQUIRE_MESSAGE(error == cudaSuccess, cudaGetErrorString(error) << " at " << one.describe());
  }
}

TEST_CASE("of a length that passes a shard's table, the tokens with room are attended to") {
  if (!has_gpu()) return;
  auto engine = random_engine(7512);
  CAPTURE(seed());
  const ContextShard shard = {3, 1, 16};
  for (const AttentionGeometry& geometry : kGeometries) {
    // Two blocks and two entries more are 64 tokens: 4 of the rank's stretches. The fifth begins
    // at token 208.
    AttendCase one(geometry, 4, {{2, 96}}, engine, 0, shard);
    REQUIRE(one.params.block_table_stride == 4);
    one.table[2] = one.table[0];
    one.table[3] = one.table[1];
    one.seq_lens[0] = 208;
    const Outputs expected = one.run_cpu();
    for (const int32_t length : {208, 209, 2147483647}) {
      one.seq_lens[0] = length;
      for (const AttendCase::CudaRun& run : one.run_cuda()) {
        one.compare(run, expected, "a length past the table");
        INFO(run.row << ": " << one.describe());
        CHECK((run.fault_count > 0) == (length > 208));
      }
    }
  }
}

}  // namespace
}  // namespace larder::test
