// Calls of the kind that a decoding engine makes, which the tuned attend row takes: at random, with
// special values, with sequences taken out of a batch, and with heads that sequences share.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_case.h"
#include "tests/support/random.h"

namespace larder::test {

inline constexpr KvFormat kDecodeFormats[] = {KvFormat::kNvfp4, KvFormat::kFp8E4m3, KvFormat::kBf16,
                                              KvFormat::kFp16};

inline AttentionGeometry decode_geometry(KvFormat format, int32_t kv_heads, int32_t block_tokens,
                                         int32_t dim) {
  return {1, kv_heads, block_tokens, dim, dim, format, format};
}

// K or V element `index` of a row as a special value. nvfp4 has it as the scale of the element's
// group, and like fp8_e4m3 a NaN alone.
inline void put_special(const StoredBytes& row, int64_t index, float special) {
  const bool is_nan = std::isnan(special);
  const auto sign = static_cast<uint16_t>(special < 0 ? 0x8000 : 0);
  switch (row.format) {
    case KvFormat::kNvfp4:
      row.scales[index / 16] = std::byte{0x7F};
      return;
    case KvFormat::kFp8E4m3:
    case KvFormat::kFp8E5m2:
      row.data[index] = std::byte{0x7F};
      return;
    case KvFormat::kBf16:
      put_half(row.data + 2 * index, static_cast<uint16_t>((is_nan ? 0x7FC0 : 0x7F80) | sign));
      return;
    case KvFormat::kFp16:
      put_half(row.data + 2 * index, static_cast<uint16_t>((is_nan ? 0x7E00 : 0x7C00) | sign));
      return;
  }
}
// The special values that a format has.
inline std::vector<float> specials_of(KvFormat format) {
  if (format == KvFormat::kBf16 || format == KvFormat::kFp16) return {NAN, INFINITY, -INFINITY};
  return {NAN};
}

// Rows of a tree of drafts: each sees what was there before the rows, itself and its ancestors.
inline void set_tree_mask(AttendCase& one, std::mt19937_64& engine) {
  std::vector<std::vector<int64_t>> parents;
  for (const int32_t q_len : one.q_lens) {
    parents.emplace_back();
    for (int64_t row = 0; row < q_len; ++row) parents.back().push_back(draw(engine, -1, row - 1));
  }
  one.set_mask([&](int64_t s, int64_t row, int64_t key) {
    const auto at = static_cast<size_t>(s);
    const int64_t first = one.seq_lens[at] - one.q_lens[at];
    if (key < first) return true;
    for (int64_t seen = row; seen >= 0; seen = parents[at][static_cast<size_t>(seen)])
      if (first + seen == key) return true;
    return false;
  });
}

// How many rows a sequence has in a batch of a kind: decode, a few drafts, 16, any of them, more
// rows than tokens.
inline int32_t decode_q_len(int64_t kind, int32_t seq_len, std::mt19937_64& engine) {
  if (kind == 0) return 1;
  if (kind == 1) return static_cast<int32_t>(draw(engine, 2, 5));
  if (kind == 2) return 16;
  if (kind == 3) return pick<int32_t>(engine, {0, 1, 2, 3, 5, 16, 33});
  return seq_len < 20 ? seq_len + static_cast<int32_t>(draw(engine, 1, 3)) : 1;
}

// Lengths around those of tiles and blocks, so many that a case stays small.
inline std::vector<Lengths> decode_lengths(const AttentionGeometry& g, int64_t heads,
                                           std::mt19937_64& engine) {
  int64_t values_left = 600'000;
  int64_t products_left = 40'000'000;
  const int64_t kind = draw(engine, 0, 4);
  std::vector<Lengths> lengths;
  for (int64_t s = draw(engine, 1, 9); s > 0; --s) {
    const auto seq_len =
        pick<int32_t>(engine, {0, 1, 15, 16, 17, 63, 64, 65, 127, 129, 255, 257, 1000, 4097});
    const int32_t q_len = decode_q_len(kind, seq_len, engine);
    const int64_t values = int64_t{seq_len} * g.num_kv_heads * g.k_dim;
    const int64_t products = int64_t{q_len} * seq_len * heads * g.k_dim;
    if (values > values_left || products > products_left) continue;
    values_left -= values;
    products_left -= products;
    lengths.push_back({q_len, seq_len});
  }
  return lengths;
}

inline void set_decode_mask(AttendCase& one, std::mt19937_64& engine) {
  const int64_t kind = draw(engine, 0, 5);
  if (kind == 0) set_tree_mask(one, engine);
  if (kind == 1) one.set_random_mask(engine);
}

// A call that the tuned row takes, with any of the options that it takes.
inline AttendCase random_decode_case(std::mt19937_64& engine) {
  const auto maybe = [&] { return draw(engine, 0, 2) == 0; };
  const AttentionGeometry g = decode_geometry(
      kDecodeFormats[draw(engine, 0, 3)], pick<int32_t>(engine, {1, 2, 8}),
      pick<int32_t>(engine, {16, 32, 64, 128}), pick<int32_t>(engine, {64, 128, 128, 256}));
  const int64_t heads = g.num_kv_heads * pick<int64_t>(engine, {1, 2, 3, 4, 5, 6, 7, 8, 8, 12, 16});
  AttendCase one(g, heads, decode_lengths(g, heads, engine), engine,
                 pick<int64_t>(engine, {0, 0, 16, 48}));
  const bool needs_bf16 = g.k_format == KvFormat::kBf16;
  one.set_queries(needs_bf16 || maybe() ? Dtype::kBf16 : Dtype::kFp16,
                  pick(engine, {Layout::kDense, Layout::kHeadsFirst, Layout::kPadded}), engine);
  one.spec.dtype = pick(engine, {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32});
  one.spec.layout = pick(engine, {Layout::kDense, Layout::kHeadsFirst, Layout::kPadded});
  one.spec.lse_form = {maybe(), maybe(), maybe()};
  one.spec.wants_lse = !maybe();
  one.params.causal = !maybe();
  one.params.window_left = pick<int32_t>(engine, {-1, -1, -1, -1, 0, 1, 15, 16, 63, 100, 1000});
  if (maybe()) one.params.soft_cap = pick(engine, {2.0f, 30.0f});
  if (maybe()) one.set_sinks(engine);
  if (one.sinks.empty()) one.params.partial = maybe();
  set_decode_mask(one, engine);
  if (maybe()) one.set_transform(static_cast<KeyTransform>(draw(engine, 1, 3)), engine);
  if (!is_rotated(one.params.layer.key_transform))
    one.params.scale *= pick(engine, {1.0f, 1.0f, 0.25f, 3.0f});
  one.params.layer.encoder =
      static_cast<Encoder>(g.k_format == KvFormat::kNvfp4 ? draw(engine, 0, 2) : 0);
  one.params.num_splits = pick<int32_t>(engine, {0, 0, 0, 1, 2, 8});
  one.params.deterministic = maybe();
  if (maybe()) one.params.shared_prefix_tokens = kFindSharedPrefix;
  return one;
}

// Sequences [first, last) begin with `count` blocks of the first of them. Their own lie unused then
// and are poisoned.
inline void share_head(AttendCase& one, size_t first, size_t last, int64_t count) {
  const auto stride = static_cast<size_t>(one.params.block_table_stride);
  const int32_t* head = one.table.data() + first * stride;
  for (size_t s = first + 1; s < last; ++s)
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      const int64_t token = static_cast<int64_t>(i) * one.params.layer.geometry.block_tokens;
      if (token < one.seq_lens[s])
        std::memset(one.block_bytes(s, token), 0xFF,
                    static_cast<size_t>(one.params.layer.page.page_bytes));
      one.table[s * stride + i] = head[i];
    }
}

