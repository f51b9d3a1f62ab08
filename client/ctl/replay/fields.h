// Reading JSON strictly: every key is known, every value has its type and range, and what is wrong
// is said with the path of the field. Reading goes on with a neutral value after a mistake, so that
// callers need no branches; they look at Problem when they are done.
#pragma once

#include <cstdint>
#include <initializer_list>
#include <limits>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <nlohmann/json.hpp>

namespace larder::replay {

using nlohmann::json;

// The first mistake of a file. Later ones are dropped: they may follow from it.
class Problem {
 public:
  bool found() const { return !text_.empty(); }
  const std::string& text() const { return text_; }
  void say(const std::string& path, const std::string& sentence);

 private:
  std::string text_;
};

// A value for a message: short, printable, structures by their kind.
std::string shown(const json& value);
std::string shown(double value);
// "\"a\", \"b\" or \"c\""
std::string one_of(const std::vector<std::string_view>& names);

// A value and its path in the step. The value outlives the cursor.
class Cursor {
 public:
  Cursor(const json& value, std::string path, Problem& problem)
      : value_(&value), path_(std::move(path)), problem_(&problem) {}

  const json& value() const { return *value_; }
  const std::string& path() const { return path_; }
  Problem& problem() const { return *problem_; }
  void refuse(const std::string& sentence) const { problem_->say(path_, sentence); }
  // "is X, expected WHAT"
  void expected(const std::string& what) const;
  Cursor at(size_t index) const;

  int64_t integer(int64_t min, int64_t max) const;
  int32_t int32() const;
  // A JSON number, or "NaN", "inf", "-inf".
  double number() const;
  bool boolean() const;
  std::string text() const;
  // The index of the text among `names`.
  size_t choice(const std::vector<std::string_view>& names) const;
  std::vector<uint8_t> hex() const;
  // The elements of a list of at most `count_max`; 0 for anything else.
  size_t list_size(size_t count_max) const;
  std::vector<double> numbers(size_t count_max) const;
  std::vector<float> floats(size_t count_max) const;
  std::vector<int32_t> int32s(size_t count_max) const;

 private:
  const json* value_;
  std::string path_;
  Problem* problem_;
};

// The fields of an object. finish() says which key is none of those that were asked for.
class Fields {
 public:
  explicit Fields(const Cursor& object);

  const Cursor& object() const { return object_; }
  std::optional<Cursor> find(const std::string& key);
  // The field, or a null value when it is missing, which has been said then.
  Cursor need(const std::string& key);

  int32_t int32(const std::string& key, int32_t otherwise);
  int64_t integer(const std::string& key, int64_t otherwise,
                  int64_t min = std::numeric_limits<int64_t>::min(),
                  int64_t max = std::numeric_limits<int64_t>::max());
  double number(const std::string& key, double otherwise);
  bool boolean(const std::string& key, bool otherwise);
  std::string text(const std::string& key, const std::string& otherwise);
  size_t choice(const std::string& key, const std::vector<std::string_view>& names);  // first: 0

  void finish();

 private:
  Cursor object_;
  std::vector<std::string> known_;
};

// Digits in pairs, either case; empty for anything else.
std::optional<std::vector<uint8_t>> parse_hex(std::string_view text);
std::string to_hex(const std::vector<uint8_t>& bytes);

}  // namespace larder::replay
