// CrashPlan: when larderd is killed. It is killed by an exception from inside what it is doing.
#pragma once

#include <algorithm>
#include <optional>
#include <utility>
#include <vector>

#include "tests/simulation/chance.h"
#include "tests/simulation/coverage.h"

namespace larder::sim {

// Thrown through larderd's code: nothing of it runs any more.
struct LarderdKilled {};

class CrashPlan {
 public:
  CrashPlan(Chance& chance, Coverage& coverage) : chance_(chance), coverage_(coverage) {}

  void enable(bool enabled) { enabled_ = enabled; }

  // Once for every event: now and then decides on a point, which stays wanted until it is passed.
  void consider() {
    if (!enabled_) return;
    if (!any_ && chance_.one_in(300)) any_ = random_point();
    if (chance_.one_in(100)) {
      const auto activity = static_cast<size_t>(chance_.below(kNumActivities));
      const CrashPoint point = random_point();
      if (can_be_killed_at(activity, point)) pairs_.emplace_back(activity, point);
      if (pairs_.size() > kMaxPairs) pairs_.erase(pairs_.begin());
    }
    if (skip_ == 0 && chance_.one_in(8)) skip_ = chance_.below(4);
  }

  // Whether larderd is killed here. The caller does what there is to do, and throws.
  bool due(size_t activity, CrashPoint point) {
    if (!enabled_) return false;
    const auto pair = std::find(pairs_.begin(), pairs_.end(), std::pair(activity, point));
    if (pair == pairs_.end() && any_ != point) return false;
    if (point == CrashPoint::kBeforeEffect && skip_ > 0) {
      --skip_;
      return false;
    }
    if (pair != pairs_.end()) {
      pairs_.erase(pair);
    } else {
      any_.reset();
    }
    ++coverage_.crashes[activity][static_cast<size_t>(point)];
    return true;
  }
  void pass(size_t activity, CrashPoint point) {
    if (due(activity, point)) throw LarderdKilled();
  }

  // Whether it waits for this activity to make a checkpoint.
  bool wants_checkpoint(size_t activity) const {
    const auto is_of_checkpoint = [](CrashPoint point) {
      return point == CrashPoint::kBeforeCheckpoint || point == CrashPoint::kAfterCheckpoint ||
             point == CrashPoint::kInFlight;
    };
    if (!enabled_) return false;
    return (any_ && is_of_checkpoint(*any_)) ||
           std::any_of(pairs_.begin(), pairs_.end(), [&](const auto& pair) {
             return pair.first == activity && is_of_checkpoint(pair.second);
           });
  }

 private:
  static constexpr size_t kMaxPairs = 24;  // rare ones wait longest

  CrashPoint random_point() { return static_cast<CrashPoint>(chance_.below(kNumCrashPoints)); }

  Chance& chance_;
  Coverage& coverage_;
  bool enabled_ = true;
  std::optional<CrashPoint> any_;                     // whatever larderd does
  std::vector<std::pair<size_t, CrashPoint>> pairs_;  // while it does this
  int skip_ = 0;                                      // effects to carry out first
};

}  // namespace larder::sim
