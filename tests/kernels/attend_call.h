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
#include "tests/kernels/mla_rows.h"
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
  std::vector<float> lse;  // [rows, num_q_heads], or as lse_form says
  bool operator==(const AttendResult&) const = default;
};

// What the bytes of a tensor mean, with out_scale for fp8_e4m3. Not for e2m1x2.
inline std::vector<float> read_values(const std::vector<std::byte>& bytes, Dtype dtype,
                                      float out_scale) {
  std::vector<float> values;
  for (size_t at = 0; at < bytes.size(); at += static_cast<size_t>(dtype_bytes(dtype))) {
    uint16_t half = 0;
    float single = 0;
    if (dtype == Dtype::kFp32) std::memcpy(&single, &bytes[at], 4);
    if (dtype == Dtype::kBf16 || dtype == Dtype::kFp16) std::memcpy(&half, &bytes[at], 2);
    if (dtype == Dtype::kBf16) single = static_cast<float>(bf16_value(half));
    if (dtype == Dtype::kFp16) single = static_cast<float>(fp16_value(half));
    if (dtype == Dtype::kFp8E4m3)
      single = static_cast<float>(e4m3_value(std::to_integer<int>(bytes[at]))) * out_scale;
    values.push_back(single);
  }
  return values;
}

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
    q = normal_values(rows_ * num_q_heads * geometry.k_dim, engine);
    scale = 1.0f / std::sqrt(static_cast<float>(geometry.k_dim));
  }

  Pool& pool() { return *pool_; }
  std::vector<int32_t>& table() { return table_; }
  int64_t table_stride() const { return table_stride_; }
  int64_t num_rows() const { return rows_; }
  int64_t num_q_heads() const { return num_q_heads_; }
  const std::vector<SequenceLengths>& sequences() const { return sequences_; }

  // From here on the stored keys count as transformed ones.
  void transform_keys(KeyTransform transform, std::mt19937_64& engine) {
    pool_->layer().key_transform = transform;
    if (!is_centred(transform)) return;
    offsets_ = normal_values(pool_->geometry().num_kv_heads * pool_->geometry().k_dim, engine);
    pool_->layer().key_offset = offsets_.data();
  }

  // A bit for each row and key of the sequence, one after another, in whole bytes.
  void set_mask(size_t sequence, std::vector<bool> bits) {
    masks_.resize(sequences_.size());
    masks_[sequence] = std::move(bits);
    mask_bytes_.assign(1, 0xFF);  // no sequence begins at the first byte
    mask_offsets_.clear();
    for (const auto& mask : masks_) {
      mask_offsets_.push_back(static_cast<int64_t>(mask_bytes_.size()));
      for (size_t i = 0; i < mask.size(); ++i) {
        if (i % 8 == 0) mask_bytes_.push_back(0);
        if (mask[i]) mask_bytes_.back() = static_cast<uint8_t>(mask_bytes_.back() | 1 << i % 8);
      }
    }
  }

  void set_random_masks(std::mt19937_64& engine) {
    for (size_t s = 0; s < sequences_.size(); ++s) {
      std::vector<bool> bits(
          static_cast<size_t>(int64_t{sequences_[s].q_len} * sequences_[s].seq_len));
      for (size_t i = 0; i < bits.size(); ++i) bits[i] = engine() % 3 != 0;
      set_mask(s, bits);
    }
  }

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
    AttendResult result;
    const Status status = try_rows(q_lens, seq_lens, first_row, table_row, result);
    LARDER_CHECK(status.ok(), status.to_string());
    return result;
  }

  // The same for calls that may be refused.
  Status try_rows(const std::vector<int32_t>& q_lens, const std::vector<int32_t>& seq_lens,
                  int64_t first_row, int64_t table_row, AttendResult& result) {
    const AttentionGeometry& g = pool_->geometry();
    const int64_t rows = std::accumulate(q_lens.begin(), q_lens.end(), int64_t{0});
    std::vector<std::byte> queries = query_bytes(first_row, rows);
    std::vector<std::byte> out(
        static_cast<size_t>(rows * num_q_heads_ * g.v_dim * dtype_bytes(out_dtype)),
        std::byte{0xFF});
    result.lse.assign(static_cast<size_t>(rows * num_q_heads_), NAN);
    kernels::AttendParams params;
    params.layer = pool_->layer();
    params.q = dense_tensor(queries.data(), q_dtype, rows, num_q_heads_, g.k_dim);
    params.output.out = dense_tensor(out.data(), out_dtype, rows, num_q_heads_, g.v_dim);
    params.output.lse = result.lse.data();
    params.output.lse_form = lse_form;
    params.output.out_scale = out_scale;
    params.q_lens = q_lens.data();
    params.seq_lens = seq_lens.data();
    params.num_seqs = static_cast<int64_t>(q_lens.size());
    params.block_table = table_.data() + table_row * table_stride_;
    params.block_table_stride = table_stride_;
    params.scale = scale;
    params.causal = causal;
    params.window_left = window_left;
    params.soft_cap = soft_cap;
    params.sinks = sinks.empty() ? nullptr : sinks.data();
    params.alibi_slopes = alibi_slopes.empty() ? nullptr : alibi_slopes.data();
    if (!masks_.empty()) {
      params.mask = mask_bytes_.data();
      params.mask_offsets = mask_offsets_.data() + table_row;
      params.mask_bytes = static_cast<int64_t>(mask_bytes_.size());
    }
    params.partial = partial;
    params.num_splits = num_splits;
    params.deterministic = deterministic;
    Status status = kernels::run_attend(params);
    if (status.ok()) result.out = read_values(out, out_dtype, out_scale);
    return status;
  }

  // The float64 oracle over what a reader of the cache sees.
  DenseResult oracle() {
    DenseResult all;
    int64_t row = 0;
    for (size_t s = 0; s < sequences_.size(); ++s) {
      append_result(dense_attention(dense_call(s, row)), all);
      row += sequences_[s].q_len;
    }
    return all;
  }

  int64_t slot(size_t sequence, int64_t token) const {
    const int64_t block_tokens = pool_->geometry().block_tokens;
    const auto entry =
        static_cast<size_t>(static_cast<int64_t>(sequence) * table_stride_ + token / block_tokens);
    return table_[entry] * block_tokens + token % block_tokens;
  }

  // The call on dense tensors for one sequence, whose first row of q is `first_row`.
  DenseAttention dense_call(size_t sequence, int64_t first_row) {
    const AttentionGeometry& g = pool_->geometry();
    DenseAttention call;
    call.q_len = sequences_[sequence].q_len;
    call.seq_len = sequences_[sequence].seq_len;
    call.num_q_heads = num_q_heads_;
    call.num_kv_heads = g.num_kv_heads;
    call.k_dim = g.k_dim;
    call.v_dim = g.v_dim;
    const std::vector<float> queries =
        read_values(query_bytes(first_row, call.q_len), q_dtype, 1.0f);
    call.q.assign(queries.begin(), queries.end());
    for (int64_t token = 0; token < call.seq_len; ++token)
      for (int64_t head = 0; head < g.num_kv_heads; ++head) {
        const auto k = read_key(slot(sequence, token), head);
        const auto v = read_value(slot(sequence, token), head);
        call.k.insert(call.k.end(), k.begin(), k.end());
        call.v.insert(call.v.end(), v.begin(), v.end());
      }
    call.scale = scale;
    call.causal = causal;
    call.window_left = window_left;
    call.soft_cap = soft_cap;
    call.sinks.assign(sinks.begin(), sinks.end());
    call.alibi_slopes.assign(alibi_slopes.begin(), alibi_slopes.end());
    if (!masks_.empty()) call.mask = masks_[sequence];
    return call;
  }

  std::vector<float> q;  // [rows, num_q_heads, k_dim]
  float scale = 1;
  bool causal = true;
  int32_t window_left = -1;
  float soft_cap = 0;
  std::vector<float> sinks;         // [num_q_heads], or empty
  std::vector<float> alibi_slopes;  // [num_q_heads], or empty
  bool partial = false;
  int32_t num_splits = 0;
  bool deterministic = false;
  Dtype q_dtype = Dtype::kFp32;
  Dtype out_dtype = Dtype::kFp32;
  float out_scale = 1;
  LseForm lse_form;

 private:
  static int64_t blocks_of(const AttentionGeometry& geometry, int64_t seq_len) {
    return (seq_len + geometry.block_tokens - 1) / geometry.block_tokens;
  }

  static std::vector<float> normal_values(int64_t count, std::mt19937_64& engine) {
    std::normal_distribution<float> normal;
    std::vector<float> values(static_cast<size_t>(count));
    for (float& x : values) x = normal(engine);
    return values;
  }

  // Keys and values of a token as attention is to see them.
  std::vector<double> read_key(int64_t token_slot, int64_t head) {
    const AttentionGeometry& g = pool_->geometry();
    if (g.mla_row != MlaRow::kNone) return pool_->read_mla(token_slot);
    std::vector<double> key = pool_->read(Side::kK, token_slot, head);
    const KeyTransform transform = pool_->layer().key_transform;
    if (is_rotated(transform)) key = hadamard(key, rotation_dim(g.k_dim));
    if (is_centred(transform))
      for (size_t i = 0; i < key.size(); ++i)
        key[i] += offsets_[static_cast<size_t>(head * g.k_dim) + i];
    return key;
  }

  std::vector<double> read_value(int64_t token_slot, int64_t head) {
    if (pool_->geometry().mla_row == MlaRow::kNone) return pool_->read(Side::kV, token_slot, head);
    std::vector<double> value = pool_->read_mla(token_slot);
    value.resize(512);
    return value;
  }

  std::vector<std::byte> query_bytes(int64_t first_row, int64_t rows) const {
    const int64_t row_size = num_q_heads_ * pool_->geometry().k_dim;
    std::vector<std::byte> bytes(static_cast<size_t>(rows * row_size * dtype_bytes(q_dtype)));
    for (int64_t i = 0; i < rows * row_size; ++i) {
      const float value = q[static_cast<size_t>(first_row * row_size + i)];
      const uint16_t half = q_dtype == Dtype::kBf16 ? nearest_bf16(value) : nearest_fp16(value);
      if (q_dtype == Dtype::kFp32)
        std::memcpy(bytes.data() + 4 * i, &value, 4);
      else
        std::memcpy(bytes.data() + 2 * i, &half, 2);
    }
    return bytes;
  }

  // Entries past a sequence's blocks are what a stale table may hold.
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
    pool_->layer().k_scale = 0.5f;
    pool_->layer().v_scale = 2.0f;
    std::vector<int64_t> slots;
    for (size_t s = 0; s < sequences_.size(); ++s)
      for (int64_t token = 0; token < sequences_[s].seq_len; ++token)
        slots.push_back(slot(s, token));
    if (g.mla_row != MlaRow::kNone) {
      for (const int64_t one : slots) fill_mla_row(*pool_, one, engine);
      return;
    }
    const auto rows = static_cast<int64_t>(slots.size());
    std::vector<float> k = normal_values(rows * g.num_kv_heads * g.k_dim, engine);
    std::vector<float> v = normal_values(rows * g.num_kv_heads * g.v_dim, engine);
    kernels::AppendParams params;
    params.layer = pool_->layer();
    params.k = dense_tensor(k.data(), Dtype::kFp32, rows, g.num_kv_heads, g.k_dim);
    params.v = dense_tensor(v.data(), Dtype::kFp32, rows, g.num_kv_heads, g.v_dim);
    params.slots = slots.data();
    params.num_slots = rows;
    const Status status = kernels::run_append(params);
    LARDER_CHECK(status.ok(), status.to_string());
  }

  int64_t num_q_heads_;
  std::vector<SequenceLengths> sequences_;
  int64_t rows_ = 0;
  int64_t table_stride_ = 0;
  std::unique_ptr<Pool> pool_;
  std::vector<int32_t> table_;
  std::vector<float> offsets_;            // [num_kv_heads, k_dim], if keys are centred
  std::vector<std::vector<bool>> masks_;  // [num_seqs] of [q_len, seq_len], or empty
  std::vector<uint8_t> mask_bytes_;
  std::vector<int64_t> mask_offsets_;
};

// Compares with the oracle: rows without keys exactly, LSE and output within the bounds. The LSEs
// are in the larder's own form.
struct Closeness {
  double lse = 0;  // largest |error| / max(1, |lse|)
  double out = 0;  // relative L2
  bool empty_rows_match = true;
};

inline Closeness compare(const AttendResult& result, const DenseResult& expected) {
  Closeness closeness;
  const size_t v_dim = result.lse.empty() ? 0 : result.out.size() / result.lse.size();
  for (size_t row = 0; row < result.lse.size(); ++row) {
    if (!std::isinf(expected.lse[row])) {
      const double error = std::fabs(result.lse[row] - expected.lse[row]) /
                           std::max(1.0, std::fabs(expected.lse[row]));
      closeness.lse = std::isnan(error) ? INFINITY : std::max(closeness.lse, error);
      continue;
    }
    closeness.empty_rows_match &= result.lse[row] == expected.lse[row];
    for (size_t d = 0; d < v_dim; ++d)
      closeness.empty_rows_match &= result.out[row * v_dim + d] == 0.0f;
  }
  closeness.out =
      relative_l2(std::vector<double>(result.out.begin(), result.out.end()), expected.out);
  return closeness;
}

}  // namespace larder::test
