#include <algorithm>
#include <bit>
#include <cmath>
#include <set>

#include "client/ctl/replay/expectation.h"

namespace larder::replay {
namespace {

// An operand ready to be compared element by element.
struct Wanted {
  std::vector<double> values;
  bool is_one = false;  // values[0] stands for every element
  double at(size_t index) const { return is_one ? values[0] : values[index]; }
};

std::string counted(size_t count) {
  return std::to_string(count) + (count == 1 ? " element" : " elements");
}

// "3 (1, 0, 3)": the row-major index, and the indices where there are several axes.
std::string place(const Value& value, size_t index) {
  std::string text = std::to_string(index);
  const auto* floats = std::get_if<Floats>(&value.data);
  if (floats == nullptr || floats->shape.size() < 2) return text;
  std::string indices;
  auto rest = static_cast<int64_t>(index);
  for (size_t axis = floats->shape.size(); axis-- > 0;) {
    if (!indices.empty()) indices.insert(0, ", ");
    indices.insert(0, std::to_string(rest % floats->shape[axis]));
    rest /= floats->shape[axis];
  }
  return text + " (" + indices + ")";
}

bool same_bits(double a, double b) {
  return (std::isnan(a) && std::isnan(b)) ||
         std::bit_cast<uint64_t>(a) == std::bit_cast<uint64_t>(b);
}

class Judge {
 public:
  Judge(const Value& value, std::string part, const Results& results, JudgedOn judged_on)
      : value_(value), part_(std::move(part)), results_(results), judged_on_(judged_on) {}

  std::vector<Finding> run(const Expectation& expectation) {
    if (expectation.near) judge_near(*expectation.near);
    if (expectation.equal) judge_equal(*expectation.equal);
    if (expectation.rel_l2) judge_rel_l2(*expectation.rel_l2);
    if (expectation.same_as) judge_same(*expectation.same_as, true);
    if (expectation.differs_from) judge_same(*expectation.differs_from, false);
    if (expectation.at_most) judge_bound(*expectation.at_most, true);
    if (expectation.at_least) judge_bound(*expectation.at_least, false);
    if (expectation.unique) judge_unique();
    return std::move(findings_);
  }

 private:
  Finding& add(bool holds, std::string text) {
    findings_.push_back({holds, part_, std::move(text), std::nullopt, std::nullopt});
    return findings_.back();
  }

  const Value* find(const std::string& name, const std::string& part) const {
    const auto found = results_.find(name);
    if (found == results_.end()) return nullptr;
    const std::string& wanted = part.empty() ? part_ : part;
    if (const Value* inner = found->second.part(wanted)) return inner;
    return &found->second;
  }

  // Empty after a finding has said why there is nothing to compare.
  std::optional<Wanted> wanted(const Operand& operand, const std::string& check) {
    Wanted result;
    if (const auto* number = std::get_if<double>(&operand)) {
      result = {{*number}, true};
    } else if (const auto* list = std::get_if<std::vector<double>>(&operand)) {
      result.values = *list;
    } else if (const auto* spec = std::get_if<TensorSpec>(&operand)) {
      const std::vector<float> values = elements_of(*spec);
      result.values.assign(values.begin(), values.end());
    } else if (const auto* bytes = std::get_if<ByteString>(&operand)) {
      result.values.assign(bytes->begin(), bytes->end());
    } else if (const auto* of = std::get_if<OfResult>(&operand)) {
      const Value* value = find(of->name, of->part);
      if (value == nullptr || !has_numbers(*value)) {
        add(false, check + ": \"" + of->name + "\" holds no numbers");
        return std::nullopt;
      }
      for (size_t i = 0; i < size_of(*value); ++i)
        result.values.push_back(number_at(*value, i) * of->times);
    } else {
      add(false, check + ": texts are compared with checksums and keys only");
      return std::nullopt;
    }
    if (!has_numbers(value_)) {
      add(false, check + ": the result holds no numbers");
      return std::nullopt;
    }
    if (result.is_one && size_of(value_) == 0) {
      add(false, check + ": the result is empty");
      return std::nullopt;
    }
    if (!result.is_one && result.values.size() != size_of(value_)) {
      add(false, check + ": expected " + counted(result.values.size()) + ", the result has " +
                     counted(size_of(value_)));
      return std::nullopt;
    }
    return result;
  }

  std::string compared(size_t index, double expected) const {
    return "element " + place(value_, index) + " is " + shown(number_at(value_, index)) +
           ", expected " + shown(expected);
  }

