#include "allocator/journal.h"

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <cstring>
#include <optional>
#include <string>

#include "allocator/crc32c.h"
#include "larder/check.h"

namespace larder {
namespace {

template <typename T>
std::string hex(T value) {
  char text[24];
  std::snprintf(text, sizeof text, "0x%0*llx", static_cast<int>(2 * sizeof value),
                static_cast<unsigned long long>(value));
  return text;
}

uint32_t header_crc(const JournalHeader& header) {
  return crc32c(std::as_bytes(std::span(&header, 1)).first(offsetof(JournalHeader, crc)));
}

uint32_t record_crc(const JournalRecordHeader& header, std::span<const std::byte> payload) {
  const auto covered =
      std::as_bytes(std::span(&header, 1)).subspan(offsetof(JournalRecordHeader, length_bytes));
  return crc32c(payload, crc32c(covered));
}

std::atomic_ref<uint64_t> committed_word(std::byte* memory) {
  return std::atomic_ref(
      *reinterpret_cast<uint64_t*>(memory + offsetof(JournalHeader, committed_bytes)));
}

void check_aligned(const std::byte* memory) {
  LARDER_CHECK(reinterpret_cast<uintptr_t>(memory) % alignof(JournalHeader) == 0);
}

Status damage(std::string what) { return {ErrorCode::kInternal, "the journal " + std::move(what)}; }

// The header of a journal, or what is wrong with it.
Result<JournalHeader> read_header(std::span<const std::byte> memory) {
  check_aligned(memory.data());
  JournalHeader header;
  if (memory.size() < sizeof header)
    return damage("has " + std::to_string(memory.size()) + " bytes, and its header alone " +
                  std::to_string(sizeof header));
  std::memcpy(&header, memory.data(), sizeof header);
  // atomic_ref takes no const object; a load writes nothing.
  header.committed_bytes =
      committed_word(const_cast<std::byte*>(memory.data())).load(std::memory_order_acquire);
  if (header.magic != kJournalMagic)
    return damage("has magic " + hex(header.magic) + ", expected " + hex(kJournalMagic));
  if (header.version != kJournalVersion)
    return Status(ErrorCode::kUnsupported,
                  "the journal has version " + std::to_string(header.version) +
                      ", and this build reads version " + std::to_string(kJournalVersion));
  if (const uint32_t computed = header_crc(header); computed != header.crc)
    return damage("has a damaged header: CRC32C stored " + hex(header.crc) + ", computed " +
                  hex(computed));
  if (header.committed_bytes < sizeof header + Journal::bytes_needed(0) ||
      header.committed_bytes > memory.size() || header.committed_bytes % 8 != 0)
    return damage("has " + std::to_string(header.committed_bytes) +
                  " committed bytes, expected a multiple of 8 from " +
                  std::to_string(sizeof header + Journal::bytes_needed(0)) + " to " +
                  std::to_string(memory.size()));
  return header;
}

// Goes from record to record.
class Reader {
 public:
  Reader(std::span<const std::byte> memory, uint64_t first_sequence)
      : memory_(memory), sequence_(first_sequence) {}

  size_t position() const { return position_; }

  // The payload of the next record, which ends at `limit` or below and then is passed; or what is
  // wrong with it. `limit` is within the memory.
  Result<std::span<const std::byte>> next(size_t limit) {
    JournalRecordHeader header;
    if (limit - position_ < sizeof header)
      return wrong("has " + std::to_string(limit - position_) + " bytes left before byte " +
                   std::to_string(limit) + ", and its header alone " +
                   std::to_string(sizeof header));
    std::memcpy(&header, memory_.data() + position_, sizeof header);
    if (header.sequence != sequence_)
      return wrong("has sequence " + std::to_string(header.sequence));
    const size_t size = Journal::bytes_needed(header.length_bytes);
    if (size > limit - position_)
      return wrong("has length " + std::to_string(header.length_bytes) + " and would end at byte " +
                   std::to_string(position_ + size) + ", expected at most " +
                   std::to_string(limit));
    const auto payload = memory_.subspan(position_ + sizeof header, header.length_bytes);
    if (const uint32_t computed = record_crc(header, payload); computed != header.crc)
      return wrong("has length " + std::to_string(header.length_bytes) + " and CRC32C stored " +
                   hex(header.crc) + ", computed " + hex(computed));
    position_ += size;
    ++sequence_;
    return payload;
  }

