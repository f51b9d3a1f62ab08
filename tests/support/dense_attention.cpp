#include "tests/support/dense_attention.h"

#include <cmath>
#include <limits>

namespace larder::test {
namespace {

// Key j is visible to row i if it is not after the row's own token (causal) and at most
// window_left before it. Both are written as in FlashInfer: kv_idx + qo_len + w >= kv_len + qo_idx.
bool is_visible(const DenseAttention& call, int64_t i, int64_t j) {
  if (call.causal && j > call.seq_len - call.q_len + i) return false;
  return call.window_left < 0 || j + call.q_len + call.window_left >= call.seq_len + i;
}

double dot(const DenseAttention& call, int64_t row, int64_t q_head, int64_t key, int64_t kv_head) {
  double sum = 0;
  for (int64_t d = 0; d < call.k_dim; ++d)
    sum += call.q[static_cast<size_t>((row * call.num_q_heads + q_head) * call.k_dim + d)] *
           call.k[static_cast<size_t>((key * call.num_kv_heads + kv_head) * call.k_dim + d)];
  return sum;
}

void attend_row(const DenseAttention& call, int64_t row, int64_t q_head, DenseResult& result) {
  const int64_t kv_head = q_head / (call.num_q_heads / call.num_kv_heads);
  double max = -std::numeric_limits<double>::infinity();
  for (int64_t j = 0; j < call.seq_len; ++j)
    if (is_visible(call, row, j))
      max = std::max(max, call.scale * dot(call, row, q_head, j, kv_head));
  if (std::isinf(max)) return;
  double denominator = 0;
  double* out = &result.out[static_cast<size_t>((row * call.num_q_heads + q_head) * call.v_dim)];
  for (int64_t j = 0; j < call.seq_len; ++j) {
    if (!is_visible(call, row, j)) continue;
    const double weight = std::exp(call.scale * dot(call, row, q_head, j, kv_head) - max);
    denominator += weight;
    for (int64_t d = 0; d < call.v_dim; ++d)
      out[d] +=
          weight * call.v[static_cast<size_t>((j * call.num_kv_heads + kv_head) * call.v_dim + d)];
  }
  for (int64_t d = 0; d < call.v_dim; ++d) out[d] /= denominator;
  result.lse[static_cast<size_t>(row * call.num_q_heads + q_head)] = max + std::log(denominator);
}

}  // namespace

DenseResult dense_attention(const DenseAttention& call) {
  DenseResult result;
  result.out.assign(static_cast<size_t>(call.q_len * call.num_q_heads * call.v_dim), 0.0);
  result.lse.assign(static_cast<size_t>(call.q_len * call.num_q_heads),
                    -std::numeric_limits<double>::infinity());
  for (int64_t row = 0; row < call.q_len; ++row)
    for (int64_t head = 0; head < call.num_q_heads; ++head) attend_row(call, row, head, result);
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