  void judge_near(const Near& near) {
    const double atol =
        judged_on_ == JudgedOn::kGpu ? near.gpu_atol.value_or(near.atol) : near.atol;
    const std::string check = "near, atol " + shown(atol) + ", rtol " + shown(near.rtol);
    const auto expected = wanted(near.to, check);
    if (!expected) return;
    size_t num_wrong = 0;
    size_t worst = 0;
    size_t first_wrong = 0;
    double largest = 0;
    for (size_t i = 0; i < size_of(value_); ++i) {
      const double a = number_at(value_, i);
      const double b = expected->at(i);
      const bool same_infinity = std::isinf(a) && a == b;
      const double error = same_infinity ? 0 : std::fabs(a - b);
      const bool holds =
          same_infinity || (std::isfinite(b) && error <= atol + near.rtol * std::fabs(b));
      if (!holds && num_wrong++ == 0) first_wrong = i;
      if (error > largest || (std::isnan(error) && !std::isnan(largest))) {
        largest = error;
        worst = i;
      }
    }
    std::string text = check + ": largest error " + shown(largest);
    if (size_of(value_) > 0) text += " at " + place(value_, worst);
    if (num_wrong > 0)
      text += "; " + std::to_string(num_wrong) + " of " + counted(size_of(value_)) +
              " wrong, the first: " + compared(first_wrong, expected->at(first_wrong));
    Finding& finding = add(num_wrong == 0, std::move(text));
    finding.largest_error = largest;
    finding.at = worst;
  }

  void judge_equal(const Operand& operand) {
    if (const auto* texts = std::get_if<Texts>(&operand)) {
      const auto* own = std::get_if<Texts>(&value_.data);
      add(own != nullptr && *own == *texts,
          "equal to a list of " + counted(texts->size()) + ": came " + shown_briefly());
      return;
    }
    const auto expected = wanted(operand, "equal");
    if (!expected) return;
    // Results are float32, and so are numbers that a file writes in decimals.
    const bool rounds = std::holds_alternative<Floats>(value_.data);
    size_t num_wrong = 0;
    size_t first_wrong = 0;
    double largest = 0;
    size_t worst = 0;
    for (size_t i = 0; i < size_of(value_); ++i) {
      const double a = number_at(value_, i);
      const double b =
          rounds ? static_cast<double>(static_cast<float>(expected->at(i))) : expected->at(i);
      if (same_bits(a, b)) continue;
      if (num_wrong++ == 0) first_wrong = i;
      if (const double error = std::fabs(a - b); error > largest || num_wrong == 1) {
        largest = error;
        worst = i;
      }
    }
    std::string text = "equal: all " + counted(size_of(value_));
    if (num_wrong > 0)
      text = "equal: " + std::to_string(num_wrong) + " of " + counted(size_of(value_)) +
             " differ, the first: " + compared(first_wrong, expected->at(first_wrong)) +
             "; largest error " + shown(largest) + " at " + place(value_, worst);
    Finding& finding = add(num_wrong == 0, std::move(text));
    finding.largest_error = largest;
    finding.at = worst;
  }

  void judge_rel_l2(const RelativeL2& relative) {
    const auto expected = wanted(relative.to, "rel_l2");
    if (!expected) return;
    double difference = 0;
    double norm = 0;
    for (size_t i = 0; i < size_of(value_); ++i) {
      const double b = expected->at(i);
      const double error = number_at(value_, i) - b;
      difference += error * error;
      norm += b * b;
    }
    const double figure = difference == 0 ? 0 : std::sqrt(difference / norm);
    add(figure <= relative.max, "rel_l2 at most " + shown(relative.max) + ": came " + shown(figure))
        .largest_error = figure;
  }

  void judge_same(const std::string& name, bool wants_same) {
    const Value* other = find(name, "");
    const std::string check = (wants_same ? "same as \"" : "differs from \"") + name + "\"";
    if (other == nullptr) {
      add(false, check + ": there is no such result");
      return;
    }
    if (!comparable(value_, *other)) {
      add(false, check + ": the results are of different kinds");
      return;
    }
    const std::string difference = first_difference(value_, *other);
    add(difference.empty() == wants_same,
        check + ": " + (difference.empty() ? "it is the same" : difference));
  }

  // Results of the same kind, with the same parts: others neither agree nor differ.
  static bool comparable(const Value& a, const Value& b) {
    if (a.data.index() != b.data.index()) return false;
    const auto* parts = std::get_if<Parts>(&a.data);
    if (parts == nullptr) return true;
    return std::all_of(parts->begin(), parts->end(), [&](const Part& part) {
      const Value* other = b.part(part.name);
      return other != nullptr && comparable(part.value, *other);
    });
  }

