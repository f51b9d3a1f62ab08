// attend against the float64 oracle, and the promise that a row's bits depend on its keys alone.
#include <cmath>

#include <doctest/doctest.h>

#include "kernels/cpu/bf16.h"
#include "tests/kernels/attend_call.h"
#include "tests/kernels/kernel_targets.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::AttendBatch;
using test::AttendResult;

constexpr double kMaxRelativeL2 = 1e-3;
constexpr double kMaxLseError = 1e-4;

constexpr KvFormat kBf16 = KvFormat::kBf16;
constexpr KvFormat kNvfp4 = KvFormat::kNvfp4;
constexpr KvFormat kFormats[] = {kBf16, KvFormat::kFp16, KvFormat::kFp8E4m3, KvFormat::kFp8E5m2,
                                 kNvfp4};

void check_close(const AttendResult& result, const test::DenseResult& expected) {
  REQUIRE(result.out.size() == expected.out.size());
  REQUIRE(result.lse.size() == expected.lse.size());
  const size_t v_dim = result.lse.empty() ? 0 : result.out.size() / result.lse.size();
  for (size_t row = 0; row < result.lse.size(); ++row) {
    if (std::isinf(expected.lse[row])) {
      CHECK(result.lse[row] == expected.lse[row]);
      for (size_t d = 0; d < v_dim; ++d) REQUIRE(result.out[row * v_dim + d] == 0.0f);
    } else {
      REQUIRE(std::fabs(result.lse[row] - expected.lse[row]) <= kMaxLseError);
    }
  }
  const std::vector<double> out(result.out.begin(), result.out.end());
  CHECK(test::relative_l2(out, expected.out) <= kMaxRelativeL2);
}

TEST_CASE("random shapes, formats, windows and batches agree with the float64 oracle") {
  auto engine = test::random_engine(20);
  CAPTURE(test::seed());
  const int32_t dims[] = {16, 32, 48, 64, 80, 128};
  const int32_t block_sizes[] = {1, 2, 7, 16, 64};
  for (int round = 0; round < 120; ++round) {
    const auto pick = [&](int low, int high) {
      return std::uniform_int_distribution<int>(low, high)(engine);
    };
    const KvFormat k_format = kFormats[pick(0, 4)];
    const KvFormat v_format = kFormats[pick(0, 4)];
    const bool any_dims = k_format != kNvfp4 && v_format != kNvfp4;
    const AttentionGeometry geometry = {1,
                                        pick(1, 3),
                                        block_sizes[pick(0, 4)],
                                        any_dims ? pick(1, 70) : dims[pick(0, 5)],
                                        any_dims ? pick(1, 70) : dims[pick(0, 5)],
                                        k_format,
                                        v_format};
    std::vector<test::SequenceLengths> sequences;
    for (int s = pick(0, 4); s >= 0; --s) {
      const int32_t seq_len = pick(0, 5) == 0 ? 0 : pick(1, 200);
      const int32_t q_len = pick(0, 2) == 0 ? 1 : pick(0, std::min(seq_len + 3, 40));
      sequences.push_back({q_len, seq_len});
    }
    AttendBatch batch(geometry, geometry.num_kv_heads * pick(1, 9), sequences, engine);
    if (geometry.k_dim % 16 == 0)
      batch.transform_keys(static_cast<KeyTransform>(pick(0, 3)), engine);
    batch.causal = pick(0, 1) == 1;
    batch.window_left = pick(0, 1) == 0 ? -1 : pick(0, 130);
    CAPTURE(round);
    const test::DenseResult expected = batch.oracle();
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      check_close(batch.run(), expected);
    });
  }
}

TEST_CASE("a sequence alone gives the bits that it gives in a batch") {
  auto engine = test::random_engine(21);
  CAPTURE(test::seed());
  AttendBatch batch({1, 2, 16, 64, 48, kNvfp4, kNvfp4}, 6,
                    {{1, 100}, {17, 17}, {0, 30}, {5, 129}, {3, 0}, {70, 300}, {1, 4500}}, engine);
  // That every call is deterministic does not depend on being asked for.
  for (const auto& [window, splits] : {std::pair{-1, 0}, {20, 0}, {-1, 5}, {200, 3}}) {
    batch.window_left = window;
    batch.num_splits = splits;
    batch.deterministic = splits == 3;
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      const AttendResult together = batch.run();
      AttendResult alone;
      for (size_t s = 0; s < 7; ++s) {
        const AttendResult one = batch.run(s, s + 1);
        alone.out.insert(alone.out.end(), one.out.begin(), one.out.end());
        alone.lse.insert(alone.lse.end(), one.lse.begin(), one.lse.end());
      }
      CHECK(alone.out == together.out);
      CHECK(alone.lse == together.lse);
    });
  }
}

