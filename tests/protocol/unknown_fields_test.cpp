// Messages of a later version: whatever they set that this build does not know is refused by name.
//
// A later version's message is made from one of ours by copying it struct by struct and making one
// of the structs larger, which is just what a schema with one more field does.
#include <cstring>
#include <functional>

#include <capnp/any.h>
#include <capnp/message.h>
#include <capnp/serialize.h>
#include <doctest/doctest.h>

#include "protocol/executor_messages.h"
#include "protocol/messages.h"
#include "protocol/notices.h"
#include "tests/protocol/any_message.h"
#include "tests/support/random.h"

namespace larder::protocol {
namespace {

using test::Filler;

enum class Growth {
  kNone,
  kZeroWord,     // a new field that has its default value
  kWord,         // a new number
  kPointer,      // a new text
  kNullPointer,  // a new text that is not set
};

class Copier {
 public:
  // Grows the struct (or the list of structs) that is met as number `target`.
  Copier(int target, Growth growth) : target_(target), growth_(growth) {}

  Bytes copy(const Bytes& message) {
    std::vector<capnp::word> words(message.size() / sizeof(capnp::word));
    std::memcpy(words.data(), message.data(), message.size());
    capnp::FlatArrayMessageReader reader(kj::arrayPtr(words.data(), words.size()));
    capnp::MallocMessageBuilder builder;
    copy(reader.getRoot<capnp::AnyPointer>(), builder.getRoot<capnp::AnyPointer>());
    const auto flat = capnp::messageToFlatArray(builder);
    Bytes result(flat.asBytes().size());
    std::memcpy(result.data(), flat.begin(), result.size());
    return result;
  }
  int num_met() const { return num_met_; }

 private:
  bool grows(Growth a, Growth b) const {
    return num_met_ == target_ && (growth_ == a || growth_ == b);
  }

  void copy(capnp::AnyPointer::Reader from, capnp::AnyPointer::Builder to) {
    if (from.isStruct()) {
      const auto reader = from.getAs<capnp::AnyStruct>();
      const Sizes sizes = next_sizes(reader);
      auto builder = to.initAsAnyStruct(sizes.words, sizes.pointers);
      copy_struct(reader, builder, sizes);
    } else if (from.isList() && from.getAs<capnp::AnyList>().getElementSize() ==
                                    capnp::ElementSize::INLINE_COMPOSITE) {
      const auto reader = from.getAs<capnp::AnyList>().as<capnp::List<capnp::AnyStruct>>();
      if (reader.size() == 0) return;
      const Sizes sizes = next_sizes(reader[0]);
      auto builder = to.initAsListOfAnyStruct(sizes.words, sizes.pointers, reader.size());
      for (uint32_t i = 0; i < reader.size(); ++i) copy_struct(reader[i], builder[i], sizes);
    } else if (!from.isNull()) {
      to.set(from);
    }
  }

  struct Sizes {
    uint16_t words;
    uint16_t pointers;
    bool set_word;
    bool set_pointer;
  };
  Sizes next_sizes(capnp::AnyStruct::Reader reader) {
    const bool word = grows(Growth::kWord, Growth::kZeroWord);
    const bool pointer = grows(Growth::kPointer, Growth::kNullPointer);
    const Sizes sizes{static_cast<uint16_t>(reader.getDataSection().size() / 8 + (word ? 1 : 0)),
                      static_cast<uint16_t>(reader.getPointerSection().size() + (pointer ? 1 : 0)),
                      grows(Growth::kWord, Growth::kWord),
                      grows(Growth::kPointer, Growth::kPointer)};
    ++num_met_;
    return sizes;
  }
  void copy_struct(capnp::AnyStruct::Reader from, capnp::AnyStruct::Builder to,
                   const Sizes& sizes) {
    const auto data = from.getDataSection();
    if (data.size() > 0) std::memcpy(to.getDataSection().begin(), data.begin(), data.size());
    if (sizes.set_word) to.getDataSection()[data.size() + 7] = 1;
    const auto pointers = from.getPointerSection();
    for (uint32_t i = 0; i < pointers.size(); ++i) copy(pointers[i], to.getPointerSection()[i]);
    if (sizes.set_pointer) to.getPointerSection()[pointers.size()].setAs<capnp::Text>("new");
  }

