// Ids of the things that the state machine decides about. No dtypes, no sockets.
#pragma once

#include <compare>
#include <cstdint>
#include <string_view>

namespace larder {

// None of these is ever used twice within one cache: the journal keeps the last one of each.
enum class SessionId : uint64_t {};  // 0 is nobody
enum class PoolId : uint64_t {};
enum class SegmentId : uint64_t {};

// A block of one group of a pool, as control messages name it: an old generation is refused.
struct BlockRef {
  int32_t id = -1;
  uint32_t generation = 0;
  auto operator<=>(const BlockRef&) const = default;
};

constexpr uint64_t value(SessionId id) { return static_cast<uint64_t>(id); }
constexpr uint64_t value(PoolId id) { return static_cast<uint64_t>(id); }
constexpr uint64_t value(SegmentId id) { return static_cast<uint64_t>(id); }

// Each may do what those before may.
enum class Role : uint8_t { kRead = 0, kAppend = 1, kAdmin = 2 };

// How it will be known that a session that has ended cannot write into its open blocks any more.
enum class FenceClass : uint8_t {
  kFenced = 0,  // it is known already: it said goodbye, or had neither memory nor queued calls
  kExecutorOnly = 1,  // never mapped memory: once the executor has done what it had queued
  kPidfd = 2,         // once its process has exited and its socket is at EOF
  kMps = 3,           // once the MPS server does not list it any more
  kUnprovable = 4,    // nothing tells: once every other session that mapped the pool is gone
};
inline constexpr int kNumFenceClasses = 5;

constexpr std::string_view fence_class_name(FenceClass fence) {
  constexpr std::string_view kNames[kNumFenceClasses] = {"fenced", "executor-only", "pidfd", "mps",
                                                         "unprovable"};
  return kNames[static_cast<int>(fence)];
}

}  // namespace larder
