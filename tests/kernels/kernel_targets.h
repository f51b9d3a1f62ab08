// Runs a check on every vector target that the machine supports.
#pragma once

#include <string>
#include <vector>

#include <hwy/highway.h>

namespace larder::test {

// `check` is called with the target's name. Tests of one program run one after another, so changing
// the program-wide choice of target is safe.
template <typename Check>
void on_every_target(const Check& check) {
  for (const int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    check(std::string(hwy::TargetName(target)));
  }
  hwy::SetSupportedTargetsForTest(0);
}

// Calls it on one target: another one every time, in turn.
template <typename Check>
void on_next_target(const Check& check) {
  static size_t turn = 0;
  const std::vector<int64_t> targets = hwy::SupportedAndGeneratedTargets();
  const int64_t target = targets[turn++ % targets.size()];
  hwy::SetSupportedTargetsForTest(target);
  check(std::string(hwy::TargetName(target)));
  hwy::SetSupportedTargetsForTest(0);
}

}  // namespace larder::test
