// attend on a GPU over pools whose offsets need 64 bits, and whose block ids need more than 16.
#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

// Device memory of a size that no test copies, 0xFF everywhere.
class LargeMemory {
 public:
  explicit LargeMemory(int64_t bytes) {
    if (cudaMalloc(reinterpret_cast<void**>(&memory_), static_cast<size_t>(bytes)) != cudaSuccess) {
      cudaGetLastError();
      memory_ = nullptr;
      return;
    }
    REQUIRE(cudaMemset(memory_, 0xFF, static_cast<size_t>(bytes)) == cudaSuccess);
  }
  LargeMemory(const LargeMemory&) = delete;
  LargeMemory& operator=(const LargeMemory&) = delete;
  ~LargeMemory() { cudaFree(memory_); }
  std::byte* data() const { return memory_; }

 private:
  std::byte* memory_ = nullptr;
};

struct LargePool {
  AttentionGeometry geometry;
  int64_t num_blocks;
  std::vector<int32_t> ids;  // of the sequence's first block, where something may go wrong
};

TEST_CASE("blocks past 2^31 bytes, 2^31 elements and 65535 give the bits of blocks near the base") {
  if (!has_gpu()) return;
  auto engine = random_engine(7700);
  CAPTURE(seed());
  const LargePool pools[] = {
      {decode_geometry(KvFormat::kNvfp4, 8, 16, 128),
       117'520,
       {116'508, 116'509, 116'514, 117'519}},
      {decode_geometry(KvFormat::kBf16, 8, 16, 128),
       66'560,
       {32'767, 32'768, 65'535, 65'536, 65'541, 66'559}},
      {decode_geometry(KvFormat::kNvfp4, 1, 16, 64), 70'000, {65'535, 65'536, 69'999}},
  };
  for (const LargePool& pool : pools) {
    AttendCase one(pool.geometry, 16, {{1, 3}, {2, 40}}, engine);
    const int64_t page_bytes = one.params.layer.page.page_bytes;
    const LargeMemory memory(pool.num_blocks * page_bytes);
    if (memory.data() == nullptr) {
      MESSAGE("skipped: no room for a pool of " << pool.num_blocks * page_bytes << " bytes");
      continue;
    }
    // Block `id` of the large pool gets what the table's entry names; the table names it then.
    const auto place = [&](size_t entry, int64_t small_id, int32_t id) {
      CHECK(cudaMemcpy(memory.data() + id * page_bytes, one.pool.data() + small_id * page_bytes,
                       static_cast<size_t>(page_bytes), cudaMemcpyHostToDevice) == cudaSuccess);
      one.table[entry] = id;
    };
    const std::vector<int32_t> small = one.table;
    const auto second = static_cast<size_t>(one.params.block_table_stride);
    const auto run_at = [&](int32_t first_id, int32_t second_id) {
      place(0, small[0], first_id);
      place(second, small[second], 2);
      place(second + 1, small[second + 1], second_id);
      place(second + 2, small[second + 2], 4);
      return one.run_cuda(nullptr, [&](kernels::AttendParams& made) {
        made.layer.base = memory.data();
        made.layer.num_blocks = pool.num_blocks;
      });
    };
    const auto expected = run_at(1, 3);
    one.table = small;
    one.compare(expected, one.run_cpu(), "near the base");
    for (const int32_t id : pool.ids) {
      const auto runs = run_at(id, id - 8);
      REQUIRE(runs.size() == expected.size());
      for (size_t i = 0; i < runs.size(); ++i) {
        CHECK(runs[i].fault_count == 0);
        for (const size_t s : {0, 1})
          check_same_bits(
              result_bytes(one, runs[i].outputs, s), result_bytes(one, expected[i].outputs, s),
              std::string(runs[i].row) + ", block " + std::to_string(id) + ": " + one.describe());
      }
    }
  }
}

}  // namespace
}  // namespace larder::test
