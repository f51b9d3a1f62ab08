// The fixed-size records that larderd and larder-keeper exchange: the keeper parses nothing else.
//
// The keeper holds file descriptors under 64 bytes of metadata that only larderd understands. One
// larderd at a time owns it: hello is answered BUSY while the last owner's process lives. Every
// request is answered by one KeeperReply, in order; put and list carry one fd.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <type_traits>

namespace larder::protocol {

inline constexpr uint32_t kKeeperMagic = 0x3150454b;  // "KEP1"
inline constexpr uint64_t kMaxKeeperEntries = 1 << 16;

enum class KeeperOp : uint32_t {
  kHello = 1,  // become the owner; the reply's epoch goes into every later request
  kPut = 2,    // keep the fd under `key`, replacing what was there
  kDrop = 3,   // close what is under `key`; NOT_FOUND is an answer, not a failure
  kList = 4,   // the entry with the smallest key >= `key`, with a duplicate of its fd
};

struct KeeperRequest {
  uint32_t magic = kKeeperMagic;
  KeeperOp op = KeeperOp::kHello;
  uint64_t epoch = 0;  // 0 in hello
  uint64_t key = 0;
  std::array<uint8_t, 64> metadata = {};
};
static_assert(sizeof(KeeperRequest) == 88 && std::is_trivially_copyable_v<KeeperRequest>);

struct KeeperReply {
  uint32_t magic = kKeeperMagic;
  uint32_t code = 0;  // larder::ErrorCode
  uint64_t epoch = 0;
  uint64_t num_entries = 0;
  uint64_t key = 0;  // list: the key found
  std::array<uint8_t, 64> metadata = {};
};
static_assert(sizeof(KeeperReply) == 96 && std::is_trivially_copyable_v<KeeperReply>);

}  // namespace larder::protocol
