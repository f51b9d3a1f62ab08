// Damages one byte of a pool on purpose, from a second connection: proof that the keys and values
// that a generation uses are the bytes of the shared pool, and not a copy of the engine's own.
#pragma once

#include <cstdint>

#include "larder/client.h"

namespace larder::examples {

struct PokeReport {
  int64_t offset_bytes = 0;  // from Pool::data()
  uint8_t before = 0;
  uint8_t after = 0;
};

// Changes the V of one token in one layer, KV head 0: the byte that holds the exponent of element
// 0, or the scale of elements 0 to 15 in nvfp4, becomes one of a value of 128 or more. A byte of
// that size is seen by every later token that attends to this one. Nothing may append to that block
// in that layer meanwhile: its page is read and written as a whole.
Result<PokeReport> poke_value(const ClientOptions& client_options, PoolOptions pool_options,
                              int32_t layer, int32_t block_id, int32_t offset_tokens);

}  // namespace larder::examples