  // Empty when both are the same, bit for bit; blocks with their generations.
  std::string first_difference(const Value& a, const Value& b) const {
    if (const auto* parts = std::get_if<Parts>(&a.data)) {
      for (const Part& part : *parts) {
        if (auto text = first_difference(part.value, *b.part(part.name)); !text.empty())
          return part.name + ": " + text;
      }
      return "";
    }
    if (size_of(a) != size_of(b))
      return counted(size_of(a)) + " here, " + counted(size_of(b)) + " there";
    for (size_t i = 0; i < size_of(a); ++i)
      if (std::string text = element_difference(a, b, i); !text.empty())
        return "element " + place(a, i) + " is " + text;
    return "";
  }

  static std::string element_difference(const Value& a, const Value& b, size_t i) {
    if (const auto* texts = std::get_if<Texts>(&a.data)) {
      const std::string& other = std::get<Texts>(b.data)[i];
      return (*texts)[i] == other ? "" : (*texts)[i] + " here, " + other + " there";
    }
    if (const auto* blocks = std::get_if<Blocks>(&a.data)) {
      const BlockHandle& here = (*blocks)[i];
      const BlockHandle& there = std::get<Blocks>(b.data)[i];
      const auto text = [](const BlockHandle& block) {
        return "block " + std::to_string(block.id) + " generation " +
               std::to_string(block.generation);
      };
      return here == there ? "" : text(here) + " here, " + text(there) + " there";
    }
    const double x = number_at(a, i);
    const double y = number_at(b, i);
    return same_bits(x, y) ? "" : shown(x) + " here, " + shown(y) + " there";
  }

  void judge_bound(double bound, bool is_upper) {
    const std::string check = (is_upper ? "at most " : "at least ") + shown(bound);
    if (!has_numbers(value_)) {
      add(false, check + ": the result holds no numbers");
      return;
    }
    if (size_of(value_) == 0) {
      add(false, check + ": the result is empty");
      return;
    }
    for (size_t i = 0; i < size_of(value_); ++i) {
      const double number = number_at(value_, i);
      if (is_upper ? number <= bound : number >= bound) continue;
      add(false, check + ": element " + place(value_, i) + " is " + shown(number));
      return;
    }
    add(true, check + ": all " + counted(size_of(value_)));
  }

  void judge_unique() {
    std::set<std::string> seen;
    for (size_t i = 0; i < size_of(value_); ++i) {
      const auto* texts = std::get_if<Texts>(&value_.data);
      const std::string text = texts != nullptr ? (*texts)[i] : shown(number_at(value_, i));
      if (seen.insert(text).second) continue;
      add(false, "unique: " + text + " appears twice");
      return;
    }
    add(true, "unique: all " + counted(size_of(value_)));
  }

  std::string shown_briefly() const {
    constexpr size_t kMaxBytes = 200;
    std::string text = to_json(value_).dump();
    if (text.size() > kMaxBytes) text = text.substr(0, kMaxBytes) + "...";
    return text;
  }

  const Value& value_;
  std::string part_;
  const Results& results_;
  JudgedOn judged_on_;
  std::vector<Finding> findings_;
};

Finding judge_refusal(const Expectation& expectation, const Status& status) {
  Finding finding;
  finding.text =
      "error " + *expectation.error + ": came " + (status.ok() ? "a result" : status.to_string());
  finding.holds = error_code_name(status.code()) == *expectation.error;
  for (const std::string& word : expectation.mentions) {
    if (status.message().find(word) != std::string::npos) continue;
    finding.holds = false;
    finding.text += "; the message does not mention \"" + word + "\"";
  }
  return finding;
}

}  // namespace

std::vector<Finding> judge(const Expectation& expectation, const Outcome& outcome,
                           const Results& results, JudgedOn judged_on) {
  if (expectation.error) return {judge_refusal(expectation, outcome.status)};
  if (!outcome.status.ok())
    return {{false, "", "expected a result: came " + outcome.status.to_string(), {}, {}}};
  std::vector<Finding> findings = Judge(outcome.value, "", results, judged_on).run(expectation);
  for (const auto& [name, inner] : expectation.parts) {
    const Value* part = outcome.value.part(name);
    if (part == nullptr) {
      findings.push_back({false, name, "the result has no such part", {}, {}});
      continue;
    }
    for (Finding& finding : Judge(*part, name, results, judged_on).run(inner))
      findings.push_back(std::move(finding));
  }
  return findings;
}

}  // namespace larder::replay
