// DeviceCalls::copy_bytes and whole blocks: many copies at once, between every two kinds of memory.

#include "kernels/run_on.h"
#include "tests/kernels/cuda/device_calls_support.h"

namespace larder::test {
namespace {

using namespace kernels;

std::vector<std::byte> random_bytes(std::mt19937_64& engine, size_t size) {
  std::vector<std::byte> bytes(size);
  for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
  return bytes;
}

struct Piece {
  size_t to = 0;
  size_t from = 0;
  size_t size = 0;
};

// Between memory of every two kinds; what no piece names must stay as it was.
void check_everywhere(const std::vector<std::byte>& source, const std::vector<std::byte>& target,
                      const std::vector<Piece>& pieces) {
  auto calls = open_gpu();
  std::vector<std::byte> expected = target;
  for (const Piece& piece : pieces)
    std::memcpy(expected.data() + piece.to, source.data() + piece.from, piece.size);
  for (const Where from : kEverywhere)
    for (const Where to : kEverywhere) {
      CAPTURE(name(from));
      CAPTURE(name(to));
      Placed there(source, from, *calls);
      Placed here(target, to, *calls);
      std::vector<ByteCopy> copies;
      for (const Piece& piece : pieces)
        copies.push_back({here.data() + piece.to, there.data() + piece.from, piece.size});
      CHECK_OK(calls->copy_bytes(copies));
      check_same("target", here.read(), expected);
      check_same("source", there.read(), source);
    }
}

TEST_CASE("copies go between memory of every kind, whether they touch each other or not") {
  if (!has_gpu()) return;
  std::mt19937_64 engine = random_engine(231);
  const std::vector<std::byte> source = random_bytes(engine, 1 << 20);
  const std::vector<std::byte> target = random_bytes(engine, 1 << 20);
  check_everywhere(source, target, {});
  check_everywhere(source, target, {{0, 0, 1 << 20}});
  // Pieces of 0 to 2999 bytes in places that are shuffled, some next to each other on both sides.
  std::vector<Piece> pieces;
  size_t at = 3;
  while (at + 6000 < source.size()) {
    const size_t size = engine() % 3000;
    pieces.push_back({at, at, size});
    at += size + engine() % 2 * 100;
  }
  REQUIRE(pieces.size() > 300);  // several batches
  check_everywhere(source, target, pieces);
  // Each piece takes what lay under another one of its size at least.
  for (size_t i = 0; i + 1 < pieces.size(); i += 2) {
    std::swap(pieces[i].from, pieces[i + 1].from);
    pieces[i].size = pieces[i + 1].size = std::min(pieces[i].size, pieces[i + 1].size);
  }
  std::shuffle(pieces.begin(), pieces.end(), engine);
  check_everywhere(source, target, pieces);
}

TEST_CASE("of copies that write the same bytes the last one stays") {
  if (!has_gpu()) return;
  std::mt19937_64 engine = random_engine(232);
  const std::vector<std::byte> source = random_bytes(engine, 1 << 20);
  const std::vector<std::byte> target = random_bytes(engine, 1 << 20);
  std::vector<Piece> pieces;
  for (size_t i = 0; i < 100; ++i)
    pieces.push_back({engine() % 4000, engine() % (source.size() / 2), 1 + engine() % 300'000});
  check_everywhere(source, target, pieces);
}

TEST_CASE("a copy reads what a copy before it in the list has written") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  std::mt19937_64 engine = random_engine(233);
  const std::vector<std::byte> bytes = random_bytes(engine, 64'000);
  for (const Where where : kEverywhere) {
    CAPTURE(name(where));
    Placed memory(bytes, where, *calls);
    std::vector<ByteCopy> copies;
    for (int i = 0; i < 63; ++i)
      copies.push_back({memory.data() + (i + 1) * 1000, memory.data() + i * 1000, 1000});
    CHECK_OK(calls->copy_bytes(copies));
    const std::vector<std::byte> after = memory.read();
    for (size_t i = 0; i < after.size(); ++i)
      if (after[i] != bytes[i % 1000]) {
        CHECK_MESSAGE(false, "byte " << i << " is not that of the first 1000");
        break;
      }
  }
}

TEST_CASE("whole blocks come and go in the order of the list, and nothing between them moves") {
  if (!has_gpu()) return;
  auto calls = open_gpu();
  std::mt19937_64 engine = random_engine(234);
  constexpr int64_t kLayers = 3;
  constexpr int64_t kBlocks = 9;
  for (const int64_t layer_bytes : {1, 576, 100'000})
    for (const bool layer_first : {false, true})
      for (const int64_t gap : {0, 7})
        for (const Where where : kEverywhere) {
          CAPTURE(layer_bytes);
          CAPTURE(layer_first);
          CAPTURE(gap);
          CAPTURE(name(where));
          const int64_t layer_stride = layer_first ? kBlocks * layer_bytes + gap : layer_bytes;
          const int64_t block_stride = layer_first ? layer_bytes : kLayers * layer_bytes + gap;
          const auto size = static_cast<size_t>(kLayers * layer_stride + kBlocks * block_stride);
          std::vector<std::byte> pool = random_bytes(engine, size);
          DeviceBytes device(pool);
          const BlocksView view = {device.data(), block_stride, layer_stride,
                                   layer_bytes,   kLayers,      kBlocks};
          const std::vector<int32_t> blocks = {7, 8, 0, 3};
          std::vector<std::byte> expected;
          for (const int32_t block : blocks)
            for (int64_t layer = 0; layer < kLayers; ++layer) {
              const auto begin = pool.begin() + block * block_stride + layer * layer_stride;
              expected.insert(expected.end(), begin, begin + layer_bytes);
            }
          Placed out(random_bytes(engine, expected.size()), where, *calls);
          CHECK_OK(copy_blocks_on(calls.get(), view, blocks, out.data(), false));
          check_same("out", out.read(), expected);

          std::vector<std::byte> fresh = random_bytes(engine, expected.size());
          Placed in(fresh, where, *calls);
          CHECK_OK(copy_blocks_on(calls.get(), view, blocks, in.data(), true));
          auto next = fresh.begin();
          for (const int32_t block : blocks)
            for (int64_t layer = 0; layer < kLayers; ++layer, next += layer_bytes)
              std::copy(next, next + layer_bytes,
                        pool.begin() + block * block_stride + layer * layer_stride);
          check_same("pool", device.read(), pool);
        }
}

}  // namespace
}  // namespace larder::test