  // Of the record that was being written here. Its length is written before anything else of it;
  // where nothing was written, there are zeros.
  size_t torn_bytes() const {
    JournalRecordHeader header;
    const size_t left = memory_.size() - position_;
    if (left < sizeof header) return 0;  // no record fits, so none was begun
    std::memcpy(&header, memory_.data() + position_, sizeof header);
    if (header.crc == 0 && header.length_bytes == 0 && header.sequence == 0) return 0;
    return std::min(left, Journal::bytes_needed(header.length_bytes));
  }

 private:
  Status wrong(std::string what) const {
    return damage("is damaged: the record of sequence " + std::to_string(sequence_) + " at byte " +
                  std::to_string(position_) + ' ' + std::move(what));
  }

  std::span<const std::byte> memory_;
  size_t position_ = Journal::kHeaderBytes;
  uint64_t sequence_;  // of the next record
};

}  // namespace

Result<JournalContents> read_journal(std::span<const std::byte> memory) {
  const auto header = read_header(memory);
  if (!header) return header.status();
  Reader reader(memory, header->snapshot_sequence);
  const auto snapshot = reader.next(header->committed_bytes);
  if (!snapshot) return snapshot.status();
  JournalContents contents;
  contents.snapshot_sequence = header->snapshot_sequence;
  contents.snapshot = *snapshot;
  while (reader.position() < header->committed_bytes) {
    const auto record = reader.next(header->committed_bytes);
    if (!record) return record.status();
    contents.records.push_back(*record);
  }
  while (const auto record = reader.next(memory.size())) contents.records.push_back(*record);
  contents.last_sequence = contents.snapshot_sequence + contents.records.size();
  contents.end_bytes = reader.position();
  contents.torn_bytes = reader.torn_bytes();
  return contents;
}

Journal::Journal(std::span<std::byte> memory, uint64_t last_sequence, size_t end_bytes,
                 size_t num_records)
    : memory_(memory),
      last_sequence_(last_sequence),
      end_bytes_(end_bytes),
      num_records_(num_records) {}

Journal Journal::start(std::span<std::byte> memory, uint64_t sequence,
                       std::span<const std::byte> snapshot) {
  check_aligned(memory.data());
  LARDER_CHECK(snapshot.size() <= kMaxPayloadBytes &&
                   memory.size() >= kHeaderBytes + bytes_needed(snapshot.size()),
               snapshot.size(), memory.size());
  JournalHeader header;
  header.snapshot_sequence = sequence;
  header.crc = header_crc(header);
  std::memcpy(memory.data(), &header, sizeof header);
  Journal journal(memory, sequence, kHeaderBytes, 0);
  journal.write_record(sequence, snapshot);
  journal.commit();
  return journal;
}

Journal Journal::resume(std::span<std::byte> memory, const JournalContents& contents) {
  check_aligned(memory.data());
  LARDER_CHECK(contents.end_bytes <= memory.size() &&
                   contents.torn_bytes <= memory.size() - contents.end_bytes,
               contents.end_bytes, contents.torn_bytes, memory.size());
  // Nothing of it may lie where a later record could end.
  std::fill_n(memory.data() + contents.end_bytes, contents.torn_bytes, std::byte{0});
  Journal journal(memory, contents.last_sequence, contents.end_bytes, contents.records.size());
  journal.commit();
  return journal;
}

bool Journal::append(std::span<const std::byte> payload) {
  const size_t room = memory_.size() - end_bytes_;
  if (payload.size() > std::min(room, kMaxPayloadBytes) || bytes_needed(payload.size()) > room)
    return false;
  write_record(last_sequence_ + 1, payload);
  ++last_sequence_;
  ++num_records_;
  commit();
  return true;
}

// The length comes first and the CRC last. What a killed process had stored is all there, so a
// fence for the compiler is enough.
void Journal::write_record(uint64_t sequence, std::span<const std::byte> payload) {
  JournalRecordHeader header{0, static_cast<uint32_t>(payload.size()), sequence};
  std::byte* const record = memory_.data() + end_bytes_;
  std::memcpy(record, &header, sizeof header);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  if (!payload.empty()) std::memcpy(record + sizeof header, payload.data(), payload.size());
  header.crc = record_crc(header, payload);
  std::atomic_signal_fence(std::memory_order_seq_cst);
  std::memcpy(record + offsetof(JournalRecordHeader, crc), &header.crc, sizeof header.crc);
  end_bytes_ += bytes_needed(payload.size());
}

void Journal::commit() {
  committed_word(memory_.data()).store(end_bytes_, std::memory_order_release);
}

}  // namespace larder
