#include "allocator/prefix_index.h"

#include <doctest/doctest.h>

namespace larder {
namespace {

BlockKey key_of(uint8_t number) {
  BlockKey key{};
  key[0] = number;
  return key;
}

// Blocks 0..n-1, each the parent of the next, under the keys of their numbers.
PrefixIndex chain(int32_t num_blocks) {
  PrefixIndex index;
  for (int32_t block = 0; block < num_blocks; ++block)
    index.insert(block, key_of(static_cast<uint8_t>(block)), block - 1, 0);
  return index;
}

TEST_CASE("a key finds its block until the block is evicted") {
  PrefixIndex index = chain(2);
  CHECK(index.find(key_of(1)) == 1);
  CHECK(index.key(1) == key_of(1));
  CHECK(index.find(key_of(2)) == PrefixIndex::kNoBlock);
  index.set_in_use(1, false);
  CHECK(index.num_evictable() == 1);
  CHECK(index.evict() == 1);
  CHECK(index.find(key_of(1)) == PrefixIndex::kNoBlock);
  CHECK(!index.contains(1));
  CHECK(index.num_evictable() == 0);
}

TEST_CASE("a block before one in use is not evictable, whatever its own state") {
  PrefixIndex index = chain(3);
  index.set_in_use(0, false);
  index.set_in_use(1, false);
  CHECK(index.num_evictable() == 0);
  index.set_in_use(2, false);
  CHECK(index.num_evictable() == 3);
  index.set_in_use(1, true);
  CHECK(index.num_evictable() == 1);
  index.check_consistency();
  CHECK(index.evict() == 2);
}

TEST_CASE("equally old blocks go deepest first, then by number") {
  PrefixIndex index = chain(3);
  index.insert(4, key_of(4), 0, 0);
  index.insert(3, key_of(3), 0, 0);
  for (int32_t block = 0; block < 5; ++block) index.set_in_use(block, false);
  for (int32_t expected : {2, 1, 3, 4, 0}) {
    index.check_consistency();
    CHECK(index.evict() == expected);
  }
}

TEST_CASE("a leaf that was used longer ago goes first, however shallow") {
  PrefixIndex index = chain(3);
  index.insert(3, key_of(3), PrefixIndex::kNoBlock, 0);
  for (int32_t block = 0; block < 4; ++block) index.set_in_use(block, false);
  for (int32_t block = 0; block < 3; ++block) index.touch(block, 10);
  index.check_consistency();
  for (int32_t expected : {3, 2, 1, 0}) CHECK(index.evict() == expected);
}

TEST_CASE("a new child takes a leaf out of the order of eviction") {
  PrefixIndex index = chain(1);
  index.set_in_use(0, false);
  index.insert(1, key_of(1), 0, 0);
  CHECK(index.num_evictable() == 0);
  index.set_in_use(1, false);
  index.check_consistency();
  CHECK(index.evict() == 1);
  CHECK(index.evict() == 0);
}

}  // namespace
}  // namespace larder
