// Faults that attention kernels of other projects had, with values that tell them, on every CUDA
// row: expected are numbers that follow from the definition, not another kernel's.
#include <algorithm>
#include <cmath>
#include <cstring>

#include <doctest/doctest.h>

#include "tests/kernels/cuda/attend_decode_support.h"

namespace larder::test {
namespace {

// A stored row as its readers see it, from the definitions of the formats.
std::vector<double> values_of(const StoredBytes& row, double scale) {
  std::vector<double> values;
  for (int64_t i = 0; i < row.dim; ++i) {
    uint16_t half = 0;
    if (row.format == KvFormat::kNvfp4) {
      const int pair = std::to_integer<int>(row.data[i / 2]);
      values.push_back(e2m1_value(i % 2 == 0 ? pair & 15 : pair >> 4) *
                       e4m3_value(std::to_integer<int>(row.scales[i / 16])) * scale);
    } else if (row.format == KvFormat::kFp8E4m3) {
      values.push_back(e4m3_value(std::to_integer<int>(row.data[i])) * scale);
    } else {
      std::memcpy(&half, row.data + 2 * i, 2);
      values.push_back(row.format == KvFormat::kBf16 ? bf16_value(half) : fp16_value(half));
    }
  }
  return values;
}

// All elements of a row: `value`, which is one that every format has with a scale of 1.
void set_row(const StoredBytes& row, float value) {
  const auto e4m3 = static_cast<std::byte>(nearest_e4m3(value));
  const auto scale = static_cast<std::byte>(nearest_e4m3(std::fabs(value)));
  const int e2m1 = nearest_e2m1(value < 0 ? -1.0 : 1.0);
  for (int64_t i = 0; i < row.dim; ++i) switch (row.format) {
      case KvFormat::kNvfp4:
        row.data[i / 2] = static_cast<std::byte>(e2m1 | e2m1 << 4);
        row.scales[i / 16] = scale;
        break;
      case KvFormat::kBf16:
        put_half(row.data + 2 * i, nearest_bf16(value));
        break;
      case KvFormat::kFp16:
        put_half(row.data + 2 * i, nearest_fp16(value));
        break;
      default:
        row.data[i] = e4m3;
    }
}

void set_queries(AttendCase& one, float value) {
  const int64_t size = dtype_bytes(one.q_view.dtype);
  for (int64_t i = 0; i < static_cast<int64_t>(one.q.size()) / size; ++i)
    put_value(one.q, one.q_view.dtype, i, value);
}

double output_at(const AttendCase& one, const AttendCase::CudaRun& run, int64_t row, int64_t head,
                 int64_t i) {
  const int64_t dim = one.params.layer.geometry.v_dim;
  return element(run.outputs.out, one.spec.dtype, (row * one.num_q_heads + head) * dim + i);
}
double lse_at(const AttendCase& one, const AttendCase::CudaRun& run, int64_t row, int64_t head) {
  return run.outputs.lse[static_cast<size_t>(row * one.num_q_heads + head)];
}

void check_near(double got, double expected, double tolerance, const AttendCase& one,
                const AttendCase::CudaRun& run, const std::string& what) {
  INFO(run.row << ", " << what << " is " << got << ", expected " << expected << ": "
               << one.describe());
  CHECK(std::fabs(got - expected) <= tolerance);
}

AttendCase plain_case(KvFormat format, const std::vector<Lengths>& lengths, int64_t heads,
                      std::mt19937_64& engine, int32_t dim = 128) {
  AttendCase one(decode_geometry(format, 1, 16, dim), heads, lengths, engine);
  one.params.layer.k_scale = one.params.layer.v_scale = 1.0f;
  return one;
}

TEST_CASE("the unwritten tail of the last block never reaches the mean of the others") {
  if (!has_gpu()) return;
  auto engine = random_engine(7600);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t seq_len : {1, 13, 15, 16, 17, 255, 257})
      for (const bool causal : {true, false}) {
        AttendCase one = plain_case(format, {{1, seq_len}}, 8, engine);
        set_queries(one, 0.0f);
        one.params.causal = causal;
        std::vector<double> mean(128, 0.0);
        for (int32_t token = 0; token < seq_len; ++token) {
          const auto v = values_of(one.stored(0, token, 0, false), 1.0);
          for (size_t i = 0; i < 128; ++i) mean[i] += v[i] / seq_len;
        }
        for (const auto& run : one.run_cuda()) {
          check_near(lse_at(one, run, 0, 7), std::log(seq_len), 1e-4, one, run, "lse");
          for (int64_t i = 0; i < 128; ++i)
            check_near(output_at(one, run, 0, 7, i), mean[static_cast<size_t>(i)],
                       1e-3 * std::max(1.0, std::fabs(mean[static_cast<size_t>(i)])), one, run,
                       "out");
        }
      }
}

TEST_CASE("lse is the natural logarithm or that to base 2, on decode and prefill, split or not") {
  if (!has_gpu()) return;
  auto engine = random_engine(7601);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t q_len : {1, 4, 100})
      for (const int32_t splits : {0, 1, 8})
        for (const bool base2 : {false, true}) {
          AttendCase one = plain_case(format, {{q_len, 256}}, 4, engine);
          set_queries(one, 0.0f);
          one.params.causal = false;
          one.params.num_splits = splits;
          one.spec.lse_form.base2 = base2;
          for (const auto& run : one.run_cuda())
            for (const int64_t row : {0, q_len - 1})
              check_near(lse_at(one, run, row, 3), base2 ? 8.0 : 5.545177, 1e-4, one, run, "lse");
        }
}