// Where each sequence's rows begin, and the number of rows at the end.
inline std::vector<int64_t> first_rows(const AttendCase& one) {
  std::vector<int64_t> rows = {0};
  for (const int32_t q_len : one.q_lens) rows.push_back(rows.back() + q_len);
  return rows;
}

// The sequences `chosen` of a batch with dense queries, in that order, in a table whose rows have
// `more` further entries, which no kernel may read.
inline AttendCase take_sequences(const AttendCase& batch, const std::vector<size_t>& chosen,
                                 int64_t more) {
  AttendCase one = batch;
  const std::vector<int64_t> rows = first_rows(batch);
  const auto stride = batch.params.block_table_stride;
  const int64_t row_bytes = batch.q_view.strides[0] * dtype_bytes(batch.q_view.dtype);
  one.q_lens.clear();
  one.seq_lens.clear();
  one.table.clear();
  one.q.clear();
  one.mask_offsets.clear();
  one.num_rows = 0;
  for (const size_t s : chosen) {
    one.q_lens.push_back(batch.q_lens[s]);
    one.seq_lens.push_back(batch.seq_lens[s]);
    const auto entries = batch.table.begin() + static_cast<int64_t>(s) * stride;
    one.table.insert(one.table.end(), entries, entries + stride);
    one.table.insert(one.table.end(), static_cast<size_t>(more), -5);
    one.q.insert(one.q.end(), batch.q.begin() + rows[s] * row_bytes,
                 batch.q.begin() + rows[s + 1] * row_bytes);
    if (!batch.mask.empty()) one.mask_offsets.push_back(batch.mask_offsets[s]);
    one.num_rows += batch.q_lens[s];
  }
  one.params.block_table_stride = stride + more;
  one.q_view.shape[0] = one.num_rows;
  return one;
}

// The bytes of a sequence's dense results: its output rows, then their LSEs.
inline std::vector<std::byte> result_bytes(const AttendCase& one, const Outputs& outputs,
                                           size_t sequence) {
  const std::vector<int64_t> rows = first_rows(one);
  const int64_t row_bytes =
      one.num_q_heads * one.params.layer.geometry.v_dim * dtype_bytes(one.spec.dtype);
  std::vector<std::byte> bytes(outputs.out.begin() + rows[sequence] * row_bytes,
                               outputs.out.begin() + rows[sequence + 1] * row_bytes);
  const auto* lse = reinterpret_cast<const std::byte*>(outputs.lse.data());
  bytes.insert(bytes.end(), lse + rows[sequence] * one.num_q_heads * 4,
               lse + rows[sequence + 1] * one.num_q_heads * 4);
  return bytes;
}

inline void check_same_bits(const std::vector<std::byte>& got,
                            const std::vector<std::byte>& expected, const std::string& what) {
  const std::string found = differences(got, expected);
  CHECK_MESSAGE(found.empty(), what << ": output and LSE bytes, " << found);
}

}  // namespace larder::test
