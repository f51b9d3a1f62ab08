// Private to kernels/cuda: the part of a block table on the host that a plain call copies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "larder/context_shard.h"

namespace larder::kernels::cuda {

// The entries of a block table that lengths reach (as far as their tokens are the shard's), without
// what lies behind them: a caller's rows may be much longer, and the last one need not be there as
// a whole.
struct ShortTable {
  std::vector<int32_t> entries;
  int64_t stride = 0;
};
inline ShortTable short_table(const int32_t* table, int64_t table_stride, const int32_t* seq_lens,
                              int64_t num_seqs, int64_t block_tokens,
                              const ContextShard& shard = {}) {
  const auto blocks_of = [&](int64_t sequence) {
    const int64_t blocks =
        (local_tokens(shard, seq_lens[sequence]) + block_tokens - 1) / block_tokens;
    return table == nullptr ? 0 : std::min(blocks, table_stride);
  };
  ShortTable result;
  for (int64_t s = 0; s < num_seqs; ++s) result.stride = std::max(result.stride, blocks_of(s));
  result.entries.resize(static_cast<size_t>(num_seqs * result.stride));
  for (int64_t s = 0; s < num_seqs; ++s)
    std::copy_n(table + s * table_stride, blocks_of(s), result.entries.begin() + s * result.stride);
  return result;
}

}  // namespace larder::kernels::cuda
