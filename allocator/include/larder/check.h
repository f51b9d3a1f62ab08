// LARDER_CHECK: an invariant whose failure is a bug of ours. Always on; prints and aborts.
//
// Bad input is never a bug: it is answered with a Status (larder/status.h).
#pragma once

#include <cstdio>
#include <cstdlib>
#include <sstream>

namespace larder::detail {

template <typename... Values>
[[noreturn]] void check_failed(const char* file, int line, const char* expression,
                               const Values&... values) {
  std::ostringstream text;
  ((text << ' ' << values), ...);
  std::fprintf(stderr, "%s:%d: check failed: %s:%s\n", file, line, expression, text.str().c_str());
  std::abort();
}

}  // namespace larder::detail

// The values after the condition are printed with it.
#define LARDER_CHECK(condition, ...)                                                             \
  do {                                                                                           \
    if (!(condition)) [[unlikely]]                                                               \
      ::larder::detail::check_failed(__FILE__, __LINE__, #condition __VA_OPT__(, ) __VA_ARGS__); \
  } while (false)
