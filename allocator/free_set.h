// FreeSet: a set of small numbers that gives its lowest one at once.
//
// A tree of bitmaps, 64 ways: inserting, removing and finding the lowest member cost one step per
// level, four levels for 2^24 numbers. Which numbers are in it decides what it gives, and nothing
// else does: the order of insertions cannot be seen.
#pragma once

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace larder {

class FreeSet {
 public:
  static constexpr int32_t kNone = -1;

  bool contains(int32_t number) const {
    const auto word = static_cast<size_t>(number) / 64;
    return word < levels_[0].size() && (levels_[0][word] >> (number % 64) & 1) != 0;
  }
  void insert(int32_t number) {
    auto at = static_cast<size_t>(number);
    for (size_t level = 0;; ++level) {
      if (level == levels_.size()) levels_.push_back({summary_of(level - 1)});
      std::vector<uint64_t>& words = levels_[level];
      if (words.size() <= at / 64) words.resize(at / 64 + 1);
      words[at / 64] |= uint64_t{1} << (at % 64);
      at /= 64;
      if (at == 0 && level + 1 >= levels_.size() && words.size() <= 1) return;
    }
  }
  void erase(int32_t number) {
    auto at = static_cast<size_t>(number);
    for (std::vector<uint64_t>& words : levels_) {
      if (at / 64 >= words.size()) return;
      words[at / 64] &= ~(uint64_t{1} << (at % 64));
      if (words[at / 64] != 0) return;
      at /= 64;
    }
  }
  // The lowest member that is not below `from`, which is not negative.
  int32_t lowest(int32_t from = 0) const {
    auto at = static_cast<size_t>(from);
    for (size_t level = 0; level < levels_.size(); ++level) {
      size_t word = at / 64;
      if (word >= levels_[level].size()) return kNone;
      if (const uint64_t rest = levels_[level][word] >> (at % 64); rest != 0) {
        at += static_cast<size_t>(std::countr_zero(rest));
        for (; level > 0; --level)
          at = at * 64 + static_cast<size_t>(std::countr_zero(levels_[level - 1][at]));
        return static_cast<int32_t>(at);
      }
      at = word + 1;
    }
    return kNone;
  }

 private:
  // The first word of a level that comes to exist: which of the words below are not empty.
  uint64_t summary_of(size_t level) const {
    uint64_t summary = 0;
    for (size_t i = 0; i < levels_[level].size() && i < 64; ++i)
      if (levels_[level][i] != 0) summary |= uint64_t{1} << i;
    return summary;
  }

  std::vector<std::vector<uint64_t>> levels_ = {{}};  // [0] has a bit per number
};

}  // namespace larder
