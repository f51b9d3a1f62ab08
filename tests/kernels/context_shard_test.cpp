// Attention over a context that is spread over ranks, each with a pool of its own: the joined
// results are those of the whole context.
#include <cmath>
#include <memory>
#include <numeric>

#include <doctest/doctest.h>

#include "tests/kernels/attend_call.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::AttendResult;
using test::DenseResult;
using test::Pool;
using test::SequenceLengths;
using test::Side;

const float kNan = std::nanf("");

static_assert(local_tokens({}, 7) == 7 && global_token({}, 7) == 7);

TEST_CASE("a rank's tokens and their places are those that counting finds") {
  for (int32_t ranks = 1; ranks <= 5; ++ranks)
    for (const int32_t interleave : {1, 2, 3, 16, 48})
      for (int32_t rank = 0; rank < ranks; ++rank) {
        const ContextShard shard = {ranks, rank, interleave};
        int64_t held = 0;
        for (int64_t token = 0; token < 600; ++token) {
          CAPTURE(ranks);
          CAPTURE(interleave);
          CAPTURE(rank);
          CAPTURE(token);
          REQUIRE(local_tokens(shard, token) == held);
          if (token / interleave % ranks != rank) continue;
          REQUIRE(global_token(shard, held) == token);
          ++held;
        }
      }
  const ContextShard last = {65536, 65535, 32767};
  CHECK(local_tokens(last, 2147483647) == 32767);
  CHECK(global_token(last, 32766) == 2147418111);
}

// Sequences whose keys and values exist once, and the pools of the ranks that hold them.
class SpreadContext {
 public:
  SpreadContext(const AttentionGeometry& shape, int64_t heads, std::vector<SequenceLengths> lengths,
                int32_t num_ranks, int32_t interleave, std::mt19937_64& random)
      : geometry(shape), num_q_heads(heads), sequences(std::move(lengths)), engine(random) {
    for (const SequenceLengths& one : sequences) {
      rows += one.q_len;
      tokens += one.seq_len;
    }
    q = normals(rows * heads * shape.k_dim);
    k = normals(tokens * shape.num_kv_heads * shape.k_dim);
    v = normals(tokens * shape.num_kv_heads * shape.v_dim);
    ranks.resize(static_cast<size_t>(num_ranks));
    for (int32_t rank = 0; rank < num_ranks; ++rank) fill_rank({num_ranks, rank, interleave});
  }

  // What the options set in `change` make of the call on a rank.
  template <typename Change>
  AttendResult run(size_t rank, const Change& change) {
    Rank& one = ranks[rank];
    AttendResult result;
    result.out.assign(static_cast<size_t>(rows * num_q_heads * geometry.v_dim), kNan);
    result.lse.assign(static_cast<size_t>(rows * num_q_heads), kNan);
    std::vector<int32_t> q_lens, seq_lens;
    for (const SequenceLengths& s : sequences) {
      q_lens.push_back(s.q_len);
      seq_lens.push_back(s.seq_len);
    }
    AttendParams params;
    params.layer = one.pool->layer();
    params.q = dense_tensor(q.data(), Dtype::kFp32, rows, num_q_heads, geometry.k_dim);
    params.output.out =
        dense_tensor(result.out.data(), Dtype::kFp32, rows, num_q_heads, geometry.v_dim);
    params.output.lse = result.lse.data();
    params.q_lens = q_lens.data();
    params.seq_lens = seq_lens.data();
    params.block_table = one.table.data();
    params.num_seqs = static_cast<int64_t>(sequences.size());
    params.block_table_stride = one.stride;
    params.scale = 0.2f;
    params.partial = true;
    params.shard = one.shard;
    change(params);
    const Status status = run_attend(params);
    REQUIRE_MESSAGE(status.ok(), status.to_string());
    return result;
  }

