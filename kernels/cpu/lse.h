// Arithmetic on log-sum-exp values: sinks, and the forms of an API's boundary. In float64, natural
// log, -inf for a row without keys. Plain definitions.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "larder/lse_form.h"

namespace larder::kernels::cpu {

inline constexpr double kNoKeys = -std::numeric_limits<double>::infinity();

// What a sink takes from the output of a row that sees keys: exp(lse) / (exp(lse) + exp(sink)). A
// sink of -inf takes nothing (exactly 1), one of +inf everything; a NaN gives NaN.
inline double sink_factor(double lse, double sink) { return 1.0 / (1.0 + std::exp(sink - lse)); }

// log(exp(a) + exp(b)).
inline double log_add(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<double>::quiet_NaN();
  const double larger = std::max(a, b);
  if (std::isinf(larger)) return larger;
  return larger + std::log1p(std::exp(std::min(a, b) - larger));
}

// A double has room for both conversions: a float that goes to natural log and back is the same
// float.
inline double lse_from_form(float value, LseForm form) {
  return form.base2 ? value * std::numbers::ln2 : value;
}

// `sink` is nullptr if there are none.
inline float lse_to_form(double lse, LseForm form, const float* sink) {
  if (form.includes_sink && sink != nullptr) lse = log_add(lse, *sink);
  return static_cast<float>(form.base2 ? lse * std::numbers::log2e : lse);
}

// Where the value of (row, head) stands.
inline int64_t lse_index(LseForm form, int64_t row, int64_t head, int64_t num_rows,
                         int64_t num_heads) {
  return form.heads_first ? head * num_rows + row : row * num_heads + head;
}

}  // namespace larder::kernels::cpu
