// Faults that attention kernels of other projects had, with the values that tell them.
#include <cmath>
#include <cstring>
#include <limits>
#include <sys/mman.h>

#include <doctest/doctest.h>

#include "tests/kernels/small_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::AttendBatch;
using test::AttendResult;
using test::Side;
using test::SmallPool;

constexpr KvFormat kBf16 = KvFormat::kBf16;
constexpr KvFormat kNvfp4 = KvFormat::kNvfp4;
constexpr float kInfinity = std::numeric_limits<float>::infinity();

TEST_CASE("the unwritten tail of the last block never reaches the result") {
  auto engine = test::random_engine(40);
  for (const KvFormat format : {kBf16, kNvfp4})
    for (const int32_t seq_len : {1, 13, 15, 16, 17, 255, 257})
      for (const bool causal : {true, false}) {
        CAPTURE(seq_len);
        AttendBatch batch({1, 1, 16, 128, 128, format, format}, 1, {{1, seq_len}}, engine);
        std::fill(batch.q.begin(), batch.q.end(), 0.0f);
        batch.causal = causal;
        const AttendResult result = batch.run();
        CHECK(result.lse[0] == doctest::Approx(std::log(seq_len)).epsilon(1e-6));
        std::vector<double> mean(128, 0.0);
        for (int32_t token = 0; token < seq_len; ++token) {
          const int64_t block = batch.table()[static_cast<size_t>(token / 16)];
          const auto v = batch.pool().read(Side::kV, block * 16 + token % 16, 0);
          for (size_t d = 0; d < 128; ++d) mean[d] += v[d] / seq_len;
        }
        for (size_t d = 0; d < 128; ++d) CHECK(std::fabs(result.out[d] - mean[d]) < 1e-3);
      }
}

TEST_CASE("rows without keys are 0 and -inf, and the others are as if alone") {
  auto engine = test::random_engine(41);
  AttendBatch batch({1, 1, 16, 32, 32, kNvfp4, kNvfp4}, 1,
                    {{1, 0}, {1, 5}, {1, 0}, {1, 16}, {1, 0}}, engine);
  const AttendResult result = batch.run();
  for (const size_t row : {0, 2, 4}) {
    CHECK(result.lse[row] == -kInfinity);
    for (size_t d = 0; d < 32; ++d) CHECK(result.out[row * 32 + d] == 0.0f);
  }
  for (const size_t row : {1, 3}) {
    const AttendResult alone = batch.run(row, row + 1);
    CHECK(alone.lse[0] == result.lse[row]);
    for (size_t d = 0; d < 32; ++d) CHECK(alone.out[d] == result.out[row * 32 + d]);
  }
}

TEST_CASE("a batch of empty sequences, and a batch of none, are fine") {
  auto engine = test::random_engine(42);
  AttendBatch empty({1, 1, 16, 32, 32, kNvfp4, kNvfp4}, 1, {{2, 0}, {1, 0}}, engine);
  for (const float lse : empty.run().lse) CHECK(lse == -kInfinity);
  AttendBatch none({1, 1, 16, 32, 32, kNvfp4, kNvfp4}, 1, {}, engine);
  CHECK(none.run().out.empty());
}

TEST_CASE("more query rows than tokens leave the first rows empty") {
  auto engine = test::random_engine(43);
  AttendBatch batch({1, 1, 16, 32, 32, kNvfp4, kNvfp4}, 1, {{4, 2}}, engine);
  const AttendResult result = batch.run();
  CHECK(result.lse[0] == -kInfinity);
  CHECK(result.lse[1] == -kInfinity);
  for (size_t i = 0; i < 64; ++i) CHECK(result.out[i] == 0.0f);
  CHECK(std::isfinite(result.lse[2]));
  CHECK(std::isfinite(result.lse[3]));
}

TEST_CASE("lse is the natural logarithm on decode and prefill alike") {
  auto engine = test::random_engine(44);
  for (const KvFormat format : {kBf16, kNvfp4}) {
    AttendBatch decode({1, 1, 16, 32, 32, format, format}, 4, {{1, 256}}, engine);
    std::fill(decode.q.begin(), decode.q.end(), 0.0f);
    for (const float lse : decode.run().lse) CHECK(lse == doctest::Approx(5.5452).epsilon(1e-5));
    AttendBatch prefill({1, 1, 16, 32, 32, format, format}, 1, {{100, 256}}, engine);
    std::fill(prefill.q.begin(), prefill.q.end(), 0.0f);
    prefill.causal = false;
    for (const float lse : prefill.run().lse) CHECK(lse == doctest::Approx(5.5452).epsilon(1e-5));
  }
}

