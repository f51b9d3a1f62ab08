#include "allocator/journal.h"

#include <algorithm>
#include <cstring>
#include <string>

#include <doctest/doctest.h>

#include "allocator/crc32c.h"
#include "tests/support/random.h"

namespace larder {
namespace {

std::span<const std::byte> bytes_of(const std::string& text) {
  return std::as_bytes(std::span(text));
}

std::string text_of(std::span<const std::byte> bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

std::vector<std::string> texts_of(const JournalContents& contents) {
  std::vector<std::string> texts;
  for (const auto record : contents.records) texts.push_back(text_of(record));
  return texts;
}

template <typename T>
void poke(std::span<std::byte> memory, size_t position, T value) {
  std::memcpy(memory.data() + position, &value, sizeof value);
}

template <typename T>
T peek(std::span<const std::byte> memory, size_t position) {
  T value;
  std::memcpy(&value, memory.data() + position, sizeof value);
  return value;
}

// As the process leaves the memory that was killed before it said that the last record is complete.
void uncommit_to(std::span<std::byte> memory, size_t committed_bytes) {
  poke(memory, offsetof(JournalHeader, committed_bytes), uint64_t{committed_bytes});
}

// A journal of sequence 40 on: a snapshot of 5 bytes and records of 3, 0, 8 and 21 bytes. None of
// them ends with a zero.
struct Sample {
  std::vector<std::byte> memory = std::vector<std::byte>(1024);
  std::vector<std::string> texts = {"one", "", "eight...", "the last of the records"};
  Journal journal = Journal::start(memory, 40, bytes_of("state"));
  std::vector<size_t> ends = {journal.used_bytes()};  // of the snapshot and of each record

  Sample() {
    for (const std::string& text : texts) {
      REQUIRE(journal.append(bytes_of(text)));
      ends.push_back(journal.used_bytes());
    }
  }
};

void check_refused(std::span<const std::byte> memory, ErrorCode code,
                   const std::vector<std::string>& parts) {
  const auto contents = read_journal(memory);
  REQUIRE(!contents.ok());
  CHECK(contents.status().code() == code);
  for (const std::string& part : parts) {
    INFO(contents.status().message(), " has no ", part);
    CHECK(contents.status().message().find(part) != std::string::npos);
  }
}

TEST_CASE("a snapshot and records are read back in order") {
  const Sample sample;
  const auto contents = read_journal(sample.memory);
  REQUIRE(contents.ok());
  CHECK(contents->snapshot_sequence == 40);
  CHECK(text_of(contents->snapshot) == "state");
  CHECK(texts_of(*contents) == sample.texts);
  CHECK(contents->last_sequence == 44);
  // Header 64; then 16 for each record and its payload up to a multiple of 8: 8, 8, 0, 8, 24.
  CHECK(contents->end_bytes == 64 + 5 * 16 + 48);
  CHECK(contents->torn_bytes == 0);
  CHECK(sample.journal.last_sequence() == 44);
  CHECK(sample.journal.used_bytes() == contents->end_bytes);
  CHECK(sample.journal.num_records() == 4);
}

TEST_CASE("the bytes are those of the documented format") {
  std::vector<std::byte> memory(256);
  Journal journal = Journal::start(memory, 5, bytes_of("s"));
  REQUIRE(journal.append(bytes_of("record")));
  CHECK(text_of(std::span(memory).first(8)) == "LRDJRNL1");
  CHECK(peek<uint32_t>(memory, 8) == 1);
  CHECK(peek<uint64_t>(memory, 16) == 5);
  CHECK(peek<uint32_t>(memory, 52) == crc32c(std::span(memory).first(52)));
  CHECK(peek<uint64_t>(memory, 56) == 64 + 24 + 24);
  CHECK(peek<uint32_t>(memory, 88) == crc32c(std::span(memory).subspan(92, 12 + 6)));
  CHECK(peek<uint32_t>(memory, 92) == 6);
  CHECK(peek<uint64_t>(memory, 96) == 6);
  CHECK(text_of(std::span(memory).subspan(104, 8)) == std::string("record\0\0", 8));
  CHECK(std::ranges::all_of(std::span(memory).subspan(112),
                            [](std::byte byte) { return byte == std::byte{0}; }));
}

TEST_CASE("an empty snapshot and no record are a journal") {
  std::vector<std::byte> memory(Journal::kHeaderBytes + Journal::bytes_needed(0));
  Journal journal = Journal::start(memory, 0, {});
  const auto contents = read_journal(memory);
  REQUIRE(contents.ok());
  CHECK(contents->snapshot.empty());
  CHECK(contents->records.empty());
  CHECK(contents->last_sequence == 0);
  CHECK(contents->end_bytes == memory.size());
  CHECK(!journal.append({}));
}

TEST_CASE("a record is appended to the last byte of room, and not past it") {
  std::vector<std::byte> memory(Journal::kHeaderBytes + Journal::bytes_needed(0) +
                                Journal::bytes_needed(9));
  Journal journal = Journal::start(memory, 1, {});
  const auto before = memory;
  CHECK(!journal.append(bytes_of(std::string(17, 'x'))));
  CHECK(!journal.append(bytes_of(std::string(100, 'x'))));
  CHECK(memory == before);
  CHECK(journal.last_sequence() == 1);
  CHECK(journal.append(bytes_of(std::string(16, 'y'))));
  CHECK(journal.used_bytes() == memory.size());
  CHECK(!journal.append({}));
  const auto contents = read_journal(memory);
  REQUIRE(contents.ok());
  CHECK(texts_of(*contents) == std::vector{std::string(16, 'y')});
  // Memory that does not end at a multiple of 8 has no room in its last bytes.
  std::vector<std::byte> odd(Journal::kHeaderBytes + Journal::bytes_needed(0) + 16 + 7);
  Journal narrow = Journal::start(odd, 1, {});
  CHECK(!narrow.append(bytes_of("x")));
  CHECK(narrow.append({}));
  CHECK(read_journal(odd)->torn_bytes == 0);
}

TEST_CASE("a record torn at any byte is dropped, and those before it stay") {
  const Sample whole;
  const size_t begin = whole.ends[3];
  const size_t last_byte = begin + Journal::kRecordHeaderBytes + whole.texts[3].size();
  for (size_t torn = begin; torn < whole.ends[4]; ++torn) {
    INFO("torn at byte ", torn);
    Sample sample;
    std::fill(sample.memory.begin() + static_cast<ptrdiff_t>(torn), sample.memory.end(),
              std::byte{0});
    uncommit_to(sample.memory, begin);
    const auto contents = read_journal(sample.memory);
    REQUIRE(contents.ok());
    if (torn >= last_byte) {  // only padding is missing
      CHECK(texts_of(*contents) == sample.texts);
      CHECK(contents->torn_bytes == 0);
      continue;
    }
    CHECK(texts_of(*contents) == std::vector<std::string>{"one", "", "eight..."});
    CHECK(contents->last_sequence == 43);
    CHECK(contents->end_bytes == begin);
    CHECK(contents->torn_bytes >= torn - begin);
    CHECK((contents->torn_bytes == 0) == (torn == begin));

    Journal journal = Journal::resume(sample.memory, *contents);
    CHECK(journal.last_sequence() == 43);
    CHECK(journal.num_records() == 3);
    CHECK(std::all_of(sample.memory.begin() + static_cast<ptrdiff_t>(begin), sample.memory.end(),
                      [](std::byte byte) { return byte == std::byte{0}; }));
    REQUIRE(journal.append(bytes_of("new")));
    const auto again = read_journal(sample.memory);
    REQUIRE(again.ok());
    CHECK(texts_of(*again) == std::vector<std::string>{"one", "", "eight...", "new"});
    CHECK(again->last_sequence == 44);
  }
}

TEST_CASE("a torn record of which any bytes are missing is dropped") {
  auto engine = test::random_engine(1);
  for (int round = 0; round < 2000; ++round) {
    Sample sample;
    const size_t begin = sample.ends[3];
    bool changed = false;
    // The length is stored first and the checksum last; between them come the others in any order.
    for (size_t i = begin; i < sample.ends[4]; ++i) {
      const bool is_length = i >= begin + 4 && i < begin + 8;
      if (is_length || (i >= begin + 4 && engine() % 4 != 0)) continue;
      changed = changed || sample.memory[i] != std::byte{0};
      sample.memory[i] = std::byte{0};
    }
    uncommit_to(sample.memory, begin);
    const auto contents = read_journal(sample.memory);
    REQUIRE(contents.ok());
    REQUIRE(changed);
    CHECK(contents->records.size() == 3);
    CHECK(contents->torn_bytes == sample.ends[4] - begin);
  }
}

TEST_CASE(
    "a complete record that was not committed is part of the journal, and is committed next") {
  for (const size_t committed : {size_t{0}, size_t{1}, size_t{3}}) {
    Sample sample;
    uncommit_to(sample.memory, sample.ends[committed]);
    const auto contents = read_journal(sample.memory);
    REQUIRE(contents.ok());
    CHECK(texts_of(*contents) == sample.texts);
    CHECK(contents->torn_bytes == 0);
    Journal::resume(sample.memory, *contents);
    CHECK(peek<uint64_t>(sample.memory, offsetof(JournalHeader, committed_bytes)) ==
          sample.ends[4]);
  }
}

TEST_CASE("remains behind a torn record cannot become records") {
  // The payload of the torn record holds what looks like the next record but one.
  std::vector<std::byte> memory(512);
  Journal journal = Journal::start(memory, 1, {});
  std::vector<std::byte> donor_memory(512);
  Journal donor = Journal::start(donor_memory, 2, {});
  REQUIRE(donor.append(bytes_of("forged")));
  const size_t begin = journal.used_bytes();
  REQUIRE(journal.append(bytes_of(std::string(44, 'p'))));
  // Where a record of sequence 2 with a payload of up to 8 bytes would end.
  std::memcpy(memory.data() + begin + 24, donor_memory.data() + 80, 24);
  uncommit_to(memory, begin);
  const auto contents = read_journal(memory);
  REQUIRE(contents.ok());
  CHECK(contents->records.empty());
  Journal resumed = Journal::resume(memory, *contents);
  REQUIRE(resumed.append(bytes_of("honest")));
  const auto again = read_journal(memory);
  REQUIRE(again.ok());
  CHECK(texts_of(*again) == std::vector<std::string>{"honest"});
}

TEST_CASE("any flipped bit below the committed bytes is refused, or lies where nobody reads") {
  const Sample whole;
  const auto is_padding = [&](size_t i) {
    for (size_t record = 1; record < whole.ends.size(); ++record)
      if (i < whole.ends[record])
        return i >= whole.ends[record - 1] + 16 + whole.texts[record - 1].size();
    return false;
  };
  for (size_t i = 0; i < whole.ends[4]; ++i)
    for (int bit = 0; bit < 8; ++bit) {
      INFO("byte ", i, " bit ", bit);
      Sample sample;
      sample.memory[i] ^= static_cast<std::byte>(1 << bit);
      const auto contents = read_journal(sample.memory);
      const bool snapshot_padding = i >= 64 + 16 + 5 && i < 64 + 24;
      if (contents.ok()) {
        // A committed word that points at an earlier record's end loses nothing either.
        const bool commits_less = i >= 56 && i < 64;
        CHECK((snapshot_padding || commits_less || (i >= sample.ends[0] && is_padding(i))));
        CHECK(texts_of(*contents) == sample.texts);
        CHECK(text_of(contents->snapshot) == "state");
        continue;
      }
      CHECK(!snapshot_padding);
      CHECK(contents.status().code() ==
            (i >= 8 && i < 12 ? ErrorCode::kUnsupported : ErrorCode::kInternal));
      if (i < sample.ends[0] - 24) continue;
      size_t record = 0;
      while (i >= sample.ends[record]) ++record;
      const size_t begin = record == 0 ? 64 : sample.ends[record - 1];
      const std::string name = "the record of sequence " + std::to_string(40 + record) +
                               " at byte " + std::to_string(begin);
      INFO(contents.status().message());
      CHECK(contents.status().message().find(name) != std::string::npos);
    }
}

TEST_CASE("damage is named with what is stored and what is expected") {
  {
    Sample sample;
    poke(sample.memory, 0, uint64_t{0x1122334455667788});
    check_refused(sample.memory, ErrorCode::kInternal,
                  {"magic 0x1122334455667788", "expected 0x314c4e524a44524c"});
  }
  {
    Sample sample;
    poke(sample.memory, 8, uint32_t{9});
    check_refused(sample.memory, ErrorCode::kUnsupported, {"version 9", "reads version 1"});
  }
  {
    Sample sample;
    poke(sample.memory, 52, uint32_t{0x1234});
    check_refused(sample.memory, ErrorCode::kInternal, {"header", "stored 0x00001234", "computed"});
  }
  for (const uint64_t committed : {uint64_t{0}, uint64_t{64}, uint64_t{1032}, ~uint64_t{7}}) {
    Sample sample;
    uncommit_to(sample.memory, committed);
    check_refused(sample.memory, ErrorCode::kInternal,
                  {std::to_string(committed) + " committed bytes", "from 80 to 1024"});
  }
  {
    Sample sample;
    const size_t at = sample.ends[2];
    poke(sample.memory, at + 8, uint64_t{99});
    check_refused(sample.memory, ErrorCode::kInternal,
                  {"the record of sequence 43 at byte " + std::to_string(at), "has sequence 99"});
  }
  {
    Sample sample;
    const size_t at = sample.ends[2];
    poke(sample.memory, at + 4, uint32_t{0xFFFFFFFF});
    check_refused(sample.memory, ErrorCode::kInternal,
                  {"sequence 43", "length 4294967295", "end at byte",
                   "at most " + std::to_string(sample.ends[4])});
  }
  {
    Sample sample;
    const size_t at = sample.ends[2];
    poke(sample.memory, at, uint32_t{0xABCD});
    check_refused(sample.memory, ErrorCode::kInternal,
                  {"sequence 43", "CRC32C stored 0x0000abcd, computed 0x"});
  }
  {  // The committed bytes end in the middle of a record, or in front of a complete header.
    Sample sample;
    uncommit_to(sample.memory, sample.ends[4] - 8);
    check_refused(sample.memory, ErrorCode::kInternal, {"sequence 44", "length 23"});
    uncommit_to(sample.memory, sample.ends[3] + 8);
    check_refused(sample.memory, ErrorCode::kInternal, {"sequence 44", "8 bytes left"});
  }
}

TEST_CASE("memory without a journal is refused") {
  check_refused({}, ErrorCode::kInternal, {"has 0 bytes"});
  std::vector<std::byte> memory(63);
  check_refused(memory, ErrorCode::kInternal, {"has 63 bytes", "64"});
  memory.resize(4096);
  check_refused(memory, ErrorCode::kInternal, {"magic 0x0000000000000000"});
}

TEST_CASE("a journal cut short anywhere is refused, or has every committed record") {
  const Sample whole;
  for (size_t size = 0; size <= whole.memory.size(); ++size) {
    const std::vector<std::byte> part(whole.memory.begin(),
                                      whole.memory.begin() + static_cast<ptrdiff_t>(size));
    const auto contents = read_journal(part);
    REQUIRE(contents.ok() == (size >= whole.ends[4]));
    if (contents.ok()) CHECK(texts_of(*contents) == whole.texts);
  }
}

TEST_CASE("sequences go on past the largest number") {
  std::vector<std::byte> memory(512);
  Journal journal = Journal::start(memory, ~uint64_t{0} - 1, {});
  for (int i = 0; i < 3; ++i) REQUIRE(journal.append(bytes_of("x")));
  const auto contents = read_journal(memory);
  REQUIRE(contents.ok());
  CHECK(contents->records.size() == 3);
  CHECK(contents->last_sequence == 1);
  CHECK(journal.last_sequence() == 1);
}

TEST_CASE("random journals read back whole, whatever garbage lies behind them") {
  auto engine = test::random_engine(2);
  for (int round = 0; round < 300; ++round) {
    std::vector<std::byte> memory(4096 + engine() % 4096 / 8 * 8);
    std::vector<std::string> texts;
    const std::string snapshot(engine() % 300, 's');
    Journal journal = Journal::start(memory, engine(), bytes_of(snapshot));
    for (int i = 0; i < 40; ++i) {
      std::string text(engine() % 200, '\0');
      for (char& c : text) c = static_cast<char>(engine());
      if (!journal.append(bytes_of(text))) break;
      texts.push_back(text);
    }
    if (round % 2 == 0)
      for (size_t i = journal.used_bytes(); i < memory.size(); ++i)
        memory[i] = static_cast<std::byte>(engine());
    auto contents = read_journal(memory);
    REQUIRE(contents.ok());
    CHECK(texts_of(*contents) == texts);
    CHECK(text_of(contents->snapshot) == snapshot);
    Journal resumed = Journal::resume(memory, *contents);
    if (resumed.append(bytes_of("after"))) texts.push_back("after");
    contents = read_journal(memory);
    REQUIRE(contents.ok());
    CHECK(texts_of(*contents) == texts);
  }
}

TEST_CASE("random memory is refused") {
  auto engine = test::random_engine(3);
  for (int round = 0; round < 2000; ++round) {
    std::vector<std::byte> memory(engine() % 512);
    for (std::byte& byte : memory) byte = static_cast<std::byte>(engine());
    CHECK(!read_journal(memory).ok());
    if (memory.size() < 8) continue;
    poke(memory, 0, kJournalMagic);
    CHECK(!read_journal(memory).ok());
  }
}

}  // namespace
}  // namespace larder
