#include "client/ctl/replay/expectation.h"

#include <algorithm>

namespace larder::replay {
namespace {

constexpr size_t kMaxListElements = size_t{1} << 24;
constexpr size_t kMaxListDepth = 4;
constexpr size_t kMaxWords = 64;

class Parser {
 public:
  Parser(const PartNames* known, std::vector<std::string>& references)
      : known_(known), references_(references) {}

  Expectation parse(const Cursor& cursor, const std::vector<std::string>& parts,
                    const std::string& part) {
    part_ = part;
    Expectation result;
    Fields fields(cursor);
    parse_values(fields, result);
    parse_names(fields, result);
    if (part.empty()) {
      parse_error(fields, result);
      for (const std::string& name : parts)
        if (const auto inner = fields.find(name)) {
          result.parts.emplace(name, parse(*inner, {}, name));
          part_ = part;
        }
    }
    fields.finish();
    const bool is_empty = cursor.value().is_object() && cursor.value().empty();
    if (is_empty) cursor.refuse("is empty, expected at least one check");
    if (result.error && cursor.value().size() > (result.mentions.empty() ? 1u : 2u))
      cursor.refuse("has \"error\" and checks of a result, which a refused step does not have");
    if (!parts.empty() && has_value_checks(result))
      cursor.refuse("checks the whole result, but it has the parts " +
                    one_of({parts.begin(), parts.end()}));
    return result;
  }

 private:
  static bool has_value_checks(const Expectation& e) {
    return e.near || e.equal || e.rel_l2 || e.at_most || e.at_least || e.unique;
  }

  void parse_values(Fields& fields, Expectation& result) {
    if (const auto to = fields.find("near")) result.near = Near{parse_operand(*to)};
    if (const auto atol = parse_tolerance(fields, "atol", result)) result.near->atol = *atol;
    if (const auto rtol = parse_tolerance(fields, "rtol", result)) result.near->rtol = *rtol;
    if (const auto atol = parse_tolerance(fields, "gpu_atol", result)) result.near->gpu_atol = atol;
    if (const auto to = fields.find("equal")) result.equal = parse_operand(*to);
    if (const auto relative = fields.find("rel_l2")) {
      Fields inner(*relative);
      Operand to = parse_operand(inner.need("to"));
      result.rel_l2 = RelativeL2{std::move(to), inner.need("max").number()};
      inner.finish();
    }
    if (const auto most = fields.find("at_most")) result.at_most = most->number();
    if (const auto least = fields.find("at_least")) result.at_least = least->number();
    if (const auto unique = fields.find("unique")) {
      result.unique = unique->boolean();
      if (!result.unique) unique->expected("true");
    }
  }

  // Of the result's "near"; nullopt where the file gives none, or none that can be used.
  static std::optional<double> parse_tolerance(Fields& fields, const char* key,
                                               const Expectation& result) {
    const auto tolerance = fields.find(key);
    if (!tolerance) return std::nullopt;
    const double number = tolerance->number();
    if (!(number >= 0)) tolerance->expected("a number that is not negative");
    if (result.near) return number;
    tolerance->refuse("needs \"near\" beside it");
    return std::nullopt;
  }

  void parse_names(Fields& fields, Expectation& result) {
    if (const auto name = fields.find("same_as")) result.same_as = parse_name(*name);
    if (const auto name = fields.find("differs_from")) result.differs_from = parse_name(*name);
  }

  static void parse_error(Fields& fields, Expectation& result) {
    if (const auto error = fields.find("error")) {
      std::vector<std::string_view> codes;
      for (int code = 1; code < kNumErrorCodes; ++code)
        codes.push_back(error_code_name(static_cast<ErrorCode>(code)));
      result.error = codes[error->choice(codes)];
    }
    if (const auto mentions = fields.find("mentions")) {
      const size_t count = mentions->list_size(kMaxWords);
      for (size_t i = 0; i < count; ++i) result.mentions.push_back(mentions->at(i).text());
      if (!result.error) mentions->refuse("needs \"error\" beside it");
    }
  }

  std::string parse_name(const Cursor& cursor) {
    std::string name = cursor.text();
    if (!cursor.value().is_string()) return name;
    if (known_ != nullptr && !known_->contains(name))
      cursor.refuse("is " + shown(cursor.value()) + ", which no earlier step names with \"as\"");
    references_.push_back(name);
    return name;
  }

  Operand parse_operand(const Cursor& cursor) {
    const json& value = cursor.value();
    if (value.is_object() && value.contains("of")) return parse_reference(cursor);
    if (value.is_object()) return parse_tensor(cursor, 0);
    if (value.is_array() && !value.empty() && value[0].is_string() && !is_number_text(value[0]))
      return parse_texts(cursor);
    if (value.is_array()) {
      std::vector<double> numbers;
      flatten(cursor, 0, numbers);
      return numbers;
    }
    if (value.is_string() && !is_number_text(value)) return cursor.hex();
    if (!value.is_number() && !value.is_string())
      cursor.expected("a number, a list, a tensor, hexadecimal digits or {\"of\": NAME}");
    return cursor.number();
  }

  static bool is_number_text(const json& value) {
    const auto& text = value.get_ref<const std::string&>();
    return text == "NaN" || text == "inf" || text == "-inf";
  }

  static Texts parse_texts(const Cursor& cursor) {
    Texts texts(cursor.list_size(kMaxListElements));
    for (size_t i = 0; i < texts.size(); ++i) texts[i] = cursor.at(i).text();
    return texts;
  }

  static void flatten(const Cursor& cursor, size_t depth, std::vector<double>& to) {
    if (!cursor.value().is_array()) return to.push_back(cursor.number());
    if (depth == kMaxListDepth) return cursor.refuse("is nested too deeply");
    const size_t count = cursor.list_size(kMaxListElements);
    for (size_t i = 0; i < count; ++i) flatten(cursor.at(i), depth + 1, to);
  }

  OfResult parse_reference(const Cursor& cursor) {
    Fields fields(cursor);
    OfResult result;
    result.name = parse_name(fields.need("of"));
    result.part = fields.text("part", "");
    result.times = fields.number("times", 1);
    fields.finish();
    if (known_ == nullptr || cursor.problem().found()) return result;
    const std::vector<std::string>& parts = known_->at(result.name);
    const std::string& part = result.part.empty() ? part_ : result.part;
    const bool has_part = std::find(parts.begin(), parts.end(), part) != parts.end();
    if (parts.empty() && !result.part.empty())
      cursor.refuse("names a part of \"" + result.name + "\", which has none");
    if (!parts.empty() && !has_part)
      cursor.refuse("needs a \"part\" of \"" + result.name +
                    "\": " + one_of({parts.begin(), parts.end()}));
    return result;
  }

  const PartNames* known_;
  std::vector<std::string>& references_;
  std::string part_;  // that the checks being parsed are about; empty: the whole result
};

}  // namespace

Expectation parse_expectation(const Cursor& cursor, const std::vector<std::string>& parts,
                              const PartNames* known, std::vector<std::string>& references) {
  return Parser(known, references).parse(cursor, parts, "");
}

}  // namespace larder::replay
