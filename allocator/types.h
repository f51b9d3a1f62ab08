// Ids of the things that the state machine decides about. No dtypes, no sockets.
#pragma once

#include <compare>
#include <cstdint>

namespace larder {

enum class SessionId : uint64_t {};  // never reused within one boot of the daemon; 0 is nobody
enum class PoolId : uint64_t {};     // never reused within one boot of the daemon
enum class SegmentId : uint64_t {};  // never reused within one boot of the daemon

// A block of one group of a pool, as control messages name it: an old generation is refused.
struct BlockRef {
  int32_t id = -1;
  uint32_t generation = 0;
  auto operator<=>(const BlockRef&) const = default;
};

constexpr uint64_t value(SessionId id) { return static_cast<uint64_t>(id); }
constexpr uint64_t value(PoolId id) { return static_cast<uint64_t>(id); }
constexpr uint64_t value(SegmentId id) { return static_cast<uint64_t>(id); }

}  // namespace larder
