// Segment: one physical allocation, named by one fd. The fd is the memory: it stays as long as
// somebody holds the fd or a mapping of it.
#pragma once

#include <cstdint>

#include "larder/own_fd.h"

namespace larder {

struct Segment {
  OwnFd fd;
  int64_t size_bytes = 0;
};

}  // namespace larder
