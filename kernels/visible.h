// Which keys a query row sees: the one place where causality and the window are decided.
#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/params.h"

namespace larder::kernels {

// Keys [begin, end); empty if begin >= end.
struct KeyRange {
  int64_t begin = 0;
  int64_t end = 0;
  bool operator==(const KeyRange&) const = default;
};

// Row `row` of the q_len rows of a sequence stands at position seq_len - q_len + row, which is
// negative if there are more rows than tokens.
inline KeyRange visible_keys(bool causal, int32_t window_left, int64_t q_len, int64_t seq_len,
                             int64_t row) {
  const int64_t position = seq_len - q_len + row;
  KeyRange range = {0, causal ? std::max<int64_t>(position + 1, 0) : seq_len};
  if (window_left >= 0) range.begin = std::max<int64_t>(position - window_left, 0);
  return range;
}

// Keys that at least one row of the sequence may see.
inline KeyRange touched_keys(bool causal, int32_t window_left, int64_t q_len, int64_t seq_len) {
  if (q_len == 0) return {};
  return {visible_keys(causal, window_left, q_len, seq_len, 0).begin, seq_len};
}

}  // namespace larder::kernels
