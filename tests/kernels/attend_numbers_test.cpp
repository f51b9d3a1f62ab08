// Soft cap, sinks, splits and masks with numbers worked out by hand.
#include <cmath>
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/small_pool.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::AttendBatch;
using test::AttendResult;
using test::Side;
using test::SmallPool;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// A query row of 16 elements whose first one is x.
std::vector<float> query(float x) {
  std::vector<float> q(16, 0.0f);
  q[0] = x;
  return q;
}

TEST_CASE("the soft cap bends logits before masking") {
  SmallPool small(16);
  small.set(Side::kK, 0, 0, 100.0f);
  small.set(Side::kK, 1, 0, 98.0f);
  small.set(Side::kV, 0, 0, 1.0f);
  for (int64_t token = 2; token < 4; ++token) small.set(Side::kV, token, 0, 1000.0f);
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    const auto run = [&](float cap, int32_t seq_len) {
      return small.run(query(1), seq_len, 1.0f,
                       [&](AttendParams& params) { params.soft_cap = cap; });
    };
    CHECK(run(50, 2).out[0] == doctest::Approx(0.5367).epsilon(1e-4));
    CHECK(run(0, 2).out[0] == doctest::Approx(0.8808).epsilon(1e-4));
    CHECK(run(50, 1).lse[0] == doctest::Approx(50 * std::tanh(2.0)).epsilon(1e-6));
    // A cap that no logit comes near changes nothing to speak of; a tiny one makes all logits 0.
    CHECK(run(1e30f, 2).out[0] == doctest::Approx(0.8808).epsilon(1e-4));
    CHECK(run(1e-38f, 2).out[0] == doctest::Approx(0.5).epsilon(1e-6));
    CHECK(run(1e-38f, 2).lse[0] == doctest::Approx(std::log(2.0)).epsilon(1e-6));
  });
}

TEST_CASE("an infinite logit is capped like any other; a NaN stays") {
  SmallPool small(16);
  small.set(Side::kK, 0, 0, -kInfinity);
  small.set(Side::kV, 0, 0, 3.0f);
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    const auto capped = [&] {
      return small.run(query(1), 1, 1.0f, [](AttendParams& params) { params.soft_cap = 5; });
    };
    small.set(Side::kK, 0, 0, -kInfinity);
    CHECK(capped().out[0] == 3.0f);
    CHECK(capped().lse[0] == doctest::Approx(-5));
    small.set(Side::kK, 0, 0, kNan);
    CHECK(std::isnan(capped().out[0]));
    CHECK(std::isnan(capped().lse[0]));
  });
}

// Keys with logit 0 and V = 1 in element 0.
struct SinkCall {
  SinkCall() : small(16, 16) {
    for (int64_t token = 0; token < 16; ++token) small.set(Side::kV, token, 0, 1.0f);
  }
  AttendResult run(int32_t seq_len, const std::function<void(AttendParams&)>& change = {}) {
    return small.run(query(0), seq_len, 1.0f, [&](AttendParams& params) {
      params.sinks = &sink;
      params.output.lse_form.includes_sink = includes_sink;
      if (change) change(params);
    });
  }
  SmallPool small;
  float sink = 0;
  bool includes_sink = false;
};

TEST_CASE("a sink counts once in the denominator, with any number of splits") {
  SinkCall call;
  for (const int32_t splits : {0, 1, 2, 8, 4096}) {
    CAPTURE(splits);
    const auto in_splits = [=](AttendParams& params) { params.num_splits = splits; };
    AttendResult result = call.run(3, in_splits);
    CHECK(result.out[0] == doctest::Approx(0.75));
    CHECK(result.lse[0] == doctest::Approx(std::log(3.0)));
    call.includes_sink = true;
    CHECK(call.run(3, in_splits).lse[0] == doctest::Approx(std::log(4.0)));
    call.includes_sink = false;
    // A mask that leaves the first split without a key: keys 5, 6 and 7 of 8.
    const uint8_t mask = 0xE0;
    const int64_t offset = 0;
    result = call.run(8, [&](AttendParams& params) {
      params.num_splits = splits;
      params.mask = &mask;
      params.mask_offsets = &offset;
      params.mask_bytes = 1;
    });
    CHECK(result.out[0] == doctest::Approx(0.75));
    CHECK(result.lse[0] == doctest::Approx(std::log(3.0)));
    result = call.run(12, [&](AttendParams& params) {
      params.num_splits = splits;
      params.window_left = 2;
      params.soft_cap = 7;
    });
    CHECK(result.out[0] == doctest::Approx(0.75));
    CHECK(result.lse[0] == doctest::Approx(std::log(3.0)));
  }
}

TEST_CASE("without keys a sink gives zeros, and its own value as the lse that includes it") {
  SinkCall call;
  call.sink = 2.5f;
  AttendResult result = call.run(0);
  for (const float x : result.out) CHECK(x == 0.0f);
  CHECK(result.lse[0] == -kInfinity);
  call.includes_sink = true;
  CHECK(call.run(0).lse[0] == 2.5f);
  call.sink = kNan;
  CHECK(call.run(0).out[0] == 0.0f);
}

