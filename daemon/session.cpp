#include "daemon/session.h"

#include <cstring>
#include <sys/eventfd.h>

#include "allocator/host_memory.h"
#include "larder/system_error.h"

namespace larder::daemon {

SessionArena::SessionArena(uint64_t size_bytes)
    : segment_(create_host_segment("larder-arena", static_cast<int64_t>(size_bytes))),
      mapping_(SharedMapping::map(segment_.fd.get(), segment_.size_bytes, true)),
      arena_(std::span(mapping_.data(), static_cast<size_t>(segment_.size_bytes))),
      eventfd_(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK)) {
  if (!eventfd_.valid()) throw SystemError("eventfd()");
  arena_.format();
}

SessionArena::SessionArena(OwnFd arena, OwnFd eventfd, uint64_t size_bytes)
    : segment_{std::move(arena), static_cast<int64_t>(size_bytes)},
      mapping_(SharedMapping::map(segment_.fd.get(), segment_.size_bytes, true)),
      arena_(std::span(mapping_.data(), static_cast<size_t>(segment_.size_bytes))),
      eventfd_(std::move(eventfd)) {}

bool SessionArena::busy() const {
  const protocol::ArenaHeader& shared = arena_.header();
  return shared.submit_tail.load(std::memory_order_acquire) !=
         shared.submit_head.load(std::memory_order_acquire);
}

template <typename T>
Result<std::vector<T>> SessionArena::read(const char* field,
                                          const protocol::ArenaRange& range) const {
  // The decoder has bounded the count, so the product cannot overflow.
  const uint64_t bytes = range.count * sizeof(T);
  if (!arena_.holds(range.offset_bytes, bytes))
    return Status(ErrorCode::kInvalidArgument,
                  std::string(field) + ": " + std::to_string(bytes) + " bytes at offset " +
                      std::to_string(range.offset_bytes) + " are not in the arena's data part (" +
                      std::to_string(protocol::kArenaDataOffset) + " .. " +
                      std::to_string(size_bytes()) + ")");
  std::vector<T> values(range.count);
  std::memcpy(values.data(), arena_.memory().data() + range.offset_bytes, bytes);
  return values;
}

Result<std::vector<int32_t>> SessionArena::read_tokens(const protocol::ArenaRange& range) const {
  return read<int32_t>("tokens", range);
}

Result<std::vector<float>> SessionArena::read_floats(const char* field,
                                                     const protocol::ArenaRange& range) const {
  return read<float>(field, range);
}

void SessionArena::fail_outstanding(const Status& status) {
  protocol::ArenaServer server(arena_);
  for (uint32_t i = 0; i < protocol::kSubmissionSlots && server.can_complete(); ++i) {
    const auto submission = server.peek();
    if (!submission || !submission->has_value()) return;
    server.complete(**submission, status);
  }
}

}  // namespace larder::daemon
