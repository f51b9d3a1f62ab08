// A batch of sequences in a pool, with the tables of an attend call and its judged result.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <numeric>
#include <random>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/support/dense_attention.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::test {

struct SequenceLengths {
  int32_t q_len;
  int32_t seq_len;
};

// One query row per element of out and lse, bit for bit comparable.
struct AttendResult {
  std::vector<float> out;  // [rows, num_q_heads, v_dim]
  std::vector<float> lse;  // [rows, num_q_heads]
  bool operator==(const AttendResult&) const = default;
};

// Sequences over one pool: fills the cache with normal values, in shuffled blocks.
class AttendBatch {
 public:
  AttendBatch(const AttentionGeometry& geometry, int64_t num_q_heads,
              std::vector<SequenceLengths> sequences, std::mt19937_64& engine)
      : num_q_heads_(num_q_heads), sequences_(std::move(sequences)) {
    int64_t num_blocks = 1;  // block 0 belongs to nobody
    for (const auto& s : sequences_) {
      num_blocks += blocks_of(geometry, s.seq_len);
      table_stride_ = std::max(table_stride_, blocks_of(geometry, s.seq_len) + 2);
      rows_ += s.q_len;
    }
    pool_ = std::make_unique<Pool>(geometry, num_blocks, std::byte{0x7F}, 3);  // NaN everywhere
    fill_tables(engine);
    fill_cache(engine);
    std::normal_distribution<float> normal;
    q.resize(static_cast<size_t>(rows_ * num_q_heads * geometry.k_dim));
    for (float& x : q) x = normal(engine);
    scale = 1.0f / std::sqrt(static_cast<float>(geometry.k_dim));
  }

  Pool& pool() { return *pool_; }
  std::vector<int32_t>& table() { return table_; }
  int64_t table_stride() const { return table_stride_; }

  // All sequences, or those in [first, last), in one call.
  AttendResult run(size_t first = 0, size_t last = SIZE_MAX) {
    last = std::min(last, sequences_.size());
    std::vector<int32_t> q_lens, seq_lens;
    int64_t first_row = 0;
    for (size_t s = 0; s < last; ++s) {
      if (s < first) {
        first_row += sequences_[s].q_len;
        continue;
      }
      q_lens.push_back(sequences_[s].q_len);
      seq_lens.push_back(sequences_[s].seq_len);
    }
    return run_rows(q_lens, seq_lens, first_row, static_cast<int64_t>(first));
  }

