// Which tokens of a sequence a rank holds when a context is spread over several: tokens are dealt
// out `interleave` at a time, rank after rank, so token t is with rank t / interleave % num_ranks.
// Plain arithmetic, any thread.
#pragma once

#include <algorithm>
#include <cstdint>

namespace larder {

struct ContextShard {
  int32_t num_ranks = 1;   // 1: the whole context, whatever the interleave
  int32_t rank = 0;        // 0 to num_ranks - 1
  int32_t interleave = 1;  // 1 or more; its product with num_ranks is below 2^31

  bool operator==(const ContextShard&) const = default;
};

// How many of a sequence's first `tokens` tokens (>= 0) the rank holds. They are the first of its
// own, so this is also the place in its cache of the first token that is not among them.
constexpr int64_t local_tokens(const ContextShard& shard, int64_t tokens) {
  if (shard.num_ranks == 1) return tokens;
  const int64_t round = int64_t{shard.num_ranks} * shard.interleave;
  const int64_t begin = int64_t{shard.rank} * shard.interleave;
  return tokens / round * shard.interleave +
         std::clamp<int64_t>(tokens % round - begin, 0, shard.interleave);
}

// The place in the sequence of the rank's token number `local` (>= 0).
constexpr int64_t global_token(const ContextShard& shard, int64_t local) {
  if (shard.num_ranks == 1) return local;
  return (local / shard.interleave * shard.num_ranks + shard.rank) * shard.interleave +
         local % shard.interleave;
}

}  // namespace larder