TEST_CASE("decoding token by token, and any chunking, gives the bits of one prefill") {
  auto engine = test::random_engine(22);
  CAPTURE(test::seed());
  const int32_t length = 150;
  for (const int64_t group_size : {1, 3, 8})
    for (const KvFormat format : {kBf16, kNvfp4})
      for (const int32_t window : {-1, 0, 37}) {
        AttendBatch batch({1, 2, 16, 48, 64, format, format}, 2 * group_size, {{length, length}},
                          engine);
        batch.window_left = window;
        if (window == 37) batch.soft_cap = 2;
        test::on_every_target([&](const std::string& target) {
          CAPTURE(target);
          const AttendResult whole = batch.run();
          for (const int32_t chunk : {1, 7, 64, 65}) {
            AttendResult parts;
            for (int32_t done = 0; done < length; done += chunk) {
              const int32_t q_len = std::min(chunk, length - done);
              const AttendResult part = batch.run_rows({q_len}, {done + q_len}, done, 0);
              parts.out.insert(parts.out.end(), part.out.begin(), part.out.end());
              parts.lse.insert(parts.lse.end(), part.lse.begin(), part.lse.end());
            }
            CHECK(parts.out == whole.out);
            CHECK(parts.lse == whole.lse);
          }
        });
      }
}

TEST_CASE("identical query rows get identical results, however many there are") {
  auto engine = test::random_engine(23);
  const AttentionGeometry geometries[] = {{1, 1, 16, 32, 32, kNvfp4, kNvfp4},
                                          mla_geometry(1, 16, MlaRow::kNvfp4Ds)};
  for (const AttentionGeometry& geometry : geometries)
    for (const int32_t rows : {1, 63, 64, 65, 128}) {
      AttendBatch batch(geometry, 1, {{rows, 200}}, engine);
      batch.causal = false;
      const auto k_dim = static_cast<size_t>(geometry.k_dim);
      const auto v_dim = static_cast<size_t>(geometry.v_dim);
      for (size_t i = 0; i < batch.q.size(); ++i) batch.q[i] = batch.q[i % k_dim];
      const AttendResult result = batch.run();
      for (size_t i = 0; i < result.out.size(); ++i)
        REQUIRE(result.out[i] == result.out[i % v_dim]);
    }
}

TEST_CASE("every ratio of query heads to KV heads agrees with the oracle") {
  auto engine = test::random_engine(24);
  CAPTURE(test::seed());
  for (const int64_t ratio : {1, 2, 3, 4, 5, 6, 7, 8, 12, 16, 80}) {
    CAPTURE(ratio);
    AttendBatch batch({1, 2, 8, 64, 64, kNvfp4, kNvfp4}, 2 * ratio, {{2, 37}}, engine);
    check_close(batch.run(), batch.oracle());
  }
}

TEST_CASE("every dim with every block size and format agrees with the oracle") {
  auto engine = test::random_engine(25);
  CAPTURE(test::seed());
  const int64_t ratios[] = {1, 2, 3, 4, 5, 6, 7, 8, 12, 16};
  for (const int32_t dim : {64, 80, 96, 112, 128, 192, 256, 512, 1024})
    for (const int32_t block_tokens : {1, 2, 8, 16, 32, 64, 128})
      for (const KvFormat format : kFormats) {
        const int64_t ratio = ratios[engine() % 10];  // a sample: all of them take long
        CAPTURE(dim);
        CAPTURE(block_tokens);
        CAPTURE(ratio);
        AttendBatch batch({1, 1, block_tokens, dim, dim, format, format}, ratio, {{1, 37}}, engine);
        check_close(batch.run(), batch.oracle());
      }
}

TEST_CASE("K and V dims that differ do not drift apart over long sequences") {
  auto engine = test::random_engine(26);
  CAPTURE(test::seed());
  const std::pair<int32_t, int32_t> dims[] = {{192, 128}, {576, 512}};
  for (const auto& [k_dim, v_dim] : dims)
    for (const KvFormat format : {kBf16, kNvfp4})
      for (const int32_t seq_len : {1, 575, 576, 577, 1200}) {
        CAPTURE(seq_len);
        AttendBatch batch({1, 1, 64, k_dim, v_dim, format, format}, 2, {{1, seq_len}}, engine);
        check_close(batch.run(), batch.oracle());
      }
}