TEST_CASE("logits far below any finite sentinel still win when they are all there is") {
  if (!has_gpu()) return;
  auto engine = random_engine(7602);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t splits : {0, 1, 2}) {
      AttendCase one = plain_case(format, {{1, 1}}, 8, engine);
      set_queries(one, 64.0f);
      set_row(one.stored(0, 0, 0, true), -16.0f);
      const auto v = values_of(one.stored(0, 0, 0, false), 1.0);
      one.params.num_splits = splits;
      for (const auto& run : one.run_cuda()) {
        check_near(lse_at(one, run, 0, 0), -11585.2375, 0.01, one, run, "lse");
        for (int64_t i = 0; i < 128; ++i) {
          const double expected = v[static_cast<size_t>(i)];
          check_near(output_at(one, run, 0, 0, i), expected, 1e-3 * std::fabs(expected), one, run,
                     "out");
        }
      }
    }
}

// Two keys with logits of 100 and 98, values of 1 and of (nearly) nothing.
TEST_CASE("the soft cap bends the logits that are scaled and not yet masked") {
  if (!has_gpu()) return;
  auto engine = random_engine(7603);
  CAPTURE(seed());
  for (const KvFormat format : {KvFormat::kBf16, KvFormat::kFp16, KvFormat::kFp8E4m3})
    for (const float cap : {0.0f, 50.0f}) {
      AttendCase one = plain_case(format, {{1, 2}}, 8, engine);
      set_queries(one, 0.0f);
      for (int64_t head = 0; head < 8; ++head) {
        put_value(one.q, one.q_view.dtype, head * 128, 100.0f);
        put_value(one.q, one.q_view.dtype, head * 128 + 1, -2.0f);
      }
      one.params.scale = 1.0f;
      one.params.soft_cap = cap;
      for (const int64_t token : {0, 1}) {
        set_row(one.stored(0, token, 0, true), 0.0f);
        set_row(one.stored(0, token, 0, false), token == 0 ? 1.0f : 0.0f);
        const StoredBytes key = one.stored(0, token, 0, true);
        StoredBytes first = key;
        first.dim = token == 0 ? 1 : 2;
        set_row(first, 1.0f);
      }
      for (const auto& run : one.run_cuda())
        check_near(output_at(one, run, 0, 5, 17), cap > 0 ? 0.536748 : 0.880797, 1e-3, one, run,
                   "out");
    }
}

TEST_CASE("a sink counts once, split or not, and where a window leaves parts without keys") {
  if (!has_gpu()) return;
  auto engine = random_engine(7604);
  CAPTURE(seed());
  for (const KvFormat format : kDecodeFormats)
    for (const int32_t seq_len : {0, 3, 300})
      for (const int32_t splits : {0, 1, 2, 8})
        for (const bool includes_sink : {false, true}) {
          AttendCase one = plain_case(format, {{1, seq_len}}, 8, engine);
          set_queries(one, 0.0f);
          one.sinks.assign(8, 0.0f);
          one.params.num_splits = splits;
          one.spec.lse_form.includes_sink = includes_sink;
          if (seq_len == 300) one.params.window_left = 2;
          for (int64_t token = 0; token < seq_len; ++token)
            set_row(one.stored(0, token, 0, false), 1.0f);
          const double lse = seq_len == 0 ? 0.0 : std::log(includes_sink ? 4.0 : 3.0);
          for (const auto& run : one.run_cuda()) {
            if (seq_len == 0 && !includes_sink)
              CHECK(lse_at(one, run, 0, 2) == -INFINITY);
            else
              check_near(lse_at(one, run, 0, 2), lse, 1e-4, one, run, "lse");
            check_near(output_at(one, run, 0, 2, 9), seq_len == 0 ? 0.0 : 0.75, 5e-4, one, run,
                       "out");
          }
        }
}

