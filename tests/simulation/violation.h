// Violation: an invariant of the simulated node does not hold. SIM_CHECK throws it, with the values
// that are named after the condition.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace larder::sim {

class Violation : public std::runtime_error {
 public:
  using std::runtime_error::runtime_error;
};

template <typename... Values>
[[noreturn]] void violated(const char* file, int line, const char* condition,
                           const Values&... values) {
  std::ostringstream text;
  text << file << ':' << line << ": " << condition;
  ((text << ' ' << values), ...);
  throw Violation(text.str());
}

}  // namespace larder::sim

#define SIM_CHECK(condition, ...)                                                         \
  do {                                                                                    \
    if (!(condition)) [[unlikely]]                                                        \
      ::larder::sim::violated(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
