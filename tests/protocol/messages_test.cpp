// Every message comes out as it went in.
#include "protocol/messages.h"

#include <doctest/doctest.h>

#include "protocol/executor_messages.h"
#include "protocol/notices.h"
#include "tests/protocol/any_message.h"
#include "tests/support/random.h"

namespace larder::protocol {
namespace {

using test::Filler;
using test::same;

constexpr int kRoundsPerKind = 60;

Result<Request> decode(const Request& request) {
  DecodedRequest decoded = decode_request(encode(request));
  CHECK(decoded.id == request.id);
  return decoded.request;
}
Result<Reply> decode(const Reply& reply) { return decode_reply(encode(reply)); }
Result<ExecutorCommand> decode(const ExecutorCommand& command) {
  return decode_command(encode(command));
}
Result<ExecutorReport> decode(const ExecutorReport& report) {
  return decode_report(encode(report));
}
Result<Notice> decode(const Notice& notice) { return decode_notice(encode(notice)); }

template <typename Message>
void check_round_trips(uint64_t num_kinds, uint64_t stream) {
  Filler filler(test::random_engine(stream));
  for (uint64_t kind = 0; kind < num_kinds; ++kind) {
    for (int round = 0; round < kRoundsPerKind; ++round) {
      CAPTURE(kind);
      CAPTURE(test::seed());
      const Message message = filler.message<Message>(kind);
      const auto decoded = decode(message);
      CAPTURE(decoded.status().to_string());
      REQUIRE(decoded.ok());
      CHECK(same(*decoded, message));
    }
  }
}

TEST_CASE("every kind of request comes out as it went in") {
  check_round_trips<Request>(std::variant_size_v<RequestBody>, 1);
}

TEST_CASE("every kind of reply comes out as it went in") {
  check_round_trips<Reply>(std::variant_size_v<ReplyBody>, 2);
}

TEST_CASE("every kind of executor command comes out as it went in") {
  check_round_trips<ExecutorCommand>(std::variant_size_v<ExecutorCommand>, 3);
}

TEST_CASE("every kind of executor report comes out as it went in") {
  check_round_trips<ExecutorReport>(std::variant_size_v<ExecutorReport>, 4);
}

TEST_CASE("every kind of notice and its acknowledgement come out as they went in") {
  check_round_trips<Notice>(std::variant_size_v<Notice>, 5);
  Filler filler(test::random_engine(6));
  for (int round = 0; round < kRoundsPerKind; ++round) {
    NoticeAck ack;
    filler.fill(ack);
    const auto decoded = decode_notice_ack(encode(ack));
    REQUIRE(decoded.ok());
    CHECK(same(*decoded, ack));
  }
}

TEST_CASE("a default message comes out as it went in") {
  GroupSpec group;
  CHECK(same(decode(Request{1, 0, OpenPool{{"", "", {group}}}}).value(),
             Request{1, 0, OpenPool{{"", "", {group}}}}));
  CHECK(same(decode(ExecutorCommand{AddGroup{}}).value(), ExecutorCommand{AddGroup{}}));
  CHECK(same(decode(Reply{0, 0, DaemonStatus{}}).value(), Reply{0, 0, DaemonStatus{}}));
  CHECK(same(decode(ExecutorReport{Copied{7, Status()}}).value(),
             ExecutorReport{Copied{7, Status()}}));
}

TEST_CASE("the comparison of these tests sees a difference in any field") {
  const Request request{1, 2, Allocate{3, 4, 5}};
  CHECK(same(request, Request{1, 2, Allocate{3, 4, 5}}));
  CHECK_FALSE(same(request, Request{9, 2, Allocate{3, 4, 5}}));
  CHECK_FALSE(same(request, Request{1, 2, Allocate{3, 4, 9}}));
  CHECK_FALSE(same(request, Request{1, 2, ClosePool{3}}));
  CHECK_FALSE(same(Reply{1, 2, Blocks{{{1, 1}}}}, Reply{1, 2, Blocks{{{1, 2}}}}));
}

TEST_CASE("an error reply that says OK is refused") {
  const auto decoded = decode(Reply{1, 2, Status()});
  CHECK(decoded.status().to_string() == "INVALID_ARGUMENT: an error reply carries the code OK");
}

TEST_CASE("an error code of a later version becomes INTERNAL and keeps its number") {
  const auto decoded = decode(Reply{1, 2, Status(static_cast<ErrorCode>(777), "why")});
  REQUIRE(decoded.ok());
  CHECK(std::get<Status>(decoded->body).to_string() == "INTERNAL: unknown error code 777: why");
}

TEST_CASE("any error text arrives as text that can be printed") {
  const auto sent = [](const std::string& message) {
    const auto decoded = decode(Reply{1, 2, Status(ErrorCode::kInternal, message)});
    return std::get<Status>(decoded.value().body).message();
  };
  CHECK(sent("two\nlines\x1b[2J and \xff") == "two?lines?[2J and ?");
  CHECK(sent(std::string(2000, 'x')).size() == kMaxErrorBytes);
  // An umlaut across the limit is left out whole.
  CHECK(sent(std::string(kMaxErrorBytes - 1, 'x') + "\u00fc").size() == kMaxErrorBytes - 1);
  const auto report = decode(ExecutorReport{BrokenRing{1, "a\tb"}});
  CHECK(std::get<BrokenRing>(report.value()).message == "a?b");
}

}  // namespace
}  // namespace larder::protocol
