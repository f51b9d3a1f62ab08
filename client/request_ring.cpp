#include "client/request_ring.h"

#include <algorithm>
#include <cstring>
#include <string>
#include <unistd.h>

#include "allocator/host_memory.h"
#include "larder/system_error.h"

namespace larder {
namespace {

constexpr uint64_t kAlignment = 64;
constexpr auto kLookForEnd = std::chrono::milliseconds(50);

std::span<std::byte> bytes_of(const SharedMapping& mapping) {
  return {mapping.data(), static_cast<size_t>(mapping.size_bytes())};
}

const std::byte* element(const TensorView& tensor, int64_t token, int64_t head) {
  // A size-1 axis may carry any stride; its index is 0.
  const int64_t offset = (tensor.shape[0] > 1 ? token * tensor.strides[0] : 0) +
                         (tensor.shape[1] > 1 ? head * tensor.strides[1] : 0);
  return static_cast<const std::byte*>(tensor.data) + offset * dtype_bytes(tensor.dtype);
}

bool is_dense_row(const TensorView& tensor) {
  return tensor.shape[2] <= 1 || tensor.strides[2] == 1;
}

// One (token, head) row between strided and dense memory.
void copy_row(std::byte* to, int64_t to_stride, const std::byte* from, int64_t from_stride,
              int64_t dim, int64_t element_bytes) {
  for (int64_t i = 0; i < dim; ++i)
    std::memcpy(to + i * to_stride * element_bytes, from + i * from_stride * element_bytes,
                static_cast<size_t>(element_bytes));
}

}  // namespace

Result<RequestRing> RequestRing::open(std::vector<OwnFd> fds, uint64_t arena_bytes,
                                      std::function<Status()> ended) {
  if (fds.size() != 2)
    return Status(ErrorCode::kInvalidArgument,
                  "the handshake brought " + std::to_string(fds.size()) + " fds, not 2");
  const auto size = static_cast<int64_t>(arena_bytes);
  if (arena_bytes < protocol::kMinArenaBytes || arena_bytes > protocol::kMaxArenaBytes)
    return Status(ErrorCode::kInvalidArgument,
                  "the arena has " + std::to_string(arena_bytes) + " bytes");
  if (Status status = check_host_segment(fds[0].get(), size); !status.ok()) return status;
  RequestRing ring(SharedMapping::map(fds[0].get(), size, true), std::move(fds[1]),
                   std::move(ended));
  if (Status status = ring.arena_.check(); !status.ok()) return status;
  return ring;
}

RequestRing::RequestRing(SharedMapping mapping, OwnFd wake, std::function<Status()> ended)
    : mapping_(std::move(mapping)),
      arena_(bytes_of(mapping_)),
      submissions_(arena_),
      completions_(arena_),
      wake_(std::move(wake)),
      ended_(std::move(ended)) {}

uint64_t RequestRing::capacity_bytes() const {
  return static_cast<uint64_t>(mapping_.size_bytes()) - protocol::kArenaDataOffset;
}

Status RequestRing::start(std::chrono::steady_clock::time_point deadline) {
  if (under_way_) {
    const Status status = await(deadline);
    if (under_way_)
      return status.code() == ErrorCode::kDeadlineExceeded
                 ? Status(ErrorCode::kDeadlineExceeded, "an earlier call is still under way")
                 : status;
  }
  staged_end_ = protocol::kArenaDataOffset;
  return {};
}

Result<protocol::ArenaArray> RequestRing::reserve(uint64_t bytes) {
  const uint64_t begin = (staged_end_ + kAlignment - 1) / kAlignment * kAlignment;
  const auto end = static_cast<uint64_t>(mapping_.size_bytes());
  if (begin > end || bytes > end - begin)
    return Status(ErrorCode::kResourceExhausted,
                  "the call needs " + std::to_string(bytes) + " more bytes of the arena, " +
                      std::to_string(begin > end ? 0 : end - begin) + " of " +
                      std::to_string(capacity_bytes()) +
                      " are left: connect with a larger arena_bytes, or make smaller calls");
  staged_end_ = begin + bytes;
  return protocol::ArenaArray{begin, 0};
}

void RequestRing::copy_in(uint64_t offset_bytes, const void* values, size_t bytes) {
  if (bytes > 0) std::memcpy(mapping_.data() + offset_bytes, values, bytes);
}

Result<protocol::TensorRecord> RequestRing::stage_rows(const TensorView& tensor, int64_t first,
                                                       int64_t count) {
  TensorView part = tensor;
  part.shape[0] = count;
  auto record = reserve_output(part);
  if (!record) return record;
  const int64_t element_bytes = dtype_bytes(tensor.dtype);
  const int64_t row_bytes = tensor.shape[2] * element_bytes;
  std::byte* to = mapping_.data() + record->offset_bytes;
  for (int64_t token = first; token < first + count; ++token) {
    for (int64_t head = 0; head < tensor.shape[1]; ++head, to += row_bytes) {
      const std::byte* from = element(tensor, token, head);
      if (is_dense_row(tensor)) {
        std::memcpy(to, from, static_cast<size_t>(row_bytes));
      } else {
        copy_row(to, 1, from, tensor.strides[2], tensor.shape[2], element_bytes);
      }
    }
  }
  return record;
}

Result<protocol::TensorRecord> RequestRing::reserve_output(const TensorView& tensor) {
  const auto& [tokens, heads, dim] = tensor.shape;
  const auto array =
      reserve(static_cast<uint64_t>(tokens * heads * dim * dtype_bytes(tensor.dtype)));
  if (!array) return array.status();
  protocol::TensorRecord record;
  record.memory = static_cast<uint32_t>(protocol::TensorMemory::kArena);
  record.dtype = static_cast<uint32_t>(tensor.dtype);
  record.offset_bytes = array->offset_bytes;
  record.shape = tensor.shape;
  record.strides = {heads * dim, dim, 1};
  return record;
}

void RequestRing::copy_out_row(const std::byte* from, const TensorView& to, int64_t token) const {
  const int64_t element_bytes = dtype_bytes(to.dtype);
  const int64_t row_bytes = to.shape[2] * element_bytes;
  for (int64_t head = 0; head < to.shape[1]; ++head, from += row_bytes) {
    auto* target = const_cast<std::byte*>(element(to, token, head));
    if (is_dense_row(to)) {
      std::memcpy(target, from, static_cast<size_t>(row_bytes));
    } else {
      copy_row(target, to.strides[2], from, 1, to.shape[2], element_bytes);
    }
  }
}

void RequestRing::copy_out(const protocol::TensorRecord& from, const TensorView& to) const {
  const int64_t bytes = to.shape[1] * to.shape[2] * dtype_bytes(to.dtype);
  for (int64_t token = 0; token < to.shape[0]; ++token)
    copy_out_row(mapping_.data() + from.offset_bytes + token * bytes, to, token);
}

void RequestRing::copy_out_rows(const protocol::TensorRecord& from, const TensorView& to,
                                int64_t first, std::span<const int64_t> slots) const {
  if (to.shape[0] == 0) return;
  const int64_t bytes = to.shape[1] * to.shape[2] * dtype_bytes(to.dtype);
  for (size_t i = 0; i < slots.size(); ++i)
    if (slots[i] >= 0)
      copy_out_row(mapping_.data() + from.offset_bytes + static_cast<int64_t>(i) * bytes, to,
                   first + static_cast<int64_t>(i));
}

void RequestRing::copy_out_bytes(uint64_t offset_bytes, void* to, size_t bytes) const {
  if (bytes > 0) std::memcpy(to, mapping_.data() + offset_bytes, bytes);
}

Status RequestRing::run(protocol::Submission submission,
                        std::chrono::steady_clock::time_point deadline) {
  submission.request = next_request_++;
  // One call is under way at most, so a full ring means that its indices were tampered with.
  if (!submissions_.push(submission))
    return {ErrorCode::kInternal, "the submission ring is full with no call under way"};
  under_way_ = submission.request;
  if (submissions_.wake_needed()) {
    const uint64_t one = 1;
    if (::write(wake_.get(), &one, sizeof one) != sizeof one && errno != EAGAIN)
      throw SystemError("write(eventfd)");
  }
  return await(deadline);
}

Status RequestRing::await(std::chrono::steady_clock::time_point deadline) {
  while (true) {
    while (const auto completion = completions_.pop()) {
      if (completion->request != *under_way_) continue;  // a repeat, after an executor's death
      under_way_.reset();
      return protocol::completion_status(*completion);
    }
    // The wait goes on over a restart of larderd and executor: the next executor answers. Only
    // where the session has ended, nobody will.
    const auto now = std::chrono::steady_clock::now();
    if (completions_.wait(ended_ ? std::min(deadline, now + kLookForEnd) : deadline)) continue;
    if (Status status = ended_ ? ended_() : Status(); !status.ok()) return status;
    if (std::chrono::steady_clock::now() >= deadline)
      return {ErrorCode::kDeadlineExceeded, "the executor did not answer in time"};
  }
}

}  // namespace larder
