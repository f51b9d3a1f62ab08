// Bytes that are no message, or a message made to hurt whoever reads it.
#include <bit>
#include <cstring>

#include <doctest/doctest.h>

#include "protocol/executor_messages.h"
#include "protocol/limits.h"
#include "protocol/messages.h"
#include "protocol/notices.h"
#include "tests/protocol/any_message.h"
#include "tests/support/random.h"

namespace larder::protocol {
namespace {

using Words = std::vector<uint64_t>;

Bytes to_bytes(const Words& words) {
  Bytes bytes(words.size() * sizeof(uint64_t));
  if (!words.empty()) std::memcpy(bytes.data(), words.data(), bytes.size());
  return bytes;
}

Words to_words(const Bytes& bytes) {
  Words words(bytes.size() / sizeof(uint64_t));
  std::memcpy(words.data(), bytes.data(), bytes.size());
  return words;
}

// One segment: its table word and the words.
Bytes one_segment(Words words) {
  words.insert(words.begin(), words.size() << 32);
  return to_bytes(words);
}

// A pointer to a struct that lies `offset` words after the pointer's end.
uint64_t struct_pointer(int32_t offset, uint16_t data_words, uint16_t pointers) {
  return static_cast<uint32_t>(offset) << 2 | uint64_t{data_words} << 32 | uint64_t{pointers} << 48;
}

void check_refused_by_all(const Bytes& bytes) {
  for (const Status& status : {decode_request(bytes).request.status(), decode_reply(bytes).status(),
                               decode_command(bytes).status(), decode_report(bytes).status(),
                               decode_notice(bytes).status(), decode_notice_ack(bytes).status()}) {
    CAPTURE(status.to_string());
    CHECK(status.code() == ErrorCode::kInvalidArgument);
    CHECK_FALSE(status.message().empty());
  }
}

TEST_CASE("a size that no message has is refused with the number") {
  check_refused_by_all({});
  check_refused_by_all(Bytes(kMaxMessageBytes + 8));
  Bytes odd = encode(Request{1, 0, Goodbye{}});
  odd.pop_back();
  check_refused_by_all(odd);
  const Status status = decode_request(odd).request.status();
  CHECK(status.message().starts_with("a message of " + std::to_string(odd.size()) + " bytes"));
}

TEST_CASE("bytes after the message are refused") {
  for (Bytes bytes : {encode(Request{1, 0, Goodbye{}}), encode(Reply{1, 0, Done{}})}) {
    bytes.resize(bytes.size() + 8);
    check_refused_by_all(bytes);
  }
}

TEST_CASE("segment tables that make no sense are refused") {
  check_refused_by_all(to_bytes({0xffffffff}));                     // 2^32 segments
  check_refused_by_all(to_bytes({uint64_t{1000} << 32, 0}));        // longer than the message
  check_refused_by_all(to_bytes({uint64_t{0xffffffff} << 32, 0}));  // 32 GiB
  check_refused_by_all(to_bytes({600, 0, 0, 0}));                   // more segments than there are
  Words many(1 + 601 / 2, 0);
  many[0] = 600;  // 601 empty segments
  check_refused_by_all(to_bytes(many));
}

TEST_CASE("pointers that lead nowhere are refused") {
  check_refused_by_all(one_segment({struct_pointer(1000, 3, 1)}));         // past the end
  check_refused_by_all(one_segment({struct_pointer(-100, 3, 1)}));         // before the start
  check_refused_by_all(one_segment({struct_pointer(0, 0xffff, 0xffff)}));  // larger than all
  check_refused_by_all(one_segment({uint64_t{2} | uint64_t{7} << 32}));    // far, no such segment
  check_refused_by_all(one_segment({uint64_t{2}}));                        // far, to itself
  check_refused_by_all(one_segment({uint64_t{6}, uint64_t{6}}));           // double far, to itself
  check_refused_by_all(one_segment({uint64_t{3}}));                        // a capability
  check_refused_by_all(one_segment({uint64_t{1} | uint64_t{2} << 32}));    // a list as root
}

TEST_CASE("a struct that contains itself is refused") {
  // The body of an openPool request whose group list is the request itself.
  const uint64_t kind = 2;
  const Words words = {struct_pointer(0, 3, 1), 1, 0, kind, struct_pointer(-5, 3, 1)};
  const DecodedRequest decoded = decode_request(one_segment(words));
  CHECK(decoded.request.status().code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("nesting in a field that we do not know is not followed") {
  constexpr int kLevels = 10'000;
  Words words = {struct_pointer(0, 3, 2), 1, 0, 1 /* goodbye */, 0};
  for (int level = 0; level < kLevels; ++level) words.push_back(struct_pointer(0, 0, 1));
  words.push_back(0);
  const DecodedRequest decoded = decode_request(one_segment(words));
  CHECK(decoded.id == 1);
  CHECK(decoded.request.status().message() == "request has fields that version 1 does not know");
}

TEST_CASE("a small message that names the same bytes many times is refused") {
  constexpr size_t kEntries = 2000;
  Lookup body{1, "", {}, std::vector<std::string>(kEntries), false, 0};
  body.extra[0] = std::string(kMaxExtraBytesPerBlock, 'x');
  Words words = to_words(encode(Request{9, 0, body}));
  // Data of no bytes has a pointer of its own; find the list by its first entry.
  const uint64_t first_upper = uint64_t{kMaxExtraBytesPerBlock} << 35 | uint64_t{2} << 32;
  size_t first = 0;
  while (first < words.size() && (words[first] >> 32 << 32) != first_upper) ++first;
  REQUIRE(first + kEntries <= words.size());
  const uint32_t offset = static_cast<uint32_t>(words[first]) >> 2;
  for (uint32_t i = 0; i < kEntries; ++i) {
    // The entries are 8 bytes apart and all point to where the first one does.
    words[first + i] = first_upper | static_cast<uint32_t>((offset - i) << 2 | 1u);
  }
  const DecodedRequest decoded = decode_request(to_bytes(words));
  CHECK(decoded.id == 9);
  CHECK(decoded.request.status().code() == ErrorCode::kInvalidArgument);
  CHECK(decoded.request.status().message().starts_with("malformed message"));
}

TEST_CASE("a list of a billion empty entries is refused by its length") {
  // A release whose blocks are a list of 2^29 - 1 entries of no bytes.
  const uint64_t kind = 7;
  const Words words = {struct_pointer(0, 3, 1), 1, 0, kind,
                       struct_pointer(0, 2, 1), 1, 0, uint64_t{1} | uint64_t{0x1fffffff} << 35};
  const DecodedRequest decoded = decode_request(one_segment(words));
  CHECK(decoded.request.status().code() == ErrorCode::kInvalidArgument);
}

TEST_CASE("a key list that does not match its blocks is refused") {
  Published published{{PublishedBlock{}, PublishedBlock{}}};
  Words words = to_words(encode(Reply{1, 2, published}));
  // The keys are the only list of 64 bytes.
  const uint64_t upper = uint64_t{64} << 35 | uint64_t{2} << 32;
  bool found = false;
  for (uint64_t& word : words) {
    if ((word >> 32 << 32) != upper) continue;
    word = (uint64_t{63} << 35 | uint64_t{2} << 32) | (word & 0xffffffff);
    found = true;
  }
  REQUIRE(found);
  CHECK(decode_reply(to_bytes(words)).status().message() == "keys has 63 bytes, not 64");
}

TEST_CASE("a session token that has not 32 bytes is refused with its size") {
  Words resume = to_words(encode(Request{9, 0, Resume{}}));
  Words connected = to_words(encode(Reply{9, 1, Connected{}}));
  for (Words* words : {&resume, &connected}) {
    const uint64_t upper = uint64_t{32} << 35 | uint64_t{2} << 32;
    bool found = false;
    for (uint64_t& word : *words) {
      if ((word >> 32 << 32) != upper) continue;
      word = (uint64_t{31} << 35 | uint64_t{2} << 32) | (word & 0xffffffff);
      found = true;
    }
    REQUIRE(found);
  }
  CHECK(decode_request(to_bytes(resume)).request.status().message() ==
        "session_token has 31 bytes, not 32");
  CHECK(decode_reply(to_bytes(connected)).status().message() ==
        "session_token has 31 bytes, not 32");
}

TEST_CASE("every truncation of a message is refused or read, never more") {
  test::Filler filler(test::random_engine(21));
  for (uint64_t kind = 0; kind < std::variant_size_v<RequestBody>; ++kind) {
    const Bytes bytes = encode(filler.message<Request>(kind));
    for (size_t size = 0; size < bytes.size(); size += 8) {
      const auto decoded = decode_request(std::span(bytes).first(size));
      CHECK(decoded.request.status().code() == ErrorCode::kInvalidArgument);
    }
  }
}

TEST_CASE("many small messages hit no limit that adds up") {
  const Bytes bytes = encode(Request{1, 0, Allocate{1, 0, 1}});
  size_t num_ok = 0;
  constexpr size_t kMessages = 100'000;
  for (size_t i = 0; i < kMessages; ++i) num_ok += decode_request(bytes).request.ok() ? 1 : 0;
  CHECK(num_ok == kMessages);
}

}  // namespace
}  // namespace larder::protocol
