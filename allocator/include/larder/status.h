// The answer of an operation that may be refused: a code and a sentence.
//
// A refusal is an expected outcome and is returned, never thrown. The sentence names the field and
// the numbers, so that the reader can act on it without a debugger. Bugs go to larder/check.h, and
// failures of the operating system to larder/system_error.h.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "larder/check.h"

namespace larder {

// The same codes in the schema, the C++ API, the CLI's JSON and the `reason` metric label.
enum class ErrorCode : uint16_t {
  kOk = 0,
  kInvalidArgument = 1,    // a field is wrong whatever the state is
  kUnsupported = 2,        // legal, but this build or device has no way to do it
  kResourceExhausted = 3,  // no room now; the message carries requested and available
  kNotFound = 4,
  kStaleGeneration = 5,  // the block was released and may belong to somebody else
  kStaleSession = 6,     // the daemon does not know this session (any more)
  kPermissionDenied = 7,
  kBusy = 8,
  kDeadlineExceeded = 9,
  kShuttingDown = 10,
  kUnavailable = 11,  // the other side is not there (now)
  kInternal = 12,
};
inline constexpr int kNumErrorCodes = 13;

// "INVALID_ARGUMENT" and so on; "UNKNOWN_CODE" for a value outside the enum.
constexpr std::string_view error_code_name(ErrorCode code) {
  constexpr std::string_view kNames[kNumErrorCodes] = {
      "OK",        "INVALID_ARGUMENT",  "UNSUPPORTED",   "RESOURCE_EXHAUSTED",
      "NOT_FOUND", "STALE_GENERATION",  "STALE_SESSION", "PERMISSION_DENIED",
      "BUSY",      "DEADLINE_EXCEEDED", "SHUTTING_DOWN", "UNAVAILABLE",
      "INTERNAL",
  };
  const auto index = static_cast<size_t>(code);
  return index < kNumErrorCodes ? kNames[index] : "UNKNOWN_CODE";
}

class [[nodiscard]] Status {
 public:
  Status() = default;  // ok
  Status(ErrorCode code, std::string message) : code_(code), message_(std::move(message)) {}

  bool ok() const { return code_ == ErrorCode::kOk; }
  ErrorCode code() const { return code_; }
  const std::string& message() const { return message_; }
  // "INVALID_ARGUMENT: k_dim is 100, ...".
  std::string to_string() const {
    if (ok()) return "OK";
    return std::string(error_code_name(code_)) + ": " + message_;
  }

 private:
  ErrorCode code_ = ErrorCode::kOk;
  std::string message_;
};

// A value, or the Status that says why there is none. (std::expected is C++23.)
template <typename T>
class [[nodiscard]] Result {
 public:
  Result(T value) : value_(std::move(value)) {}
  Result(Status status) : status_(std::move(status)) {
    LARDER_CHECK(!status_.ok(), "a Result needs a value or a refusal");
  }
  Result(ErrorCode code, std::string message) : Result(Status(code, std::move(message))) {}

  bool ok() const { return value_.has_value(); }
  explicit operator bool() const { return ok(); }
  const Status& status() const { return status_; }

  T& value() & {
    LARDER_CHECK(ok(), status_.to_string());
    return *value_;
  }
  const T& value() const& {
    LARDER_CHECK(ok(), status_.to_string());
    return *value_;
  }
  T&& value() && {
    LARDER_CHECK(ok(), status_.to_string());
    return std::move(*value_);
  }
  T& operator*() & { return value(); }
  const T& operator*() const& { return value(); }
  T&& operator*() && { return std::move(*this).value(); }
  T* operator->() { return &value(); }
  const T* operator->() const { return &value(); }

 private:
  std::optional<T> value_;
  Status status_;
};

}  // namespace larder
