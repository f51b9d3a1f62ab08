// RequestRing: the client's side of on-request calls: staging in the arena, submission, answer.
//
// One call at a time. A call that is given up at its deadline may still run in the executor, so the
// arena is left alone until its completion has come. Thread rule: one thread at a time.
#pragma once

#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "allocator/mapped_range.h"
#include "larder/own_fd.h"
#include "larder/status.h"
#include "larder/tensor.h"
#include "protocol/arena.h"

namespace larder {

class RequestRing {
 public:
  // fds: arena, wake-up eventfd, as they came with the handshake: they stay while the session does,
  // whichever larderd and executor serve them. `ended`, where there is one, says why nobody will
  // any more. INVALID_ARGUMENT when the arena is not what the daemon said. Throws SystemError.
  static Result<RequestRing> open(std::vector<OwnFd> fds, uint64_t arena_bytes,
                                  std::function<Status()> ended = {});

  uint64_t capacity_bytes() const;
  std::span<std::byte> memory() const { return arena_.memory(); }
  std::atomic<uint64_t>& word(uint32_t index) const { return arena_.word(index); }
  // Forgets what was staged, once no call is under way: DEADLINE_EXCEEDED while one is.
  Status start(std::chrono::steady_clock::time_point deadline);
  // Room for `bytes`, 64-byte aligned. RESOURCE_EXHAUSTED names what was asked and what is left.
  Result<protocol::ArenaArray> reserve(uint64_t bytes);
  // Copies an array in.
  template <typename T>
  Result<protocol::ArenaArray> stage(const T* values, size_t count) {
    auto array = reserve(count * sizeof(T));
    if (!array) return array;
    copy_in(array->offset_bytes, values, count * sizeof(T));
    array->count = count;
    return array;
  }
  // Copies rows [first, first + count) of a tensor in, densely.
  Result<protocol::TensorRecord> stage_rows(const TensorView& tensor, int64_t first, int64_t count);
  // Room for an output of the tensor's shape, dense.
  Result<protocol::TensorRecord> reserve_output(const TensorView& tensor);
  void copy_out(const protocol::TensorRecord& from, const TensorView& to) const;
  // Row i of `from` to row first + i of `to`, where slots[i] >= 0. Nothing if `to` has no rows.
  void copy_out_rows(const protocol::TensorRecord& from, const TensorView& to, int64_t first,
                     std::span<const int64_t> slots) const;
  template <typename T>
  void copy_out(const protocol::ArenaArray& from, T* to) const {
    copy_out_bytes(from.offset_bytes, to, from.count * sizeof(T));
  }

  // Submits and waits. The deadline leaves the call under way (see start).
  Status run(protocol::Submission submission, std::chrono::steady_clock::time_point deadline);

 private:
  RequestRing(SharedMapping mapping, OwnFd wake, std::function<Status()> ended);
  void copy_in(uint64_t offset_bytes, const void* values, size_t bytes);
  void copy_out_bytes(uint64_t offset_bytes, void* to, size_t bytes) const;
  void copy_out_row(const std::byte* from, const TensorView& to, int64_t token) const;
  Status await(std::chrono::steady_clock::time_point deadline);

  SharedMapping mapping_;
  protocol::Arena arena_;
  protocol::SubmissionWriter submissions_;
  protocol::CompletionReader completions_;
  OwnFd wake_;
  std::function<Status()> ended_;
  uint64_t staged_end_ = protocol::kArenaDataOffset;
  uint64_t next_request_ = 1;
  std::optional<uint64_t> under_way_;
};

}  // namespace larder
