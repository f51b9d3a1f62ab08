// What larderd and its executor say to each other, as plain structs, and their codec. The socket
// between them is a socketpair, but the same limits and checks hold as for clients.
#pragma once

#include <cstdint>
#include <variant>
#include <vector>

#include "protocol/messages.h"

namespace larder::protocol {

// Commands: what the executor must know to serve the rings, and work that larderd orders itself.
// fds: the ownership table, 8 bytes per block; the pool's counters (daemon/pool_store.h); then, for
// centred keys, the key offsets, float32 [num_layers, num_kv_heads, k_dim] (in the spec they are
// empty).
struct AddGroup {
  uint64_t pool = 0;
  uint32_t group = 0;
  GroupSpec spec;
  GroupLayout layout;
};
struct AddSegments {  // one fd per size, one extent after the other
  uint64_t pool = 0;
  uint32_t group = 0;
  std::vector<int64_t> size_bytes;
  uint32_t first_index = 0;
};
struct DropExtent {  // nobody uses it any more
  uint64_t pool = 0;
  uint32_t group = 0;
  uint32_t index = 0;
};
struct DropPool {
  uint64_t pool = 0;
};
struct AddSession {  // fds: arena memfd, wake-up eventfd
  uint64_t session = 0;
  uint64_t arena_bytes = 0;
  std::vector<uint64_t> pools;  // open in it already: its ring is served from now on
};
struct AttachPool {
  uint64_t session = 0;
  uint64_t pool = 0;
};
struct DetachPool {
  uint64_t session = 0;
  uint64_t pool = 0;
};
struct DropSession {
  uint64_t session = 0;
};
// Answered with Drained once the session's ring is empty or the session is dropped; asked again of
// the next executor when this one dies.
struct Drain {
  uint64_t session = 0;
  uint64_t ticket = 0;
};
struct CopyBlocks {  // answered with Copied; may be run twice
  uint64_t copy = 0;
  uint64_t pool = 0;
  uint32_t group = 0;
  std::vector<int32_t> from;
  std::vector<int32_t> to;
};
// Memory that calls of the session may name. fds: the memory, but of kind cuda_ipc. Answered with
// ImportDone.
struct AddImport {
  uint64_t session = 0;
  uint64_t import_id = 0;
  RegisterImport memory;
};
struct RemoveImport {
  uint64_t session = 0;
  uint64_t import_id = 0;
};
using ExecutorCommand =
    std::variant<AddGroup, AddSegments, DropPool, AddSession, AttachPool, DetachPool, DropSession,
                 Drain, CopyBlocks, DropExtent, AddImport, RemoveImport>;

struct Ready {};  // the executor serves
struct Drained {
  uint64_t ticket = 0;
};
struct Copied {
  uint64_t copy = 0;
  Status status;
};
struct BrokenRing {  // the session's ring indices make no sense: it is not served any more
  uint64_t session = 0;
  std::string message;
};
struct ImportDone {
  uint64_t session = 0;
  uint64_t import_id = 0;
  Status status;  // what is not OK is not there
};
using ExecutorReport = std::variant<Ready, Drained, Copied, BrokenRing, ImportDone>;

Bytes encode(const ExecutorCommand& command);
Bytes encode(const ExecutorReport& report);
Result<ExecutorCommand> decode_command(std::span<const std::byte> bytes);
Result<ExecutorReport> decode_report(std::span<const std::byte> bytes);

}  // namespace larder::protocol
