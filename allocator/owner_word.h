// The ownership table: one 64-bit word per block of a group, written by larderd and read by the
// executor where it uses a block. It is what makes plain slots and block ids safe to accept.
//
// Word = session id << 2 | state. Thread rule: larderd's loop thread stores with release order, the
// executor loads with acquire order; the table lives in shared memory.
#pragma once

#include <cstdint>

#include "allocator/types.h"

namespace larder {

enum class OwnerState : uint64_t {
  kNone = 0,       // free, quarantined or reserved: nobody may touch it on request
  kOpen = 1,       // one writer: the session in the word, which may also read it
  kPublished = 2,  // read-only, for every session attached to the pool
};

constexpr uint64_t owner_word(OwnerState state, SessionId session = SessionId{0}) {
  return value(session) << 2 | static_cast<uint64_t>(state);
}
constexpr bool may_append(uint64_t word, SessionId session) {
  return word == owner_word(OwnerState::kOpen, session);
}
constexpr bool may_attend(uint64_t word, SessionId session) {
  return may_append(word, session) || word == owner_word(OwnerState::kPublished);
}

}  // namespace larder
