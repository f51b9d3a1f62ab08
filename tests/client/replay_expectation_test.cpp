// Expectations of replay files: when they hold, and what is said when they do not.
#include <cmath>
#include <limits>
#include <string>

#include <doctest/doctest.h>

#include "client/ctl/replay/expectation.h"

namespace larder::replay {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
constexpr float kInf = std::numeric_limits<float>::infinity();

Expectation parse(const std::string& text, const std::vector<std::string>& parts = {}) {
  const json value = json::parse(text);
  Problem problem;
  std::vector<std::string> references;
  Expectation expectation =
      parse_expectation(Cursor(value, "expect", problem), parts, nullptr, references);
  REQUIRE_MESSAGE(!problem.found(), problem.text());
  return expectation;
}

Value floats(std::vector<float> values) {
  const auto size = static_cast<int64_t>(values.size());
  return {Floats{{size, 1, 1}, std::move(values)}};
}

std::vector<Finding> findings(const Value& value, const std::string& text,
                              const Results& results = {}, JudgedOn judged_on = JudgedOn::kHost) {
  std::vector<std::string> parts;
  if (const auto* list = std::get_if<Parts>(&value.data))
    for (const Part& part : *list) parts.push_back(part.name);
  return judge(parse(text, parts), Outcome{{}, value}, results, judged_on);
}

bool holds(const Value& value, const std::string& text, const Results& results = {}) {
  const auto found = findings(value, text, results);
  REQUIRE(!found.empty());
  for (const Finding& finding : found) {
    CHECK(!finding.text.empty());
    if (!finding.holds) return false;
  }
  return true;
}

TEST_CASE("near takes a number, a list or a tensor, within both tolerances") {
  CHECK(holds(floats({1, 1}), R"({"near": 1})"));
  CHECK(holds(floats({1, 2}), R"({"near": [1, 2]})"));
  CHECK(holds(floats({1, 2}), R"({"near": [[1], [2]]})"));
  CHECK(holds(floats({1, 2}), R"({"near": {"shape": [2], "values": [1, 2]}})"));
  CHECK(holds(floats({1.0000009f}), R"({"near": 1})"));
  CHECK_FALSE(holds(floats({1.000002f}), R"({"near": 1})"));
  CHECK(holds(floats({1.5f}), R"({"near": 1, "atol": 0.5})"));
  CHECK(holds(floats({110}), R"({"near": 100, "rtol": 0.1})"));
  CHECK_FALSE(holds(floats({111}), R"({"near": 100, "rtol": 0.1})"));
  CHECK_FALSE(holds(floats({1, 2, 3}), R"({"near": [1, 2]})"));
  // Of nothing nothing can be said, except that it is nothing.
  CHECK_FALSE(holds(floats({}), R"({"near": 1})"));
  CHECK_FALSE(holds(floats({}), R"({"equal": 1})"));
  CHECK_FALSE(holds(floats({}), R"({"at_least": 1})"));
  CHECK_FALSE(holds(floats({}), R"({"at_most": 1})"));
  CHECK(holds(floats({}), R"({"near": []})"));
}

TEST_CASE("on a GPU the tolerance for it counts, where there is one") {
  const auto holds_on = [](JudgedOn judged_on, const std::string& text) {
    return findings(floats({1.001f}), text, {}, judged_on).at(0).holds;
  };
  const std::string wide = R"({"near": 1, "atol": 1e-4, "gpu_atol": 2e-3})";
  CHECK_FALSE(holds_on(JudgedOn::kHost, wide));
  CHECK(holds_on(JudgedOn::kGpu, wide));
  CHECK_FALSE(holds_on(JudgedOn::kGpu, R"({"near": 1, "gpu_atol": 5e-4})"));
  CHECK_FALSE(holds_on(JudgedOn::kGpu, R"({"near": 1, "atol": 1e-4})"));
  CHECK(holds_on(JudgedOn::kGpu, R"({"near": 1, "atol": 2e-3})"));
  // In place of atol, also where it is less.
  CHECK_FALSE(holds_on(JudgedOn::kGpu, R"({"near": 1, "atol": 2e-3, "gpu_atol": 0})"));
}

TEST_CASE("equal infinities are near, a NaN never is") {
  CHECK(holds(floats({kInf, -kInf}), R"({"near": ["inf", "-inf"]})"));
  CHECK_FALSE(holds(floats({kInf}), R"({"near": "-inf"})"));
  CHECK_FALSE(holds(floats({1e30f}), R"({"near": "inf"})"));
  CHECK_FALSE(holds(floats({kInf}), R"({"near": 1, "atol": 1e30})"));
  CHECK_FALSE(holds(floats({kNan}), R"({"near": "NaN"})"));
  CHECK_FALSE(holds(floats({kNan}), R"({"near": 1, "atol": "inf"})"));
  CHECK_FALSE(holds(floats({1}), R"({"near": "NaN"})"));
}

TEST_CASE("the largest error is reported with its place") {
  const auto found = findings({Floats{{2, 1, 2}, {1, 2, 3, 9}}}, R"({"near": [1, 2, 3.5, 4]})");
  REQUIRE(found.size() == 1);
  CHECK(found[0].largest_error == 5.0);
  CHECK(found[0].at == size_t{3});
  CHECK(found[0].text.find("largest error 5 at 3 (1, 0, 1)") != std::string::npos);
  CHECK(found[0].text.find("2 of 4 elements wrong, the first: element 2 (1, 0, 0) is 3, expected "
                           "3.5") != std::string::npos);
  const auto nan = findings(floats({1, kNan, 5}), R"({"near": 1})");
  CHECK(nan[0].at == size_t{1});
}

TEST_CASE("equal is bit for bit, and NaN equals NaN") {
  CHECK(holds(floats({kNan, 1}), R"({"equal": ["NaN", 1]})"));
  CHECK_FALSE(holds(floats({-0.0f}), R"({"equal": 0})"));
  CHECK(holds(floats({-0.0f}), R"({"equal": -0.0})"));
  // 0.1 is not a float32; the number in the file becomes one.
  CHECK(holds(floats({0.1f}), R"({"equal": 0.1})"));
  CHECK_FALSE(holds(floats({std::nextafter(0.1f, 1.0f)}), R"({"equal": 0.1})"));
  CHECK(holds({ByteString{0x42, 0x00}}, R"({"equal": "4200"})"));
  CHECK(holds({ByteString{0x42, 0x42}}, R"({"equal": 66})"));
  CHECK_FALSE(holds({ByteString{0x42, 0x00}}, R"({"equal": "42"})"));
  CHECK(holds({Blocks{{3, 1}, {1, 9}}}, R"({"equal": [3, 1]})"));
  CHECK(holds({Texts{"00ff", "01"}}, R"({"equal": ["00ff", "01"]})"));
  CHECK_FALSE(holds({Texts{"00ff"}}, R"({"equal": ["00fe"]})"));
  CHECK_FALSE(holds({Texts{"00ff"}}, R"({"equal": 1})"));
  CHECK(holds({9007199254740991.0}, R"({"equal": 9007199254740991})"));
  CHECK_FALSE(holds({}, R"({"equal": 1})"));
}

TEST_CASE("rel_l2 is the norm of the difference over the norm of what is expected") {
  // |(0.3, 0.4)| / |(3, 4)| = 0.1
  CHECK(holds(floats({3.3f, 4.4f}), R"({"rel_l2": {"to": [3, 4], "max": 0.1001}})"));
  CHECK_FALSE(holds(floats({3.3f, 4.4f}), R"({"rel_l2": {"to": [3, 4], "max": 0.0999}})"));
  CHECK(holds(floats({0, 0}), R"({"rel_l2": {"to": 0, "max": 0}})"));
  CHECK_FALSE(holds(floats({1, 0}), R"({"rel_l2": {"to": 0, "max": 1}})"));
  CHECK_FALSE(holds(floats({kNan, 0}), R"({"rel_l2": {"to": 1, "max": 100}})"));
}

TEST_CASE("other results, their parts and multiples") {
  Results results;
  results["a"] = {Parts{{"out", floats({1, 2})}, {"lse", floats({3})}}};
  results["x"] = floats({1, kNan});
  CHECK(holds(floats({2, 4}), R"({"near": {"of": "a", "part": "out", "times": 2}})", results));
  const Value same = {Parts{{"out", floats({1, 2})}, {"lse", floats({3})}}};
  const Value other = {Parts{{"out", floats({1, 2})}, {"lse", floats({4})}}};
  CHECK(holds(same, R"({"same_as": "a"})", results));
  CHECK_FALSE(holds(other, R"({"same_as": "a"})", results));
  CHECK(holds(other, R"({"differs_from": "a"})", results));
  CHECK(holds(other, R"({"out": {"same_as": "a"}, "lse": {"differs_from": "a"}})", results));
  CHECK(holds(other, R"({"lse": {"equal": {"of": "a", "times": 1.3333333333333333}}})", results));
  CHECK(holds(floats({1, kNan}), R"({"same_as": "x"})", results));
  CHECK_FALSE(holds(floats({1}), R"({"same_as": "x"})", results));
  CHECK(holds(floats({1}), R"({"differs_from": "x"})", results));
  CHECK_FALSE(holds(floats({1}), R"({"same_as": "nobody"})", results));
  CHECK_FALSE(holds(floats({1}), R"({"differs_from": "nobody"})", results));
  // Results of different kinds neither agree nor differ.
  CHECK_FALSE(holds(floats({1}), R"({"differs_from": "a"})", results));
  CHECK_FALSE(holds(floats({1}), R"({"same_as": "a"})", results));
}

TEST_CASE("blocks are the same with their generations alone") {
  Results results;
  results["b"] = {Blocks{{3, 1}}};
  CHECK(holds({Blocks{{3, 1}}}, R"({"same_as": "b"})", results));
  CHECK_FALSE(holds({Blocks{{3, 2}}}, R"({"same_as": "b"})", results));
}

TEST_CASE("bounds and uniqueness") {
  CHECK(holds(floats({1, 3}), R"({"at_least": 1, "at_most": 3})"));
  CHECK_FALSE(holds(floats({1, 4}), R"({"at_least": 1, "at_most": 3})"));
  CHECK_FALSE(holds(floats({kNan}), R"({"at_least": 1})"));
  CHECK(holds({Blocks{{3, 1}, {1, 9}}}, R"({"unique": true})"));
  CHECK_FALSE(holds({Blocks{{3, 1}, {3, 9}}}, R"({"unique": true})"));
}

TEST_CASE("a refusal is expected by its code and the words of its sentence") {
  const Outcome outcome = refused(ErrorCode::kBusy, "requested 9, available 8");
  const auto holds_for = [&](const std::string& text) {
    return judge(parse(text), outcome, {}, JudgedOn::kHost)[0].holds;
  };
  CHECK(holds_for(R"({"error": "BUSY"})"));
  CHECK(holds_for(R"({"error": "BUSY", "mentions": ["9", "available 8"]})"));
  CHECK_FALSE(holds_for(R"({"error": "BUSY", "mentions": ["7"]})"));
  CHECK_FALSE(holds_for(R"({"error": "NOT_FOUND"})"));
  CHECK_FALSE(holds_for(R"({"equal": 1})"));
  CHECK_FALSE(
      judge(parse(R"({"error": "BUSY"})"), Outcome{{}, {1.0}}, {}, JudgedOn::kHost)[0].holds);
}

TEST_CASE("values come back from their packed form") {
  const Value value = {Parts{{"f", {Floats{{2, 1}, {kInf, -0.0f}}}},
                             {"n", {9007199254740993.0}},
                             {"b", {Blocks{{-1, 4294967295u}}}},
                             {"x", {ByteString{0, 255}}},
                             {"t", {Texts{"a"}}},
                             {"none", {}}}};
  const Value back = unpack(json::from_cbor(json::to_cbor(pack(value))));
  Results results;
  results["v"] = value;
  CHECK(holds(back, R"({"same_as": "v"})", results));
  CHECK(to_json(back).dump() ==
        R"({"b":[{"generation":4294967295,"id":-1}],"f":[["inf"],[-0.0]],"n":9007199254740992,)"
        R"("none":null,"t":["a"],"x":"00ff"})");
}

}  // namespace
}  // namespace larder::replay
