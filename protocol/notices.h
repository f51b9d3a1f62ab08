// What larderd tells a client unasked, over a socket of its own that came with the handshake, and
// how the client answers. A client that asked for notices reads them at any time.
#pragma once

#include <cstdint>
#include <variant>

#include "protocol/messages.h"

namespace larder::protocol {

// One segment of a growing pool is wanted back. The client unmaps it in every mapping that it has,
// closes its fd, and answers with NoticeAck: from then on it cannot reach the bytes any more.
struct Unmap {
  uint64_t pool = 0;
  uint32_t group = 0;
  uint32_t index = 0;  // in mapping order
};
// larderd ends by itself; the connection will close, and the session may be resumed.
struct ShuttingDown {};
using Notice = std::variant<Unmap, ShuttingDown>;

struct NoticeAck {
  uint64_t pool = 0;
  uint32_t group = 0;
  uint32_t index = 0;
};

Bytes encode(const Notice& notice);
Bytes encode(const NoticeAck& ack);
Result<Notice> decode_notice(std::span<const std::byte> bytes);
Result<NoticeAck> decode_notice_ack(std::span<const std::byte> bytes);

}  // namespace larder::protocol