  // In float64, over what a reader of the ranks' caches sees. `change` is given the options.
  template <typename Change>
  DenseResult oracle(const Change& change) {
    DenseResult all;
    int64_t row = 0, token = 0;
    for (size_t s = 0; s < sequences.size(); ++s) {
      test::DenseAttention call;
      call.q_len = sequences[s].q_len;
      call.seq_len = sequences[s].seq_len;
      call.num_q_heads = num_q_heads;
      call.num_kv_heads = geometry.num_kv_heads;
      call.k_dim = geometry.k_dim;
      call.v_dim = geometry.v_dim;
      call.scale = 0.2f;
      const int64_t row_size = num_q_heads * geometry.k_dim;
      call.q.assign(q.begin() + row * row_size, q.begin() + (row + call.q_len) * row_size);
      for (int64_t i = 0; i < call.seq_len; ++i)
        for (int64_t head = 0; head < geometry.num_kv_heads; ++head) {
          const auto [rank, slot] = places[static_cast<size_t>(token + i)];
          const auto key = ranks[rank].pool->read(Side::kK, slot, head);
          const auto value = ranks[rank].pool->read(Side::kV, slot, head);
          call.k.insert(call.k.end(), key.begin(), key.end());
          call.v.insert(call.v.end(), value.begin(), value.end());
        }
      change(call, s);
      test::append_result(test::dense_attention(call), all);
      row += call.q_len;
      token += call.seq_len;
    }
    return all;
  }

  AttentionGeometry geometry;
  int64_t num_q_heads;
  std::vector<SequenceLengths> sequences;
  int64_t rows = 0;
  std::vector<float> q;

 private:
  struct Rank {
    ContextShard shard;
    std::unique_ptr<Pool> pool;
    std::vector<int32_t> table;
    int64_t stride = 0;
  };

  std::vector<float> normals(int64_t count) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = normal(engine);
    return values;
  }

  // Counts out what the rank holds; the places of blocks are random, what is not used is NaN.
  void fill_rank(const ContextShard& shard) {
    Rank& one = ranks[static_cast<size_t>(shard.rank)];
    one.shard = shard;
    const auto holds = [&](int64_t token) {
      return token / shard.interleave % shard.num_ranks == shard.rank;
    };
    std::vector<int64_t> held;
    int64_t num_blocks = 1;
    for (const SequenceLengths& s : sequences) {
      held.push_back(0);
      for (int64_t token = 0; token < s.seq_len; ++token) held.back() += holds(token) ? 1 : 0;
      const int64_t blocks = (held.back() + geometry.block_tokens - 1) / geometry.block_tokens;
      num_blocks += blocks;
      one.stride = std::max(one.stride, blocks);
    }
    one.pool = std::make_unique<Pool>(geometry, num_blocks, std::byte{0x7F}, 3);
    std::vector<int32_t> ids(static_cast<size_t>(num_blocks - 1));
    std::iota(ids.begin(), ids.end(), 1);
    std::shuffle(ids.begin(), ids.end(), engine);
    std::vector<int64_t> slots;  // by token of all sequences; -1: with another rank
    for (size_t s = 0; s < sequences.size(); ++s) {
      std::vector<int32_t> row(static_cast<size_t>(one.stride), -1);
      for (int64_t i = 0; i * geometry.block_tokens < held[s]; ++i) {
        row[static_cast<size_t>(i)] = ids.back();
        ids.pop_back();
      }
      int64_t next = 0;
      for (int64_t token = 0; token < sequences[s].seq_len; ++token) {
        if (!holds(token)) {
          slots.push_back(-1);
          continue;
        }
        const int64_t block = row[static_cast<size_t>(next / geometry.block_tokens)];
        slots.push_back(block * geometry.block_tokens + next++ % geometry.block_tokens);
      }
      one.table.insert(one.table.end(), row.begin(), row.end());
    }
    places.resize(slots.size());
    for (size_t token = 0; token < slots.size(); ++token)
      if (slots[token] >= 0) places[token] = {static_cast<size_t>(shard.rank), slots[token]};
    AppendParams params;
    params.layer = one.pool->layer();
    params.k = dense_tensor(k.data(), Dtype::kFp32, tokens, geometry.num_kv_heads, geometry.k_dim);
    params.v = dense_tensor(v.data(), Dtype::kFp32, tokens, geometry.num_kv_heads, geometry.v_dim);
    params.slots = slots.data();
    params.num_slots = tokens;
    const Status status = run_append(params);
    REQUIRE_MESSAGE(status.ok(), status.to_string());
  }

  std::mt19937_64& engine;
  int64_t tokens = 0;  // of all sequences
  std::vector<float> k, v;
  std::vector<Rank> ranks;
  std::vector<std::pair<size_t, int64_t>> places;  // rank and slot of each token
};

