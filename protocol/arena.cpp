#include "protocol/arena.h"

#include <algorithm>
#include <cstring>
#include <linux/futex.h>
#include <string>
#include <sys/syscall.h>
#include <unistd.h>

#include <climits>

#include "larder/check.h"
#include "protocol/text.h"

namespace larder::protocol {
namespace {

// Shared-memory copies: the other side may write at the same time, so each byte is read once and
// nothing is assumed about what was read. (A torn record is validated like any other.) The fence
// keeps the compiler from reading shared memory again in place of the copy.
__attribute__((no_sanitize("thread"))) void copy_shared(void* to, const void* from, size_t bytes) {
  std::memcpy(to, from, bytes);
  std::atomic_signal_fence(std::memory_order_seq_cst);
}

void futex_wake(std::atomic<uint32_t>& word) {
  ::syscall(SYS_futex, &word, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void futex_wait(std::atomic<uint32_t>& word, uint32_t seen, std::chrono::nanoseconds timeout) {
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(timeout);
  const timespec limit{seconds.count(), (timeout - seconds).count()};
  // EAGAIN, EINTR and ETIMEDOUT are all handled by looking again.
  ::syscall(SYS_futex, &word, FUTEX_WAIT, seen, &limit, nullptr, 0);
}

}  // namespace

Completion make_completion(uint64_t request, const Status& status) {
  Completion completion;
  completion.request = request;
  completion.code = static_cast<uint32_t>(status.code());
  const std::string message = printable(status.message(), completion.message.size());
  completion.message_bytes = static_cast<uint32_t>(message.size());
  std::memcpy(completion.message.data(), message.data(), message.size());
  return completion;
}

Status completion_status(const Completion& completion) {
  if (completion.code == static_cast<uint32_t>(ErrorCode::kOk)) return {};
  const size_t size = std::min<size_t>(completion.message_bytes, completion.message.size());
  std::string message = printable({completion.message.data(), size}, size);
  if (completion.code >= static_cast<uint32_t>(kNumErrorCodes))
    return {ErrorCode::kInternal,
            "unknown error code " + std::to_string(completion.code) + ": " + message};
  return {static_cast<ErrorCode>(completion.code), std::move(message)};
}

Arena::Arena(std::span<std::byte> memory) : memory_(memory) {
  LARDER_CHECK(memory.size() >= kMinArenaBytes && memory.size() <= kMaxArenaBytes, memory.size());
  LARDER_CHECK(reinterpret_cast<uintptr_t>(memory.data()) % alignof(ArenaHeader) == 0);
}

void Arena::format() {
  header().magic = kArenaMagic;
  header().size_bytes = memory_.size();
}

Status Arena::check() const {
  if (header().magic != kArenaMagic || header().size_bytes != memory_.size())
    return {ErrorCode::kInvalidArgument,
            "the arena's header says " + std::to_string(header().size_bytes) +
                " bytes, the mapping has " + std::to_string(memory_.size())};
  return {};
}

std::atomic<uint64_t>& Arena::word(uint32_t index) const {
  LARDER_CHECK(index < kTimelineWords, index);
  return reinterpret_cast<std::atomic<uint64_t>*>(memory_.data() + kArenaWordsOffset)[index];
}

bool Arena::holds(uint64_t offset_bytes, uint64_t bytes) const {
  return offset_bytes >= kArenaDataOffset && offset_bytes <= memory_.size() &&
         bytes <= memory_.size() - offset_bytes;
}

std::byte* Arena::submission_slot(uint32_t index) const {
  return memory_.data() + kArenaSubmissionsOffset + (index % kSubmissionSlots) * sizeof(Submission);
}

std::byte* Arena::completion_slot(uint32_t index) const {
  return memory_.data() + kArenaCompletionsOffset + (index % kCompletionSlots) * sizeof(Completion);
}

SubmissionWriter::SubmissionWriter(Arena arena)
    : arena_(arena), tail_(arena.header().submit_tail.load(std::memory_order_relaxed)) {}

bool SubmissionWriter::push(const Submission& submission) {
  const uint32_t head = arena_.header().submit_head.load(std::memory_order_acquire);
  if (tail_ - head >= kSubmissionSlots) return false;
  copy_shared(arena_.submission_slot(tail_), &submission, sizeof submission);
  ++tail_;
  // Sequentially consistent together with `sleeping`: either the executor sees the new tail before
  // it sleeps, or we see that it sleeps.
  arena_.header().submit_tail.store(tail_, std::memory_order_seq_cst);
  return true;
}

bool SubmissionWriter::wake_needed() {
  return arena_.header().sleeping.load(std::memory_order_seq_cst) != 0;
}

CompletionReader::CompletionReader(Arena arena)
    : arena_(arena), head_(arena.header().complete_head.load(std::memory_order_relaxed)) {}

std::optional<Completion> CompletionReader::pop() {
  if (!is_ready(arena_.header().complete_tail.load(std::memory_order_acquire))) return std::nullopt;
  Completion completion;
  copy_shared(&completion, arena_.completion_slot(head_), sizeof completion);
  ++head_;
  arena_.header().complete_head.store(head_, std::memory_order_release);
  return completion;
}

bool CompletionReader::is_ready(uint32_t tail) const {
  return tail != head_ && tail - head_ <= kCompletionSlots;
}

bool CompletionReader::wait(std::chrono::steady_clock::time_point deadline) {
  std::atomic<uint32_t>& tail = arena_.header().complete_tail;
  // A short spin covers small calls, whose answer comes sooner than a sleep would take.
  for (int spin = 0; spin < 2000; ++spin) {
    if (is_ready(tail.load(std::memory_order_acquire))) return true;
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
  }
  while (true) {
    const uint32_t seen = tail.load(std::memory_order_acquire);
    if (is_ready(seen)) return true;
    const auto left = deadline - std::chrono::steady_clock::now();
    if (left.count() <= 0) return false;
    futex_wait(tail, seen, left);
  }
}

ArenaServer::ArenaServer(Arena arena)
    : arena_(arena),
      head_(arena.header().submit_head.load(std::memory_order_acquire)),
      complete_tail_(arena.header().complete_tail.load(std::memory_order_acquire)) {}

Result<std::optional<Submission>> ArenaServer::peek() {
  const uint32_t tail = arena_.header().submit_tail.load(std::memory_order_seq_cst);
  if (tail == head_) return std::optional<Submission>();
  if (tail - head_ > kSubmissionSlots)
    return Status(ErrorCode::kInvalidArgument, "submit_tail is " + std::to_string(tail) + " with " +
                                                   std::to_string(head_) + " taken: the ring has " +
                                                   std::to_string(kSubmissionSlots) + " slots");
  const uint32_t completions_read = arena_.header().complete_head.load(std::memory_order_acquire);
  if (complete_tail_ - completions_read > kCompletionSlots)
    return Status(ErrorCode::kInvalidArgument,
                  "complete_head is " + std::to_string(completions_read) + " with " +
                      std::to_string(complete_tail_) + " written: the ring has " +
                      std::to_string(kCompletionSlots) + " slots");
  Submission submission;
  copy_shared(&submission, arena_.submission_slot(head_), sizeof submission);
  return std::optional<Submission>(submission);
}

bool ArenaServer::can_complete() const {
  return complete_tail_ - arena_.header().complete_head.load(std::memory_order_acquire) <
         kCompletionSlots;
}

void ArenaServer::complete(const Submission& submission, const Status& status) {
  if (submission.signal_word < kTimelineWords)
    arena_.word(submission.signal_word).store(submission.signal_value, std::memory_order_release);
  const Completion completion = make_completion(submission.request, status);
  copy_shared(arena_.completion_slot(complete_tail_), &completion, sizeof completion);
  ++complete_tail_;
  ++head_;
  // The completion is visible first: if we die in between, the next executor runs the record again
  // and the client gets a second completion, which it drops. The other order could lose it.
  arena_.header().complete_tail.store(complete_tail_, std::memory_order_release);
  arena_.header().submit_head.store(head_, std::memory_order_release);
  futex_wake(arena_.header().complete_tail);
}

bool ArenaServer::wait_reached(const Submission& submission) const {
  // Not validated yet: a number that names no word waits for nothing and is refused afterwards.
  return submission.wait_word >= kTimelineWords ||
         arena_.word(submission.wait_word).load(std::memory_order_acquire) >= submission.wait_value;
}

uint32_t ArenaServer::num_pending() const {
  const uint32_t tail = arena_.header().submit_tail.load(std::memory_order_seq_cst);
  return std::min(tail - head_, kSubmissionSlots);
}

void ArenaServer::set_sleeping(bool sleeping) {
  arena_.header().sleeping.store(sleeping ? 1 : 0, std::memory_order_seq_cst);
}

}  // namespace larder::protocol
