// A failed system call: thrown with the call, errno and sizes; caught only at the edge of a
// session, in the C API and in main.
#pragma once

#include <cerrno>
#include <string>
#include <system_error>

namespace larder {

class SystemError : public std::system_error {
 public:
  // `call` names the call and its arguments: "ftruncate(fd 7, 4096 bytes)".
  explicit SystemError(const std::string& call, int error = errno)
      : std::system_error(error, std::generic_category(), call) {}
};

}  // namespace larder
