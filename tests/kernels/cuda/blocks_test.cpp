// copy, scrub and checksum on the GPU: the bytes and figures of the CPU's rows, for the entries of
// the lists that may be used.
#include <limits>
#include <set>

#include "tests/kernels/cuda/device_calls.h"

namespace larder::kernels {
namespace {

using test::DeviceBytes;
using test::draw;
using test::pick;

constexpr int32_t kInt32Max = std::numeric_limits<int32_t>::max();

// Random bytes on the host, and a view of blocks in them; the device has the same.
struct Memory {
  Memory(int64_t layers, int64_t blocks, int64_t layer_bytes, bool layer_first, int64_t gap,
         std::mt19937_64& engine)
      : bytes(static_cast<size_t>(layers * blocks * (layer_bytes + gap) + 2 * gap)) {
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(engine());
    view = {bytes.data() + gap, 0, 0, layer_bytes, layers, blocks};
    view.block_stride_bytes = (layer_bytes + gap) * (layer_first ? 1 : layers);
    view.layer_stride_bytes = (layer_bytes + gap) * (layer_first ? blocks : 1);
    // Strides that are never used may be anything.
    if (blocks == 1) view.block_stride_bytes = -3;
    if (layers == 1) view.layer_stride_bytes = -5;
  }
  Memory(const Memory&) = delete;  // the view points into bytes
  Memory& operator=(const Memory&) = delete;

  BlocksView on_device(const DeviceBytes& device) const {
    BlocksView result = view;
    result.base = device.data() + (view.base - bytes.data());
    return result;
  }

