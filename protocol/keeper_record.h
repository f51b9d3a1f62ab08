// The fixed-size records that larderd and larder-keeper exchange: the keeper parses nothing else.
//
// The keeper holds file descriptors under 64 bytes of metadata that only larderd understands, and
// so are the kinds in the keys. One larderd at a time owns it: hello is answered BUSY while the
// last owner's process lives. Every request is answered by one KeeperReply, in order. put carries
// one fd, and the answer to list one for each entry.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

#include "larder/check.h"

namespace larder::protocol {

inline constexpr uint32_t kKeeperMagic = 0x3250454b;  // "KEP2"
inline constexpr uint64_t kMaxKeeperEntries = 1 << 16;
inline constexpr size_t kMaxKeeperEntriesPerList = 16;

// What an fd is: the top byte of its key. Never renumbered, as a keeper outlives larderd's
// versions.
enum class KeeperKind : uint8_t {
  kJournal = 1,
  kSegment = 2,
  kArena = 3,
  kWakeUp = 4,    // the eventfd of a session
  kProcess = 5,   // the pidfd of a session's process
  kExecutor = 6,  // its pidfd
  kCounters = 7,
  kLifeline =
      8,  // of a session: the reading end of a pipe that its processes have the other end of
};

inline constexpr int kKeeperIdBits = 56;

// It is a bug if the id has more than 56 bits.
constexpr uint64_t keeper_key(KeeperKind kind, uint64_t id) {
  LARDER_CHECK(id >> kKeeperIdBits == 0, id);
  return uint64_t{static_cast<uint8_t>(kind)} << kKeeperIdBits | id;
}
// Any value: the key may come from another version.
constexpr KeeperKind keeper_kind(uint64_t key) {
  return static_cast<KeeperKind>(key >> kKeeperIdBits);
}
constexpr uint64_t keeper_id(uint64_t key) { return key & ((uint64_t{1} << kKeeperIdBits) - 1); }

enum class KeeperOp : uint32_t {
  kHello = 1,  // become the owner; the reply's epoch goes into every later request
  kPut = 2,    // keep the fd under `key`, replacing in one step what was there
  kDrop = 3,   // close what is under `key`; NOT_FOUND is an answer, not a failure
  kList = 4,   // the entries with the smallest keys >= `key`, with duplicates of their fds
};

struct KeeperRequest {
  uint32_t magic = kKeeperMagic;
  KeeperOp op = KeeperOp::kHello;
  uint64_t epoch = 0;  // 0 in hello
  uint64_t key = 0;
  std::array<uint8_t, 64> metadata = {};
};
static_assert(sizeof(KeeperRequest) == 88 && std::is_trivially_copyable_v<KeeperRequest>);

struct KeeperEntry {
  uint64_t key = 0;
  std::array<uint8_t, 64> metadata = {};
};
static_assert(sizeof(KeeperEntry) == 72);

struct KeeperReply {
  uint32_t magic = kKeeperMagic;
  uint32_t code = 0;         // larder::ErrorCode
  uint64_t epoch = 0;        // 0 for those who are not the owner
  uint64_t num_entries = 0;  // that the keeper holds
  uint32_t num_listed = 0;   // list: fewer than kMaxKeeperEntriesPerList after the last entry
  uint32_t reserved = 0;
  std::array<KeeperEntry, kMaxKeeperEntriesPerList> listed = {};  // in the order of keys
};
static_assert(sizeof(KeeperReply) == 32 + 16 * 72 && std::is_trivially_copyable_v<KeeperReply>);

}  // namespace larder::protocol
