// Keys of the prefix index: SHA-256 over domain-separated, length-prefixed fields.
//
// key(block i) = H("larder.block.v1", key(block i-1), token ids, extra bytes). The root carries
// what must never be shared: the tenant's salt (made by the daemon), model, adapter and the pool's
// identity. Two processes that state the same fields get the same keys.
#pragma once

#include <array>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace larder {

using BlockKey = std::array<uint8_t, 32>;
using Identity = std::vector<std::pair<std::string, std::string>>;  // ordered (field, value) pairs

// Every field is written as its length in 8 little-endian bytes followed by its bytes. The fields
// are "larder.root.v1", salt, model, adapter, then field and value of each identity pair.
BlockKey root_key(std::string_view salt, std::string_view model, std::string_view adapter,
                  const Identity& identity);
// The fields are "larder.block.v1", parent, tokens (4 little-endian bytes each), extra.
BlockKey child_key(const BlockKey& parent, std::span<const int32_t> tokens, std::string_view extra);

}  // namespace larder