  int target_;
  Growth growth_;
  int num_met_ = 0;
};

using Decode = std::function<Status(const Bytes&)>;

Status request_status(const Bytes& bytes) { return decode_request(bytes).request.status(); }
Status reply_status(const Bytes& bytes) { return decode_reply(bytes).status(); }
Status command_status(const Bytes& bytes) { return decode_command(bytes).status(); }
Status report_status(const Bytes& bytes) { return decode_report(bytes).status(); }
Status notice_status(const Bytes& bytes) { return decode_notice(bytes).status(); }
Status ack_status(const Bytes& bytes) { return decode_notice_ack(bytes).status(); }

// Returns how many structs of the message were grown.
int check_growth(const Bytes& message, const Decode& decode) {
  Copier plain(-1, Growth::kNone);
  REQUIRE(decode(plain.copy(message)).ok());
  for (int target = 0; target < plain.num_met(); ++target) {
    CAPTURE(target);
    for (const Growth growth : {Growth::kWord, Growth::kPointer}) {
      const Status status = decode(Copier(target, growth).copy(message));
      CAPTURE(status.to_string());
      CHECK(status.code() == ErrorCode::kInvalidArgument);
      CHECK(status.message().ends_with(" has fields that version 1 does not know"));
    }
    for (const Growth growth : {Growth::kZeroWord, Growth::kNullPointer}) {
      const Status status = decode(Copier(target, growth).copy(message));
      CAPTURE(status.to_string());
      CHECK(status.ok());
    }
  }
  return plain.num_met();
}

template <typename Message>
void check_every_struct(uint64_t num_kinds, uint64_t stream, const Decode& decode) {
  Filler filler(test::random_engine(stream));
  int num_structs = 0;
  for (uint64_t kind = 0; kind < num_kinds; ++kind) {
    CAPTURE(kind);
    CAPTURE(test::seed());
    for (int round = 0; round < 10; ++round) {
      const Message message = filler.message<Message>(kind);
      num_structs += check_growth(encode(message), decode);
    }
  }
  CHECK(num_structs > static_cast<int>(num_kinds));
}

TEST_CASE("a new field in any struct of a request is refused unless it is not set") {
  check_every_struct<Request>(std::variant_size_v<RequestBody>, 11, request_status);
}

TEST_CASE("a new field in any struct of a reply is refused unless it is not set") {
  check_every_struct<Reply>(std::variant_size_v<ReplyBody>, 12, reply_status);
}

TEST_CASE("a new field in any struct of a command or a report is refused unless it is not set") {
  check_every_struct<ExecutorCommand>(std::variant_size_v<ExecutorCommand>, 13, command_status);
  check_every_struct<ExecutorReport>(std::variant_size_v<ExecutorReport>, 14, report_status);
}

TEST_CASE("a new field in a notice or its acknowledgement is refused unless it is not set") {
  check_every_struct<Notice>(std::variant_size_v<Notice>, 15, notice_status);
  CHECK(check_growth(encode(NoticeAck{1, 2, 3}), ack_status) == 1);
}

// The first word of the root struct's data section.
constexpr size_t kRootOffset = 2 * sizeof(capnp::word);

TEST_CASE("a new field in the padding of a struct that we know is refused") {
  // Reply and Request have 16 bytes of numbers before the kind; what follows the kind is padding.
  Bytes request = encode(Request{1, 2, Goodbye{}});
  REQUIRE(request_status(request).ok());
  request[kRootOffset + 18] = std::byte{1};
  CHECK(request_status(request).message() == "request has fields that version 1 does not know");
  Bytes reply = encode(Reply{1, 2, Done{}});
  reply[kRootOffset + 23] = std::byte{0x80};
  CHECK(reply_status(reply).message() == "reply has fields that version 1 does not know");
}

TEST_CASE("a kind of a later version is refused with its number") {
  const auto patched = [](Bytes bytes, size_t offset) {
    const uint16_t kind = 999;
    std::memcpy(bytes.data() + kRootOffset + offset, &kind, sizeof kind);
    return bytes;
  };
  const Bytes request = patched(encode(Request{42, 0, Goodbye{}}), 16);
  CHECK(request_status(request).to_string() ==
        "INVALID_ARGUMENT: request kind 999 is unknown to version 1");
  CHECK(decode_request(request).id == 42);
  CHECK(reply_status(patched(encode(Reply{1, 2, Done{}}), 16)).message() ==
        "reply kind 999 is unknown");
  CHECK(command_status(patched(encode(ExecutorCommand{DropPool{1}}), 0)).message() ==
        "command kind 999 is unknown");
  CHECK(report_status(patched(encode(ExecutorReport{Ready{}}), 0)).message() ==
        "report kind 999 is unknown");
  CHECK(notice_status(patched(encode(Notice{ShuttingDown{}}), 0)).message() ==
        "notice kind 999 is unknown");
}

}  // namespace
}  // namespace larder::protocol
