// Rows through the client: RoPE on their way in, first tokens on their way out.
#include <cmath>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "tests/support/node.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr float kPoison = 77.0f;

TensorView view(std::vector<float>& values, int64_t dim) {
  return dense_tensor(values.data(), Dtype::kFp32, static_cast<int64_t>(values.size()) / (2 * dim),
                      2, dim);
}

Pool open(Client& client, Execution execution, const std::string& name) {
  PoolOptions options;
  options.name = name;
  options.model = "test";
  options.geometry = {1, 2, 16, 64, 32, KvFormat::kBf16, KvFormat::kNvfp4};
  options.num_blocks = 8;
  options.execution = execution;
  auto opened = client.open_pool(options);
  REQUIRE_MESSAGE(opened.ok(), opened.status().to_string());
  return std::move(*opened);
}

std::vector<int64_t> slots_of(Pool& pool, int64_t tokens, std::vector<int32_t>& blocks) {
  auto allocated = pool.allocate((tokens + 15) / 16);
  REQUIRE(allocated.ok());
  std::vector<int64_t> slots;
  for (const BlockHandle& block : *allocated) blocks.push_back(block.id);
  for (int64_t token = 0; token < tokens; ++token)
    slots.push_back(blocks[static_cast<size_t>(token / 16)] * 16 + token % 16);
  return slots;
}

TEST_CASE("append in process turns keys by their positions, on request it says that it cannot") {
  Node node;
  Client client = node.connect();
  Pool here = open(client, Execution::kInProcess, "rope-here");
  std::vector<int32_t> blocks;
  const std::vector<int64_t> slots = slots_of(here, 3, blocks);
  std::vector<float> k = random_values(3 * 2 * 64, 140), v = random_values(3 * 2 * 32, 141);
  const std::vector<int64_t> positions = {0, 5, 1'000'000};
  AppendOptions options;
  options.rope.dim = 32;
  options.rope.positions = positions.data();
  REQUIRE(here.append(0, view(k, 64), view(v, 32), slots, options).ok());
  std::vector<float> read_k(k.size(), kPoison), read_v(v.size(), kPoison);
  REQUIRE(here.read(0, view(read_k, 64), view(read_v, 32), slots).ok());
  for (size_t row = 0; row < 6; ++row)
    for (size_t i = 0; i < 64; ++i) {
      const size_t at = row * 64 + i;
      double expected = k[at];
      if (i < 32) {
        const double angle = static_cast<double>(positions[row / 2]) *
                             std::pow(10000.0, -2.0 * static_cast<double>(i % 16) / 32);
        const double partner = i < 16 ? -k[at + 16] : k[at - 16];
        expected = k[at] * std::cos(angle) + partner * std::sin(angle);
      }
      CHECK(read_k[at] == doctest::Approx(expected).epsilon(0.005));  // bf16
    }
  const std::vector<int64_t> wrong = {0, -1, 2};
  options.rope.positions = wrong.data();
  const Status refused = here.append(0, view(k, 64), view(v, 32), slots, options);
  CHECK(refused.code() == ErrorCode::kInvalidArgument);
  CHECK(refused.message().find("rope.positions[1] is -1") != std::string::npos);

  Pool there = open(client, Execution::kOnRequest, "rope-there");
  const Status unsupported = there.append(0, view(k, 64), view(v, 32), slots, options);
  CHECK(unsupported.code() == ErrorCode::kUnsupported);
  CHECK(unsupported.message().find("rope.dim is 32: append on request") != std::string::npos);
  const LayerRows rows = {0, view(k, 64), view(v, 32)};
  CHECK(here.append_layers_in_stream({&rows, 1}, {}, nullptr).code() == ErrorCode::kUnsupported);
  CHECK(here.append_layers_in_stream({}, {}, nullptr).code() == ErrorCode::kInvalidArgument);
  CHECK(here.gather_in_stream(0, DeviceGatherBatch(), nullptr).code() == ErrorCode::kUnsupported);
}

TEST_CASE("gather begins at first tokens, with the same bits in both executions") {
  Node node;
  Client client = node.connect();
  std::vector<float> results[2][2];
  for (const Execution execution : {Execution::kInProcess, Execution::kOnRequest}) {
    const bool is_here = execution == Execution::kInProcess;
    Pool pool = open(client, execution, is_here ? "gather-here" : "gather-there");
    std::vector<int32_t> blocks;
    const std::vector<int64_t> slots = slots_of(pool, 40, blocks);
    std::vector<float> k = random_values(40 * 2 * 64, 142), v = random_values(40 * 2 * 32, 143);
    REQUIRE(pool.append(0, view(k, 64), view(v, 32), slots).ok());
    const std::vector<int32_t> seq_lens = {40, 10}, first_tokens = {35, 8};
    // The first blocks of the first sequence have been let go, say.
    const std::vector<int32_t> table = {-1, -1, blocks[2], blocks[0], -1, -1};
    std::vector<float> k_out(14 * 2 * 64, kPoison), v_out(14 * 2 * 32, kPoison);
    GatherBatch batch;
    batch.k_out = view(k_out, 64);
    batch.v_out = view(v_out, 32);
    batch.seq_lens = seq_lens;
    batch.first_tokens = first_tokens;
    batch.block_table = table;
    batch.block_table_stride = 3;
    batch.rows_per_sequence = 7;
    const Status status = pool.gather(0, batch);
    CAPTURE(status.to_string());
    REQUIRE(status.ok());
    for (size_t row = 0; row < 14; ++row) {
      const bool has_token = row < 5 || row == 7 || row == 8;
      const size_t token = row < 7 ? 35 + row : 8 + row - 7;
      for (size_t i = 0; i < 128; ++i)
        CHECK(k_out[row * 128 + i] == (has_token
                                           ? doctest::Approx(k[token * 128 + i]).epsilon(0.005)
                                           : doctest::Approx(kPoison)));
    }
    results[is_here ? 0 : 1][0] = k_out;
    results[is_here ? 0 : 1][1] = v_out;

    batch.first_tokens = std::span(first_tokens).first(1);
    CHECK(pool.gather(0, batch).message() == "first_tokens has 1 entries, seq_lens 2");
    const std::vector<int32_t> past = {41, 8};
    batch.first_tokens = past;
    CHECK(pool.gather(0, batch).message().find("first_tokens[0] is 41") != std::string::npos);
  }
  CHECK(results[0][0] == results[1][0]);
  CHECK(results[0][1] == results[1][1]);
}

}  // namespace
}  // namespace larder::test
