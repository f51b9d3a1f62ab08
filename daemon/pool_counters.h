// What the executor counts for a pool, in memory that larderd and the executor share and the keeper
// holds: the figures go on over the death of either.
#pragma once

#include <atomic>
#include <cstdint>
#include <utility>

#include "allocator/mapped_range.h"
#include "allocator/segment.h"
#include "larder/own_fd.h"

namespace larder::daemon {

struct PoolCounters {
  std::atomic<uint64_t> appended_tokens;  // on request, summed over layers, as are the others
  std::atomic<uint64_t> attended_rows;
  std::atomic<uint64_t> refusals;
};
static_assert(std::atomic<uint64_t>::is_always_lock_free);

class SharedCounters {
 public:
  static constexpr int64_t kBytes = 4096;

  static SharedCounters create();         // zeros; throws SystemError
  static SharedCounters adopt(OwnFd fd);  // a memfd that create() has made; throws SystemError
  PoolCounters& operator*() const { return *reinterpret_cast<PoolCounters*>(mapping_.data()); }
  PoolCounters* operator->() const { return &**this; }
  int fd() const { return fd_.get(); }

 private:
  explicit SharedCounters(OwnFd fd)
      : fd_(std::move(fd)), mapping_(SharedMapping::map(fd_.get(), kBytes, true)) {}

  OwnFd fd_;
  SharedMapping mapping_;
};

}  // namespace larder::daemon
