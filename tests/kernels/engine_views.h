// What the tests of engine layouts share: addresses that nobody reads, and refusals.
#pragma once

#include <limits>
#include <string_view>

#include <doctest/doctest.h>

#include "larder/engine_layouts.h"

namespace larder::test {

inline constexpr int64_t kMaxInt64 = std::numeric_limits<int64_t>::max();
inline constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;
inline constexpr ErrorCode kUnsupported = ErrorCode::kUnsupported;

// Nothing is read or written there.
inline std::byte* const kBase = reinterpret_cast<std::byte*>(0x100000);

inline AttentionGeometry both(KvFormat format, int32_t heads, int32_t tokens, int32_t dim) {
  return {1, heads, tokens, dim, dim, format, format};
}

template <typename T>
void check_refused(const Result<T>& result, ErrorCode code, std::string_view part) {
  CAPTURE(part);
  REQUIRE(!result.ok());
  CAPTURE(result.status().to_string());
  CHECK(result.status().code() == code);
  CHECK(result.status().message().find(part) != std::string::npos);
}

template <typename T>
const T& good(const Result<T>& result) {
  REQUIRE_MESSAGE(result.ok(), result.status().to_string());
  return result.value();
}

}  // namespace larder::test
