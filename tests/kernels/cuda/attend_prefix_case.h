// What the tests of shared prefixes work with: cases whose tables begin alike, a run on a GPU, and
// the comparison of its states and sums with float64 over the pool's bytes.
#pragma once

#include <cmath>
#include <limits>
#include <string>
#include <vector>

#include "kernels/cuda/attend_prefix.h"
#include "tests/kernels/cuda/attend_case.h"
#include "tests/support/dense_attention.h"

namespace larder::test {

// A run of sequences whose tables begin with the same blocks.
struct Run {
  size_t first;
  size_t count;
  int32_t tokens;
};

inline void share(AttendCase& one, const Run& run) {
  const auto stride = static_cast<size_t>(one.params.block_table_stride);
  const int64_t blocks = run.tokens / one.params.layer.geometry.block_tokens;
  for (size_t s = run.first + 1; s < run.first + run.count; ++s)
    std::copy_n(one.table.begin() + static_cast<std::ptrdiff_t>(run.first * stride), blocks,
                one.table.begin() + static_cast<std::ptrdiff_t>(s * stride));
}

struct PrefixResults {
  std::vector<int32_t> tokens;
  std::vector<float2> states;  // of all splits
  std::vector<float> sums;
  size_t num_splits = 0;
  uint32_t fault_count = 0;
};

template <typename T>
std::vector<T> part_of(const std::vector<std::byte>& all, const DeviceBytes& memory, const T* first,
                       size_t count) {
  std::vector<T> values(count);
  std::memcpy(values.data(),
              all.data() + (reinterpret_cast<const std::byte*>(first) - memory.data()),
              count * sizeof(T));
  return values;
}

inline PrefixResults run_prefix(AttendCase& one) {
  PrefixResults results;
  Uploads uploads;
  const DeviceBytes faults(std::vector<kernels::CallFaults>(1));
  const kernels::AttendParams params = one.call(uploads);
  const kernels::cuda::PrefixLayout layout = kernels::cuda::prefix_layout(params);
  REQUIRE(layout.is_used);
  REQUIRE(layout.num_splits > 0);
  const DeviceBytes workspace(static_cast<size_t>(layout.total_bytes));
  kernels::Target target;
  target.backend = kernels::Backend::kCuda;
  target.faults = faults.data<kernels::CallFaults>();
  kernels::cuda::PrefixView view;
  const Status status =
      kernels::cuda::attend_prefix(params, target, layout, workspace.data(), {}, &view);
  REQUIRE_MESSAGE(status.ok(), status.to_string());
  const std::vector<std::byte> all = workspace.read();
  const auto pairs = static_cast<size_t>(one.num_rows * one.num_q_heads);
  REQUIRE(view.key == nullptr);
  REQUIRE(view.num_results == static_cast<int64_t>(pairs));
  REQUIRE(view.num_splits == layout.num_splits);
  results.num_splits = static_cast<size_t>(view.num_splits);
  results.tokens = part_of(all, workspace, view.tokens, one.q_lens.size());
  results.states = part_of(all, workspace, view.states, results.num_splits * pairs);
  results.sums =
      part_of(all, workspace, view.sums,
              results.num_splits * pairs * static_cast<size_t>(one.params.layer.geometry.v_dim));
  results.fault_count = faults.read<kernels::CallFaults>()[0].count;
  uploads.check_guards();
  return results;
}

inline double stored_element(const StoredBytes& row, int64_t i) {
  uint16_t half = 0;
  switch (row.format) {
    case KvFormat::kFp16:
      std::memcpy(&half, row.data + 2 * i, 2);
      return fp16_value(half);
    case KvFormat::kFp8E4m3:
      return e4m3_value(std::to_integer<int>(row.data[i]));
    default:
      return e2m1_value(std::to_integer<int>(row.data[i / 2]) >> 4 * (i % 2) & 15) *
             e4m3_value(std::to_integer<int>(row.scales[i / 16]));
  }
}

// What is known of a sequence's prefix: keys as they were appended, values without v_scale.
// hidden(token) is left out.
template <typename Hidden>
DenseResult expected_of(AttendCase& one, size_t sequence, int64_t first_row, int32_t tokens,
                        const Hidden& hidden) {
  const AttentionGeometry& g = one.params.layer.geometry;
  const KeyTransform transform = one.params.layer.key_transform;
  DenseAttention dense;
  dense.q_len = one.q_lens[sequence];
  dense.num_q_heads = one.num_q_heads;
  dense.num_kv_heads = g.num_kv_heads;
  dense.k_dim = g.k_dim;
  dense.v_dim = g.v_dim;
  dense.scale = double{one.params.scale};
  dense.causal = false;
  dense.soft_cap = double{one.params.soft_cap};
  for (int64_t row = first_row; row < first_row + dense.q_len; ++row)
    for (int64_t head = 0; head < one.num_q_heads; ++head)
      for (int64_t i = 0; i < g.k_dim; ++i)
        dense.q.push_back(element(one.q, one.q_view.dtype,
                                  row * one.q_view.strides[0] + head * one.q_view.strides[1] + i));
  const double k_scale = g.k_format == KvFormat::kFp16 ? 1.0 : double{one.params.layer.k_scale};
  for (int64_t token = 0; token < tokens; ++token) {
    if (hidden(token)) continue;
    ++dense.seq_len;
    for (int64_t head = 0; head < g.num_kv_heads; ++head) {
      const StoredBytes k = one.stored(sequence, token, head, true);
      const StoredBytes v = one.stored(sequence, token, head, false);
      std::vector<double> key;
      for (int64_t i = 0; i < g.k_dim; ++i) key.push_back(stored_element(k, i) * k_scale);
      if (is_rotated(transform)) key = hadamard(key, g.k_dim);
      for (int64_t i = 0; i < g.k_dim; ++i)
        dense.k.push_back(key[static_cast<size_t>(i)] +
                          (is_centred(transform)
                               ? double{one.key_offset[static_cast<size_t>(head * g.k_dim + i)]}
                               : 0.0));
      for (int64_t i = 0; i < g.v_dim; ++i) dense.v.push_back(stored_element(v, i));
    }
  }
  return dense_attention(dense);
}

// The states of a row and head as a result: out without v_scale, and lse. Those of splits without a
// key count too, nothing.
struct Finished {
  std::vector<double> out;
  double lse = -std::numeric_limits<double>::infinity();
};
inline Finished finish(const AttendCase& one, const PrefixResults& results, int64_t row,
                       int64_t head) {
  const auto dim = static_cast<size_t>(one.params.layer.geometry.v_dim);
  Finished finished;
  finished.out.assign(dim, 0.0);
  const auto pairs = static_cast<size_t>(one.num_rows * one.num_q_heads);
  const auto first = static_cast<size_t>(row * one.num_q_heads + head);
  double base = -std::numeric_limits<double>::infinity();
  for (size_t split = 0; split < results.num_splits; ++split) {
    const float2 state = results.states[split * pairs + first];
    base = std::max(base, double{state.x});
  }
  double total = 0.0;
  for (size_t split = 0; split < results.num_splits; ++split) {
    const size_t at = split * pairs + first;
    const float2 state = results.states[at];
    if (state.y == 0.0f) CHECK(state.x == std::numeric_limits<float>::lowest());
    const double weight = std::exp2(double{state.x} - base);
    total += weight * double{state.y};
    for (size_t i = 0; i < dim; ++i) finished.out[i] += weight * double{results.sums[at * dim + i]};
  }
  if (total == 0.0) return finished;
  for (double& value : finished.out) value /= total;
  finished.lse = (base + std::log2(total)) * std::log(2.0);
  return finished;
}

template <typename Hidden>
void compare_prefix(AttendCase& one, const PrefixResults& results,
                    const std::vector<int32_t>& tokens, const std::string& what,
                    const Hidden& hidden) {
  Differences differences(what + ": " + one.describe());
  const auto dim = static_cast<size_t>(one.params.layer.geometry.v_dim);
  int64_t first_row = 0;
  for (size_t s = 0; s < one.q_lens.size(); ++s) {
    if (results.tokens[s] != tokens[s])
      differences.add("tokens[", s, "] expected", tokens[s], "got", results.tokens[s]);
    const int64_t rows = one.q_lens[s];
    if (tokens[s] == 0 || results.tokens[s] != tokens[s]) {
      first_row += rows;
      continue;
    }
    const DenseResult expected = expected_of(one, s, first_row, tokens[s], hidden);
    for (int64_t pair = 0; pair < rows * one.num_q_heads; ++pair) {
      const int64_t row = first_row + pair / one.num_q_heads;
      const int64_t head = pair % one.num_q_heads;
      const Finished finished = finish(one, results, row, head);
      const double lse = expected.lse[static_cast<size_t>(pair)];
      const auto from =
          expected.out.begin() + static_cast<std::ptrdiff_t>(static_cast<size_t>(pair) * dim);
      const std::vector<double> out(from, from + static_cast<std::ptrdiff_t>(dim));
      const double distance = relative_l2(finished.out, out);
      if (!(distance <= 1e-3)) {
        size_t worst = 0;
        for (size_t i = 0; i < dim; ++i)
          if (!(std::fabs(finished.out[i] - out[i]) <= std::fabs(finished.out[worst] - out[worst])))
            worst = i;
        differences.add("sequence", s, "row", row, "head", head, "distance", distance, "out[",
                        worst, "] expected", out[worst], "got", finished.out[worst]);
      }
      // A rotated query is rounded to halves, which moves a logit by 1e-4 of what logits vary by.
      const double tolerance = is_rotated(one.params.layer.key_transform) ? 1e-3 : 1e-4;
      if (!same_kind(lse, finished.lse) ||
          (std::isfinite(lse) &&
           !(std::fabs(lse - finished.lse) <= tolerance + 4e-7 * std::fabs(lse))))
        differences.add("sequence", s, "row", row, "head", head, "lse expected", lse, "got",
                        finished.lse);
    }
    first_row += rows;
  }
}
inline void compare_prefix(AttendCase& one, const PrefixResults& results,
                           const std::vector<int32_t>& tokens, const std::string& what) {
  compare_prefix(one, results, tokens, what, [](int64_t) { return false; });
}

}  // namespace larder::test
