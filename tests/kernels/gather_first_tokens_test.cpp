// gather with first tokens: sequences that begin in the middle.
#include <cstring>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/row_calls.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::consecutive_slots;
using test::normal_values;
using test::Pool;

constexpr int64_t kBlocks = 12;
constexpr int64_t kBlockTokens = 5;
constexpr float kPoison = 77.0f;

// Five sequences over blocks in any order; entries before a first token's block are no blocks.
struct Sequences {
  std::vector<int32_t> seq_lens = {17, 10, 3, 0, 15};
  std::vector<int32_t> first_tokens = {7, 10, 0, 0, 5};
  std::vector<int32_t> table = {-99, 3,   1,  8,   //
                                -1,  700, -1, -1,  //
                                2,   -1,  -1, -1,  //
                                -1,  -1,  -1, -1,  //
                                -7,  11,  0,  -1};
};

// The slot of the row-th token of a sequence, counted from its first token.
int64_t slot_at(const Sequences& s, size_t sequence, int64_t row) {
  const int64_t token = s.first_tokens[sequence] + row;
  return s.table[sequence * 4 + static_cast<size_t>(token / kBlockTokens)] * kBlockTokens +
         token % kBlockTokens;
}

void check(const AttentionGeometry& geometry, int64_t k_dim, int64_t rows_per_sequence) {
  auto engine = test::random_engine(130);
  const Sequences sequences;
  const bool is_mla = geometry.mla_row != MlaRow::kNone;
  const int64_t heads = geometry.num_kv_heads;
  const int64_t num_slots = kBlocks * kBlockTokens;
  Pool pool(geometry, kBlocks);
  std::vector<float> k = normal_values(engine, num_slots * heads * (is_mla ? 512 : k_dim));
  std::vector<float> v = normal_values(engine, num_slots * heads * (is_mla ? 64 : geometry.v_dim));
  REQUIRE(test::append(pool, k, v, consecutive_slots(0, num_slots)).ok());
  // The rows by slots, as the call without a table gives them.
  std::vector<int64_t> slots;
  for (size_t s = 0; s < 5; ++s) {
    if (rows_per_sequence > 0) slots.resize(s * static_cast<size_t>(rows_per_sequence), -1);
    for (int64_t row = 0; row < sequences.seq_lens[s] - sequences.first_tokens[s]; ++row)
      slots.push_back(slot_at(sequences, s, row));
  }
  const auto rows = static_cast<int64_t>(slots.size()) + 1;
  slots.resize(static_cast<size_t>(rows), -1);
  std::vector<float> outs[2][2];
  for (auto& call : outs) {
    call[0].assign(static_cast<size_t>(rows * heads * k_dim), kPoison);
    call[1].assign(static_cast<size_t>(rows * heads * geometry.v_dim), kPoison);
  }
  test::on_next_target([&](const std::string& target) {
    CAPTURE(target);
    for (size_t by_table = 0; by_table < 2; ++by_table) {
      GatherParams params;
      params.layer = pool.layer();
      params.k_out = dense_tensor(outs[by_table][0].data(), Dtype::kFp32, rows, heads, k_dim);
      if (!is_mla)
        params.v_out =
            dense_tensor(outs[by_table][1].data(), Dtype::kFp32, rows, heads, geometry.v_dim);
      if (by_table == 0) {
        params.slots = slots.data();
        params.num_slots = rows;
      } else {
        params.seq_lens = sequences.seq_lens.data();
        params.first_tokens = sequences.first_tokens.data();
        params.block_table = sequences.table.data();
        params.block_table_stride = 4;
        params.num_seqs = 5;
        params.rows_per_sequence = rows_per_sequence;
      }
      const Status status = run_gather(params);
      CAPTURE(status.to_string());
      REQUIRE(status.ok());
    }
  });
  CHECK(outs[0][0] == outs[1][0]);
  CHECK(outs[0][1] == outs[1][1]);
}

TEST_CASE("tokens before a sequence's first are left out, their blocks are not looked up") {
  CAPTURE(test::seed());
  // Rows per sequence: one after another, exactly the 10 tokens of the longest, and more.
  for (const int64_t rows_per_sequence : {0, 10, 13}) {
    CAPTURE(rows_per_sequence);
    for (size_t format = 0; format < kKvFormatNames.size(); ++format) {
      CAPTURE(kKvFormatNames[format]);
      check({1, 3, kBlockTokens, 80, 48, static_cast<KvFormat>(format), KvFormat::kNvfp4}, 80,
            rows_per_sequence);
    }
    for (const MlaRow row : {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16}) {
      CAPTURE(name(row));
      check(mla_geometry(1, kBlockTokens, row), 576, rows_per_sequence);
    }
  }
}

TEST_CASE("a window's rows need no more room than the window, however long the sequence") {
  auto engine = test::random_engine(131);
  CAPTURE(test::seed());
  Pool pool({1, 1, 4, 16, 16, KvFormat::kBf16, KvFormat::kBf16}, 2);
  std::vector<float> k = normal_values(engine, 8 * 16);
  REQUIRE(test::append(pool, k, k, consecutive_slots(0, 8)).ok());
  const int32_t seq_len = 1'000'003, first_token = 999'999;
  std::vector<int32_t> table(250'001, -1);
  table[249'999] = 1;
  table[250'000] = 0;
  std::vector<float> out(4 * 16, kPoison);
  GatherParams params;
  params.layer = pool.layer();
  params.k_out = dense_tensor(out.data(), Dtype::kFp32, 4, 1, 16);
  params.seq_lens = &seq_len;
  params.first_tokens = &first_token;
  params.block_table = table.data();
  params.block_table_stride = 250'001;
  params.num_seqs = 1;
  params.rows_per_sequence = 4;
  REQUIRE(run_gather(params).ok());
  // Token 999,999 is the last of block 1, 1,000,000 to 1,000,002 are the first of block 0.
  for (const auto& [row, slot] :
       {std::pair(0, 7), std::pair(1, 0), std::pair(2, 1), std::pair(3, 2)})
    for (int i = 0; i < 16; ++i)
      CHECK(out[static_cast<size_t>(row * 16 + i)] ==
            pool.read(test::Side::kK, slot, 0)[static_cast<size_t>(i)]);
}

}  // namespace
}  // namespace larder::kernels