  std::vector<std::byte> bytes;
  BlocksView view;
};

// Every shape that matters: odd sizes, both orders, gaps that break alignment, many chunks.
template <typename Check>
void on_memories(uint64_t stream, const Check& check) {
  auto engine = test::random_engine(stream);
  for (const int64_t layers : {1, 2, 5})
    for (const int64_t blocks : {1, 7, 40})
      for (const int64_t layer_bytes : {1, 3, 20, 576, 1000, 4096, 70000, 131072})
        for (const bool layer_first : {false, true})
          for (const int64_t gap : {0, 1, 8, 48}) {
            if (blocks == 40 && layer_bytes > 4096) continue;
            Memory memory(layers, blocks, layer_bytes, layer_first, gap, engine);
            CAPTURE(layers);
            CAPTURE(blocks);
            CAPTURE(layer_bytes);
            CAPTURE(layer_first);
            CAPTURE(gap);
            CAPTURE(test::seed());
            check(memory, engine);
          }
}

int32_t wild_block(int64_t num_blocks, std::mt19937_64& engine) {
  return pick<int32_t>(engine, {-1, static_cast<int32_t>(num_blocks), kInt32Max, -kInt32Max - 1});
}

void expect_bytes(const DeviceBytes& device, const Memory& memory) {
  const std::string text = test::differences(device.read(), memory.bytes);
  CHECK_MESSAGE(text.empty(), text);
}

TEST_CASE("copy moves what may be read to what may be written, and nothing else") {
  if (!test::has_gpu()) return;
  on_memories(7201, [](Memory& memory, std::mt19937_64& engine) {
    const int64_t num_blocks = memory.view.num_blocks;
    test::PointOfUse use(num_blocks, draw(engine, 0, 1) == 0, engine);
    std::vector<int32_t> from, to, good_from, good_to;
    std::vector<int64_t> wrong;
    for (int64_t block = 1; block < num_blocks; block += 2) {  // odd blocks are written
      from.push_back(static_cast<int32_t>(2 * draw(engine, 0, (num_blocks - 1) / 2)));
      to.push_back(static_cast<int32_t>(block));
      if (draw(engine, 0, 9) == 0) from.back() = wild_block(num_blocks, engine);
      if (draw(engine, 0, 9) == 0) to.back() = wild_block(num_blocks, engine);
      const bool may_read = use.may(from.back(), false);
      const bool may_write = use.may(to.back(), true);
      if (!may_read) wrong.push_back(from.back());
      if (!may_write) wrong.push_back(to.back());
      if (!may_read || !may_write) continue;
      good_from.push_back(from.back());
      good_to.push_back(to.back());
    }
    const DeviceBytes device(memory.bytes);
    const DeviceBytes device_from(from);
    const DeviceBytes device_to(to);
    test::check_ok(run_copy({memory.on_device(device), device_from.data<int32_t>(),
                             device_to.data<int32_t>(), static_cast<int64_t>(from.size())},
                            use.target()));
    test::check_ok(run_copy(
        {memory.view, good_from.data(), good_to.data(), static_cast<int64_t>(good_from.size())}));
    expect_bytes(device, memory);
    use.check(wrong);
  });
}

TEST_CASE("scrub zeroes what may be written, and nothing else") {
  if (!test::has_gpu()) return;
  on_memories(7202, [](Memory& memory, std::mt19937_64& engine) {
    const int64_t num_blocks = memory.view.num_blocks;
    test::PointOfUse use(num_blocks, draw(engine, 0, 1) == 0, engine);
    std::vector<int32_t> blocks, good;
    std::vector<int64_t> wrong;
    for (int64_t i = 0; i < num_blocks / 2 + 1; ++i) {
      blocks.push_back(draw(engine, 0, 5) == 0
                           ? wild_block(num_blocks, engine)
                           : static_cast<int32_t>(draw(engine, 0, num_blocks - 1)));
      if (use.may(blocks.back(), true))
        good.push_back(blocks.back());
      else
        wrong.push_back(blocks.back());
    }
    const DeviceBytes device(memory.bytes);
    const DeviceBytes list(blocks);
    test::check_ok(run_scrub(
        {memory.on_device(device), list.data<int32_t>(), static_cast<int64_t>(blocks.size())},
        use.target()));
    test::check_ok(run_scrub({memory.view, good.data(), static_cast<int64_t>(good.size())}));
    expect_bytes(device, memory);
    use.check(wrong);
  });
}

TEST_CASE("checksums are the CPU's, and 0 for what may not be read") {
  if (!test::has_gpu()) return;
  on_memories(7203, [](Memory& memory, std::mt19937_64& engine) {
    const int64_t num_blocks = memory.view.num_blocks;
    test::PointOfUse use(num_blocks, draw(engine, 0, 1) == 0, engine);
    std::vector<int32_t> blocks;
    std::vector<uint64_t> expected;
    std::vector<int64_t> wrong;
    for (int64_t i = 0; i < num_blocks + 2; ++i) {
      blocks.push_back(draw(engine, 0, 5) == 0
                           ? wild_block(num_blocks, engine)
                           : static_cast<int32_t>(draw(engine, 0, num_blocks - 1)));
      expected.push_back(0);
      if (use.may(blocks.back(), false))
        test::check_ok(run_checksum({memory.view, &blocks.back(), 1, &expected.back()}));
      else
        wrong.push_back(blocks.back());
    }
    const DeviceBytes device(memory.bytes);
    const DeviceBytes list(blocks);
    const DeviceBytes checksums(blocks.size() * sizeof(uint64_t));
    for (int twice = 0; twice < 2; ++twice) {
      test::check_ok(run_checksum({memory.on_device(device), list.data<int32_t>(),
                                   static_cast<int64_t>(blocks.size()), checksums.data<uint64_t>()},
                                  use.target()));
      CHECK(checksums.read<uint64_t>() == expected);
      use.check(wrong);
    }
    expect_bytes(device, memory);
  });
}

TEST_CASE("empty lists launch nothing, and lists longer than a grid has CTAs are done") {
  if (!test::has_gpu()) return;
  constexpr int64_t kCount = 1'100'000;
  auto engine = test::random_engine(7204);
  Memory memory(1, kCount, 24, false, 0, engine);
  const DeviceBytes device(memory.bytes);
  const BlocksView view = memory.on_device(device);
  test::PointOfUse use(kCount, false, engine);
  test::check_ok(run_copy({view, nullptr, nullptr, 0}, use.target()));
  test::check_ok(run_scrub({view, nullptr, 0}, use.target()));
  test::check_ok(run_checksum({view, nullptr, 0, nullptr}, use.target()));
  expect_bytes(device, memory);
  std::vector<int32_t> blocks(kCount);
  for (size_t i = 0; i < blocks.size(); ++i) blocks[i] = static_cast<int32_t>(i);
  std::vector<uint64_t> expected(blocks.size());
  test::check_ok(run_checksum({memory.view, blocks.data(), kCount, expected.data()}));
  const DeviceBytes list(blocks);
  const DeviceBytes checksums(blocks.size() * sizeof(uint64_t));
  test::check_ok(
      run_checksum({view, list.data<int32_t>(), kCount, checksums.data<uint64_t>()}, use.target()));
  CHECK(checksums.read<uint64_t>() == expected);
  test::check_ok(run_scrub({view, list.data<int32_t>(), kCount}, use.target()));
  CHECK(device.read() == std::vector<std::byte>(memory.bytes.size()));
  use.check({});
}

}  // namespace
}  // namespace larder::kernels
