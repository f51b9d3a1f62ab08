// Private to client: pool options as larderd reads them.
#pragma once

#include "larder/client.h"
#include "protocol/messages.h"

namespace larder {

// INVALID_ARGUMENT for what the kind of a group has no use for, and for names that two groups have.
Status check_options(const PoolOptions& options);
protocol::PoolSpec to_wire(const PoolOptions& options);

}  // namespace larder
