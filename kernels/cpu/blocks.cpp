#include "kernels/cpu/blocks.h"

#include <cstring>

#include "kernels/cpu/stretches.h"

namespace larder::kernels::cpu {

Status supports_copy(const CopyParams&) { return {}; }
Status supports_scrub(const ScrubParams&) { return {}; }

void copy(const CopyParams& params) {
  const Stretches stretches = stretches_of(params.view);
  for (int64_t i = 0; i < params.count; ++i) {
    const std::byte* from = block_of(params.view, params.from[i]);
    std::byte* to = block_of(params.view, params.to[i]);
    for (int64_t k = 0; k < stretches.count; ++k)
      std::memcpy(to + k * stretches.stride_bytes, from + k * stretches.stride_bytes,
                  static_cast<size_t>(stretches.bytes));
  }
}

void scrub(const ScrubParams& params) {
  const Stretches stretches = stretches_of(params.view);
  for (int64_t i = 0; i < params.count; ++i) {
    std::byte* block = block_of(params.view, params.blocks[i]);
    for (int64_t k = 0; k < stretches.count; ++k)
      std::memset(block + k * stretches.stride_bytes, 0, static_cast<size_t>(stretches.bytes));
  }
}

}  // namespace larder::kernels::cpu
