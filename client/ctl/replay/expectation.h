// What a step expects of its result, and whether it holds.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "client/ctl/replay/tensor_spec.h"
#include "client/ctl/replay/value.h"

namespace larder::replay {

inline constexpr double kDefaultAtol = 1e-6;

// A result of an earlier step, or a part of it, times a factor.
struct OfResult {
  std::string name;
  std::string part;  // empty: all of it
  double times = 1;
};
// The X of an expectation. A single number stands for every element.
using Operand = std::variant<double, std::vector<double>, TensorSpec, ByteString, Texts, OfResult>;

struct Near {
  Operand to;
  double atol = kDefaultAtol;
  double rtol = 0;
  std::optional<double> gpu_atol = {};  // in place of atol where the pools are memory of a GPU
};
struct RelativeL2 {
  Operand to;
  double max = 0;
};
struct Expectation {
  std::optional<std::string> error;  // the code's name
  std::vector<std::string> mentions;
  std::optional<Near> near;
  std::optional<Operand> equal;
  std::optional<RelativeL2> rel_l2;
  std::optional<std::string> same_as;
  std::optional<std::string> differs_from;
  std::optional<double> at_most;
  std::optional<double> at_least;
  bool unique = false;
  std::map<std::string, Expectation> parts;  // one level deep
};

// The parts that the results of earlier steps have; none for a result that is one value.
using PartNames = std::map<std::string, std::vector<std::string>>;

// `parts` are those of the step's own result. A name that `known` lacks is refused; nullptr: names
// are not looked at. Names that are used are added to `references`.
Expectation parse_expectation(const Cursor& cursor, const std::vector<std::string>& parts,
                              const PartNames* known, std::vector<std::string>& references);

// One check that was made.
struct Finding {
  bool holds = false;
  std::string part;  // empty: the whole result
  std::string text;  // what was expected and what came
  std::optional<double> largest_error;
  std::optional<size_t> at;  // index of the largest error, row-major
};
// Where the result came from, as far as tolerances depend on it.
enum class JudgedOn : uint8_t { kHost, kGpu };
std::vector<Finding> judge(const Expectation& expectation, const Outcome& outcome,
                           const Results& results, JudgedOn judged_on);

}  // namespace larder::replay
