// LARDER_ENSURE: what must hold of a state. Whoever recounts decides what a contradiction means: a
// bug of ours in a state that we have made, a refusal in one that was loaded.
#pragma once

#include <sstream>
#include <stdexcept>
#include <string>

namespace larder {

// Names the first thing that does not agree.
class Inconsistent : public std::logic_error {
 public:
  using std::logic_error::logic_error;

  template <typename... Values>
  [[noreturn]] static void raise(const char* file, int line, const char* expression,
                                 const Values&... values) {
    std::ostringstream text;
    text << file << ':' << line << ": " << expression << ':';
    ((text << ' ' << values), ...);
    throw Inconsistent(text.str());
  }
};

}  // namespace larder

// The values after the condition are part of the sentence.
#define LARDER_ENSURE(condition, ...)                                                           \
  do {                                                                                          \
    if (!(condition)) [[unlikely]]                                                              \
      ::larder::Inconsistent::raise(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