  // Rows from `first_row` on as sequences with these lengths, with the tables from `table_row` on.
  AttendResult run_rows(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& seq_lens,
                        int64_t first_row, int64_t table_row) {
    const AttentionGeometry& g = pool_->geometry();
    const int64_t rows = std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0});
    AttendResult result;
    result.out.assign(static_cast<size_t>(rows * num_q_heads_ * g.v_dim), NAN);
    result.lse.assign(static_cast<size_t>(rows * num_q_heads_), NAN);
    kernels::AttendParams params;
    params.layer = pool_->layer();
    params.q = dense_tensor(q.data() + first_row * num_q_heads_ * g.k_dim, Dtype::kFp32, rows,
                            num_q_heads_, g.k_dim);
    params.out = dense_tensor(result.out.data(), Dtype::kFp32, rows, num_q_heads_, g.v_dim);
    params.lse = result.lse.data();
    params.q_lens = q_lens.data();
    params.seq_lens = seq_lens.data();
    params.num_seqs = static_cast<int64_t>(q_lens.size());
    params.block_table = table_.data() + table_row * table_stride_;
    params.block_table_stride = table_stride_;
    params.scale = scale;
    params.causal = causal;
    params.window_left = window_left;
    const Status status = kernels::run_attend(params);
    LARDER_CHECK(status.ok(), status.to_string());
    return result;
  }

  // The float64 oracle over what a reader of the cache sees.
  DenseResult oracle() const {
    DenseResult all;
    int64_t row = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      const DenseResult one = dense_attention(dense_call(s, row));
      all.out.insert(all.out.end(), one.out.begin(), one.out.end());
      all.lse.insert(all.lse.end(), one.lse.begin(), one.lse.end());
      row += sequences_[s].q_len;
    }
    return all;
  }

  std::vector<float> q;  // [rows, num_q_heads, k_dim]
  float scale = 1;
  bool causal = true;
  int32_t window_left = -1;

 private:
  static int64_t blocks_of(const AttentionGeometry& geometry, int64_t seq_len) {
    return (seq_len + geometry.block_tokens - 1) / geometry.block_tokens;
  }

  int64_t slot(size_t sequence, int64_t token) const {
    const int64_t block_tokens = pool_->geometry().block_tokens;
    const auto entry =
        static_cast<size_t>(static_cast<int64_t>(sequence) * table_stride_ + token / block_tokens);
    return table_[entry] * block_tokens + token % block_tokens;
  }

  // Shuffled block ids; beyond a sequence's blocks, what a stale table may hold.
  void fill_tables(std::mt19937_64& engine) {
    const int32_t garbage[] = {2147483647, -1, static_cast<int32_t>(0xDEADBEEF)};
    std::vector<int32_t> ids(static_cast<size_t>(pool_->layer().num_blocks - 1));
    std::iota(ids.begin(), ids.end(), 1);
    std::shuffle(ids.begin(), ids.end(), engine);
    for (const auto& s : sequences_)
      for (int64_t i = 0; i < table_stride_; ++i) {
        const bool used = i < blocks_of(pool_->geometry(), s.seq_len);
        table_.push_back(used ? ids.back() : garbage[engine() % 3]);
        if (used) ids.pop_back();
      }
  }

  void fill_cache(std::mt19937_64& engine) {
    const AttentionGeometry& g = pool_->geometry();
    std::vector<int64_t> slots;
    for (size_t s = 0; s < sequences_.size(); ++s)
      for (int64_t token = 0; token < sequences_[s].seq_len; ++token)
        slots.push_back(slot(s, token));
    const auto rows = static_cast<int64_t>(slots.size());
    std::normal_distribution<float> normal;
    std::vector<float> k(static_cast<size_t>(rows * g.num_kv_heads * g.k_dim));
    std::vector<float> v(static_cast<size_t>(rows * g.num_kv_heads * g.v_dim));
    for (float& x : k) x = normal(engine);
    for (float& x : v) x = normal(engine);
    pool_->layer().k_scale = 0.5f;
    pool_->layer().v_scale = 2.0f;
    kernels::AppendParams params;
    params.layer = pool_->layer();
    params.k = dense_tensor(k.data(), Dtype::kFp32, rows, g.num_kv_heads, g.k_dim);
    params.v = dense_tensor(v.data(), Dtype::kFp32, rows, g.num_kv_heads, g.v_dim);
    params.slots = slots.data();
    params.num_slots = rows;
    const Status status = kernels::run_append(params);
    LARDER_CHECK(status.ok(), status.to_string());
  }

  DenseAttention dense_call(size_t sequence, int64_t first_row) const {
    const AttentionGeometry& g = pool_->geometry();
    DenseAttention call;
    call.q_len = sequences_[sequence].q_len;
    call.seq_len = sequences_[sequence].seq_len;
    call.num_q_heads = num_q_heads_;
    call.num_kv_heads = g.num_kv_heads;
    call.k_dim = g.k_dim;
    call.v_dim = g.v_dim;
    const auto begin = q.begin() + first_row * num_q_heads_ * g.k_dim;
    call.q.assign(begin, begin + call.q_len * num_q_heads_ * g.k_dim);
    for (int64_t token = 0; token < call.seq_len; ++token)
      for (int64_t head = 0; head < g.num_kv_heads; ++head) {
        const auto k = pool_->read(Side::kK, slot(sequence, token), head);
        const auto v = pool_->read(Side::kV, slot(sequence, token), head);
        call.k.insert(call.k.end(), k.begin(), k.end());
        call.v.insert(call.v.end(), v.begin(), v.end());
      }
    call.scale = scale;
    call.causal = causal;
    call.window_left = window_left;
    return call;
  }

  int64_t num_q_heads_;
  std::vector<SequenceLengths> sequences_;
  int64_t rows_ = 0;
  int64_t table_stride_ = 0;
  std::unique_ptr<Pool> pool_;
  std::vector<int32_t> table_;
};

}  // namespace larder::test