// [rows, heads] of the oracle in another form.
std::vector<double> lse_in(const LseForm& form, const std::vector<double>& lse, int64_t rows) {
  std::vector<double> result(lse.size());
  const auto heads = static_cast<int64_t>(lse.size()) / rows;
  for (int64_t i = 0; i < static_cast<int64_t>(lse.size()); ++i) {
    const int64_t at = form.heads_first ? i % heads * rows + i / heads : i;
    result[static_cast<size_t>(at)] =
        lse[static_cast<size_t>(i)] / (form.base2 ? std::log(2.0) : 1.0);
  }
  return result;
}

void check_lse(const std::vector<float>& lse, const std::vector<double>& expected) {
  REQUIRE(lse.size() == expected.size());
  for (size_t i = 0; i < lse.size(); ++i)
    if (std::isinf(expected[i]))
      CHECK(lse[i] == expected[i]);
    else
      CHECK(std::fabs(lse[i] - expected[i]) <= 1e-5 * std::max(1.0, std::fabs(expected[i])));
}

// The parts of all ranks, joined in both ways, are the whole.
void check_joins(SpreadContext& context, std::vector<AttendResult> parts, const LseForm& form,
                 const std::vector<float>& sinks, const DenseResult& whole) {
  const auto num_results = static_cast<int64_t>(whole.lse.size());
  const int64_t v_dim = context.geometry.v_dim;
  const auto view = [&](std::vector<float>& out) {
    return dense_tensor(out.data(), Dtype::kFp32, context.rows, context.num_q_heads, v_dim);
  };
  const std::vector<double> expected = lse_in(form, whole.lse, context.rows);
  std::vector<TensorView> outs;
  std::vector<const float*> lses;
  std::vector<float> gathered;
  for (AttendResult& part : parts) {
    outs.push_back(view(part.out));
    lses.push_back(part.lse.data());
    gathered.insert(gathered.end(), part.lse.begin(), part.lse.end());
  }
  std::vector<float> out(whole.out.size(), kNan), lse(whole.lse.size(), kNan);
  MergeParams merge;
  merge.outs = outs.data();
  merge.lses = lses.data();
  merge.num_states = static_cast<int64_t>(parts.size());
  merge.state_form = merge.output.lse_form = form;
  merge.sinks = sinks.empty() ? nullptr : sinks.data();
  merge.output.out = view(out);
  merge.output.lse = lse.data();
  REQUIRE(run_merge(merge).ok());
  CHECK(test::relative_l2({out.begin(), out.end()}, whole.out) <= 1e-5);
  check_lse(lse, expected);

  std::vector<double> sum(whole.out.size(), 0.0);
  for (size_t rank = 0; rank < parts.size(); ++rank) {
    std::vector<float> total(static_cast<size_t>(num_results), kNan);
    CombineParams combine;
    combine.out = view(parts[rank].out);
    combine.lses = gathered.data();
    combine.num_ranks = static_cast<int64_t>(parts.size());
    combine.rank = static_cast<int64_t>(rank);
    combine.lse_form = form;
    combine.sinks = sinks.empty() ? nullptr : sinks.data();
    combine.total_lse = total.data();
    REQUIRE(run_combine(combine).ok());
    check_lse(total, expected);
    for (size_t i = 0; i < sum.size(); ++i) sum[i] += parts[rank].out[i];
  }
  CHECK(test::relative_l2(sum, whole.out) <= 1e-5);
}

constexpr AttentionGeometry kSmall = {1, 2, 16, 32, 16, KvFormat::kNvfp4, KvFormat::kFp8E4m3};

