// attend on a GPU: formats, dims, groups, lengths, special values, long sequences.
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_case.h"
#include "tests/support/random.h"

namespace larder::test {
namespace {

constexpr KvFormat kFormats[] = {KvFormat::kBf16, KvFormat::kFp16, KvFormat::kFp8E4m3,
                                 KvFormat::kFp8E5m2, KvFormat::kNvfp4};
constexpr MlaRow kMlaRows[] = {MlaRow::kNvfp4Ds, MlaRow::kFp8Ds, MlaRow::kFp8, MlaRow::kBf16};

AttentionGeometry geometry(int32_t kv_heads, int32_t block_tokens, int32_t k_dim, int32_t v_dim,
                           KvFormat k, KvFormat v) {
  return {1, kv_heads, block_tokens, k_dim, v_dim, k, v};
}

const std::vector<Lengths> kRagged = {{1, 1}, {3, 40}, {0, 7}, {2, 33}, {1, 129}, {5, 5}};

TEST_CASE("every pair of formats gives the CPU's result, at every dim in use") {
  if (!has_gpu()) return;
  auto engine = random_engine(7100);
  CAPTURE(seed());
  const int32_t dims[] = {64, 80, 96, 112, 128, 192, 256, 512};
  size_t turn = 0;
  for (const KvFormat k : kFormats)
    for (const KvFormat v : kFormats)
      for (int round = 0; round < 2; ++round) {
        const int32_t k_dim = dims[turn % 8];
        const int32_t v_dim = round == 0 ? k_dim : dims[turn / 8 % 8];
        ++turn;
        AttendCase one(geometry(2, 16, k_dim, v_dim, k, v), 8, kRagged, engine);
        one.check("formats");
      }
}

TEST_CASE("the largest, the smallest and odd dims") {
  if (!has_gpu()) return;
  auto engine = random_engine(7101);
  CAPTURE(seed());
  for (const auto& [k_dim, v_dim] :
       {std::pair{1024, 1024}, {1024, 16}, {16, 1024}, {1, 1}, {3, 130}, {131, 5}, {17, 257}})
    for (const int64_t heads : {2, 34}) {
      AttendCase one(geometry(2, 16, k_dim, v_dim, KvFormat::kBf16, KvFormat::kFp8E4m3), heads,
                     kRagged, engine);
      one.check("dims");
    }
}

TEST_CASE("every group size, with decode and prefill in one batch") {
  if (!has_gpu()) return;
  auto engine = random_engine(7102);
  CAPTURE(seed());
  for (int64_t group = 1; group <= 18; ++group)
    for (const bool is_prefill : {false, true}) {
      const std::vector<Lengths> lengths =
          is_prefill ? std::vector<Lengths>{{37, 50}, {1, 90}, {64, 64}} : kRagged;
      AttendCase one(geometry(3, 16, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4), 3 * group,
                     lengths, engine);
      one.check("group");
    }
}

TEST_CASE("MLA rows of every format, 1 to 128 heads") {
  if (!has_gpu()) return;
  auto engine = random_engine(7103);
  CAPTURE(seed());
  for (const MlaRow row : kMlaRows)
    for (const int64_t heads : {1, 16, 20, 128}) {
      AttendCase one(mla_geometry(1, 64, row), heads, {{1, 70}, {3, 200}, {2, 1}, {0, 0}}, engine);
      const Outputs expected = one.run_cpu();
      for (const int32_t splits : {0, 1, 3}) {
        one.params.num_splits = splits;
        one.check("mla", expected);
      }
    }
}

TEST_CASE("blocks of any size") {
  if (!has_gpu()) return;
  auto engine = random_engine(7104);
  CAPTURE(seed());
  for (const int32_t block_tokens : {1, 3, 16, 64, 1024, 4096})
    for (const KvFormat format : {KvFormat::kNvfp4, KvFormat::kFp16}) {
      AttendCase one(geometry(2, block_tokens, 96, 96, format, format), 4,
                     {{1, 100}, {4, 65}, {2, 2}}, engine);
      one.check("blocks");
    }
}

TEST_CASE("pages that begin at odd bytes") {
  if (!has_gpu()) return;
  auto engine = random_engine(7105);
  CAPTURE(seed());
  for (const KvFormat k : kFormats)
    for (const KvFormat v : kFormats) {
      AttendCase one(geometry(1, 1, 16, 16, k, v), 2, {{1, 40}, {2, 9}}, engine, 3);
      one.check("odd bytes");
    }
  for (const MlaRow row : kMlaRows) {
    AttendCase one(mla_geometry(1, 1, row), 4, {{1, 40}, {2, 9}}, engine, 1);
    one.check("odd bytes");
  }
}

TEST_CASE("no sequences, no rows, and rows without a key") {
  if (!has_gpu()) return;
  auto engine = random_engine(7106);
  CAPTURE(seed());
  const AttentionGeometry small = geometry(1, 16, 64, 64, KvFormat::kBf16, KvFormat::kBf16);
  for (const auto& lengths :
       {std::vector<Lengths>{}, {{0, 0}}, {{0, 30}}, {{3, 0}}, {{5, 2}, {0, 4}, {1, 0}}})
    for (const int32_t splits : {0, 1, 8})
      for (const bool includes_sink : {false, true}) {
        AttendCase one(small, 4, lengths, engine);
        one.params.num_splits = splits;
        one.spec.lse_form.includes_sink = includes_sink;
        one.set_sinks(engine);
        one.check("empty");
      }
}

TEST_CASE("thousands of sequences, most of them without a row") {
  if (!has_gpu()) return;
  auto engine = random_engine(7107);
  CAPTURE(seed());
  std::vector<Lengths> lengths;
  for (int i = 0; i < 3000; ++i) {
    const auto q_len = static_cast<int32_t>(engine() % 5 == 0 ? 1 + engine() % 3 : 0);
    lengths.push_back({q_len, static_cast<int32_t>(engine() % 9)});
  }
  AttendCase one(geometry(1, 16, 32, 32, KvFormat::kFp8E4m3, KvFormat::kFp8E4m3), 2, lengths,
                 engine);
  one.check("thousands");
}

TEST_CASE("a NaN or an infinity shows in the rows that see it and in no other") {
  if (!has_gpu()) return;
  auto engine = random_engine(7108);
  CAPTURE(seed());
  for (const float special : {NAN, INFINITY, -INFINITY})
    for (const bool is_key : {true, false})
      for (const bool masked : {true, false})
        for (const int32_t splits : {1, 3}) {
          AttendCase one(geometry(1, 16, 64, 64, KvFormat::kBf16, KvFormat::kBf16), 2,
                         {{40, 60}, {1, 30}}, engine);
          // Token 41 of the first sequence: its rows from 21 on see it.
          const StoredBytes row = one.stored(0, 41, 0, is_key);
          put_half(row.data + 2 * 7, std::isnan(special) ? 0x7FC0 : special > 0 ? 0x7F80 : 0xFF80);
          if (masked) one.set_random_mask(engine);
          one.params.num_splits = splits;
          one.check("special value " + std::to_string(special) + (is_key ? " in K" : " in V"));
        }
}

// V is 0.1 everywhere, so every output is that value, however many keys are weighed: a float32 sum
// of a million equal values would be 0.7 % off.
TEST_CASE("a sequence of a million tokens is summed without drift") {
  if (!has_gpu()) return;
  auto engine = random_engine(7109);
  CAPTURE(seed());
  constexpr int32_t kTokens = 1 << 20;
  AttendCase one(geometry(1, 1024, 16, 16, KvFormat::kFp8E4m3, KvFormat::kBf16), 2, {{2, kTokens}},
                 engine);
  const Outputs of_random = one.run_cpu();
  for (const int32_t splits : {0, 1, 8}) {
    one.params.num_splits = splits;
    one.check("a million random tokens", of_random);
  }
  for (int32_t token = 0; token < kTokens; ++token) {
    std::memset(one.stored(0, token, 0, true).data, 0x38, 16);  // equal keys
    for (int i = 0; i < 16; ++i)
      put_half(one.stored(0, token, 0, false).data + 2 * i, nearest_bf16(0.1f));
  }
  const Outputs of_equal = one.run_cpu();
  for (const int32_t splits : {0, 1, 8}) {
    one.params.num_splits = splits;
    for (const AttendCase::CudaRun& run : one.check("a million equal tokens", of_equal)) {
      double worst = 0;
      for (int64_t i = 0; i < one.num_rows * 2 * 16; ++i)
        worst = std::max(worst, std::fabs(element(run.outputs.out, Dtype::kFp32, i) /
                                              bf16_value(nearest_bf16(0.1f)) -
                                          1));
      CAPTURE(run.row);
      CAPTURE(splits);
      CHECK(worst < 1e-3);
    }
  }
}

TEST_CASE("a prefill of some hundred rows in two sequences") {
  if (!has_gpu()) return;
  auto engine = random_engine(7110);
  CAPTURE(seed());
  for (const int32_t window : {-1, 50}) {
    AttendCase one(geometry(2, 16, 128, 128, KvFormat::kNvfp4, KvFormat::kNvfp4), 8,
                   {{300, 520}, {211, 211}}, engine);
    one.params.window_left = window;
    one.check("prefill");
  }
}

}  // namespace
}  // namespace larder::test
