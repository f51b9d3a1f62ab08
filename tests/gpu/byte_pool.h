// The pool that tests on a GPU and their engine processes share.
#pragma once

#include <string>

#include "larder/client.h"

namespace larder::test {

// A pool of opaque blocks of 2 MiB.
inline PoolOptions byte_pool(const std::string& name, int64_t num_blocks, Execution execution) {
  PoolOptions options;
  options.name = name;
  options.model = "bytes@1";
  options.opaque_block_bytes = int64_t{2} << 20;
  options.geometry.block_tokens = 16;
  options.num_blocks = num_blocks;
  options.execution = execution;
  return options;
}

}  // namespace larder::test
