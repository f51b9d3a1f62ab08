#include "daemon/pool_counters.h"

#include "allocator/host_memory.h"

namespace larder::daemon {

SharedCounters SharedCounters::create() {
  return SharedCounters(std::move(create_host_segment("larder-counters", kBytes).fd));
}

SharedCounters SharedCounters::adopt(OwnFd fd) { return SharedCounters(std::move(fd)); }

}  // namespace larder::daemon
