// The framing of the journal: a snapshot and the records after it, in a span of memory that is zero
// at first.
//
// It knows nothing of what the payloads mean, nor where the memory comes from
// (daemon/journal_file.h). Every byte order is the machine's: a journal never leaves its node.
//
//   JournalHeader | record (the snapshot) | record | record | ... | zeros
//   record = JournalRecordHeader | payload | up to 7 bytes that nobody reads, to a multiple of 8
//
// The writer may be killed between any two of its instructions. `committed_bytes` is stored after a
// record is complete, so what lies below it must prove itself or the journal is damaged, and what
// lies above it may be half written. Thread rule: one thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <vector>

#include "larder/status.h"

namespace larder {

inline constexpr uint64_t kJournalMagic = 0x314c4e524a44524c;  // "LRDJRNL1"
inline constexpr uint32_t kJournalVersion = 1;

struct JournalHeader {
  uint64_t magic = kJournalMagic;
  uint32_t version = kJournalVersion;
  uint32_t reserved = 0;
  uint64_t snapshot_sequence = 0;
  uint8_t reserved_bytes[28] = {};
  uint32_t crc = 0;              // CRC32C of the bytes before it
  uint64_t committed_bytes = 0;  // from the start of the memory; atomic, stored with release order
};
static_assert(sizeof(JournalHeader) == 64 && offsetof(JournalHeader, crc) == 52);

struct JournalRecordHeader {
  uint32_t crc = 0;  // CRC32C of the rest of this header and the payload, without the padding
  uint32_t length_bytes = 0;
  uint64_t sequence = 0;  // one more than the record's before it
};
static_assert(sizeof(JournalRecordHeader) == 16);

// What is in a journal; the spans point into its memory.
struct JournalContents {
  uint64_t snapshot_sequence = 0;
  std::span<const std::byte> snapshot;
  std::vector<std::span<const std::byte>> records;  // after the snapshot, in order
  uint64_t last_sequence = 0;
  size_t end_bytes = 0;   // of the last complete record, from the start of the memory
  size_t torn_bytes = 0;  // after end_bytes: of a record that was being written
};

// The memory may hold anything and is at a multiple of 8 bytes. Complete records above the
// committed bytes are part of the journal; the first that does not prove itself there is the torn
// tail. INTERNAL names the damage: which record, at which byte, what is stored and what is
// expected. UNSUPPORTED for another version.
Result<JournalContents> read_journal(std::span<const std::byte> memory);

// The writer. The memory stays the caller's and outlives it.
class Journal {
 public:
  static constexpr size_t kHeaderBytes = sizeof(JournalHeader);
  static constexpr size_t kRecordHeaderBytes = sizeof(JournalRecordHeader);
  static constexpr size_t kMaxPayloadBytes = UINT32_MAX;
  // What a record of this payload takes; the header comes to it once.
  static constexpr size_t bytes_needed(size_t payload_bytes) {
    return kRecordHeaderBytes + (payload_bytes + 7) / 8 * 8;
  }

  // A fresh journal in zeroed memory that begins with a snapshot of everything up to `sequence`.
  // It is a bug if it does not fit.
  static Journal start(std::span<std::byte> memory, uint64_t sequence,
                       std::span<const std::byte> snapshot);
  // Goes on after what read_journal() found in the same memory; a torn tail is zeroed.
  static Journal resume(std::span<std::byte> memory, const JournalContents& contents);

  // False: no room (or more than kMaxPayloadBytes), and nothing was written.
  [[nodiscard]] bool append(std::span<const std::byte> payload);

  uint64_t last_sequence() const { return last_sequence_; }  // the snapshot's before any record
  size_t used_bytes() const { return end_bytes_; }
  size_t num_records() const { return num_records_; }  // after the snapshot

 private:
  Journal(std::span<std::byte> memory, uint64_t last_sequence, size_t end_bytes,
          size_t num_records);
  void write_record(uint64_t sequence, std::span<const std::byte> payload);
  void commit();

  std::span<std::byte> memory_;
  uint64_t last_sequence_;
  size_t end_bytes_;
  size_t num_records_;
};

}  // namespace larder