TEST_CASE("one key gives back its V exactly, in each output dtype") {
  auto engine = test::random_engine(27);
  AttendBatch batch({1, 1, 4, 32, 32, kNvfp4, kNvfp4}, 1, {{1, 1}}, engine);
  const std::vector<double> v = batch.pool().read(test::Side::kV, batch.table()[0] * 4, 0);
  test::on_every_target([&](const std::string&) {
    for (const Dtype dtype : {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32}) {
      std::vector<std::byte> out(32 * 4, std::byte{0xFF});
      const int32_t one = 1;
      AttendParams params;
      params.layer = batch.pool().layer();
      params.q = dense_tensor(batch.q.data(), Dtype::kFp32, 1, 1, 32);
      params.output.out = dense_tensor(out.data(), dtype, 1, 1, 32);
      params.q_lens = params.seq_lens = &one;
      params.num_seqs = 1;
      params.block_table = batch.table().data();
      params.block_table_stride = batch.table_stride();
      REQUIRE(run_attend(params).ok());  // without lse
      for (size_t i = 0; i < 32; ++i) {
        const auto* halves = reinterpret_cast<const uint16_t*>(out.data());
        // e2m1 * e4m3 has at most 7 significant bits, so every dtype holds it.
        const float value = dtype == Dtype::kFp32   ? reinterpret_cast<const float*>(out.data())[i]
                            : dtype == Dtype::kBf16 ? bf16_to_float(halves[i])
                                                    : fp16_to_float(halves[i]);
        REQUIRE(value == v[i]);
      }
    }
  });
}

TEST_CASE("dtype and strides of q, and strides of out, do not matter") {
  auto engine = test::random_engine(28);
  AttendBatch batch({1, 2, 4, 32, 16, kNvfp4, kBf16}, 4, {{3, 9}, {2, 5}}, engine);
  for (float& x : batch.q) x = bf16_to_float(float_to_bf16(x));
  const AttendResult expected = batch.run();
  // Heads outermost in q, every second element; tokens innermost in out.
  std::vector<uint16_t> q(4 * 5 * 32 * 2, 0x7FC0);
  for (size_t t = 0; t < 5; ++t)
    for (size_t h = 0; h < 4; ++h)
      for (size_t d = 0; d < 32; ++d)
        q[(h * 5 + t) * 64 + 2 * d] = float_to_bf16(batch.q[(t * 4 + h) * 32 + d]);
  std::vector<float> out(5 * 4 * 16, NAN);
  std::vector<float> lse(5 * 4, NAN);
  const int32_t q_lens[] = {3, 2};
  const int32_t seq_lens[] = {9, 5};
  AttendParams params;
  params.layer = batch.pool().layer();
  params.q = {q.data(), Dtype::kBf16, {5, 4, 32}, {64, 5 * 64, 2}};
  params.output.out = {out.data(), Dtype::kFp32, {5, 4, 16}, {1, 5, 20}};
  params.output.lse = lse.data();
  params.q_lens = q_lens;
  params.seq_lens = seq_lens;
  params.num_seqs = 2;
  params.block_table = batch.table().data();
  params.block_table_stride = batch.table_stride();
  params.scale = batch.scale;
  REQUIRE(run_attend(params).ok());
  CHECK(lse == expected.lse);
  for (size_t t = 0; t < 5; ++t)
    for (size_t h = 0; h < 4; ++h)
      for (size_t d = 0; d < 16; ++d)
        REQUIRE(out[t + 5 * h + 20 * d] == expected.out[(t * 4 + h) * 16 + d]);
}

TEST_CASE("the tensor scales reach the logits and the output") {
  auto engine = test::random_engine(29);
  AttendBatch batch({1, 1, 4, 32, 32, kNvfp4, kNvfp4}, 1, {{1, 20}}, engine);
  const AttendResult before = batch.run();
  batch.pool().layer().v_scale *= 2;
  const AttendResult doubled = batch.run();
  for (size_t i = 0; i < before.out.size(); ++i) CHECK(doubled.out[i] == 2 * before.out[i]);
  CHECK(doubled.lse == before.lse);
  batch.pool().layer().k_scale *= 2;
  CHECK(batch.run().lse != before.lse);
  check_close(batch.run(), batch.oracle());
}

}  // namespace
}  // namespace larder::kernels
