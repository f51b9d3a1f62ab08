// Any bytes through all decoders: each is refused with a sentence, or becomes a message that
// encodes and decodes to the same bytes from then on.
#include <span>

#include "larder/check.h"
#include "protocol/executor_messages.h"
#include "protocol/limits.h"
#include "protocol/messages.h"
#include "protocol/notices.h"
#include "tests/fuzz/fuzz.h"
#include "tests/protocol/any_message.h"

namespace larder::fuzz {
namespace {

using namespace protocol;

Result<Request> decode(std::span<const std::byte> bytes, const Request*) {
  return decode_request(bytes).request;
}
Result<Reply> decode(std::span<const std::byte> bytes, const Reply*) { return decode_reply(bytes); }
Result<ExecutorCommand> decode(std::span<const std::byte> bytes, const ExecutorCommand*) {
  return decode_command(bytes);
}
Result<ExecutorReport> decode(std::span<const std::byte> bytes, const ExecutorReport*) {
  return decode_report(bytes);
}

Result<Notice> decode(std::span<const std::byte> bytes, const Notice*) {
  return decode_notice(bytes);
}
Result<NoticeAck> decode(std::span<const std::byte> bytes, const NoticeAck*) {
  return decode_notice_ack(bytes);
}

template <typename Message>
void check(std::span<const std::byte> bytes) {
  const Message* kind = nullptr;
  const Result<Message> first = decode(bytes, kind);
  if (!first.ok()) {
    LARDER_CHECK(first.status().code() == ErrorCode::kInvalidArgument, first.status().to_string());
    LARDER_CHECK(!first.status().message().empty());
    return;
  }
  const Bytes again = encode(*first);
  // Pointers to shared bytes become copies, which may need more room.
  if (again.size() > kMaxMessageBytes) return;
  const Result<Message> second = decode(again, kind);
  LARDER_CHECK(second.ok(), second.status().to_string());
  LARDER_CHECK(encode(*second) == again);
}

template <typename Message>
void add(std::vector<Input>& inputs, test::Filler& filler, uint64_t num_kinds) {
  for (uint64_t kind = 0; kind < num_kinds; ++kind)
    for (int i = 0; i < 4; ++i) {
      const Bytes bytes = encode(filler.message<Message>(kind));
      const auto* data = reinterpret_cast<const uint8_t*>(bytes.data());
      inputs.emplace_back(data, data + bytes.size());
    }
}

}  // namespace

const size_t kMaxInputBytes = kMaxMessageBytes + 16;

std::vector<Input> corpus(std::mt19937_64& engine) {
  test::Filler filler{std::mt19937_64(engine())};
  std::vector<Input> inputs;
  add<Request>(inputs, filler, std::variant_size_v<RequestBody>);
  add<Reply>(inputs, filler, std::variant_size_v<ReplyBody>);
  add<ExecutorCommand>(inputs, filler, std::variant_size_v<ExecutorCommand>);
  add<ExecutorReport>(inputs, filler, std::variant_size_v<ExecutorReport>);
  add<Notice>(inputs, filler, std::variant_size_v<Notice>);
  const Bytes ack = encode(NoticeAck{1, 2, 3});
  const auto* data = reinterpret_cast<const uint8_t*>(ack.data());
  inputs.emplace_back(data, data + ack.size());
  return inputs;
}

}  // namespace larder::fuzz

extern "C" int LLVMFuzzerTestOneInput(const uint8_t* data, size_t size) {
  using namespace larder;
  const auto bytes = std::as_bytes(std::span(data, size));
  fuzz::check<protocol::Request>(bytes);
  fuzz::check<protocol::Reply>(bytes);
  fuzz::check<protocol::ExecutorCommand>(bytes);
  fuzz::check<protocol::ExecutorReport>(bytes);
  fuzz::check<protocol::Notice>(bytes);
  fuzz::check<protocol::NoticeAck>(bytes);
  return 0;
}
