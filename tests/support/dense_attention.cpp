#include "tests/support/dense_attention.h"

#include <bit>
#include <cmath>
#include <limits>

namespace larder::test {
namespace {

constexpr double kMinusInfinity = -std::numeric_limits<double>::infinity();

// Key j is visible to row i if it is not after the row's own token (causal) and at most
// window_left before it. Both are written as in FlashInfer: kv_idx + qo_len + w >= kv_len + qo_idx.
bool is_visible(const DenseAttention& call, int64_t i, int64_t j) {
  if (!call.mask.empty()) {
    if (!call.mask[static_cast<size_t>(i * call.seq_len + j)]) return false;
  } else if (call.causal && j > call.seq_len - call.q_len + i) {
    return false;
  }
  return call.window_left < 0 || j + call.q_len + call.window_left >= call.seq_len + i;
}

double logit(const DenseAttention& call, int64_t row, int64_t q_head, int64_t key) {
  const int64_t kv_head = q_head / (call.num_q_heads / call.num_kv_heads);
  double sum = 0;
  for (int64_t d = 0; d < call.k_dim; ++d)
    sum += call.q[static_cast<size_t>((row * call.num_q_heads + q_head) * call.k_dim + d)] *
           call.k[static_cast<size_t>((key * call.num_kv_heads + kv_head) * call.k_dim + d)];
  double result = call.scale * sum;
  if (call.soft_cap > 0) result = call.soft_cap * std::tanh(result / call.soft_cap);
  if (!call.alibi_slopes.empty())
    result += call.alibi_slopes[static_cast<size_t>(q_head)] * static_cast<double>(key - row);
  return result;
}

void attend_row(const DenseAttention& call, int64_t row, int64_t q_head, DenseResult& result) {
  const int64_t kv_head = q_head / (call.num_q_heads / call.num_kv_heads);
  const auto index = static_cast<size_t>(row * call.num_q_heads + q_head);
  std::vector<std::pair<int64_t, double>> logits;  // of visible keys
  double max = kMinusInfinity;
  for (int64_t j = 0; j < call.seq_len; ++j) {
    if (!is_visible(call, row, j)) continue;
    logits.emplace_back(j, logit(call, row, q_head, j));
    max = std::max(max, logits.back().second);
  }
  const bool has_sink = !call.sinks.empty();
  const double sink = has_sink ? call.sinks[static_cast<size_t>(q_head)] : kMinusInfinity;
  result.lse_with_sink[index] = sink;
  if (std::isinf(max)) return;

  // With the sink the largest exponent may be the sink's.
  const double base = std::max(max, sink);
  double keys = 0;
  double* out = &result.out[index * static_cast<size_t>(call.v_dim)];
  for (const auto& [j, value] : logits) {
    const double weight = std::exp(value - base);
    keys += weight;
    for (int64_t d = 0; d < call.v_dim; ++d)
      out[d] +=
          weight * call.v[static_cast<size_t>((j * call.num_kv_heads + kv_head) * call.v_dim + d)];
  }
  const double denominator = keys + std::exp(sink - base);
  for (int64_t d = 0; d < call.v_dim; ++d) out[d] /= denominator;
  result.lse_with_sink[index] = base + std::log(denominator);
  double without = 0;
  for (const auto& [j, value] : logits) without += std::exp(value - max);
  result.lse[index] = max + std::log(without);
}

}  // namespace

DenseResult dense_attention(const DenseAttention& call) {
  DenseResult result;
  result.out.assign(static_cast<size_t>(call.q_len * call.num_q_heads * call.v_dim), 0.0);
  result.lse.assign(static_cast<size_t>(call.q_len * call.num_q_heads), kMinusInfinity);
  result.lse_with_sink = result.lse;
  for (int64_t row = 0; row < call.q_len; ++row)
    for (int64_t head = 0; head < call.num_q_heads; ++head) attend_row(call, row, head, result);
  return result;
}

void append_result(const DenseResult& more, DenseResult& all) {
  all.out.insert(all.out.end(), more.out.begin(), more.out.end());
  all.lse.insert(all.lse.end(), more.lse.begin(), more.lse.end());
  all.lse_with_sink.insert(all.lse_with_sink.end(), more.lse_with_sink.begin(),
                           more.lse_with_sink.end());
}

std::vector<double> hadamard(const std::vector<double>& values, int64_t stretch) {
  const auto size = static_cast<size_t>(stretch);
  const double element = 1 / std::sqrt(static_cast<double>(stretch));
  std::vector<double> result(values.size(), 0.0);
  for (size_t first = 0; first < values.size(); first += size)
    for (size_t j = 0; j < size; ++j)
      for (size_t i = 0; i < size; ++i)
        result[first + i] +=
            (std::popcount(i & j) % 2 == 0 ? element : -element) * values[first + j];
  return result;
}

double relative_l2(const std::vector<double>& a, const std::vector<double>& b) {
  double error = 0;
  double norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (error == 0) return 0;
  return std::sqrt(error / norm);
}

}  // namespace larder::test
