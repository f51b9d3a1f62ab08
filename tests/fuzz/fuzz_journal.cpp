// Any bytes as a journal's memory: they are refused with a sentence, or read as records that lie in
// the memory one after the other, and that a writer goes on after. The first byte of an input says
// which checksums are made right beforehand, without which few changes would get past them.
#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "allocator/crc32c.h"
#include "allocator/journal.h"
#include "larder/check.h"
#include "tests/fuzz/fuzz.h"

namespace larder::fuzz {
namespace {

constexpr uint8_t kRepairHeader = 1;
constexpr uint8_t kRepairRecords = 2;

// At an address that a mapping could have, with the sanitizer's guard behind the last byte.
class Memory {
 public:
  Memory(const uint8_t* data, size_t size) : bytes_(new std::byte[size]), size_(size) {
    if (size > 0) std::memcpy(bytes_.get(), data, size);
  }
  std::span<std::byte> span() const { return {bytes_.get(), size_}; }

 private:
  std::unique_ptr<std::byte[]> bytes_;
  size_t size_;
};

void repair(std::span<std::byte> memory, uint8_t what) {
  if (memory.size() < Journal::kHeaderBytes) return;
  if ((what & kRepairHeader) != 0) {
    const uint32_t crc = crc32c(memory.first(offsetof(JournalHeader, crc)));
    std::memcpy(memory.data() + offsetof(JournalHeader, crc), &crc, sizeof crc);
  }
  if ((what & kRepairRecords) == 0) return;
  size_t position = Journal::kHeaderBytes;
  while (memory.size() - position >= Journal::kRecordHeaderBytes) {
    JournalRecordHeader header;
    std::memcpy(&header, memory.data() + position, sizeof header);
    const size_t size = Journal::bytes_needed(header.length_bytes);
    if (size > memory.size() - position) return;
    const size_t covered = sizeof header + header.length_bytes - sizeof header.crc;
    header.crc = crc32c(memory.subspan(position + sizeof header.crc, covered));
    std::memcpy(memory.data() + position, &header, sizeof header);
    position += size;
  }
}

void check_contents(std::span<const std::byte> memory, const JournalContents& contents) {
  size_t position = Journal::kHeaderBytes;
  const auto pass = [&](std::span<const std::byte> payload) {
    LARDER_CHECK(payload.data() == memory.data() + position + Journal::kRecordHeaderBytes);
    position += Journal::bytes_needed(payload.size());
  };
  pass(contents.snapshot);
  for (const auto record : contents.records) pass(record);
  LARDER_CHECK(position == contents.end_bytes && position <= memory.size(), position);
  LARDER_CHECK(contents.torn_bytes <= memory.size() - position, contents.torn_bytes);
  LARDER_CHECK(contents.last_sequence == contents.snapshot_sequence + contents.records.size());
}

void go_on(std::span<std::byte> memory, const JournalContents& contents) {
  const std::byte payload[] = {std::byte{1}, std::byte{2}, std::byte{3}};
  Journal journal = Journal::resume(memory, contents);
  LARDER_CHECK(journal.used_bytes() == contents.end_bytes);
  size_t num_appended = 0;
  while (num_appended < 3 && journal.append(payload)) ++num_appended;
  LARDER_CHECK(num_appended == 3 ||
               journal.used_bytes() + Journal::bytes_needed(3) > memory.size());
  const auto again = read_journal(memory);
  LARDER_CHECK(again.ok(), again.status().to_string());
  // More may follow: what lay there may continue by chance what was appended.
  LARDER_CHECK(again->records.size() >= contents.records.size() + num_appended);
  for (size_t i = 0; i < num_appended; ++i)
    LARDER_CHECK(std::ranges::equal(again->records[contents.records.size() + i], payload));
  for (size_t i = 0; i < contents.records.size(); ++i)
    LARDER_CHECK(again->records[i].data() == contents.records[i].data() &&
                 again->records[i].size() == contents.records[i].size());
}

}  // namespace

const size_t kMaxInputBytes = 4096;

std::vector<Input> corpus(std::mt19937_64& engine) {
  std::vector<Input> inputs;
  for (int i = 0; i < 32; ++i) {
    Input input(1 + 512 + engine() % 1024);
    input[0] = static_cast<uint8_t>(i % 4);
    const Memory memory(input.data() + 1, input.size() - 1);
    const std::vector<std::byte> payload(64, static_cast<std::byte>(i));
    Journal journal = Journal::start(memory.span(), engine() % 3 == 0 ? ~uint64_t{0} - 2 : 7,
                                     std::span(payload).first(engine() % 64));
    for (size_t n = engine() % 8; n > 0; --n)
      if (!journal.append(std::span(payload).first(engine() % 64))) break;
    std::memcpy(input.data() + 1, memory.span().data(), memory.span().size());
    inputs.push_back(std::move(input));
  }
  return inputs;
}

}  // namespace larder::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace larder;
  if (size == 0) return 0;
  const fuzz::Memory memory(data + 1, size - 1);
  fuzz::repair(memory.span(), data[0]);
  const auto contents = read_journal(memory.span());
  if (!contents) {
    const ErrorCode code = contents.status().code();
    LARDER_CHECK(code == ErrorCode::kInternal || code == ErrorCode::kUnsupported);
    LARDER_CHECK(contents.status().message().starts_with("the journal "));
    return 0;
  }
  fuzz::check_contents(memory.span(), *contents);
  fuzz::go_on(memory.span(), *contents);
  return 0;
}