TEST_CASE("ranks' partial results joined by merge and by combine are the whole attention") {
  auto engine = test::random_engine(7400);
  CAPTURE(test::seed());
  for (const int32_t num_ranks : {1, 2, 3, 4})
    for (const int32_t interleave : {1, 16, 48})
      for (int32_t q_len = 1; q_len <= 5; ++q_len)
        for (const int32_t window : {-1, 20}) {
          CAPTURE(num_ranks);
          CAPTURE(interleave);
          CAPTURE(q_len);
          CAPTURE(window);
          // Of 7 tokens some ranks have none; 3 and fewer are less than the rows.
          SpreadContext context(
              kSmall, 4,
              {{q_len, static_cast<int32_t>(5 + engine() % 300)}, {1, 7}, {q_len, 3}, {0, 50}},
              num_ranks, interleave, engine);
          std::vector<float> sinks;
          if (engine() % 2 == 0) sinks = {0.5f, -1.0f, 3.0f, -INFINITY};
          const DenseResult whole = context.oracle([&](test::DenseAttention& call, size_t) {
            call.window_left = window;
            call.sinks.assign(sinks.begin(), sinks.end());
          });
          for (const LseForm& form : {LseForm{false, false, false}, LseForm{true, false, false},
                                      LseForm{false, false, true}, LseForm{true, false, true}}) {
            std::vector<AttendResult> parts;
            for (size_t rank = 0; rank < static_cast<size_t>(num_ranks); ++rank)
              parts.push_back(context.run(rank, [&](AttendParams& params) {
                params.window_left = window;
                params.output.lse_form = form;
              }));
            check_joins(context, std::move(parts), form, sinks, whole);
          }
        }
}

TEST_CASE("masks, ALiBi, rows without causality and splits are about the whole context") {
  auto engine = test::random_engine(7401);
  CAPTURE(test::seed());
  const std::vector<float> slopes = {0.5f, 0.03f, 0.25f, 0.0f};
  for (int round = 0; round < 60; ++round) {
    const auto num_ranks = static_cast<int32_t>(1 + engine() % 4);
    const int32_t interleaves[] = {1, 5, 16, 48};
    const int32_t interleave = interleaves[engine() % 4];
    SpreadContext context(kSmall, 4,
                          {{static_cast<int32_t>(1 + engine() % 5), 200},
                           {3, static_cast<int32_t>(engine() % 90)},
                           {70, 90}},
                          num_ranks, interleave, engine);
    CAPTURE(round);
    CAPTURE(num_ranks);
    CAPTURE(interleave);
    const bool is_masked = engine() % 2 == 0, is_causal = engine() % 3 != 0;
    const bool is_sloped = engine() % 2 == 0;
    const auto window = static_cast<int32_t>(engine() % 2 == 0 ? -1 : engine() % 60);
    const auto splits = static_cast<int32_t>(engine() % 6);
    std::vector<std::vector<bool>> seen;
    std::vector<uint8_t> mask(3, 0xFF);
    std::vector<int64_t> offsets;
    for (const SequenceLengths& s : context.sequences) {
      seen.emplace_back(static_cast<size_t>(s.q_len * s.seq_len));
      offsets.push_back(static_cast<int64_t>(mask.size()));
      mask.resize(mask.size() + (seen.back().size() + 7) / 8);
      for (size_t bit = 0; bit < seen.back().size(); ++bit) {
        seen.back()[bit] = engine() % 3 != 0;
        uint8_t& byte = mask[static_cast<size_t>(offsets.back()) + bit / 8];
        if (seen.back()[bit]) byte = static_cast<uint8_t>(byte | 1 << bit % 8);
      }
    }
    const DenseResult whole = context.oracle([&](test::DenseAttention& call, size_t sequence) {
      call.window_left = window;
      call.causal = is_causal;
      if (is_sloped) call.alibi_slopes.assign(slopes.begin(), slopes.end());
      if (is_masked) call.mask = seen[sequence];
    });
    std::vector<AttendResult> parts;
    for (size_t rank = 0; rank < static_cast<size_t>(num_ranks); ++rank)
      parts.push_back(context.run(rank, [&](AttendParams& params) {
        params.window_left = window;
        params.causal = is_causal;
        params.num_splits = splits;
        if (is_sloped) params.alibi_slopes = slopes.data();
        if (!is_masked) return;
        params.mask = mask.data();
        params.mask_bytes = static_cast<int64_t>(mask.size());
        params.mask_offsets = offsets.data();
      }));
    check_joins(context, std::move(parts), {}, {}, whole);
  }
}

}  // namespace
}  // namespace larder::kernels