// The sequence's blocks are a few that come again and again, in any order.
struct MillionTokens {
  explicit MillionTokens(std::mt19937_64& engine)
      : one(decode_geometry(KvFormat::kNvfp4, 1, 64, 64), 8, {{1, 7 * 64}}, engine) {
    const std::vector<int32_t> blocks(one.table.begin(), one.table.begin() + 7);
    one.params.block_table_stride = kTokens / 64;
    one.seq_lens[0] = kTokens;
    one.table.clear();
    for (int64_t i = 0; i < kTokens / 64; ++i)
      one.table.push_back(blocks[static_cast<size_t>(draw(engine, 0, 6))]);
  }
  // Of V from a token on.
  std::vector<double> mean(int64_t first) {
    std::vector<double> sum(64, 0.0);
    std::vector<std::vector<double>> rows(static_cast<size_t>(one.params.layer.num_blocks * 64));
    for (int64_t token = first; token < kTokens; ++token) {
      const int32_t block = one.table[static_cast<size_t>(token / 64)];
      auto& row = rows[static_cast<size_t>(block * 64 + token % 64)];
      if (row.empty()) row = values_of(one.stored(0, token, 0, false), one.params.layer.v_scale);
      for (size_t i = 0; i < 64; ++i) sum[i] += row[i];
    }
    for (double& value : sum) value /= static_cast<double>(kTokens - first);
    return sum;
  }
  static constexpr int32_t kTokens = 1 << 20;
  AttendCase one;
};

TEST_CASE("a million tokens give their mean, and a window of them that of the window") {
  if (!has_gpu()) return;
  auto engine = random_engine(7605);
  CAPTURE(seed());
  MillionTokens million(engine);
  AttendCase& one = million.one;
  one.check_tuned("a million random tokens");
  set_queries(one, 0.0f);
  for (const int32_t window : {-1, 511}) {
    const auto mean = million.mean(window < 0 ? 0 : MillionTokens::kTokens - 512);
    one.params.window_left = window;
    for (const int32_t splits : {0, 1, 8})
      for (const bool deterministic : {false, true}) {
        one.params.num_splits = splits;
        one.params.deterministic = deterministic;
        for (const auto& run : one.run_cuda()) {
          check_near(lse_at(one, run, 0, 5), window < 0 ? 13.862944 : 6.238325, 1e-4, one, run,
                     "lse");
          for (int64_t i = 0; i < 64; ++i)
            check_near(output_at(one, run, 0, 5, i), mean[static_cast<size_t>(i)], 1e-3, one, run,
                       "out");
          CHECK(run.fault_count == 0);
        }
      }
  }
}

// With V of 1 everywhere the output is 1: a float32 sum of a million of them may drift.
TEST_CASE("a million equal values keep their size") {
  if (!has_gpu()) return;
  auto engine = random_engine(7606);
  CAPTURE(seed());
  MillionTokens million(engine);
  AttendCase& one = million.one;
  set_queries(one, 0.01f);
  one.params.layer.v_scale = 1.0f;
  for (int64_t block = 0; block < one.params.layer.num_blocks; ++block)
    for (int64_t row = 0; row < 64; ++row)
      set_row(
          stored_bytes(one.params.layer,
                       one.pool.data() + block * one.params.layer.block_stride_bytes, row, false),
          1.0f);
  for (const int32_t splits : {0, 1, 8}) {
    one.params.num_splits = splits;
    for (const auto& run : one.run_cuda())
      for (const int64_t i : {0, 31, 63})
        check_near(output_at(one, run, 0, 7, i), 1.0, 1e-3, one, run, "out");
  }
}

// Looks at no data, so it needs no GPU.
TEST_CASE("caps and scales that the tuned row is too coarse for are not its own") {
  auto engine = random_engine(7608);
  const auto rows = kernels::attend_kernels();
  const auto row = std::find_if(rows.begin(), rows.end(),
                                [](const auto& one) { return one.name == kTunedAttend; });
  REQUIRE(row != rows.end());
  AttendCase one = plain_case(KvFormat::kNvfp4, {{1, 20}}, 8, engine);
  const auto takes = [&](auto change) {
    AttendCase changed = one;
    change(changed.params);
    return row
        ->supports(
            changed.call([](auto& values) { return values.empty() ? nullptr : values.data(); }))
        .ok();
  };
  CHECK(takes([](auto&) {}));
  CHECK(takes([](auto& params) { params.soft_cap = 128.0f; }));
  CHECK(!takes([](auto& params) { params.soft_cap = 129.0f; }));
  CHECK(!takes([](auto& params) { params.soft_cap = 1e-30f; }));
  CHECK(!takes([](auto& params) { params.scale = 0.0f; }));
  CHECK(!takes([](auto& params) { params.scale = -1.0f; }));
  CHECK(!takes([](auto& params) { params.layer.k_scale = 1e-30f; }));
  CHECK(!takes([](auto& params) { params.layer.v_scale = 1e30f; }));
}

}  // namespace
}  // namespace larder::test
