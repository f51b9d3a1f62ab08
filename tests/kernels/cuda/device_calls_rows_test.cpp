// The dense copies that staging makes; they need no GPU.
#include "kernels/cuda/device_calls_rows.h"

#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

namespace larder::test {
namespace {

using namespace kernels::cuda;

TEST_CASE("strided rows are packed in the order of their indices, in parts of any size") {
  std::vector<std::byte> memory(200);
  for (size_t i = 0; i < memory.size(); ++i) memory[i] = static_cast<std::byte>(i);
  // [2, 3, 2] runs of 2 bytes, the first axis backwards, the last not dense.
  const HostRows rows = {memory.data() + 100, {2, 3, 2}, {-50, 10, 4}, 2};
  std::vector<std::byte> expected;
  for (const int first : {100, 50})
    for (const int second : {0, 10, 20})
      for (const int third : {0, 4})
        for (const int byte : {0, 1})
          expected.push_back(static_cast<std::byte>(first + second + third + byte));
  REQUIRE(rows.dense_bytes().value == 24);
  for (int64_t part = 1; part <= 24; ++part) {
    std::vector<std::byte> dense(24);
    for (int64_t begin = 0; begin < 24; begin += part)
      copy_rows<false>(rows, begin, std::min<int64_t>(begin + part, 24), dense.data() + begin);
    CHECK(dense == expected);
  }
}

TEST_CASE("unpacking writes the rows and nothing between them") {
  std::vector<std::byte> memory(60, std::byte{0xEE});
  const HostRows rows = {memory.data() + 1, {1, 3, 2}, {0, 20, 6}, 3};
  std::vector<std::byte> dense(18);
  for (size_t i = 0; i < dense.size(); ++i) dense[i] = static_cast<std::byte>(i);
  copy_rows<true>(rows, 0, 18, dense.data());
  std::vector<std::byte> expected(60, std::byte{0xEE});
  for (size_t i = 0; i < 18; ++i)
    expected[1 + i / 6 * 20 + i / 3 % 2 * 6 + i % 3] = static_cast<std::byte>(i);
  CHECK(memory == expected);
}

TEST_CASE("dense tensors are one run, and a stride of an axis of size 1 does not matter") {
  std::vector<float> values(24);
  TensorView view = dense_tensor(values.data(), Dtype::kFp32, 4, 1, 6);
  view.strides[1] = 12345;
  CHECK(with_long_runs(rows_of(view)).run_bytes == 96);
  view.strides[0] = 0;  // the same row, four times
  const HostRows repeated = with_long_runs(rows_of(view));
  CHECK(repeated.run_bytes == 24);
  CHECK(repeated.dense_bytes().value == 96);
}

}  // namespace
}  // namespace larder::test
