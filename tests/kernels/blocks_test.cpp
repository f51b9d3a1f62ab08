// copy, scrub and checksum: exactly the bytes of the blocks, in any layout of layers and blocks.
#include <cstring>
#include <functional>
#include <limits>
#include <vector>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();

// Random bytes, and a view of blocks in them.
struct Memory {
  Memory(int64_t layers, int64_t blocks, int64_t layer_bytes, bool layer_first, int64_t gap,
         std::mt19937_64& engine)
      : bytes(static_cast<size_t>(layers * blocks * (layer_bytes + gap) + 2 * gap)) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
    view = {bytes.data() + gap, 0, 0, layer_bytes, layers, blocks};
    view.block_stride_bytes = (layer_bytes + gap) * (layer_first ? 1 : layers);
    view.layer_stride_bytes = (layer_bytes + gap) * (layer_first ? blocks : 1);
  }
  Memory(const Memory&) = delete;  // the view points into bytes
  Memory& operator=(const Memory&) = delete;

  // Index in bytes of byte i of the block, its layers one after another.
  size_t at(int64_t block, int64_t i) const {
    return static_cast<size_t>(view.base - bytes.data() + block * view.block_stride_bytes +
                               i / view.layer_bytes * view.layer_stride_bytes +
                               i % view.layer_bytes);
  }
  int64_t block_bytes() const { return view.num_layers * view.layer_bytes; }

  std::vector<std::byte> bytes;
  BlocksView view;
};

// Every shape that matters: sizes with and without a word's tail, both orders, gaps.
void on_memories(const std::function<void(Memory&)>& check) {
  auto engine = test::random_engine(301);
  for (const int64_t layers : {1, 2, 5})
    for (const int64_t blocks : {1, 4, 7})
      for (const int64_t layer_bytes : {1, 3, 8, 20, 576, 1000})
        for (const bool layer_first : {false, true})
          for (const int64_t gap : {0, 24}) {
            CAPTURE(layers);
            CAPTURE(blocks);
            CAPTURE(layer_bytes);
            CAPTURE(layer_first);
            CAPTURE(gap);
            Memory memory(layers, blocks, layer_bytes, layer_first, gap, engine);
            check(memory);
          }
}

TEST_CASE("copy moves the layers of blocks and nothing else") {
  on_memories([](Memory& memory) {
    if (memory.view.num_blocks < 4) return;
    std::vector<std::byte> expected = memory.bytes;
    const int32_t from[] = {2, 1, 2};
    const int32_t to[] = {0, 3, static_cast<int32_t>(memory.view.num_blocks - 1)};
    const int64_t count = memory.view.num_blocks > 4 ? 3 : 2;
    for (size_t k = 0; k < static_cast<size_t>(count); ++k)
      for (int64_t i = 0; i < memory.block_bytes(); ++i)
        expected[memory.at(to[k], i)] = memory.bytes[memory.at(from[k], i)];
    REQUIRE(run_copy({memory.view, from, to, count}).ok());
    CHECK(memory.bytes == expected);
  });
}

TEST_CASE("scrub zeroes the layers of blocks and nothing else") {
  on_memories([](Memory& memory) {
    std::vector<std::byte> expected = memory.bytes;
    const int32_t blocks[] = {0, static_cast<int32_t>(memory.view.num_blocks - 1), 0};
    for (const int32_t block : blocks)
      for (int64_t i = 0; i < memory.block_bytes(); ++i)
        expected[memory.at(block, i)] = std::byte{0};
    REQUIRE(run_scrub({memory.view, blocks, 3}).ok());
    CHECK(memory.bytes == expected);
  });
}

// The definition, byte by byte: words are put together from bytes, and the products are those of
// the index, not running sums.
uint64_t slow_checksum(const std::vector<std::byte>& bytes) {
  const auto mix = [](uint64_t z) {
    z ^= z >> 30;
    z *= 13787848793156543929ULL;
    z ^= z >> 27;
    z *= 10723151780598845931ULL;
    return z ^ z >> 31;
  };
  std::vector<uint64_t> words((bytes.size() + 7) / 8);
  for (size_t i = 0; i < bytes.size(); ++i)
    words[i / 8] |= std::to_integer<uint64_t>(bytes[i]) << (8 * (i % 8));
  uint64_t sum = mix(bytes.size());
  for (size_t i = 0; i < words.size(); ++i)
    sum += mix(words[i] + (i + 1) * 11400714819323198485ULL);
  return sum;
}

