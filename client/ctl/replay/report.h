// What a replay says: a line per step for people, or an object per file for programs.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "client/ctl/replay/runner.h"

namespace larder::replay {

// "FAIL     5 read       near, atol 1e-06, ...".
std::string to_text(const StepReport& report);
// With the result in full.
json to_json(const StepReport& report);

struct Totals {
  size_t num_ok = 0;
  size_t num_failed = 0;
  size_t num_skipped = 0;

  void add(Verdict verdict);
  std::string to_text() const;  // "12 ok, 1 FAIL, 2 skipped"
};

}  // namespace larder::replay
