#include "protocol/arena.h"

#include <deque>
#include <string>

#include <doctest/doctest.h>

#include "tests/protocol/arena_memory.h"
#include "tests/support/random.h"

namespace larder::protocol {
namespace {

using namespace std::chrono_literals;
using test::ArenaMemory;

constexpr uint32_t kNearWrap = 0u - 100;

Submission submission(uint64_t request) {
  Submission result;
  result.request = request;
  result.op = static_cast<uint32_t>(Op::kAppend);
  result.block_table_stride = ~request;  // the record's far end, to see torn copies
  return result;
}

uint64_t peek_request(ArenaServer& server) {
  const auto head = server.peek();
  REQUIRE(head.ok());
  REQUIRE(head->has_value());
  CHECK((*head)->block_table_stride == ~(*head)->request);
  return (*head)->request;
}

bool is_empty(ArenaServer& server) { return !server.peek().value().has_value(); }

TEST_CASE("a formatted arena is accepted, any other is refused with the numbers") {
  const ArenaMemory memory;
  Arena arena = memory.arena();
  CHECK(arena.check().code() == ErrorCode::kInvalidArgument);
  arena.format();
  CHECK(arena.check().ok());
  arena.header().size_bytes = 7;
  CHECK(arena.check().message().find("7 bytes") != std::string::npos);
}

TEST_CASE("holds() accepts the data part alone, whatever the numbers") {
  const ArenaMemory memory;
  const Arena arena = memory.arena();
  const uint64_t size = memory.bytes().size();
  CHECK(arena.holds(kArenaDataOffset, 0));
  CHECK(arena.holds(kArenaDataOffset, size - kArenaDataOffset));
  CHECK(arena.holds(size, 0));
  CHECK_FALSE(arena.holds(kArenaDataOffset, size - kArenaDataOffset + 1));
  CHECK_FALSE(arena.holds(kArenaDataOffset - 1, 1));
  CHECK_FALSE(arena.holds(0, 0));
  CHECK_FALSE(arena.holds(size + 1, 0));
  CHECK_FALSE(arena.holds(~uint64_t{0}, 1));
  CHECK_FALSE(arena.holds(kArenaDataOffset, ~uint64_t{0}));
  CHECK_FALSE(arena.holds(size - 8, ~uint64_t{0} - 3));
}

TEST_CASE("the parts of an arena do not overlap") {
  const ArenaMemory memory;
  const Arena arena = memory.arena();
  const std::byte* start = memory.bytes().data();
  CHECK(reinterpret_cast<std::byte*>(&arena.word(0)) == start + sizeof(ArenaHeader));
  CHECK(reinterpret_cast<std::byte*>(&arena.word(kTimelineWords - 1)) + 8 ==
        arena.submission_slot(0));
  CHECK(arena.submission_slot(kSubmissionSlots - 1) + sizeof(Submission) ==
        arena.completion_slot(0));
  CHECK(arena.completion_slot(kCompletionSlots - 1) + sizeof(Completion) <=
        start + kArenaDataOffset);
  CHECK(arena.submission_slot(kSubmissionSlots) == arena.submission_slot(0));
  CHECK(arena.completion_slot(0u - 1) == arena.completion_slot(kCompletionSlots - 1));
}

TEST_CASE("a call goes through both rings") {
  const ArenaMemory memory;
  SubmissionWriter writer(memory.arena());
  CompletionReader reader(memory.arena());
  ArenaServer server(memory.arena());
  CHECK(is_empty(server));
  CHECK_FALSE(reader.pop().has_value());

  REQUIRE(writer.push(submission(11)));
  REQUIRE(writer.push(submission(12)));
  CHECK(server.num_pending() == 2);
  CHECK(peek_request(server) == 11);
  CHECK(peek_request(server) == 11);  // until it is completed
  server.complete(submission(11), {});
  server.complete(submission(12), Status(ErrorCode::kNotFound, "there is no pool 4"));
  CHECK(is_empty(server));
  CHECK(server.num_pending() == 0);

  const auto first = reader.pop();
  REQUIRE(first.has_value());
  CHECK(first->request == 11);
  CHECK(completion_status(*first).ok());
  const auto second = reader.pop();
  REQUIRE(second.has_value());
  CHECK(completion_status(*second).to_string() == "NOT_FOUND: there is no pool 4");
  CHECK_FALSE(reader.pop().has_value());
}

TEST_CASE("a full submission ring takes no more until the executor takes one") {
  const ArenaMemory memory;
  memory.set_indices(0u - 10, 5);
  SubmissionWriter writer(memory.arena());
  ArenaServer server(memory.arena());
  for (uint64_t i = 0; i < kSubmissionSlots; ++i) CHECK(writer.push(submission(i)));
  CHECK_FALSE(writer.push(submission(99)));
  CHECK(server.num_pending() == kSubmissionSlots);
  server.complete(submission(peek_request(server)), {});
  CHECK(writer.push(submission(kSubmissionSlots)));
  CHECK_FALSE(writer.push(submission(99)));
  CHECK(peek_request(server) == 1);
}

TEST_CASE("completions never overtake a client that does not read them") {
  const ArenaMemory memory;
  memory.set_indices(0, 0u - 7);
  SubmissionWriter writer(memory.arena());
  CompletionReader reader(memory.arena());
  ArenaServer server(memory.arena());
  for (uint64_t i = 0; i < kCompletionSlots; ++i) {
    REQUIRE(writer.push(submission(i)));
    REQUIRE(server.can_complete());
    server.complete(submission(i), {});
  }
  REQUIRE(writer.push(submission(kCompletionSlots)));
  CHECK_FALSE(server.can_complete());
  CHECK(peek_request(server) == kCompletionSlots);  // it waits, it is not lost
  CHECK(reader.pop()->request == 0);
  CHECK(server.can_complete());
  server.complete(submission(kCompletionSlots), {});
  CHECK_FALSE(server.can_complete());
  for (uint64_t i = 1; i <= kCompletionSlots; ++i) CHECK(reader.pop()->request == i);
  CHECK_FALSE(reader.pop().has_value());
}

TEST_CASE("random traffic over the wrap of the indices agrees with two queues") {
  const ArenaMemory memory;
  memory.set_indices(kNearWrap, kNearWrap + 60);
  SubmissionWriter writer(memory.arena());
  CompletionReader reader(memory.arena());
  ArenaServer server(memory.arena());
  std::deque<uint64_t> submitted;
  std::deque<uint64_t> completed;
  uint64_t next = 1;
  auto engine = test::random_engine(31);
  CAPTURE(test::seed());
  for (int step = 0; step < 20'000; ++step) {
    // Phases in which one of the three sides is slow, so that both rings run full and empty.
    const uint64_t slow = static_cast<uint64_t>(step) / 500 % 4;
    const uint64_t action = engine() % 3;
    if (action == slow && engine() % 8 != 0) continue;
    if (action == 0) {
      const bool pushed = writer.push(submission(next));
      REQUIRE(pushed == (submitted.size() < kSubmissionSlots));
      if (pushed) submitted.push_back(next++);
    } else if (action == 1) {
      REQUIRE(server.num_pending() == submitted.size());
      REQUIRE(server.can_complete() == (completed.size() < kCompletionSlots));
      REQUIRE(is_empty(server) == submitted.empty());
      if (submitted.empty() || !server.can_complete()) continue;
      const uint64_t request = peek_request(server);
      REQUIRE(request == submitted.front());
      server.complete(submission(request), {});
      submitted.pop_front();
      completed.push_back(request);
    } else {
      const auto completion = reader.pop();
      REQUIRE(completion.has_value() == !completed.empty());
      if (completed.empty()) continue;
      REQUIRE(completion->request == completed.front());
      completed.pop_front();
    }
    if (step % 1000 == 0) server = ArenaServer(memory.arena());
  }
  CHECK(next > 500);
}

TEST_CASE("a new executor runs again what the last one did not complete") {
  const ArenaMemory memory;
  memory.set_indices(kNearWrap, kNearWrap);
  SubmissionWriter writer(memory.arena());
  CompletionReader reader(memory.arena());
  for (uint64_t i = 1; i <= 3; ++i) REQUIRE(writer.push(submission(i)));
  ArenaServer first(memory.arena());
  first.complete(submission(peek_request(first)), {});
  CHECK(peek_request(first) == 2);  // running when it dies

  SUBCASE("in the middle of an operation") {
    ArenaServer second(memory.arena());
    CHECK(second.num_pending() == 2);
    CHECK(peek_request(second) == 2);
    second.complete(submission(2), {});
    second.complete(submission(peek_request(second)), {});
    for (uint64_t i = 1; i <= 3; ++i) CHECK(reader.pop()->request == i);
    CHECK_FALSE(reader.pop().has_value());
  }
  SUBCASE("between the completion and the step of the head") {
    first.complete(submission(2), {});
    memory.arena().header().submit_head.fetch_sub(1);
    ArenaServer second(memory.arena());
    CHECK(peek_request(second) == 2);  // at least once
    second.complete(submission(2), {});
    CHECK(peek_request(second) == 3);
    CHECK(reader.pop()->request == 1);
    CHECK(reader.pop()->request == 2);
    CHECK(reader.pop()->request == 2);  // the client drops what it does not wait for
  }
  SUBCASE("and a client that comes back finds its place") {
    CHECK(reader.pop()->request == 1);
    SubmissionWriter writer_again(memory.arena());
    CompletionReader reader_again(memory.arena());
    REQUIRE(writer_again.push(submission(4)));
    ArenaServer second(memory.arena());
    for (uint64_t i = 2; i <= 4; ++i) {
      REQUIRE(peek_request(second) == i);
      second.complete(submission(i), {});
      CHECK(reader_again.pop()->request == i);
    }
  }
}

TEST_CASE("indices of a hostile client are refused with the numbers, and nothing is read") {
  const ArenaMemory memory;
  SubmissionWriter writer(memory.arena());
  REQUIRE(writer.push(submission(1)));
  ArenaServer server(memory.arena());
  ArenaHeader& header = memory.arena().header();
  for (const uint32_t tail : {kSubmissionSlots + 1, 1'000'000u, 0u - 1, 0x80000000u}) {
    header.submit_tail = tail;
    const auto head = server.peek();
    CHECK(head.status().code() == ErrorCode::kInvalidArgument);
    CHECK(head.status().message().find("submit_tail is " + std::to_string(tail)) !=
          std::string::npos);
    CHECK(server.num_pending() == kSubmissionSlots);
  }
  header.submit_tail = kSubmissionSlots;
  CHECK(peek_request(server) == 1);

  for (const uint32_t read : {1u, 1'000'000u, 0u - kCompletionSlots - 1, 0x80000000u}) {
    header.complete_head = read;
    CHECK_FALSE(server.can_complete());
    const auto head = server.peek();
    CHECK(head.status().code() == ErrorCode::kInvalidArgument);
    CHECK(head.status().message().find("complete_head is " + std::to_string(read)) !=
          std::string::npos);
  }
  // A full ring is none of those.
  header.complete_head = 0u - kCompletionSlots;
  CHECK_FALSE(server.can_complete());
  CHECK(peek_request(server) == 1);
}

TEST_CASE("a completion index that makes no sense is no completion, and waiting for it ends") {
  const ArenaMemory memory;
  CompletionReader reader(memory.arena());
  for (const uint32_t tail : {kCompletionSlots + 1, 0u - 1}) {
    memory.arena().header().complete_tail = tail;
    CHECK_FALSE(reader.pop().has_value());
    CHECK_FALSE(reader.wait(std::chrono::steady_clock::now() + 5ms));
  }
  memory.arena().header().complete_tail = kCompletionSlots;
  CHECK(reader.wait(std::chrono::steady_clock::now()));
  CHECK(reader.pop().has_value());
}

TEST_CASE("a word is waited for until it has reached the value") {
  const ArenaMemory memory;
  const ArenaServer server(memory.arena());
  Submission record = submission(1);
  CHECK(server.wait_reached(record));  // no word
  record.wait_word = kTimelineWords - 1;
  record.wait_value = 5;
  CHECK_FALSE(server.wait_reached(record));
  memory.arena().word(kTimelineWords - 1) = 4;
  CHECK_FALSE(server.wait_reached(record));
  memory.arena().word(kTimelineWords - 1) = 5;
  CHECK(server.wait_reached(record));
  memory.arena().word(kTimelineWords - 1) = ~uint64_t{0};
  CHECK(server.wait_reached(record));
  record.wait_value = 0;
  record.wait_word = 0;
  CHECK(server.wait_reached(record));
}

TEST_CASE("a word that does not exist is not waited for and not signalled") {
  const ArenaMemory memory;
  SubmissionWriter writer(memory.arena());
  ArenaServer server(memory.arena());
  for (const uint32_t word : {kTimelineWords, 1'000'000u, kNoWord - 1, kNoWord}) {
    Submission record = submission(1);
    record.wait_word = record.signal_word = word;
    record.wait_value = record.signal_value = 9;
    REQUIRE(writer.push(record));
    CHECK(server.wait_reached(record));
    server.complete(record, Status(ErrorCode::kInvalidArgument, "wait_word"));
  }
  for (uint32_t i = 0; i < kTimelineWords; ++i) CHECK(memory.arena().word(i) == 0);
}

TEST_CASE("a refused call raises its signal word all the same") {
  const ArenaMemory memory;
  SubmissionWriter writer(memory.arena());
  ArenaServer server(memory.arena());
  Submission record = submission(1);
  record.signal_word = 3;
  record.signal_value = 77;
  REQUIRE(writer.push(record));
  server.complete(record, Status(ErrorCode::kInvalidArgument, "no"));
  CHECK(memory.arena().word(3) == 77);
}

TEST_CASE("a completion carries any message, cut to its room and printable") {
  const Completion longest =
      make_completion(1, Status(ErrorCode::kInternal, std::string(1000, 'x')));
  CHECK(completion_status(longest).message() == std::string(240, 'x'));
  const Completion cut =
      make_completion(1, Status(ErrorCode::kInternal, std::string(239, 'x') + "\u00fc"));
  CHECK(completion_status(cut).message() == std::string(239, 'x'));
  const Completion lines = make_completion(1, Status(ErrorCode::kInternal, "a\nb"));
  CHECK(completion_status(lines).message() == "a?b");
}

TEST_CASE("a completion of garbage is an INTERNAL error that can be printed") {
  Completion garbage;
  garbage.code = 0xdeadbeef;
  garbage.message_bytes = 0xffffffff;
  garbage.message.fill('\x81');
  const Status status = completion_status(garbage);
  CHECK(status.code() == ErrorCode::kInternal);
  CHECK(status.message() == "unknown error code 3735928559: " + std::string(240, '?'));
  garbage.code = 0;
  CHECK(completion_status(garbage).ok());
}

TEST_CASE("waiting for a completion ends at the deadline") {
  const ArenaMemory memory;
  memory.set_indices(0, 0u - 1);
  SubmissionWriter writer(memory.arena());
  CompletionReader reader(memory.arena());
  ArenaServer server(memory.arena());
  const auto start = std::chrono::steady_clock::now();
  CHECK_FALSE(reader.wait(start - 1s));
  CHECK_FALSE(reader.wait(start + 10ms));
  CHECK(std::chrono::steady_clock::now() - start >= 10ms);
  REQUIRE(writer.push(submission(1)));
  server.complete(submission(1), {});
  CHECK(reader.wait(start - 1s));  // it is there already
}

TEST_CASE("the client is told to wake an executor that sleeps") {
  const ArenaMemory memory;
  SubmissionWriter writer(memory.arena());
  ArenaServer server(memory.arena());
  CHECK_FALSE(writer.wake_needed());
  server.set_sleeping(true);
  REQUIRE(writer.push(submission(1)));
  CHECK(writer.wake_needed());
  server.set_sleeping(false);
  CHECK_FALSE(writer.wake_needed());
}

}  // namespace
}  // namespace larder::protocol