TEST_CASE("sinks at the ends of the floats, and NaN") {
  SinkCall call;
  call.small.set(Side::kV, 0, 1, kInfinity);
  call.sink = kInfinity;
  AttendResult result = call.run(3);
  for (const float x : result.out) CHECK(x == 0.0f);
  CHECK(result.lse[0] == doctest::Approx(std::log(3.0)));
  call.includes_sink = true;
  CHECK(call.run(3).lse[0] == kInfinity);
  call.sink = -kInfinity;
  CHECK(call.run(3).out[0] == doctest::Approx(1.0));
  CHECK(call.run(3).lse[0] == doctest::Approx(std::log(3.0)));
  call.sink = 1e30f;
  CHECK(call.run(3).out[0] == 0.0f);
  CHECK(call.run(3).lse[0] == 1e30f);
  call.sink = kNan;
  CHECK(std::isnan(call.run(3).out[0]));
  CHECK(std::isnan(call.run(3).lse[0]));
  call.includes_sink = false;
  CHECK(call.run(3).lse[0] == doctest::Approx(std::log(3.0)));
}

TEST_CASE("eight splits of three tokens are the result of one") {
  auto engine = test::random_engine(70);
  CAPTURE(test::seed());
  AttendBatch batch({1, 1, 16, 64, 64, KvFormat::kNvfp4, KvFormat::kNvfp4}, 2, {{2, 3}}, engine);
  batch.num_splits = 1;
  const AttendResult one = batch.run();
  batch.num_splits = 8;
  const AttendResult eight = batch.run();
  for (size_t i = 0; i < one.out.size(); ++i) CHECK(std::fabs(one.out[i] - eight.out[i]) < 1e-5);
  for (size_t i = 0; i < one.lse.size(); ++i) CHECK(std::fabs(one.lse[i] - eight.lse[i]) < 1e-5);
}

TEST_CASE("a NaN key shows in whichever split it lies") {
  SinkCall call;
  call.small.set(Side::kK, 5, 0, kNan);
  for (const int32_t splits : {1, 2, 3, 16}) {
    const AttendResult result = call.run(9, [=](AttendParams& params) {
      params.sinks = nullptr;
      params.num_splits = splits;
    });
    CHECK(std::isnan(result.out[0]));
    CHECK(std::isnan(result.lse[0]));
  }
}

TEST_CASE("keys that the mask hides never reach the result, whatever their bytes") {
  SmallPool small(16, 16);
  for (int64_t token = 0; token < 16; ++token)
    for (size_t d = 0; d < 16; ++d) {
      small.set(Side::kK, token, d, token % 3 == 0 ? 0.0f : kNan);
      small.set(Side::kV, token, d, token % 3 == 0 ? static_cast<float>(token) : kNan);
    }
  // Row 0 sees keys 0, 3 and 12; row 1 sees none; row 2 sees key 15, which causality would hide
  // from rows before it.
  std::vector<uint8_t> mask(6, 0);
  const auto see = [&](size_t row, size_t key) {
    mask[(row * 16 + key) / 8] = static_cast<uint8_t>(mask[(row * 16 + key) / 8] | 1 << key % 8);
  };
  for (const size_t key : {0, 3, 12}) see(0, key);
  see(2, 15);
  const int64_t offset = 0;
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    const AttendResult result =
        small.run(std::vector<float>(48, 1.0f), 16, -0.5f, [&](AttendParams& params) {
          params.mask = mask.data();
          params.mask_offsets = &offset;
          params.mask_bytes = 6;
        });
    CHECK(result.out[0] == doctest::Approx(5.0));
    CHECK(result.lse[0] == doctest::Approx(std::log(3.0)));
    CHECK(result.out[16] == 0.0f);
    CHECK(result.lse[1] == -kInfinity);
    CHECK(result.out[32] == 15.0f);
    CHECK(result.lse[2] == 0.0f);
  });
}

TEST_CASE("ALiBi counts from the row's number in its call, and reaches far keys") {
  SmallPool small(16, 16);
  for (int64_t token = 0; token < 16; ++token)
    small.set(Side::kV, token, 0, static_cast<float>(token));
  const float slope = 0.5f;
  const AttendResult result =
      small.run(std::vector<float>(32, 0.0f), 4, 1.0f,
                [&](AttendParams& params) { params.alibi_slopes = &slope; });
  // Row 0 sees keys 0 to 2 with logits 0, 0.5 and 1; row 1 keys 0 to 3 with -0.5, 0, 0.5 and 1.
  const double first = 1 + std::exp(0.5) + std::exp(1.0);
  CHECK(result.lse[0] == doctest::Approx(std::log(first)).epsilon(1e-6));
  CHECK(result.out[0] == doctest::Approx((std::exp(0.5) + 2 * std::exp(1.0)) / first));
  const double second = std::exp(-0.5) + first;
  CHECK(result.lse[1] == doctest::Approx(std::log(second)).epsilon(1e-6));
}

TEST_CASE("256 keys of logit 0 have lse 5.5452, or 8 in base 2, on every path") {
  auto engine = test::random_engine(71);
  for (const MlaRow row : {MlaRow::kNone, MlaRow::kBf16})
    for (const int32_t q_len : {1, 65})
      for (const int32_t splits : {0, 1, 7}) {
        const AttentionGeometry geometry =
            row == MlaRow::kNone
                ? AttentionGeometry{1, 1, 16, 32, 32, KvFormat::kNvfp4, KvFormat::kBf16}
                : mla_geometry(1, 16, row);
        AttendBatch batch(geometry, 2, {{q_len, 256}}, engine);
        std::fill(batch.q.begin(), batch.q.end(), 0.0f);
        batch.causal = false;
        batch.num_splits = splits;
        for (const float lse : batch.run().lse) CHECK(lse == doctest::Approx(5.5452).epsilon(1e-5));
        batch.lse_form.base2 = true;
        for (const float lse : batch.run().lse) CHECK(lse == doctest::Approx(8.0).epsilon(1e-6));
      }
}

}  // namespace
}  // namespace larder::kernels
