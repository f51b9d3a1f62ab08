// merge: joining results over disjoint keys.
#include <cmath>
#include <functional>
#include <limits>

#include <doctest/doctest.h>

#include "tests/kernels/kernel_targets.h"
#include "tests/kernels/partial_attention.h"
#include "tests/support/random.h"

namespace larder::kernels {
namespace {

using test::Parts;

constexpr float kInfinity = std::numeric_limits<float>::infinity();
const float kNan = std::nanf("");

// A state of [rows, heads, dim] values and their LSEs.
struct State {
  std::vector<float> out;
  std::vector<float> lse;
  bool operator==(const State&) const = default;
};

struct MergeCall {
  MergeCall(int64_t num_rows, int64_t num_heads, int64_t head_dim)
      : rows(num_rows), heads(num_heads), dim(head_dim) {}

  void add(std::vector<float> out, std::vector<float> lse) {
    states.push_back({std::move(out), std::move(lse)});
  }

  MergeParams params(State& result) {
    outs.clear();
    lses.clear();
    for (State& state : states) {
      outs.push_back(dense_tensor(state.out.data(), Dtype::kFp32, rows, heads, dim));
      lses.push_back(state.lse.data());
    }
    result.out.assign(static_cast<size_t>(rows * heads * dim), NAN);
    result.lse.assign(static_cast<size_t>(rows * heads), NAN);
    MergeParams params;
    params.outs = outs.data();
    params.lses = lses.data();
    params.num_states = static_cast<int64_t>(states.size());
    params.sinks = sinks.empty() ? nullptr : sinks.data();
    params.output.out = dense_tensor(result.out.data(), Dtype::kFp32, rows, heads, dim);
    params.output.lse = result.lse.data();
    return params;
  }

  State run(const std::function<void(MergeParams&)>& change = {}) {
    State result;
    MergeParams call = params(result);
    if (change) change(call);
    const Status status = run_merge(call);
    LARDER_CHECK(status.ok(), status.to_string());
    return result;
  }

