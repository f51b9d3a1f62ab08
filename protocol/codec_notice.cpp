// Codec of the notice socket.
#include "protocol/codec.h"
#include "protocol/notices.h"

namespace larder::protocol {
namespace {

// Of Unmap and NoticeAck, which name a segment in the same way.
template <typename Body, typename Builder>
void write_segment(Builder to, const Body& body) {
  to.setPool(body.pool);
  to.setGroup(body.group);
  to.setIndex(body.index);
}

template <typename Body, typename Wire>
Body read_segment(Reading& reading, const char* what, typename Wire::Reader from) {
  reading.known_fields_only<Wire>(what, from);
  return {
      from.getPool(),
      static_cast<uint32_t>(reading.number("group", from.getGroup(), 0, kMaxGroups - 1)),
      static_cast<uint32_t>(reading.number("index", from.getIndex(), 0, kMaxSegmentsPerGroup - 1))};
}

Notice read_notice(Reading& reading, wire::Notice::Reader reader) {
  reading.known_fields_only<wire::Notice>("notice", reader);
  switch (reader.which()) {
    case wire::Notice::UNMAP:
      return read_segment<Unmap, wire::Unmap>(reading, "unmap", reader.getUnmap());
    case wire::Notice::SHUTTING_DOWN:
      return ShuttingDown{};
  }
  reading.refuse("notice kind " + std::to_string(static_cast<int>(reader.which())) + " is unknown");
  return ShuttingDown{};
}

}  // namespace

Bytes encode(const Notice& notice) {
  capnp::MallocMessageBuilder builder;
  auto out = builder.initRoot<wire::Notice>();
  if (const auto* unmap = std::get_if<Unmap>(&notice))
    write_segment(out.initUnmap(), *unmap);
  else
    out.setShuttingDown();
  return finish(builder);
}

Bytes encode(const NoticeAck& ack) {
  capnp::MallocMessageBuilder builder;
  write_segment(builder.initRoot<wire::NoticeAck>(), ack);
  return finish(builder);
}

Result<Notice> decode_notice(std::span<const std::byte> bytes) {
  Notice notice;
  const Status status = read_message(bytes, [&](capnp::MessageReader& message) {
    Reading reading;
    notice = read_notice(reading, message.getRoot<wire::Notice>());
    return reading.status();
  });
  if (!status.ok()) return status;
  return notice;
}

Result<NoticeAck> decode_notice_ack(std::span<const std::byte> bytes) {
  NoticeAck ack;
  const Status status = read_message(bytes, [&](capnp::MessageReader& message) {
    Reading reading;
    ack = read_segment<NoticeAck, wire::NoticeAck>(reading, "notice_ack",
                                                   message.getRoot<wire::NoticeAck>());
    return reading.status();
  });
  if (!status.ok()) return status;
  return ack;
}

}  // namespace larder::protocol