TEST_CASE("checksums are the definition's over the layers one after another") {
  on_memories([](Memory& memory) {
    const std::vector<std::byte> before = memory.bytes;
    std::vector<int32_t> blocks;
    for (int64_t b = memory.view.num_blocks; b-- > 0;) blocks.push_back(static_cast<int32_t>(b));
    blocks.push_back(0);
    std::vector<uint64_t> expected;
    for (const int32_t block : blocks) {
      std::vector<std::byte> content;
      for (int64_t i = 0; i < memory.block_bytes(); ++i)
        content.push_back(memory.bytes[memory.at(block, i)]);
      expected.push_back(slow_checksum(content));
    }
    expected.push_back(0xDEAD);
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      std::vector<uint64_t> checksums(blocks.size() + 1, 0xDEAD);
      REQUIRE(run_checksum({memory.view, blocks.data(), static_cast<int64_t>(blocks.size()),
                            checksums.data()})
                  .ok());
      CHECK(checksums == expected);
    });
    CHECK(memory.bytes == before);
  });
}

uint64_t checksum_of(std::vector<std::byte> bytes, int64_t num_layers = 1) {
  const auto layer_bytes = static_cast<int64_t>(bytes.size()) / num_layers;
  const int32_t block = 0;
  uint64_t checksum = 0;
  const BlocksView view = {bytes.data(), 0, layer_bytes, layer_bytes, num_layers, 1};
  REQUIRE(run_checksum({view, &block, 1, &checksum}).ok());
  return checksum;
}

TEST_CASE("checksums worked out elsewhere") {
  // Python, with M = 2**64 - 1:
  //   def mix(z):
  //     z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & M
  //     z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & M
  //     return z ^ (z >> 31)
  //   def checksum(b):
  //     words = [int.from_bytes(b[i:i + 8], 'little') for i in range(0, len(b), 8)]
  //     return (mix(len(b)) + sum(mix((w + (i + 1) * 0x9E3779B97F4A7C15) & M)
  //                               for i, w in enumerate(words))) & M
  // mix(0x9E3779B97F4A7C15) is SplitMix64's first number for seed 0, 0xE220A8397B1DCDAF.
  std::vector<std::byte> rising;
  for (int i = 0; i < 24; ++i) rising.push_back(static_cast<std::byte>(i));
  CHECK(checksum_of(rising) == 0x0CE1842E1FDB58A7);
  CHECK(checksum_of(rising, 8) == 0x0CE1842E1FDB58A7);  // words that span layers of 3 bytes
  CHECK(checksum_of(std::vector<std::byte>(8)) == 0xB78BC7F518097797);
  CHECK(checksum_of(std::vector<std::byte>(16)) == 0x2A1D9272E97BDC60);
  std::vector<std::byte> digits;  // "123456789"
  for (int i = 1; i <= 9; ++i) digits.push_back(static_cast<std::byte>('0' + i));
  CHECK(checksum_of(digits) == 0xBFFF5141A044E769);
}

TEST_CASE("a checksum sees any changed bit, swapped words, and zeros at the end") {
  auto engine = test::random_engine(302);
  std::vector<std::byte> bytes(61);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
  const uint64_t before = checksum_of(bytes);
  for (size_t bit = 0; bit < 8 * bytes.size(); ++bit) {
    std::vector<std::byte> changed = bytes;
    changed[bit / 8] ^= static_cast<std::byte>(1 << (bit % 8));
    CHECK(checksum_of(changed) != before);
  }
  std::vector<std::byte> swapped = bytes;
  std::swap_ranges(swapped.begin(), swapped.begin() + 8, swapped.begin() + 8);
  CHECK(checksum_of(swapped) != before);
  bytes.push_back(std::byte{0});
  CHECK(checksum_of(bytes) != before);
}

// Every op on one view: each must refuse, and write nothing.
void check_view_refused(std::string_view part, const std::function<void(BlocksView&)>& change) {
  auto engine = test::random_engine(303);
  Memory memory(3, 4, 16, false, 8, engine);
  const std::vector<std::byte> before = memory.bytes;
  change(memory.view);
  const int32_t from = 0;
  const int32_t to = 1;
  uint64_t checksum = 77;
  for (const Status& status :
       {run_copy({memory.view, &from, &to, 1}), run_scrub({memory.view, &from, 1}),
        run_checksum({memory.view, &from, 1, &checksum})}) {
    CAPTURE(status.to_string());
    CAPTURE(part);
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(status.message().find(part) != std::string::npos);
  }
  CHECK(memory.bytes == before);
  CHECK(checksum == 77);
}

