// Events and replies as bytes, for the journal and its snapshots.
//
// Of Publish and Lookup only the keys are kept, not the tokens that they were made from: nobody's
// text is in a journal. The format is the build's own: kRecordVersion changes with it, and a
// snapshot names the version that wrote it.
#pragma once

#include <cstdint>
#include <vector>

#include "allocator/byte_codec.h"
#include "allocator/effects.h"
#include "allocator/events.h"

namespace larder {

inline constexpr uint32_t kRecordVersion = 1;

void put_event(ByteWriter& out, const Event& event);
Event get_event(ByteReader& in);  // in.failed() when the bytes make no sense
void put_reply(ByteWriter& out, const ReplyBody& reply);
ReplyBody get_reply(ByteReader& in);
void put_pool_spec(ByteWriter& out, const PoolSpec& spec);
PoolSpec get_pool_spec(ByteReader& in);

struct Record {
  Event event;
  int64_t now_us = 0;
  std::vector<int64_t> choices;
};
void put_record(ByteWriter& out, const Event& event, int64_t now_us,
                const std::vector<int64_t>& choices);
Record get_record(ByteReader& in);

}  // namespace larder
