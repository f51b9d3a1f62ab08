// larder/context_shard.h on the device, in 32 bits: tokens of a sequence are int32.
#pragma once

#include <cstdint>

#include "larder/context_shard.h"

namespace larder::kernels::cuda {

struct Shard {
  uint32_t num_ranks = 1;
  uint32_t rank = 0;
  uint32_t interleave = 1;

  Shard() = default;
  explicit Shard(const ContextShard& shard)
      : num_ranks(static_cast<uint32_t>(shard.num_ranks)),
        rank(static_cast<uint32_t>(shard.rank)),
        interleave(static_cast<uint32_t>(shard.interleave)) {}

  // Of the first `tokens` tokens, which are 0 to 2^31 - 1.
  __device__ int64_t local_tokens(int64_t tokens) const {
    if (num_ranks == 1) return tokens;
    const uint32_t round = num_ranks * interleave;  // below 2^31
    const uint32_t begin = rank * interleave;
    const uint32_t rounds = static_cast<uint32_t>(tokens) / round;
    const uint32_t rest = static_cast<uint32_t>(tokens) - rounds * round;
    return rounds * interleave + (rest <= begin ? 0 : min(rest - begin, interleave));
  }
  // Of a token that the rank has, or of one past its last: 0 to 2^31 - 1. The result may be more.
  __device__ int64_t global_token(int64_t local) const {
    if (num_ranks == 1) return local;
    const uint32_t stretch = static_cast<uint32_t>(local) / interleave;
    const uint32_t rest = static_cast<uint32_t>(local) - stretch * interleave;
    return (int64_t{stretch} * num_ranks + rank) * interleave + rest;
  }
};

}  // namespace larder::kernels::cuda
