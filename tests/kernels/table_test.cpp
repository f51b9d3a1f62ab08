// Every row of every kernel table that supports a call, against figures worked out elsewhere.
#include <cmath>
#include <random>
#include <vector>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

constexpr int kTokens = 20;
constexpr int kBlockTokens = 16;
constexpr int kDim = 64;

// One append of kTokens rows into two blocks, one gather of them, and one attention over them with
// q = 0.
struct Calls {
  explicit Calls(KvFormat format)
      : pool({1, 1, kBlockTokens, kDim, kDim, format, format}, 2), values(kTokens * kDim) {
    auto engine = test::random_engine(1);
    std::normal_distribution<float> normal;
    for (float& value : values) value = normal(engine);
    for (int token = 0; token < kTokens; ++token) slots.push_back(token);
    append.layer = gather.layer = attend.layer = pool.layer();
    append.k = append.v = dense_tensor(values.data(), Dtype::kFp32, kTokens, 1, kDim);
    append.slots = slots.data();
    append.num_slots = kTokens;
    gather.v_out = dense_tensor(gathered.data(), Dtype::kFp32, kTokens, 1, kDim);
    gather.block_table = table;
    gather.seq_lens = &seq_len;
    gather.num_seqs = 1;
    gather.block_table_stride = 2;
    attend.q = dense_tensor(q.data(), Dtype::kFp32, 1, 1, kDim);
    attend.output.out = dense_tensor(out.data(), Dtype::kFp32, 1, 1, kDim);
    attend.output.lse = &lse;
    attend.q_lens = &q_len;
    attend.seq_lens = &seq_len;
    attend.block_table = table;
    attend.num_seqs = 1;
    attend.block_table_stride = 2;
  }

  test::Pool pool;
  std::vector<float> values;
  std::vector<int64_t> slots;
  std::vector<float> q = std::vector<float>(kDim, 0.0f);
  std::vector<float> out = std::vector<float>(kDim, NAN);
  float lse = NAN;
  int32_t q_len = 1;
  int32_t seq_len = kTokens;
  int32_t table[2] = {0, 1};
  std::vector<float> gathered = std::vector<float>(kTokens * kDim, NAN);
  AppendParams append;
  GatherParams gather;
  AttendParams attend;
};

// nvfp4: the groups of the independent encoder. bf16: the nearest bf16 of each element.
void check_row(Calls& calls, int64_t slot) {
  const float* row = calls.values.data() + slot * kDim;
  const auto data = static_cast<size_t>(calls.pool.data_offset(test::Side::kK, slot, 0));
  const auto& bytes = calls.pool.bytes();
  if (calls.pool.geometry().k_format == KvFormat::kBf16) {
    for (size_t i = 0; i < kDim; ++i) {
      const uint16_t wanted = test::nearest_bf16(row[i]);
      CHECK(bytes[data + 2 * i] == static_cast<std::byte>(wanted & 0xFF));
      CHECK(bytes[data + 2 * i + 1] == static_cast<std::byte>(wanted >> 8));
    }
    return;
  }
  const auto scale = static_cast<size_t>(calls.pool.scale_offset(test::Side::kK, slot, 0));
  for (size_t group = 0; group < kDim / kNvfp4GroupElements; ++group) {
    const test::Nvfp4Group wanted =
        test::nvfp4_group(row + group * kNvfp4GroupElements, calls.append.layer.k_scale);
    CHECK(bytes[scale + group] == static_cast<std::byte>(wanted.scale));
    for (size_t i = 0; i < sizeof wanted.data; ++i)
      CHECK(bytes[data + group * sizeof wanted.data + i] == static_cast<std::byte>(wanted.data[i]));
  }
}

void check_gathered(Calls& calls) {
  int num_gathers = 0;
  for (const Kernel<GatherParams>& gather : gather_kernels()) {
    if (gather.backend != Backend::kCpu || !gather.supports(calls.gather).ok()) continue;
    INFO(gather.name);
    ++num_gathers;
    REQUIRE(gather.launch(calls.gather, {}).ok());
    for (int64_t slot = 0; slot < kTokens; ++slot) {
      const auto expected = calls.pool.read(test::Side::kV, slot, 0);
      for (size_t i = 0; i < kDim; ++i)
        CHECK(calls.gathered[static_cast<size_t>(slot) * kDim + i] ==
              static_cast<float>(expected[i]));
    }
  }
  CHECK(num_gathers > 0);
}

TEST_CASE(
    "every append row writes the definition's bytes, every gather row reads them, every attend "
    "row gives the mean of V") {
  for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kBf16}) {
    int num_appends = 0;
    int num_attends = 0;
    for (const Kernel<AppendParams>& append : append_kernels()) {
      Calls calls(format);
      if (append.backend != Backend::kCpu || !append.supports(calls.append).ok()) continue;
      INFO(append.name);
      ++num_appends;
      REQUIRE(append.launch(calls.append, {}).ok());
      for (int64_t slot = 0; slot < kTokens; ++slot) check_row(calls, slot);
      check_gathered(calls);
      for (const Kernel<AttendParams>& attend : attend_kernels()) {
        if (attend.backend != Backend::kCpu || !attend.supports(calls.attend).ok()) continue;
        INFO(attend.name);
        ++num_attends;
        REQUIRE(attend.launch(calls.attend, {}).ok());
        CHECK(calls.lse == doctest::Approx(std::log(kTokens)));
        for (size_t i = 0; i < kDim; ++i) {
          double mean = 0.0;
          for (int64_t slot = 0; slot < kTokens; ++slot)
            mean += calls.pool.read(test::Side::kV, slot, 0)[i] / kTokens;
          CHECK(calls.out[i] == doctest::Approx(mean).epsilon(1e-5));
        }
      }
    }
    CHECK(num_appends > 0);
    CHECK(num_attends > 0);
  }
}

}  // namespace
}  // namespace larder::kernels
