#include "allocator/prefix_index.h"

#include <doctest/doctest.h>

namespace larder {
namespace {

constexpr int32_t kNone = PrefixIndex::kNone;

BlockKey key_of(uint8_t number) {
  BlockKey key{};
  key[0] = number;
  return key;
}

// An index of units of one block: unit u has block 100 + u and the key of its number. Every unit
// is in use at first.
struct Chain {
  explicit Chain(int32_t num_units) {
    for (int32_t unit = 0; unit < num_units; ++unit) add(unit - 1);
  }
  void add(int32_t parent, int64_t now_us = 0) {
    const int32_t block[] = {100 + count};
    REQUIRE(index.insert(key_of(static_cast<uint8_t>(count)), parent, block, now_us) == count);
    set_in_use(count++, true);
  }
  void set_in_use(int32_t unit, bool used) {
    used ? index.add_use(unit) : index.drop_use(unit);
    uses.resize(static_cast<size_t>(count > unit ? count : unit + 1));
    uses[unit] += used ? 1 : -1;
  }
  int32_t evict() {
    index.check_consistency(uses);
    const int32_t unit = index.next_to_evict();
    index.remove(unit);
    return unit;
  }
  PrefixIndex index{{{1}}};
  std::vector<int32_t> uses;
  int32_t count = 0;
};

TEST_CASE("a key finds its unit until the unit is evicted") {
  Chain chain(2);
  CHECK(chain.index.find(key_of(1)) == 1);
  CHECK(chain.index.key(1) == key_of(1));
  CHECK(chain.index.blocks(1)[0] == 101);
  CHECK(chain.index.find(key_of(2)) == kNone);
  CHECK(chain.index.next_to_evict() == kNone);
  chain.set_in_use(1, false);
  CHECK(chain.index.num_evictable(0) == 1);
  CHECK(chain.evict() == 1);
  CHECK(chain.index.find(key_of(1)) == kNone);
  CHECK(!chain.index.contains(1));
  CHECK(chain.index.num_evictable(0) == 0);
  CHECK(chain.index.num_units() == 1);
}

TEST_CASE("a unit before one in use is not evictable, whatever its own state") {
  Chain chain(3);
  chain.set_in_use(0, false);
  chain.set_in_use(1, false);
  CHECK(chain.index.num_evictable(0) == 0);
  chain.set_in_use(2, false);
  CHECK(chain.index.num_evictable(0) == 3);
  chain.set_in_use(1, true);
  CHECK(chain.index.num_evictable(0) == 1);
  CHECK(chain.evict() == 2);
}

TEST_CASE("equally old units go deepest first, then by number") {
  Chain chain(3);
  chain.add(0);
  chain.add(0);
  for (int32_t unit = 0; unit < 5; ++unit) chain.set_in_use(unit, false);
  for (int32_t expected : {2, 1, 3, 4, 0}) CHECK(chain.evict() == expected);
}

TEST_CASE("a leaf that was used longer ago goes first, however shallow") {
  Chain chain(3);
  chain.add(kNone);
  for (int32_t unit = 0; unit < 4; ++unit) chain.set_in_use(unit, false);
  for (int32_t unit = 0; unit < 3; ++unit) chain.index.touch(unit, 10);
  for (int32_t expected : {3, 2, 1, 0}) CHECK(chain.evict() == expected);
}

TEST_CASE("a new child takes a leaf out of the order of eviction") {
  Chain chain(1);
  chain.set_in_use(0, false);
  chain.add(0);
  CHECK(chain.index.num_evictable(0) == 0);
  chain.set_in_use(1, false);
  CHECK(chain.evict() == 1);
  CHECK(chain.evict() == 0);
}

TEST_CASE("a unit counts its blocks group by group, and an empty slot once it is filled") {
  PrefixIndex index({{2, 4}, {1}});
  CHECK(index.slots_per_unit() == 3);
  CHECK(index.first_slot(1) == 2);
  const int32_t blocks[] = {5, 6, kNone};
  const int32_t unit = index.insert(key_of(1), kNone, blocks, 0);
  CHECK(index.num_evictable(0) == 2);
  CHECK(index.num_evictable(0, 1) == 2);  // blocks 5 and 6 are in the second extent of 4
  CHECK(index.num_evictable(0, 0) == 0);
  CHECK(index.num_evictable(0, 9) == 0);
  CHECK(index.num_evictable(1) == 0);
  index.fill(unit, 2, 9);
  CHECK(index.num_evictable(1) == 1);
  index.add_use(unit);
  CHECK(index.num_evictable(0) == 0);
  index.add_use(unit);
  index.drop_use(unit);
  CHECK(index.num_evictable_units() == 0);
  index.drop_use(unit);
  CHECK(index.num_evictable(1) == 1);
  CHECK(index.num_evictable_units() == 1);
}

TEST_CASE("subtrees are listed leaves first, by depth and then by number, each unit once") {
  Chain chain(3);
  chain.add(0);
  chain.add(3);
  chain.add(kNone);
  const auto subtrees = [&](std::vector<int32_t> roots) { return chain.index.subtrees(roots); };
  CHECK(subtrees({0}) == std::vector<int32_t>{2, 4, 1, 3, 0});
  CHECK(subtrees({3, 3, 4}) == std::vector<int32_t>{4, 3});
  CHECK(subtrees({5, 1}) == std::vector<int32_t>{2, 1, 5});
}

TEST_CASE("keys that collide in the table are found until they go, in any order") {
  // The first 8 bytes are the hash; these differ in the last byte only.
  PrefixIndex index(std::vector<PrefixIndex::Group>{{1}});
  const auto colliding = [](int number) {
    BlockKey key{};
    key[0] = 60;  // near the end of the smallest table, so that the run wraps around
    key[31] = static_cast<uint8_t>(number);
    return key;
  };
  const int32_t block[] = {0};
  for (int i = 0; i < 20; ++i) index.insert(colliding(i), kNone, block, 0);
  for (int i = 0; i < 20; i += 3) index.remove(index.find(colliding(i)));
  for (int i = 0; i < 20; ++i) CHECK((index.find(colliding(i)) == kNone) == (i % 3 == 0));
}

}  // namespace
}  // namespace larder
