// The arena of a session: shared memory between a client and the executor for on-request calls.
//
//     [ header | timeline words | submission slots | completion slots | data ]
//
// The client writes submissions and reads completions, the executor the other way round. Records
// have a fixed size, and whoever reads one copies it to private memory before it looks at it: the
// other side may change shared memory at any time. Indices run freely (mod 2^32) and are taken
// modulo the number of slots. The memfd is sealed against shrinking, so that a mapping never
// faults. Thread rule: one producer and one consumer per ring, in any processes.
#pragma once

#include <array>
#include <atomic>
#include <chrono>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <string_view>
#include <type_traits>

#include "larder/status.h"
#include "protocol/limits.h"

namespace larder::protocol {

inline constexpr uint64_t kArenaMagic = 0x314152454452414cull;  // "LARDERA1"
inline constexpr uint32_t kNoWord = 0xffffffffu;                // no timeline word

enum class Op : uint32_t {
  kAppend = 1,
  kAttend = 2,
  kGather = 3,
  kSparseAttend = 4,
  kReadPages = 5,
  kWritePages = 6,
  kScrub = 7,
  kChecksum = 8,
};

// `count` elements at `offset_bytes` of the arena.
struct ArenaArray {
  uint64_t offset_bytes = 0;
  uint64_t count = 0;
};

// Where a tensor's memory is: in the arena, or in an import, which Submission::imports names.
// Segments of pools are UNSUPPORTED.
enum class TensorMemory : uint32_t { kArena = 0, kSegment = 1, kImport = 2 };

struct TensorRecord {
  uint32_t memory = 0;        // TensorMemory
  uint32_t dtype = 0;         // larder::Dtype
  uint64_t offset_bytes = 0;  // of element [0, 0, 0]
  std::array<int64_t, 3> shape = {};
  std::array<int64_t, 3> strides = {};  // in elements
};
static_assert(sizeof(TensorRecord) == 64);

inline constexpr uint32_t kFlagCausal = 1u << 0;
inline constexpr uint32_t kFlagPartial = 1u << 1;
inline constexpr uint32_t kFlagLseBase2 = 1u << 2;
inline constexpr uint32_t kFlagLseIncludesSink = 1u << 3;
inline constexpr uint32_t kFlagLseHeadsFirst = 1u << 4;
inline constexpr uint32_t kFlagDeterministic = 1u << 5;
inline constexpr uint32_t kKnownFlags = (1u << 6) - 1;

// Of a context that is spread over ranks. All 0: it is not.
struct ShardRecord {
  int32_t num_ranks = 0;
  int32_t rank = 0;
  int32_t interleave = 0;
};

// The places of a record that may lie in an import (a RegisterImport of the session).
enum class ImportPlace : uint32_t {
  kFirst = 0,
  kSecond = 1,
  kSlots = 2,
  kQLens = 3,
  kSeqLens = 4,
  kBlockTable = 5,
};
inline constexpr size_t kImportPlaces = 6;

struct Submission {
  uint64_t request = 0;  // chosen by the client, comes back in the Completion
  uint32_t op = 0;       // Op
  uint32_t flags = 0;
  uint64_t pool = 0;
  uint32_t group = 0;
  uint32_t layer = 0;
  // Run only when word[wait_word] >= wait_value; afterwards word[signal_word] = signal_value.
  uint32_t wait_word = kNoWord;
  uint32_t signal_word = kNoWord;
  uint64_t wait_value = 0;
  uint64_t signal_value = 0;
  float scale = 0.0f;        // attend, sparse attend
  int32_t window_left = -1;  // attend
  TensorRecord first;        // append: k; attend: q; gather: k_out
  TensorRecord second;       // append: v; attend: out; gather: v_out
  ArenaArray slots;          // append, gather: int64 [num_slots]
  ArenaArray q_lens;         // attend: int32 [num_seqs]
  ArenaArray seq_lens;       // attend: int32 [num_seqs]
  ArenaArray block_table;    // attend: int32 [num_seqs * block_table_stride]
  uint64_t block_table_stride = 0;
  ArenaArray lse;  // attend: float32 [num_rows * num_q_heads], count 0: not wanted
  // The rest of attend's options, as in kernels/params.h; count 0: none.
  float soft_cap = 0.0f;
  int32_t num_splits = 0;
  float out_scale = 0.0f;
  float out_sf_scale = 0.0f;
  uint64_t out_sf_first_row = 0;
  ArenaArray sinks;         // float32 [num_q_heads]
  ArenaArray alibi_slopes;  // float32 [num_q_heads]
  ArenaArray mask;          // bytes
  ArenaArray mask_offsets;  // int64 [num_seqs]
  ArenaArray out_sf;        // bytes, written
  ArenaArray indices;       // sparse attend: int32 [num_rows * top_k]
  ArenaArray topk_lens;     // sparse attend: int32 [num_rows]
  ArenaArray blocks;        // pages, scrub, checksum: int32 block ids
  ArenaArray bytes;         // pages: bytes; checksum: uint64, written
  // By ImportPlace: the import that the tensor (whose memory is kImport) or the table lies in; 0:
  // the arena. Offsets count from the beginning of the import. Tables in an import are read where
  // they are used, and what is wrong in them is left out and reported.
  std::array<uint32_t, kImportPlaces> imports = {};
  int32_t shared_prefix_tokens = 0;       // attend, as in kernels/params.h
  ShardRecord shard;                      // attend
  std::array<uint8_t, 24> reserved = {};  // zero
};
static_assert(sizeof(Submission) == 512 && std::is_trivially_copyable_v<Submission>);

struct Completion {
  uint64_t request = 0;
  uint32_t code = 0;  // ErrorCode
  uint32_t message_bytes = 0;
  std::array<char, 240> message = {};
};
static_assert(sizeof(Completion) == 256 && std::is_trivially_copyable_v<Completion>);

Completion make_completion(uint64_t request, const Status& status);
// Accepts a record from anybody: an unknown code becomes INTERNAL.
Status completion_status(const Completion& completion);

struct alignas(4096) ArenaHeader {
  uint64_t magic;
  uint64_t size_bytes;
  alignas(64) std::atomic<uint32_t> submit_tail;    // written by the client
  alignas(64) std::atomic<uint32_t> submit_head;    // written by the executor
  alignas(64) std::atomic<uint32_t> sleeping;       // 1: the executor needs the eventfd
  alignas(64) std::atomic<uint32_t> complete_tail;  // written by the executor; a futex
  alignas(64) std::atomic<uint32_t> complete_head;  // written by the client
};
static_assert(sizeof(ArenaHeader) == 4096);
static_assert(std::atomic<uint64_t>::is_always_lock_free);

inline constexpr uint64_t kArenaWordsOffset = sizeof(ArenaHeader);
inline constexpr uint64_t kArenaSubmissionsOffset =
    kArenaWordsOffset + kTimelineWords * sizeof(uint64_t);
inline constexpr uint64_t kArenaCompletionsOffset =
    kArenaSubmissionsOffset + kSubmissionSlots * sizeof(Submission);
inline constexpr uint64_t kArenaDataOffset =
    (kArenaCompletionsOffset + kCompletionSlots * sizeof(Completion) + 4095) / 4096 * 4096;
static_assert(kArenaDataOffset < kMinArenaBytes);

// A mapped arena. The memory must outlive the view.
class Arena {
 public:
  // `memory` is page aligned and of a size within kMinArenaBytes and kMaxArenaBytes (bugs).
  explicit Arena(std::span<std::byte> memory);

