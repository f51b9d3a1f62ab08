// Private to protocol: what the codecs of all messages share.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include <capnp/any.h>
#include <capnp/message.h>
#include <capnp/serialize.h>

#include "larder/status.h"
#include "protocol/larder.capnp.h"
#include "protocol/limits.h"
#include "protocol/messages.h"

namespace larder::protocol {

// Collects the first refusal of a decode, so that readers can be written as plain assignments.
class Reading {
 public:
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  void refuse(std::string message) {
    if (ok()) status_ = Status(ErrorCode::kInvalidArgument, std::move(message));
  }

  // At most `max_bytes`, and no byte below 0x20, which no name or sentence of ours needs.
  std::string text(const char* field, capnp::Text::Reader value, size_t max_bytes = kMaxNameBytes);
  std::string data(const char* field, capnp::Data::Reader value, size_t max_bytes);
  // The size of a list, or 0 with a refusal when it is longer than `max`.
  uint32_t count(const char* field, size_t size, size_t max);

  template <typename List>
  auto numbers(const char* field, List list, size_t max) {
    using Number = std::decay_t<decltype(list[0])>;
    std::vector<Number> result(count(field, list.size(), max));
    for (uint32_t i = 0; i < result.size(); ++i) result[i] = list[i];
    return result;
  }

  // Refuses a struct that carries data or pointers past what this build's schema knows.
  template <typename Struct>
  void known_fields_only(const char* what, typename Struct::Reader reader) {
    constexpr auto kSize = capnp::_::structSize<Struct>();
    if (has_more_than(capnp::AnyStruct::Reader(reader), kSize.data / capnp::WORDS,
                      kSize.pointers / capnp::POINTERS))
      refuse(std::string(what) + " has fields that version " + std::to_string(kMaxVersion) +
             " does not know");
  }

 private:
  static bool has_more_than(capnp::AnyStruct::Reader reader, uint32_t data_words,
                            uint32_t pointers);
  Status status_;
};

// Serializes a filled message. A message past kMaxMessageBytes is a bug of the sender's checks.
Bytes finish(capnp::MessageBuilder& builder);

// Runs `read` over the message in `bytes`; malformed bytes of any kind become INVALID_ARGUMENT.
Status read_message(std::span<const std::byte> bytes,
                    const std::function<Status(capnp::MessageReader&)>& read);

void write(wire::Block::Builder builder, const Block& block);
void write(capnp::List<wire::Block>::Builder builder, const std::vector<Block>& blocks);
std::vector<Block> read_blocks(Reading& reading, const char* field,
                               capnp::List<wire::Block>::Reader reader, size_t max);
void write(wire::GroupSpec::Builder builder, const GroupSpec& spec);
GroupSpec read_group_spec(Reading& reading, wire::GroupSpec::Reader reader);
void write(wire::PoolSpec::Builder builder, const PoolSpec& spec);
PoolSpec read_pool_spec(Reading& reading, wire::PoolSpec::Reader reader);
void write(wire::GroupLayout::Builder builder, const GroupLayout& layout);
GroupLayout read_group_layout(Reading& reading, wire::GroupLayout::Reader reader);
void write(wire::Error::Builder builder, const Status& status);
// A code outside the enum becomes INTERNAL, and the number is kept in the message.
Status read_error(Reading& reading, wire::Error::Reader reader);

template <typename Builder, typename Numbers>
void write_numbers(Builder builder, const Numbers& numbers) {
  for (uint32_t i = 0; i < numbers.size(); ++i) builder.set(i, numbers[i]);
}

}  // namespace larder::protocol
