// Blocks, slots and bytes of a step, with the names of earlier results replaced by what they hold.
#pragma once

#include <cstdint>
#include <vector>

#include "client/ctl/replay/session.h"

namespace larder::replay {

Result<std::vector<BlockHandle>> resolve_blocks(const BlockList& list, const Context& context);
Result<std::vector<int32_t>> resolve_ids(const BlockList& list, const Context& context);
Result<std::vector<int64_t>> resolve_slots(const SlotList& list, int64_t block_tokens,
                                           const Context& context);
// The value's part of the group's name, its part "blocks" or "block", or the value itself; nullptr
// where there are none.
const Blocks* blocks_of(const Value& value, const std::string& group);
Result<ByteString> resolve_bytes(const HexSource& source, const Context& context);

// Rows of one length; -1 after the end of shorter ones.
struct BlockTable {
  std::vector<int32_t> ids;
  int64_t stride = 0;
};
Result<BlockTable> resolve_table(const std::vector<BlockList>& rows, const Context& context);

}  // namespace larder::replay