TEST_CASE("logits far below any finite sentinel still win when they are all there is") {
  SmallPool small(128);
  for (size_t d = 0; d < 128; ++d) {
    small.set(Side::kK, 0, d, -16.0f);
    small.set(Side::kV, 0, d, static_cast<float>(d) - 60);
  }
  const AttendResult result =
      small.run(std::vector<float>(128, 64.0f), 1, 1.0f / std::sqrt(128.0f));
  CHECK(result.lse[0] == doctest::Approx(-11585.24).epsilon(1e-6));
  for (size_t d = 0; d < 128; ++d) CHECK(result.out[d] == static_cast<float>(d) - 60);
}

TEST_CASE("a masked key cannot win against a very low logit") {
  SmallPool small(16);
  small.set(Side::kK, 0, 0, 1.0f);
  small.set(Side::kV, 0, 0, 1.0f);
  small.set(Side::kV, 1, 0, 100.0f);
  std::vector<float> q(16, 0.0f);
  q[0] = -20000.0f;
  const AttendResult result = small.run(q, 1, 1.0f);
  CHECK(result.out[0] == 1.0f);
  CHECK(result.lse[0] == -20000.0f);
}

TEST_CASE("keys whose logits are all -inf count as no keys; a NaN key is not hidden") {
  SmallPool small(16);
  small.set(Side::kV, 0, 0, 3.0f);
  small.set(Side::kV, 1, 0, 5.0f);
  small.set(Side::kK, 0, 0, -kInfinity);
  small.set(Side::kK, 1, 0, -kInfinity);
  std::vector<float> q(16, 0.0f);
  q[0] = 1.0f;
  AttendResult result = small.run(q, 2, 1.0f);
  CHECK(result.out[0] == 0.0f);
  CHECK(result.lse[0] == -kInfinity);
  small.set(Side::kK, 1, 0, 2.0f);
  result = small.run(q, 2, 1.0f);
  CHECK(result.out[0] == 5.0f);
  CHECK(result.lse[0] == 2.0f);
  small.set(Side::kK, 0, 0, std::nanf(""));
  result = small.run(q, 2, 1.0f);
  CHECK(std::isnan(result.out[0]));
  CHECK(std::isnan(result.lse[0]));
}