  int64_t rows, heads, dim;
  std::vector<State> states;
  std::vector<float> sinks;
  std::vector<TensorView> outs;
  std::vector<const float*> lses;
};

TEST_CASE("two empty states are an empty state, whatever they hold") {
  for (const float none : {-kInfinity, kInfinity, kNan}) {
    MergeCall call(1, 1, 2);
    call.add({0, 0}, {none});
    call.add({kNan, kInfinity}, {-kInfinity});
    CHECK(call.run() == State{{0, 0}, {-kInfinity}});
    call.sinks = {1.0f};
    CHECK(call.run() == State{{0, 0}, {-kInfinity}});
    const State with_sink = call.run([](auto& p) { p.output.lse_form.includes_sink = true; });
    CHECK(with_sink == State{{0, 0}, {1.0f}});
  }
}

TEST_CASE("a state that counts alone is passed on exactly") {
  auto engine = test::random_engine(100);
  CAPTURE(test::seed());
  for (const float none : {-kInfinity, kInfinity, kNan})
    for (int round = 0; round < 200; ++round) {
      const float lse = std::ldexp(static_cast<float>(engine() % 20000) - 10000.0f,
                                   static_cast<int>(engine() % 20) - 12);
      const std::vector<float> out = {std::bit_cast<float>(static_cast<uint32_t>(engine() >> 34)),
                                      -0.0f, kInfinity, 1e-45f};
      MergeCall call(1, 1, 4);
      call.add({kNan, kNan, kInfinity, 1}, {none});
      call.add(out, {lse});
      call.add({3, 4, 5, 6}, {-kInfinity});
      for (const bool base2 : {false, true}) {
        const State got =
            call.run([&](auto& p) { p.state_form.base2 = p.output.lse_form.base2 = base2; });
        for (size_t i = 0; i < out.size(); ++i)
          REQUIRE(std::bit_cast<uint32_t>(got.out[i]) == std::bit_cast<uint32_t>(out[i]));
        REQUIRE(got.lse[0] == lse);
      }
    }
}

TEST_CASE("three states with weights worked out by hand") {
  MergeCall call(1, 1, 2);
  call.add({1, 10}, {0.0f});
  call.add({2, 20}, {std::log(2.0f)});
  call.add({4, 40}, {std::log(5.0f)});
  test::on_every_target([&](const std::string& target) {
    CAPTURE(target);
    const State got = call.run();
    CHECK(got.out[0] == doctest::Approx(25.0 / 8));
    CHECK(got.out[1] == doctest::Approx(250.0 / 8));
    CHECK(got.lse[0] == doctest::Approx(std::log(8.0)));
    call.sinks = {std::log(2.0f)};
    const State sunk = call.run();
    CHECK(sunk.out[0] == doctest::Approx(2.5));
    CHECK(sunk.lse[0] == doctest::Approx(std::log(8.0)));
    const State inclusive = call.run([](auto& p) { p.output.lse_form = {true, true, false}; });
    CHECK(inclusive.lse[0] == doctest::Approx(std::log2(10.0)));
    call.sinks.clear();
  });
}

TEST_CASE("lses far from zero neither overflow nor vanish") {
  for (const float shift : {3e38f, -3e38f, 1e6f, -1e6f}) {
    MergeCall call(1, 1, 1);
    call.add({1}, {shift});
    call.add({3}, {shift});
    CHECK(call.run() ==
          State{{2}, {call.states[0].lse[0] + (std::fabs(shift) > 1e7f ? 0.0f : std::log(2.0f))}});
  }
}

TEST_CASE("halves, and uneven parts, merge to the whole attention with sinks applied once") {
  auto engine = test::random_engine(101);
  CAPTURE(test::seed());
  Parts parts(engine);
  const test::DenseResult whole = parts.batch.oracle();
  for (const std::vector<int>& edges : {std::vector<int>{0, 128, 256},
                                        {0, 0, 1, 200, 256},
                                        {0, 256},
                                        {0, 3, 3, 64, 65, 256, 256}}) {
    MergeCall call(3, 6, 32);
    for (size_t i = 0; i + 1 < edges.size(); ++i) {
      const auto part = parts.part([&](int k) { return k >= edges[i] && k < edges[i + 1]; });
      call.add(part.out, part.lse);
    }
    call.sinks = parts.batch.sinks;
    test::on_every_target([&](const std::string& target) {
      CAPTURE(target);
      const State got = call.run();
      const test::Closeness closeness = compare({got.out, got.lse}, whole);
      CHECK(closeness.lse <= 1e-5);
      CHECK(closeness.out <= 1e-5);
    });
  }
}

// [rows, heads] in the form: heads first, base 2.
std::vector<float> to_form(const std::vector<float>& lse, size_t rows, LseForm form) {
  std::vector<float> result(lse.size());
  const size_t heads = lse.size() / rows;
  for (size_t row = 0; row < rows; ++row)
    for (size_t head = 0; head < heads; ++head) {
      const double value = lse[row * heads + head] / (form.base2 ? std::log(2.0) : 1.0);
      result[form.heads_first ? head * rows + row : row * heads + head] = static_cast<float>(value);
    }
  return result;
}

TEST_CASE("merge takes and gives every form of lse and every dtype, at any strides") {
  auto engine = test::random_engine(102);
  CAPTURE(test::seed());
  Parts parts(engine);
  const test::DenseResult whole = parts.batch.oracle();
  const auto low = parts.part([](int k) { return k < 77; });
  const auto high = parts.part([](int k) { return k >= 77; });
  for (int bits = 0; bits < 16; ++bits) {
    const LseForm in = {(bits & 1) != 0, false, (bits & 2) != 0};
    const LseForm out = {(bits & 4) != 0, false, (bits & 8) != 0};
    MergeCall call(3, 6, 32);
    call.add(low.out, to_form(low.lse, 3, in));
    call.add(high.out, to_form(high.lse, 3, in));
    call.sinks = parts.batch.sinks;
    // Heads outermost in the second state, as bf16; tokens innermost in the result.
    std::vector<uint16_t> halves(3 * 6 * 32);
    for (size_t row = 0; row < 3; ++row)
      for (size_t head = 0; head < 6; ++head)
        for (size_t d = 0; d < 32; ++d)
          halves[(head * 3 + row) * 32 + d] =
              test::nearest_bf16(high.out[(row * 6 + head) * 32 + d]);
    std::vector<float> columns(3 * 6 * 32, NAN);
    const State got = call.run([&](MergeParams& p) {
      call.outs[1] = {halves.data(), Dtype::kBf16, {3, 6, 32}, {32, 96, 1}};
      p.state_form = in;
      p.output.lse_form = out;
      p.output.out = {columns.data(), Dtype::kFp32, {3, 6, 32}, {1, 3, 18}};
    });
    State dense = got;
    for (size_t row = 0; row < 3; ++row)
      for (size_t head = 0; head < 6; ++head)
        for (size_t d = 0; d < 32; ++d)
          dense.out[(row * 6 + head) * 32 + d] = columns[row + 3 * head + 18 * d];
    const std::vector<float> expected_lse = to_form({whole.lse.begin(), whole.lse.end()}, 3, out);
    for (size_t i = 0; i < 18; ++i)
      CHECK(got.lse[i] == doctest::Approx(expected_lse[i]).epsilon(1e-5));
    const std::vector<double> values(dense.out.begin(), dense.out.end());
    CHECK(test::relative_l2(values, whole.out) <= 3e-3);
  }
}

TEST_CASE("the result may take the place of a state") {
  auto engine = test::random_engine(103);
  Parts parts(engine);
  MergeCall call(3, 6, 32);
  for (const int third : {0, 1, 2}) {
    const auto part = parts.part([=](int k) { return k % 3 == third; });
    call.add(part.out, part.lse);
  }
  const State expected = call.run();
  for (size_t place = 0; place < 3; ++place) {
    MergeCall copy = call;
    copy.run([&](MergeParams& p) {
      p.output.out = copy.outs[place];
      p.output.lse = copy.states[place].lse.data();
    });
    CHECK(copy.states[place] == expected);
  }
}

TEST_CASE("merged results are stored as fp8 too") {
  MergeCall call(1, 1, 2);
  call.add({1, 1000}, {0.0f});
  call.add({3, 3000}, {0.0f});
  uint8_t out[2] = {};
  call.run([&](auto& p) {
    p.output.out = dense_tensor(out, Dtype::kFp8E4m3, 1, 1, 2);
    p.output.out_scale = 2;
  });
  CHECK(out[0] == 0x38);  // 1
  CHECK(out[1] == 0x7E);  // 1000, past 448
}

void check_refused(const std::string& part,
                   const std::function<void(MergeCall&, MergeParams&)>& change) {
  MergeCall call(2, 2, 4);
  for (int i = 0; i < 2; ++i) call.add(std::vector<float>(16, 1.0f), std::vector<float>(4, 0.0f));
  State result;
  MergeParams params = call.params(result);
  change(call, params);
  const Status status = run_merge(params);
  CAPTURE(status.to_string());
  CAPTURE(part);
  CHECK(status.code() == ErrorCode::kInvalidArgument);
  CHECK(status.message().find(part) != std::string::npos);
  for (const float x : result.out) REQUIRE(std::isnan(x));
}

TEST_CASE("merges that cannot be are refused") {
  check_refused("num_states is 0: expected 1 to 4096", [](auto&, auto& p) { p.num_states = 0; });
  check_refused("num_states is 4097", [](auto&, auto& p) { p.num_states = 4097; });
  check_refused("outs is null", [](auto&, auto& p) { p.outs = nullptr; });
  check_refused("lses is null", [](auto&, auto& p) { p.lses = nullptr; });
  check_refused("lses[1] is null", [](auto& c, auto&) { c.lses[1] = nullptr; });
  check_refused("outs[1]: dtype is fp8_e4m3",
                [](auto& c, auto&) { c.outs[1].dtype = Dtype::kFp8E4m3; });
  check_refused("outs[0]: dtype is e2m1x2",
                [](auto& c, auto&) { c.outs[0].dtype = Dtype::kE2m1x2; });
  check_refused("outs[1] is [2, 2, 3]: expected [rows, 2, 4]",
                [](auto& c, auto&) { c.outs[1].shape[2] = 3; });
  check_refused("outs[1] has 1 rows: outs[0] has 2",
                [](auto& c, auto&) { c.outs[1].shape[0] = 1; });
  check_refused("outs[0] is [2, 0, 4]", [](auto& c, auto&) { c.outs[0].shape[1] = 0; });
  check_refused("outs[0] is [2, 2, 1025]", [](auto& c, auto&) { c.outs[0].shape[2] = 1025; });
  check_refused("out has 3 rows: expected 2", [](auto&, auto& p) { p.output.out.shape[0] = 3; });
  check_refused("out: the stride of axis 2 is 0",
                [](auto&, auto& p) { p.output.out.strides[2] = 0; });
  check_refused("state_form includes sinks",
                [](auto&, auto& p) { p.state_form.includes_sink = true; });
  check_refused("out begins where outs[1] does", [](auto& c, auto& p) {
    p.output.out = c.outs[1];
    p.output.out.strides = {4, 8, 1};
  });
  check_refused("lse is the memory of lses[0]", [](auto& c, auto& p) {
    p.output.lse = c.states[0].lse.data();
    p.output.lse_form.heads_first = true;
  });
}

}  // namespace
}  // namespace larder::kernels