  // larderd, once, on zeroed memory.
  void format();
  // A client checks what it was given: INVALID_ARGUMENT.
  Status check() const;

  ArenaHeader& header() const { return *reinterpret_cast<ArenaHeader*>(memory_.data()); }
  std::atomic<uint64_t>& word(uint32_t index) const;  // index < kTimelineWords (a bug)
  std::span<std::byte> memory() const { return memory_; }
  // Whether `bytes` bytes at `offset` lie in the data part; safe for any numbers.
  bool holds(uint64_t offset_bytes, uint64_t bytes) const;

  std::byte* submission_slot(uint32_t index) const;
  std::byte* completion_slot(uint32_t index) const;

 private:
  std::span<std::byte> memory_;
};

// The client's end.
class SubmissionWriter {
 public:
  explicit SubmissionWriter(Arena arena);
  // False when the ring is full.
  bool push(const Submission& submission);
  // After a push: whether the executor must be woken through the eventfd.
  bool wake_needed();

 private:
  Arena arena_;
  uint32_t tail_;
};

class CompletionReader {
 public:
  explicit CompletionReader(Arena arena);
  // Nothing, too, while complete_tail makes no sense: the caller's deadline ends it.
  std::optional<Completion> pop();
  // Waits until a completion is there (true) or the deadline has passed (false).
  bool wait(std::chrono::steady_clock::time_point deadline);

 private:
  bool is_ready(uint32_t tail) const;

  Arena arena_;
  uint32_t head_;
};

// The executor's end of both rings. It starts where the shared indices stand, so a new executor
// runs again what the last one did not complete.
class ArenaServer {
 public:
  explicit ArenaServer(Arena arena);

  // The submission at the head, or nothing; nothing in it is validated. INVALID_ARGUMENT when the
  // client's indices make no sense: the session must not be served any further.
  Result<std::optional<Submission>> peek();
  // Whether a completion may be written without overtaking the client.
  bool can_complete() const;
  // Completes the submission at the head (peek() returned it; can_complete() holds): raises its
  // signal word, writes the completion, moves the head on and wakes the client.
  void complete(const Submission& submission, const Status& status);
  bool wait_reached(const Submission& submission) const;
  uint32_t num_pending() const;  // at most kSubmissionSlots, whatever the client wrote

  // Around a sleep: announce it, look once more, sleep only when still nothing is pending.
  void set_sleeping(bool sleeping);

 private:
  Arena arena_;
  uint32_t head_;
  uint32_t complete_tail_;
};

}  // namespace larder::protocol