TEST_CASE("views that cannot be are refused by every op") {
  check_view_refused("num_layers is 0", [](BlocksView& v) { v.num_layers = 0; });
  check_view_refused("layer_bytes is 0", [](BlocksView& v) { v.layer_bytes = 0; });
  check_view_refused("num_blocks is -1", [](BlocksView& v) { v.num_blocks = -1; });
  check_view_refused("layer_stride_bytes is 15: a layer has 16",
                     [](BlocksView& v) { v.layer_stride_bytes = 15; });
  check_view_refused("block_stride_bytes is -72",
                     [](BlocksView& v) { v.block_stride_bytes = -72; });
  // Three layers of 16 bytes, 24 apart, span 64; four blocks 24 apart would span 88.
  check_view_refused(
      "block_stride_bytes is 63 and layer_stride_bytes 24: 3 layers of 16 bytes of 4",
      [](BlocksView& v) { v.block_stride_bytes = 63; });
  check_view_refused("block_stride_bytes is 24 and layer_stride_bytes 87", [](BlocksView& v) {
    v.block_stride_bytes = 24;
    v.layer_stride_bytes = 87;
  });
  check_view_refused("pass 2^63 bytes",
                     [](BlocksView& v) { v.block_stride_bytes = kMaxInt64 / 2; });
  check_view_refused("pass 2^63 bytes", [](BlocksView& v) { v.layer_stride_bytes = kMaxInt64; });
  check_view_refused("pass 2^63 bytes", [](BlocksView& v) { v.num_blocks = kMaxInt64; });
  check_view_refused("base is null", [](BlocksView& v) { v.base = nullptr; });
}

TEST_CASE("strides may be as tight as the bytes allow, and those of one layer or block anything") {
  std::vector<std::byte> bytes(64 + 3 * 64 + 64);
  const int32_t block = 0;
  BlocksView view = {bytes.data(), 64, 24, 16, 3, 4};  // blocks of 64 bytes, back to back
  CHECK(run_scrub({view, &block, 1}).ok());
  view = {bytes.data(), 24, 88, 16, 3, 4};  // layers of 88 bytes, back to back
  CHECK(run_scrub({view, &block, 1}).ok());
  view = {bytes.data(), -5, 24, 16, 3, 1};
  CHECK(run_scrub({view, &block, 1}).ok());
  view = {bytes.data(), 64, kMaxInt64, 16, 1, 4};
  CHECK(run_scrub({view, &block, 1}).ok());
}

TEST_CASE("block lists are refused by the entry that is wrong, and nothing is written") {
  auto engine = test::random_engine(304);
  Memory memory(2, 6, 32, false, 8, engine);
  const std::vector<std::byte> before = memory.bytes;
  const auto refused = [&](const Status& status, std::string_view part) {
    CAPTURE(status.to_string());
    CAPTURE(part);
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(status.message().find(part) != std::string::npos);
    CHECK(memory.bytes == before);
  };
  const int32_t good[] = {0, 1, 2};
  const int32_t past[] = {3, 4, 6};
  const int32_t negative[] = {3, -1, 5};
  const int32_t twice[] = {3, 5, 3};
  const int32_t shared[] = {3, 2, 4};
  const int32_t other[] = {3, 4, 5};
  uint64_t checksums[3] = {};
  const BlocksView& view = memory.view;
  refused(run_copy({view, good, past, 3}), "to[2] is 6: the pool has 6 blocks");
  refused(run_copy({view, negative, good, 3}), "from[1] is -1: the pool has 6 blocks");
  refused(run_copy({view, good, twice, 3}), "to names block 3 twice");
  refused(run_copy({view, good, shared, 3}), "from[2] is 2, which is also in to");
  refused(run_copy({view, nullptr, other, 3}), "from is null with 3 blocks");
  refused(run_copy({view, good, nullptr, 3}), "to is null with 3 blocks");
  refused(run_copy({view, good, other, -1}), "number of from is -1");
  refused(run_scrub({view, past, 3}), "blocks[2] is 6");
  refused(run_scrub({view, nullptr, 1}), "blocks is null with 1 blocks");
  refused(run_checksum({view, negative, 3, checksums}), "blocks[1] is -1");
  refused(run_checksum({view, good, 3, nullptr}), "checksums is null with 3 blocks");
  auto* odd = reinterpret_cast<uint64_t*>(reinterpret_cast<std::byte*>(checksums) + 1);
  refused(run_checksum({view, good, 2, odd}), "checksums is not aligned to 8 bytes");
  CHECK(run_copy({view, good, other, 3}).ok());
  CHECK(run_copy({view, nullptr, nullptr, 0}).ok());
  CHECK(run_scrub({view, nullptr, 0}).ok());
  CHECK(run_checksum({view, nullptr, 0, nullptr}).ok());
}

}  // namespace
}  // namespace larder::kernels
