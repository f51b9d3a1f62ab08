#include "client/ctl/replay/fields.h"

#include <algorithm>
#include <cmath>
#include <cstdio>

namespace larder::replay {
namespace {

constexpr size_t kMaxShownBytes = 60;
const json kNull;

int hex_digit(char c) {
  if (c >= '0' && c <= '9') return c - '0';
  if (c >= 'a' && c <= 'f') return c - 'a' + 10;
  if (c >= 'A' && c <= 'F') return c - 'A' + 10;
  return -1;
}

}  // namespace

void Problem::say(const std::string& path, const std::string& sentence) {
  if (found()) return;
  text_ = path.empty() ? sentence : "field \"" + path + "\" " + sentence;
}

std::string shown(const json& value) {
  if (value.is_array()) return "a list of " + std::to_string(value.size());
  if (value.is_object()) return "an object";
  std::string text = value.is_string() ? value.get_ref<const std::string&>() : value.dump();
  const bool is_long = text.size() > kMaxShownBytes;
  text.resize(std::min(text.size(), kMaxShownBytes));
  for (char& c : text)
    if (c < ' ' || c > '~') c = '?';
  if (is_long) text += "...";
  return value.is_string() ? "\"" + text + "\"" : text;
}

std::string shown(double value) {
  if (std::isnan(value)) return "NaN";
  if (std::isinf(value)) return value > 0 ? "inf" : "-inf";
  char text[32];
  std::snprintf(text, sizeof text, "%.9g", value);
  return text;
}

std::string one_of(const std::vector<std::string_view>& names) {
  std::string text;
  for (size_t i = 0; i < names.size(); ++i) {
    if (i > 0) text += i + 1 == names.size() ? " or " : ", ";
    text += "\"" + std::string(names[i]) + "\"";
  }
  return text;
}

std::optional<std::vector<uint8_t>> parse_hex(std::string_view text) {
  if (text.size() % 2 != 0) return std::nullopt;
  std::vector<uint8_t> bytes;
  bytes.reserve(text.size() / 2);
  for (size_t i = 0; i < text.size(); i += 2) {
    const int high = hex_digit(text[i]);
    const int low = hex_digit(text[i + 1]);
    if (high < 0 || low < 0) return std::nullopt;
    bytes.push_back(static_cast<uint8_t>(high * 16 + low));
  }
  return bytes;
}

std::string to_hex(const std::vector<uint8_t>& bytes) {
  static constexpr char kDigits[] = "0123456789abcdef";
  std::string text;
  text.reserve(2 * bytes.size());
  for (const uint8_t byte : bytes) {
    text += kDigits[byte >> 4];
    text += kDigits[byte & 15];
  }
  return text;
}

// --------------------------------------------------------------------------------------- Cursor

void Cursor::expected(const std::string& what) const {
  refuse("is " + shown(*value_) + ", expected " + what);
}

Cursor Cursor::at(size_t index) const {
  return {(*value_)[index], path_ + "[" + std::to_string(index) + "]", *problem_};
}

int64_t Cursor::integer(int64_t min, int64_t max) const {
  const bool fits =
      value_->is_number_unsigned()
          ? value_->get<uint64_t>() <= static_cast<uint64_t>(std::numeric_limits<int64_t>::max())
          : value_->is_number_integer();
  if (fits) {
    const auto number = value_->get<int64_t>();
    if (number >= min && number <= max) return number;
  }
  const bool is_any =
      min == std::numeric_limits<int64_t>::min() && max == std::numeric_limits<int64_t>::max();
  expected(is_any ? "a whole number of 64 bits"
                  : "a whole number from " + std::to_string(min) + " to " + std::to_string(max));
  return std::clamp<int64_t>(0, min, max);
}

int32_t Cursor::int32() const {
  return static_cast<int32_t>(
      integer(std::numeric_limits<int32_t>::min(), std::numeric_limits<int32_t>::max()));
}

double Cursor::number() const {
  if (value_->is_number()) return value_->get<double>();
  if (value_->is_string()) {
    const auto& text = value_->get_ref<const std::string&>();
    if (text == "NaN") return std::numeric_limits<double>::quiet_NaN();
    if (text == "inf") return std::numeric_limits<double>::infinity();
    if (text == "-inf") return -std::numeric_limits<double>::infinity();
  }
  expected("a number, \"NaN\", \"inf\" or \"-inf\"");
  return 0;
}

bool Cursor::boolean() const {
  if (value_->is_boolean()) return value_->get<bool>();
  expected("true or false");
  return false;
}

std::string Cursor::text() const {
  if (value_->is_string()) return value_->get<std::string>();
  expected("a text");
  return "";
}

size_t Cursor::choice(const std::vector<std::string_view>& names) const {
  if (value_->is_string()) {
    const auto found = std::find(names.begin(), names.end(), value_->get_ref<const std::string&>());
    if (found != names.end()) return static_cast<size_t>(found - names.begin());
  }
  expected(one_of(names));
  return 0;
}

std::vector<uint8_t> Cursor::hex() const {
  if (value_->is_string())
    if (auto bytes = parse_hex(value_->get_ref<const std::string&>())) return std::move(*bytes);
  expected("pairs of hexadecimal digits");
  return {};
}

size_t Cursor::list_size(size_t count_max) const {
  if (!value_->is_array()) {
    expected("a list");
    return 0;
  }
  if (value_->size() <= count_max) return value_->size();
  refuse("has " + std::to_string(value_->size()) + " elements, at most " +
         std::to_string(count_max) + " are allowed");
  return 0;
}

std::vector<double> Cursor::numbers(size_t count_max) const {
  std::vector<double> result(list_size(count_max));
  for (size_t i = 0; i < result.size(); ++i) {
    const json& element = (*value_)[i];  // paths are made for what is not a plain number alone
    result[i] = element.is_number() ? element.get<double>() : at(i).number();
  }
  return result;
}

std::vector<float> Cursor::floats(size_t count_max) const {
  const std::vector<double> values = numbers(count_max);
  return {values.begin(), values.end()};
}

std::vector<int32_t> Cursor::int32s(size_t count_max) const {
  constexpr uint64_t kLargest = std::numeric_limits<int32_t>::max();
  std::vector<int32_t> result(list_size(count_max));
  for (size_t i = 0; i < result.size(); ++i) {
    const json& element = (*value_)[i];
    const bool is_small = element.is_number_unsigned() && element.get<uint64_t>() <= kLargest;
    result[i] = is_small ? element.get<int32_t>() : at(i).int32();
  }
  return result;
}

// --------------------------------------------------------------------------------------- Fields

Fields::Fields(const Cursor& object) : object_(object) {
  if (!object.value().is_object()) object.expected("an object");
}

std::optional<Cursor> Fields::find(const std::string& key) {
  known_.push_back(key);
  if (!object_.value().is_object()) return std::nullopt;
  const auto found = object_.value().find(key);
  if (found == object_.value().end()) return std::nullopt;
  const std::string prefix = object_.path().empty() ? "" : object_.path() + ".";
  return Cursor(*found, prefix + key, object_.problem());
}

Cursor Fields::need(const std::string& key) {
  if (auto found = find(key)) return *found;
  const std::string prefix = object_.path().empty() ? "" : object_.path() + ".";
  object_.problem().say(prefix + key, "is missing");
  return {kNull, prefix + key, object_.problem()};
}

int32_t Fields::int32(const std::string& key, int32_t otherwise) {
  const auto found = find(key);
  return found ? found->int32() : otherwise;
}

int64_t Fields::integer(const std::string& key, int64_t otherwise, int64_t min, int64_t max) {
  const auto found = find(key);
  return found ? found->integer(min, max) : otherwise;
}

double Fields::number(const std::string& key, double otherwise) {
  const auto found = find(key);
  return found ? found->number() : otherwise;
}

bool Fields::boolean(const std::string& key, bool otherwise) {
  const auto found = find(key);
  return found ? found->boolean() : otherwise;
}

std::string Fields::text(const std::string& key, const std::string& otherwise) {
  const auto found = find(key);
  return found ? found->text() : otherwise;
}

size_t Fields::choice(const std::string& key, const std::vector<std::string_view>& names) {
  const auto found = find(key);
  return found ? found->choice(names) : 0;
}

void Fields::finish() {
  if (!object_.value().is_object()) return;
  const std::string prefix = object_.path().empty() ? "" : object_.path() + ".";
  for (const auto& [key, value] : object_.value().items()) {
    if (std::find(known_.begin(), known_.end(), key) != known_.end()) continue;
    std::vector<std::string_view> names(known_.begin(), known_.end());
    const std::string name = shown(json(prefix + key));
    object_.problem().say(name.substr(1, name.size() - 2), "is unknown, expected " + one_of(names));
  }
}

}  // namespace larder::replay
