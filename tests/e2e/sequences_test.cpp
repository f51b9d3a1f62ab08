// Sequences of the client library: fork, truncate and what they share.
#include <cmath>
#include <numeric>
#include <vector>

#include <doctest/doctest.h>

#include "tests/e2e/executions.h"
#include "tests/support/node.h"

namespace larder::test {
namespace {

TEST_CASE("forks share blocks until one of them writes into a shared tail") {
  Node node;
  Client client = node.connect();
  for (const Execution execution : kExecutions) {
    auto pool =
        client.open_pool(small_pool(execution == Execution::kInProcess ? "fork-here" : "fork-there",
                                    execution, KvFormat::kBf16));
    REQUIRE(pool.ok());
    const auto free_blocks = [&] { return pool->stats().value()[0].free; };
    const auto append = [&](Sequence& sequence, int64_t tokens, float value) {
      REQUIRE(sequence.extend(tokens).ok());
      std::vector<float> kv(static_cast<size_t>(tokens) * 64, value);
      for (int layer = 0; layer < 2; ++layer)
        REQUIRE(sequence.append(layer, view(kv, 1, 64), view(kv, 1, 64)).ok());
    };
    const auto value_of = [&](const Sequence& sequence, int64_t token) {
      std::vector<float> k(64, kNan);
      const std::vector<int64_t> slot = {
          sequence.block_ids()[static_cast<size_t>(token / 16)] * 16 + token % 16};
      REQUIRE(
          pool->read(1, view(k, 1, 64), dense_tensor(nullptr, Dtype::kFp32, 0, 1, 64), slot).ok());
      return k[63];
    };
    {
      Sequence a = pool->begin_sequence();
      append(a, 20, 1.0f);
      Sequence b = a.fork();
      CHECK(free_blocks() == 6);  // nothing was copied yet
      append(a, 1, 2.0f);         // a gets its own tail
      append(b, 1, 3.0f);
      CHECK(free_blocks() == 5);
      CHECK(a.block_ids()[0] == b.block_ids()[0]);
      CHECK(a.block_ids()[1] != b.block_ids()[1]);
      CHECK(value_of(a, 19) == 1.0f);
      CHECK(value_of(b, 19) == 1.0f);
      CHECK(value_of(a, 20) == 2.0f);
      CHECK(value_of(b, 20) == 3.0f);
      REQUIRE(a.end().ok());
      CHECK(value_of(b, 20) == 3.0f);
      CHECK(free_blocks() == 6);

      // At a block's edge nothing is copied.
      append(b, 11, 4.0f);
      Sequence c = b.fork();
      append(c, 1, 5.0f);
      append(b, 1, 6.0f);
      CHECK(free_blocks() == 4);
      CHECK(c.block_ids()[1] == b.block_ids()[1]);

      // Cut back into a published block: the next write must not touch it.
      std::vector<int32_t> tokens(33);
      std::iota(tokens.begin(), tokens.end(), 100);
      REQUIRE(b.publish(tokens).ok());
      REQUIRE(c.end().ok());
      REQUIRE(b.truncate(18).ok());
      CHECK(b.num_tokens() == 18);
      const int32_t published = b.block_ids()[1];
      append(b, 1, 7.0f);
      CHECK(b.block_ids()[1] != published);
      CHECK(value_of(b, 17) == 1.0f);
      CHECK(value_of(b, 18) == 7.0f);
      auto prefix = pool->lookup(tokens);
      REQUIRE(prefix.ok());
      CHECK(prefix->hit_tokens == 32);
      CHECK(prefix->blocks[1].id == published);
      REQUIRE(pool->release(prefix->blocks).ok());
      CHECK(b.truncate(20).code() == ErrorCode::kInvalidArgument);
      REQUIRE(b.truncate(0).ok());
      CHECK(b.blocks().empty());
    }
    CHECK(free_blocks() + pool->stats().value()[0].cached == 8);
  }
}

}  // namespace
}  // namespace larder::test
