// combine: one rank's share of attention over keys that are spread over ranks.
#include <cmath>
#include <functional>
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/partial_attention.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Parts;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

// Keys interleaved over the ranks, as in decode context parallelism: position p is on rank
// (p / interleave) % ranks.
TEST_CASE("the ranks' shares add up to the whole attention") {
  auto engine = test::random_engine(104);
  CAPTURE(test::seed());
  Parts parts(engine);
  for (const bool with_sinks : {false, true})
    for (const std::pair<int, int>& layout : {std::pair{1, 1}, {4, 1}, {3, 16}, {5, 100}}) {
      const int ranks = layout.first;
      const int interleave = layout.second;
      if (!with_sinks)
        parts.batch.sinks.clear();
      else
        parts.batch.sinks = {0.5f, -1.0f, 3.0f, 7.0f, 0.0f, -kInfinity};
      parts.part([](int) { return true; });  // a mask that hides nothing, for the oracle
      const test::DenseResult whole = parts.batch.oracle();
      std::vector<test::AttendResult> shares;
      std::vector<float> lses;
      for (int rank = 0; rank < ranks; ++rank) {
        shares.push_back(parts.part([&](int k) { return k / interleave % ranks == rank; }));
        // A rank without keys may hold anything.
        if (std::isinf(shares.back().lse[0])) shares.back().out.assign(3 * 6 * 32, kNan);
        lses.insert(lses.end(), shares.back().lse.begin(), shares.back().lse.end());
      }
      std::vector<double> sum(3 * 6 * 32, 0.0);
      std::vector<float> total(18, kNan);
      for (int rank = 0; rank < ranks; ++rank) {
        auto& out = shares[static_cast<size_t>(rank)].out;
        CombineParams params;
        params.out = dense_tensor(out.data(), Dtype::kFp32, 3, 6, 32);
        params.lses = lses.data();
        params.num_ranks = ranks;
        params.rank = rank;
        params.sinks = with_sinks ? parts.batch.sinks.data() : nullptr;
        params.total_lse = total.data();
        REQUIRE(run_combine(params).ok());
        for (size_t i = 0; i < sum.size(); ++i) sum[i] += out[i];
        for (size_t i = 0; i < 18; ++i)
          CHECK(total[i] == doctest::Approx(whole.lse[i]).epsilon(1e-5));
        params.lse_form.includes_sink = true;
        if (rank == 0) {
          REQUIRE(run_combine(params).ok());
          for (size_t i = 0; i < 18; ++i)
            CHECK(
                total[i] ==
                doctest::Approx(with_sinks ? whole.lse_with_sink[i] : whole.lse[i]).epsilon(1e-5));
        }
      }
      CHECK(test::relative_l2(sum, whole.out) <= 1e-5);
    }
}

struct CombineCall {
  CombineCall() {
    params.out = dense_tensor(out, Dtype::kFp32, 1, 2, 2);
    params.lses = lses;
    params.num_ranks = 3;
    params.total_lse = total;
  }
  float out[4] = {8, 16, 24, 32};
  // [ranks, rows, heads]: head 0 has weights 1, 1, 2; head 1 has none on the others.
  float lses[6] = {0, 5, 0, kInfinity, std::log(2.0f), kNan};
  float total[2] = {kNan, kNan};
  CombineParams params;
};

TEST_CASE("a share is out times its part of the sum; broken lses of other ranks do not count") {
  CombineCall call;
  REQUIRE(run_combine(call.params).ok());
  CHECK(call.out[0] == doctest::Approx(2));
  CHECK(call.out[1] == doctest::Approx(4));
  CHECK(call.out[2] == 24.0f);
  CHECK(call.out[3] == 32.0f);
  CHECK(call.total[0] == doctest::Approx(std::log(4.0)));
  CHECK(call.total[1] == 5.0f);
}

TEST_CASE("a rank without keys gives zeros, also from NaN") {
  CombineCall call;
  call.params.rank = 1;
  call.out[2] = kNan;
  call.out[3] = kInfinity;
  REQUIRE(run_combine(call.params).ok());
  CHECK(call.out[0] == doctest::Approx(2));
  CHECK(call.out[2] == 0.0f);
  CHECK(call.out[3] == 0.0f);
  std::fill_n(call.lses, 6, -kInfinity);
  REQUIRE(run_combine(call.params).ok());
  for (const float x : call.out) CHECK(x == 0.0f);
  for (const float x : call.total) CHECK(x == -kInfinity);
}

TEST_CASE("lses of combine may be base 2 and heads first") {
  CombineCall call;
  // Two rows, one head of one row would look the same either way: rows 2, heads 2, dim 1.
  call.params.out = dense_tensor(call.out, Dtype::kFp32, 2, 2, 1);
  call.params.num_ranks = 2;
  const float lses[8] = {1, 2, 3, 4, 1, 3, 5, 7};  // [ranks, heads, rows]
  float total[4];
  call.params.lses = lses;
  call.params.total_lse = total;
  call.params.lse_form = {true, false, true};
  REQUIRE(run_combine(call.params).ok());
  CHECK(call.out[0] == doctest::Approx(8.0 / 2));   // row 0, head 0: 1 and 1
  CHECK(call.out[1] == doctest::Approx(16.0 / 5));  // row 0, head 1: 3 and 5
  CHECK(call.out[2] == doctest::Approx(24.0 / 3));  // row 1, head 0: 2 and 3
  CHECK(call.out[3] == doctest::Approx(32.0 / 9));  // row 1, head 1: 4 and 7
  CHECK(total[0] == doctest::Approx(2.0));
  CHECK(total[1] == doctest::Approx(std::log2(12.0)));  // head 0, row 1
  CHECK(total[2] == doctest::Approx(std::log2(40.0)));  // head 1, row 0
}

TEST_CASE("combines that cannot be are refused") {
  const auto refused = [](const std::string& part,
                          const std::function<void(CombineParams&)>& change) {
    CombineCall call;
    change(call.params);
    const Status status = run_combine(call.params);
    CAPTURE(status.to_string());
    CAPTURE(part);
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK(status.message().find(part) != std::string::npos);
    CHECK(call.out[0] == 8.0f);
    CHECK(std::isnan(call.total[0]));
  };
  refused("num_ranks is 0", [](auto& p) { p.num_ranks = 0; });
  refused("num_ranks is 4097", [](auto& p) { p.num_ranks = 4097; });
  refused("rank is 3: expected 0 to 2", [](auto& p) { p.rank = 3; });
  refused("rank is -1", [](auto& p) { p.rank = -1; });
  refused("lses is null: 6 entries", [](auto& p) { p.lses = nullptr; });
  refused("out: dtype is fp8_e4m3", [](auto& p) { p.out.dtype = Dtype::kFp8E4m3; });
  refused("out: the stride of axis 1 is 0", [](auto& p) { p.out.strides[1] = 0; });
  refused("out is [1, 5000, 2]", [](auto& p) { p.out.shape[1] = 5000; });
  refused("out: data is null", [](auto& p) { p.out.data = nullptr; });
  refused("total_lse is not aligned", [](auto& p) {
    p.total_lse = reinterpret_cast<float*>(reinterpret_cast<char*>(p.total_lse) + 2);
  });
}

}  // namespace
}  // namespace larder::kernels
