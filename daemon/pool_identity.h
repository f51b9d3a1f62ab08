// From what an engine states about a pool to what the state machine compares and hashes.
#pragma once

#include "allocator/state_machine.h"
#include "larder/status.h"
#include "protocol/messages.h"

namespace larder::daemon {

// Refuses what no kernel serves (client/group_view.h). Format, encoder, key transform, scales,
// geometry and layout become the pool's identity: sessions that share a pool must agree on them,
// and they are part of every prefix key.
Result<PoolSpec> to_machine_spec(const protocol::PoolSpec& spec);

}  // namespace larder::daemon
