// Options of attention about what a batch shares and what a rank holds, in process and on request.
#include <vector>

#include <doctest/doctest.h>

#include "tests/e2e/executions.h"
#include "tests/support/node.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

// 40 tokens in 3 blocks of a pool that may grow, so that tables are looked at before a call. Of two
// ranks that take 16 tokens in turn, the first has blocks 0 and 2 and the second block 1.
struct Filled {
  Filled(Client& client, Execution execution)
      : pool([&] {
          PoolOptions options;
          options.name = execution == Execution::kInProcess ? "here" : "there";
          options.model = "test";
          options.geometry = {2, 2, 16, 64, 32, KvFormat::kNvfp4, KvFormat::kFp8E4m3};
          options.num_blocks = 8;
          options.max_blocks = 1 << 16;
          options.execution = execution;
          auto opened = client.open_pool(options);
          REQUIRE_MESSAGE(opened.ok(), opened.status().to_string());
          return std::move(*opened);
        }()) {
    const auto allocated = pool.allocate(3);
    REQUIRE(allocated.ok());
    for (const BlockHandle& block : *allocated) blocks.push_back(block.id);
    std::vector<int64_t> slots;
    for (size_t token = 0; token < 40; ++token)
      slots.push_back(int64_t{blocks[token / 16]} * 16 + static_cast<int64_t>(token % 16));
    std::vector<float> k = random_values(40 * 2 * 64, 2), v = random_values(40 * 2 * 32, 4);
    REQUIRE(pool.append(1, view(k, 2, 64), view(v, 2, 32), slots).ok());
  }

  Pool pool;
  std::vector<int32_t> blocks;
};

TEST_CASE("shards, shared prefixes and determinism give the same bits in both executions") {
  Node node;
  Client client = node.connect();
  std::vector<uint32_t> results[2];
  for (size_t i = 0; i < 2; ++i) {
    Filled filled(client, kExecutions[i]);
    std::vector<float> q = random_values(2 * 4 * 64, 9);
    const std::vector<int32_t> q_lens = {2}, seq_lens = {40};
    const std::vector<int32_t> tables[] = {
        {filled.blocks[0], filled.blocks[2]}, {filled.blocks[1]}, filled.blocks};
    AttendBatch batch;
    batch.q = view(q, 4, 64);
    batch.q_lens = q_lens;
    batch.seq_lens = seq_lens;
    AttendOptions options;
    options.deterministic = true;
    options.partial = true;
    std::vector<std::vector<float>> outs, lses;
    for (int32_t rank = 0; rank < 3; ++rank) {
      options.shard = rank < 2 ? ContextShard{2, rank, 16} : ContextShard();
      if (rank == 2) options.shared_prefix_tokens = 32;
      outs.emplace_back(2 * 4 * 32, kNan);
      lses.emplace_back(2 * 4, kNan);
      batch.out = view(outs.back(), 4, 32);
      batch.lse = lses.back().data();
      batch.block_table = tables[rank];
      batch.block_table_stride = static_cast<int64_t>(tables[rank].size());
      const Status status = filled.pool.attend(1, batch, options);
      REQUIRE_MESSAGE(status.ok(), status.to_string());
      for (const uint32_t word : bits(outs.back())) results[i].push_back(word);
      for (const uint32_t word : bits(lses.back())) results[i].push_back(word);
    }
    std::vector<float> joined(2 * 4 * 32, kNan), lse(2 * 4, kNan);
    const AttentionState states[] = {{view(outs[0], 4, 32), lses[0].data()},
                                     {view(outs[1], 4, 32), lses[1].data()}};
    REQUIRE(merge_states(states, view(joined, 4, 32), lse.data()).ok());
    for (size_t at = 0; at < joined.size(); ++at)
      CHECK(joined[at] == doctest::Approx(outs[2][at]).epsilon(1e-4));
    for (size_t at = 0; at < lse.size(); ++at)
      CHECK(lse[at] == doctest::Approx(lses[2][at]).epsilon(1e-5));

    options.shard = {2, 2, 16};
    CHECK(filled.pool.attend(1, batch, options).message() ==
          "shard.rank is 2: expected 0 to 1 with shard.num_ranks 2");
    options.shard = {2, 0, 16};
    batch.block_table = tables[1];
    batch.block_table_stride = 1;
    CHECK(
        filled.pool.attend(1, batch, options).message() ==
        "seq_lens[0] is 40, of which rank 0 has 24: its block_table row has 1 blocks of 16 tokens");
    Sequence sequence = filled.pool.begin_sequence();
    CHECK(sequence.attend(1, batch.q, batch.out, nullptr, options).message() ==
          "shard.num_ranks is 2, shard.interleave 16: a Sequence knows this rank's tokens alone, "
          "Pool::attend takes shards");
  }
  CHECK(results[0] == results[1]);
}

}  // namespace
}  // namespace larder::test
