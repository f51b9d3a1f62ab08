// What an earlier larderd has left with the keeper, sorted by what it is.
//
// Nothing here decides: the journal says what counts (allocator/recorded_machine.h), and what it
// does not name is given back.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "allocator/state_machine.h"
#include "daemon/journal_file.h"
#include "daemon/keeper_client.h"
#include "larder/own_fd.h"
#include "larder/status.h"

namespace larder::daemon {

struct SessionFds {
  OwnFd arena;
  OwnFd wake_up;
  OwnFd process;   // pidfd
  OwnFd lifeline;  // the reading end of a pipe whose other end the client's processes have
};

struct Recovery {
  std::optional<JournalFile::Found> journal;  // absent: there is no cache yet
  std::map<uint64_t, OwnFd> segments;         // by SegmentId
  std::map<uint64_t, OwnFd> counters;         // by PoolId
  std::map<uint64_t, SessionFds> sessions;    // by SessionId
  std::map<uint64_t, OwnFd> executors;        // pidfds, by Executors::id_of
  std::vector<uint64_t> unknown;              // keys of kinds that this build does not know
};

// INTERNAL or UNSUPPORTED, naming the damage, for a journal that does not prove itself.
Result<Recovery> read_keeper(KeeperClient& keeper);

// INTERNAL, naming it, when the machine counts on a segment that the keeper does not have, or has
// in another size. The size of a GPU's memory is the driver's to know, which a restart does
// without.
Status check_segments(const StateMachine& machine, const Recovery& recovery);

}  // namespace larder::daemon