// A pool of address space only; pages appear where they are written.
class SparsePool {
 public:
  SparsePool(const AttentionGeometry& geometry, int64_t num_blocks) {
    layer.geometry = geometry;
    layer.page = page_layout(geometry);
    layer.block_stride_bytes = layer.page.page_bytes;
    layer.num_blocks = num_blocks;
    size_bytes_ = static_cast<size_t>(num_blocks * layer.block_stride_bytes);
    void* memory = mmap(nullptr, size_bytes_, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    REQUIRE(memory != MAP_FAILED);
    layer.base = static_cast<std::byte*>(memory);
  }
  ~SparsePool() { munmap(layer.base, size_bytes_); }
  SparsePool(const SparsePool&) = delete;
  SparsePool& operator=(const SparsePool&) = delete;

  std::vector<std::byte> block(int64_t id) const {
    const std::byte* page = layer.base + id * layer.block_stride_bytes;
    return {page, page + layer.page.page_bytes};
  }

  LayerView layer;

 private:
  size_t size_bytes_;
};

// Appends `tokens` rows to block `id`, attends over them, and returns the result.
AttendResult use_block(SparsePool& pool, int64_t id, int32_t tokens, std::vector<float>& values) {
  const AttentionGeometry& g = pool.layer.geometry;
  std::vector<int64_t> slots;
  for (int32_t i = 0; i < tokens; ++i) slots.push_back(id * g.block_tokens + i);
  AppendParams append;
  append.layer = pool.layer;
  append.k = dense_tensor(values.data(), Dtype::kFp32, tokens, g.num_kv_heads, g.k_dim);
  append.v = append.k;
  append.slots = slots.data();
  append.num_slots = tokens;
  REQUIRE(run_append(append).ok());
  AttendResult result;
  result.out.assign(static_cast<size_t>(g.num_kv_heads * g.v_dim), NAN);
  result.lse.assign(static_cast<size_t>(g.num_kv_heads), NAN);
  const int32_t one = 1;
  const auto block = static_cast<int32_t>(id);
  AttendParams attend;
  attend.layer = pool.layer;
  attend.q = dense_tensor(values.data(), Dtype::kFp32, 1, g.num_kv_heads, g.k_dim);
  attend.output.out = dense_tensor(result.out.data(), Dtype::kFp32, 1, g.num_kv_heads, g.v_dim);
  attend.output.lse = result.lse.data();
  attend.q_lens = &one;
  attend.seq_lens = &tokens;
  attend.num_seqs = 1;
  attend.block_table = &block;
  attend.block_table_stride = 1;
  REQUIRE(run_attend(attend).ok());
  return result;
}

TEST_CASE("blocks past 2^31 bytes and 2^31 elements are addressed in 64 bits") {
  auto engine = test::random_engine(45);
  std::normal_distribution<float> normal;
  std::vector<float> values(3 * 8 * 128);
  for (float& x : values) x = normal(engine);
  const std::pair<KvFormat, int64_t> thresholds[] = {{kBf16, 65536}, {kNvfp4, 116509}};
  for (const auto& [format, threshold] : thresholds) {
    SparsePool pool({1, 8, 16, 128, 128, format, format}, threshold + 1000);
    const AttendResult expected = use_block(pool, 1, 3, values);
    const std::vector<std::byte> bytes = pool.block(1);
    const std::vector<std::byte> zeros(bytes.size(), std::byte{0});
    for (const int64_t id : {threshold - 1, threshold, threshold + 5, threshold + 999}) {
      CAPTURE(id);
      CHECK(use_block(pool, id, 3, values) == expected);
      CHECK(pool.block(id) == bytes);
    }
    CHECK(pool.block(0) == zeros);
    CHECK(pool.block(5) == zeros);
  }
}

TEST_CASE("block ids past 65535 are not cut to 16 bits") {
  auto engine = test::random_engine(46);
  std::normal_distribution<float> normal;
  std::vector<float> values(64);
  for (float& x : values) x = normal(engine);
  SparsePool pool({1, 1, 1, 64, 64, kNvfp4, kNvfp4}, 70000);
  const AttendResult expected = use_block(pool, 1, 1, values);
  CHECK(use_block(pool, 65535, 1, values) == expected);
  CHECK(use_block(pool, 65536, 1, values) == expected);
  CHECK(use_block(pool, 69999, 1, values) == expected);
  CHECK(pool.block(0) == std::vector<std::byte>(72, std::byte{0}));
}

TEST_CASE("a windowed row reads neither table entries nor blocks left of its window") {
  auto engine = test::random_engine(47);
  AttendBatch batch({1, 2, 16, 32, 32, kNvfp4, kNvfp4}, 4, {{3, 200}}, engine);
  batch.window_left = 50;
  const AttendResult expected = batch.run();
  // The first row stands at 197 and sees from 147 on: blocks 0 to 8 are out of everyone's sight.
  for (size_t i = 0; i < 9; ++i) batch.table()[i] = i % 2 == 0 ? 0 : -7;
  CHECK(batch.run() == expected);
  batch.table()[9] = -7;
  std::vector<float> q = batch.q;
  const int32_t q_len = 3, seq_len = 200;
  AttendParams params;
  params.layer = batch.pool().layer();
  params.q = dense_tensor(q.data(), Dtype::kFp32, 3, 4, 32);
  params.output.out = params.q;
  params.q_lens = &q_len;
  params.seq_lens = &seq_len;
  params.num_seqs = 1;
  params.block_table = batch.table().data();
  params.block_table_stride = batch.table_stride();
  params.window_left = 50;
  CHECK(run_attend(params).code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("a table that ends with its last used entry is not read further") {
  auto engine = test::random_engine(48);
  for (const int32_t seq_len : {32, 33}) {
    AttendBatch batch({1, 1, 16, 32, 32, kNvfp4, kNvfp4}, 1, {{1, seq_len}}, engine);
    const AttendResult expected = batch.run();
    // An exact allocation of its own, so that a sanitizer sees a read past it.
    const int64_t used = (seq_len + 15) / 16;
    const std::vector<int32_t> exact(batch.table().begin(), batch.table().begin() + used);
    AttendResult result = {std::vector<float>(32, NAN), std::vector<float>(1, NAN)};
    const int32_t one = 1;
    AttendParams params;
    params.layer = batch.pool().layer();
    params.q = dense_tensor(batch.q.data(), Dtype::kFp32, 1, 1, 32);
    params.output.out = dense_tensor(result.out.data(), Dtype::kFp32, 1, 1, 32);
    params.output.lse = result.lse.data();
    params.q_lens = &one;
    params.seq_lens = &seq_len;
    params.num_seqs = 1;
    params.block_table = exact.data();
    params.block_table_stride = used;
    params.scale = batch.scale;
    REQUIRE(run_attend(params).ok());
    CHECK(result == expected);
  }
}

TEST_CASE("a million tokens still give their mean, and a window of them costs a window") {
  constexpr int32_t kTokens = 1 << 20;
  SparsePool pool({1, 1, 64, 64, 64, kNvfp4, kNvfp4}, 2);
  auto engine = test::random_engine(49);
  std::normal_distribution<float> normal;
  std::vector<float> values(64 * 64);
  for (float& x : values) x = normal(engine);
  use_block(pool, 1, 64, values);
  // Every block of the sequence is the same block, so the mean is that of its 64 rows.
  const std::vector<int32_t> table(kTokens / 64, 1);
  std::vector<float> q(64, 0.0f), whole(64, NAN), windowed(64, NAN);
  float lse = NAN;
  const int32_t one = 1;
  AttendParams params;
  params.layer = pool.layer;
  params.q = dense_tensor(q.data(), Dtype::kFp32, 1, 1, 64);
  params.output.out = dense_tensor(whole.data(), Dtype::kFp32, 1, 1, 64);
  params.output.lse = &lse;
  params.q_lens = &one;
  params.seq_lens = &kTokens;
  params.num_seqs = 1;
  params.block_table = table.data();
  params.block_table_stride = static_cast<int64_t>(table.size());
  REQUIRE(run_attend(params).ok());
  CHECK(lse == doctest::Approx(13.862944).epsilon(1e-6));
  params.window_left = 511;
  params.output.out.data = windowed.data();
  REQUIRE(run_attend(params).ok());
  CHECK(lse == doctest::Approx(std::log(512.0)).epsilon(1e-6));
  for (size_t d = 0; d < 64; ++d) CHECK(std::fabs(whole[d] - windowed[d]) < 1e-3);
}

TEST_CASE("the largest lengths and windows that the types hold") {
  constexpr int32_t kMax = std::numeric_limits<int32_t>::max();
  SmallPool small(16, 4096);
  for (int64_t token = 0; token < 4096; ++token) small.set(Side::kV, token, 0, 2.0f);
  const std::vector<int32_t> table(size_t{1} << 19, 0);
  const auto far = [&](AttendParams& params) {
    params.block_table = table.data();
    params.block_table_stride = int64_t{1} << 19;
    params.window_left = 511;
  };
  for (const int32_t splits : {0, 3, 4096}) {
    const AttendResult result =
        small.run(std::vector<float>(16, 0.0f), kMax, 1.0f, [&](AttendParams& params) {
          far(params);
          params.num_splits = splits;
        });
    CHECK(result.out[0] == doctest::Approx(2.0));
    CHECK(result.lse[0] == doctest::Approx(std::log(512.0)));
  }
  const float slope = -1.0f;
  const AttendResult sloped =
      small.run(std::vector<float>(16, 0.0f), kMax, 1.0f, [&](AttendParams& params) {
        far(params);
        params.alibi_slopes = &slope;
      });
  CHECK(sloped.out[0] == doctest::Approx(2.0));
  CHECK(sloped.lse[0] == doctest::Approx(-2147483648.0));

  const auto plain = small.run(std::vector<float>(32, 1.0f), 100, 1.0f);
  const auto wide = small.run(std::vector<float>(32, 1.0f), 100, 1.0f,
                              [](AttendParams& params) { params.window_left = kMax; });
  CHECK(wide == plain);
}

}  // namespace
}  // namespace larder::kernels
