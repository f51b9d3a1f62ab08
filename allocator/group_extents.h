// The extents of one group: which there are, who has them mapped, and running figures of them.
//
// An extent is absent -> awaited -> present -> leaving -> absent. Deterministic; knows ids and
// sizes only.
#pragma once

#include <array>
#include <cstdint>
#include <set>
#include <utility>
#include <vector>

#include "allocator/extent.h"
#include "allocator/free_set.h"
#include "allocator/types.h"

namespace larder {

enum class ExtentState : uint8_t { kAbsent = 0, kAwaited = 1, kPresent = 2, kLeaving = 3 };
inline constexpr int kNumExtentStates = 4;

class GroupExtents {
 public:
  struct Extent {
    ExtentState state = ExtentState::kAbsent;
    SegmentId segment{0};           // of any other state
    std::set<SessionId> mapped_by;  // of a present one
  };

  // All are absent.
  explicit GroupExtents(const GroupLayout& layout)
      : sizes_(layout.segment_bytes), extents_(sizes_.size()) {
    counts_[0] = size();
    for (int64_t i = 0; i < size(); ++i) absent_.insert(static_cast<int32_t>(i));
  }

  int64_t size() const { return std::ssize(extents_); }
  const Extent& at(int64_t index) const { return extents_[static_cast<size_t>(index)]; }
  int64_t size_bytes(int64_t index) const { return sizes_[static_cast<size_t>(index)]; }
  int64_t count(ExtentState state) const { return counts_[static_cast<size_t>(state)]; }
  // Of those that are there or on their way.
  int64_t physical_bytes() const { return physical_bytes_; }
  // -1 when there is none from here on.
  int64_t lowest_absent(int64_t from = 0) const {
    return absent_.lowest(static_cast<int32_t>(from));
  }

  // Nobody has it mapped afterwards.
  void set(int64_t index, ExtentState state, SegmentId segment) {
    Extent& extent = extents_[static_cast<size_t>(index)];
    count_in(index, extent.state, -1);
    extent = {state, segment, {}};
    count_in(index, state, 1);
  }
  // Whether that is news.
  bool add_mapping(int64_t index, SessionId session) {
    return extents_[static_cast<size_t>(index)].mapped_by.insert(session).second;
  }
  bool is_mapped_by(SessionId session) const {
    for (const Extent& extent : extents_)
      if (extent.mapped_by.contains(session)) return true;
    return false;
  }
  void forget_mappings(SessionId session) {
    for (Extent& extent : extents_) extent.mapped_by.erase(session);
  }

 private:
  void count_in(int64_t index, ExtentState state, int64_t step) {
    counts_[static_cast<size_t>(state)] += step;
    if (state == ExtentState::kAwaited || state == ExtentState::kPresent)
      physical_bytes_ += step * size_bytes(index);
    if (state != ExtentState::kAbsent) return;
    const auto number = static_cast<int32_t>(index);
    step > 0 ? absent_.insert(number) : absent_.erase(number);
  }

  std::vector<int64_t> sizes_;
  std::vector<Extent> extents_;
  FreeSet absent_;
  std::array<int64_t, kNumExtentStates> counts_ = {};
  int64_t physical_bytes_ = 0;
};

}  // namespace larder
