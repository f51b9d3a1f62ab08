// Kernels from several threads at once, as engines call them: disjoint slots, shared reads. And
// their judge, which benchmarks ask for several sequences at once.
#include <functional>
#include <random>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include "kernels/kernel_table.h"
#include "tests/support/dense_attention.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

constexpr int kThreads = 3;
constexpr int kTokens = 16;  // one block per thread
constexpr int kDim = 64;

AttentionGeometry geometry() {
  return {1, 1, kTokens, kDim, kDim, KvFormat::kNvfp4, KvFormat::kBf16};
}

void append_block(const LayerView& layer, int block, std::vector<float>& values) {
  std::vector<int64_t> slots;
  for (int token = 0; token < kTokens; ++token) slots.push_back(block * kTokens + token);
  AppendParams params;
  params.layer = layer;
  params.k = params.v = dense_tensor(values.data(), Dtype::kFp32, kTokens, 1, kDim);
  params.slots = slots.data();
  params.num_slots = kTokens;
  CHECK(run_append(params).ok());
}

std::vector<float> attend_all(const LayerView& layer, std::vector<float>& q) {
  std::vector<float> out(kDim);
  const int32_t q_len = 1;
  const int32_t seq_len = kThreads * kTokens;
  const int32_t table[kThreads] = {0, 1, 2};
  AttendParams params;
  params.layer = layer;
  params.q = dense_tensor(q.data(), Dtype::kFp32, 1, 1, kDim);
  params.output.out = dense_tensor(out.data(), Dtype::kFp32, 1, 1, kDim);
  params.q_lens = &q_len;
  params.seq_lens = &seq_len;
  params.block_table = table;
  params.num_seqs = 1;
  params.block_table_stride = kThreads;
  params.scale = 0.125f;
  CHECK(run_attend(params).ok());
  return out;
}

void in_threads(const std::function<void(int)>& work) {
  std::vector<std::thread> threads;
  for (int i = 0; i < kThreads; ++i) threads.emplace_back(work, i);
  for (std::thread& thread : threads) thread.join();
}

TEST_CASE("appends to disjoint blocks and attends over shared ones give the serial result") {
  auto engine = test::random_engine(1);
  std::normal_distribution<float> normal;
  std::vector<std::vector<float>> values(kThreads, std::vector<float>(kTokens * kDim));
  for (auto& block : values)
    for (float& value : block) value = normal(engine);
  test::Pool serial(geometry(), kThreads);
  for (int i = 0; i < kThreads; ++i) append_block(serial.layer(), i, values[i]);
  const std::vector<float> wanted = attend_all(serial.layer(), values[0]);

  test::Pool shared(geometry(), kThreads);
  in_threads([&](int i) { append_block(shared.layer(), i, values[i]); });
  CHECK(shared.bytes() == serial.bytes());
  std::vector<std::vector<float>> out(kThreads);
  in_threads([&](int i) { out[i] = attend_all(shared.layer(), values[0]); });
  for (const auto& result : out) CHECK(result == wanted);
}

TEST_CASE("float64 attention over rotated queries gives every thread the serial result") {
  test::DenseAttention call;
  call.q_len = call.num_q_heads = call.num_kv_heads = 1;
  call.seq_len = kTokens;
  call.k_dim = call.v_dim = kDim;
  const auto doubles = [](size_t count, uint64_t stream) {
    const std::vector<float> values = test::random_values(count, stream);
    return std::vector<double>(values.begin(), values.end());
  };
  const std::vector<double> q = doubles(kDim, 2);
  call.k = doubles(kTokens * kDim, 3);
  call.v = doubles(kTokens * kDim, 4);
  const auto attend = [&] {
    test::DenseAttention rotated = call;
    rotated.q = test::hadamard(q, kDim);
    return test::dense_attention(rotated).out;
  };
  // Before the serial one: the first call of a program is the one that would set something up.
  std::vector<std::vector<double>> out(kThreads);
  in_threads([&](int i) { out[static_cast<size_t>(i)] = attend(); });
  const std::vector<double> wanted = attend();
  for (const auto& result : out) CHECK(result == wanted);
}

}  // namespace
}  // namespace larder::kernels
