// Private to protocol: what the codecs of all messages share.
#pragma once

#include <functional>
#include <span>
#include <string>
#include <vector>

#include <capnp/any.h>
#include <capnp/message.h>
#include <capnp/schema.h>
#include <capnp/serialize.h>

#include "larder/status.h"
#include "protocol/larder.capnp.h"
#include "protocol/limits.h"
#include "protocol/messages.h"

namespace larder::protocol {

// What this build's schema gives a meaning in a struct: one bit for each bit of its data section,
// and the number of its pointers.
struct KnownFields {
  explicit KnownFields(capnp::StructSchema schema);
  std::vector<uint64_t> data_bits;
  uint32_t num_pointers = 0;
};

// Collects the first refusal of a decode, so that readers can be written as plain assignments.
class Reading {
 public:
  bool ok() const { return status_.ok(); }
  const Status& status() const { return status_; }
  void refuse(std::string message) {
    if (ok()) status_ = Status(ErrorCode::kInvalidArgument, std::move(message));
  }

  // At most `max_bytes` of valid UTF-8 without control characters, which no name or sentence of
  // ours needs and which would break the logs, the JSON and the metrics that it may end up in.
  std::string text(const char* field, capnp::Text::Reader value, size_t max_bytes = kMaxNameBytes);
  std::string data(const char* field, capnp::Data::Reader value, size_t max_bytes);
  SessionToken session_token(capnp::Data::Reader value);
  // `value` if it is within [min, max], else min with a refusal.
  int64_t number(const char* field, int64_t value, int64_t min, int64_t max);
  // 0, or a size that an arena may have.
  uint64_t arena_bytes(uint64_t value);
  // The size of a list, or 0 with a refusal when it is longer than `max`.
  uint32_t count(const char* field, size_t size, size_t max);

  void same_size(const char* field, size_t size, const char* other_field, size_t other_size) {
    if (size != other_size)
      refuse(std::string(field) + " has " + std::to_string(size) + " entries, " + other_field +
             " has " + std::to_string(other_size));
  }

  template <typename List>
  auto numbers(const char* field, List list, size_t max) {
    using Number = std::decay_t<decltype(list[0])>;
    std::vector<Number> result(count(field, list.size(), max));
    for (uint32_t i = 0; i < result.size(); ++i) result[i] = list[i];
    return result;
  }

  // Refuses a struct that carries anything which this build's schema does not know: data or
  // pointers past its end, or bits that are padding in it and a later version may use.
  template <typename Struct>
  void known_fields_only(const char* what, typename Struct::Reader reader) {
    static const KnownFields kKnown{capnp::StructSchema(capnp::Schema::from<Struct>())};
    if (has_more_than(capnp::AnyStruct::Reader(reader), kKnown))
      refuse(std::string(what) + " has fields that version " + std::to_string(kMaxVersion) +
             " does not know");
  }

 private:
  static bool has_more_than(capnp::AnyStruct::Reader reader, const KnownFields& known);
  Status status_;
};

// Serializes a filled message, of whatever size it has, as one segment.
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
void write(wire::RegisterImport::Builder builder, const RegisterImport& memory);
RegisterImport read_register_import(Reading& reading, wire::RegisterImport::Reader reader);
void write(wire::PoolSpec::Builder builder, const PoolSpec& spec);
PoolSpec read_pool_spec(Reading& reading, wire::PoolSpec::Reader reader);
void write(wire::GroupLayout::Builder builder, const GroupLayout& layout);
GroupLayout read_group_layout(Reading& reading, wire::GroupLayout::Reader reader);
void write(wire::PoolInfo::Builder to, const PoolInfo& pool);
PoolInfo read_pool_info(Reading& reading, wire::PoolInfo::Reader from);
void write(wire::SessionInfo::Builder to, const SessionInfo& session);
SessionInfo read_session_info(Reading& reading, wire::SessionInfo::Reader from);
void write(wire::DaemonStatus::Builder to, const DaemonStatus& status);
DaemonStatus read_status(Reading& reading, wire::DaemonStatus::Reader from);
void write(wire::TenantInfo::Builder to, const TenantInfo& tenant);
TenantInfo read_tenant_info(Reading& reading, wire::TenantInfo::Reader from);
// The message is made printable and cut to kMaxErrorBytes.
void write(wire::Error::Builder builder, const Status& status);
// A code outside the enum becomes INTERNAL, and the number is kept in the message.
Status read_error(Reading& reading, wire::Error::Reader reader);

template <typename Builder, typename Numbers>
void write_numbers(Builder builder, const Numbers& numbers) {
  for (uint32_t i = 0; i < numbers.size(); ++i) builder.set(i, numbers[i]);
}

// Lists that travel in the message or, where they are long, through the arena.
template <typename Builder, typename Number>
void write_list(Builder builder, const std::variant<std::vector<Number>, ArenaRange>& list) {
  if (const auto* range = std::get_if<ArenaRange>(&list)) {
    auto arena = builder.initArena();
    arena.setOffsetBytes(range->offset_bytes);
    arena.setCount(range->count);
    return;
  }
  const auto& numbers = std::get<std::vector<Number>>(list);
  write_numbers(builder.initInline(static_cast<uint32_t>(numbers.size())), numbers);
}

template <typename Wire, typename Number>
std::variant<std::vector<Number>, ArenaRange> read_list(Reading& reading, const char* field,
                                                        typename Wire::Reader reader,
                                                        size_t max_inline, size_t max_in_arena) {
  reading.known_fields_only<Wire>(field, reader);
  switch (reader.which()) {
    case Wire::INLINE:
      return reading.numbers(field, reader.getInline(), max_inline);
    case Wire::ARENA: {
      const auto arena = reader.getArena();
      reading.known_fields_only<wire::ArenaRange>(field, arena);
      const ArenaRange range{arena.getOffsetBytes(), arena.getCount()};
      if (range.count > max_in_arena)
        reading.refuse(std::string(field) + " has " + std::to_string(range.count) +
                       " entries, at most " + std::to_string(max_in_arena) + " are allowed");
      return range;
    }
  }
  reading.refuse(std::string(field) + " is neither inline nor in the arena");
  return {};
}

}  // namespace larder::protocol
