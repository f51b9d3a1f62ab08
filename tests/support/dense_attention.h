// Attention in float64 over dense K and V, written from the formulas: the judge of every kernel.
// Nothing here keeps anything between calls, so several threads may judge at once.
#pragma once

#include <cstdint>
#include <vector>

namespace larder::test {

// One sequence. Its q_len rows are its last q_len tokens.
struct DenseAttention {
  int64_t q_len = 0;
  int64_t seq_len = 0;
  int64_t num_q_heads = 0;
  int64_t num_kv_heads = 0;
  int64_t k_dim = 0;
  int64_t v_dim = 0;
  std::vector<double> q;  // [q_len, num_q_heads, k_dim]
  std::vector<double> k;  // [seq_len, num_kv_heads, k_dim]
  std::vector<double> v;  // [seq_len, num_kv_heads, v_dim]
  double scale = 1.0;
  bool causal = true;
  int64_t window_left = -1;
  double soft_cap = 0;               // 0: none
  std::vector<double> sinks;         // [num_q_heads], or empty
  std::vector<double> alibi_slopes;  // [num_q_heads], or empty
  std::vector<bool> mask;            // [q_len, seq_len], or empty; replaces causal
};

struct DenseResult {
  std::vector<double> out;  // [q_len, num_q_heads, v_dim]; 0 where a row sees no key
  // [q_len, num_q_heads], natural log, without the sink and with it; -inf where a row sees no key,
  // with the sink: the sink.
  std::vector<double> lse;
  std::vector<double> lse_with_sink;
};

DenseResult dense_attention(const DenseAttention& call);

// Rows of later sequences behind those of earlier ones.
void append_result(const DenseResult& more, DenseResult& all);

// The orthonormal Hadamard transform (Sylvester order) of each stretch of `stretch` elements, by
// its matrix; stretch is a power of two that divides the size. It is its own inverse.
std::vector<double> hadamard(const std::vector<double>& values, int64_t stretch);

// |a - b| / |b| over all elements; 0 if both are all zeros, infinite if only b is.
double relative_l2(const std::vector<double>& a, const std::vector<double>& b);

}  // namespace larder::test
