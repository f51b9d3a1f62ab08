// Blocks of one group: the requests to larderd, in portions that fit its messages.
#include <algorithm>

#include "client/client_impl.h"
#include "protocol/limits.h"

namespace larder {
namespace {

std::vector<BlockHandle> from_wire(const std::vector<protocol::Block>& blocks) {
  std::vector<BlockHandle> result;
  result.reserve(blocks.size());
  for (const protocol::Block& block : blocks) result.push_back(larder::from_wire(block));
  return result;
}

Status check_single_group(const OpenedPool& pool, const char* instead) {
  if (pool.groups.size() == 1) return {};
  return {ErrorCode::kUnsupported,
          "the pool has " + std::to_string(pool.groups.size()) + " groups: use " + instead};
}

}  // namespace

Result<std::vector<BlockHandle>> Pool::Impl::allocate(int64_t num_blocks) {
  std::vector<BlockHandle> blocks;
  const auto portion = static_cast<int64_t>(protocol::kMaxBlocksPerMessage);
  const auto allocate_portion = [&](int64_t total) -> Status {
    auto part = client->session->call_for<protocol::Blocks>(
        protocol::Allocate{id, group, std::min(portion, total), std::max<int64_t>(total, 0)});
    if (!part) return part.status();
    const auto fresh = from_wire(part->blocks);
    blocks.insert(blocks.end(), fresh.begin(), fresh.end());
    return map_blocks(part->blocks, true);
  };
  do {
    if (Status status = allocate_portion(num_blocks - static_cast<int64_t>(blocks.size()));
        !status.ok()) {
      if (!blocks.empty()) (void)release(blocks);  // all or nothing
      return status;
    }
  } while (static_cast<int64_t>(blocks.size()) < num_blocks);
  return blocks;
}

Status Pool::Impl::release(std::span<const BlockHandle> blocks, Session::Patience patience) {
  return in_portions(
      blocks.size(), protocol::kMaxBlocksPerMessage, [&](size_t first, size_t count) -> Status {
        return client->session
            ->call_for<protocol::Done>(
                protocol::Release{id, group, to_wire(blocks.subspan(first, count))}, patience)
            .status();
      });
}

Result<std::vector<PublishedBlock>> Pool::Impl::publish(int64_t first_block,
                                                        std::span<const int32_t> tokens,
                                                        std::span<const BlockHandle> blocks,
                                                        const std::string& adapter,
                                                        std::span<const std::string> extra) {
  if (Status s = check_single_group(opened, "publish_units"); !s.ok()) return s;
  std::vector<PublishedBlock> result;
  const auto publish_portion = [&](size_t first, size_t count) -> Status {
    auto list = client->token_list(tokens);
    if (!list) return list.status();
    auto part = client->session->call_for<protocol::Published>(
        protocol::Publish{id,
                          adapter,
                          std::move(*list),
                          to_wire(blocks.subspan(first, count)),
                          {extra.begin(), extra.end()},
                          first_block + static_cast<int64_t>(first)});
    if (!part) return part.status();
    std::vector<protocol::Block> serving;
    for (const protocol::PublishedBlock& block : part->blocks) {
      result.push_back({block.key, larder::from_wire(block.block)});
      serving.push_back(block.block);
    }
    return map_blocks(serving, true);
  };
  Status status = in_portions(blocks.size(), protocol::kMaxBlocksPerPublish, publish_portion);
  if (status.ok()) return result;
  // Holds on blocks that the caller will not hear of.
  std::vector<BlockHandle> gained;
  for (size_t i = 0; i < std::min(result.size(), blocks.size()); ++i)
    if (result[i].block != blocks[i]) gained.push_back(result[i].block);
  if (!gained.empty()) (void)release(gained);
  return status;
}

Result<Prefix> Pool::Impl::lookup(std::span<const int32_t> tokens, bool hold,
                                  const std::string& adapter, std::span<const std::string> extra) {
  if (Status s = check_single_group(opened, "lookup_units"); !s.ok()) return s;
  Prefix prefix;
  size_t found = 0;
  const auto look_up_portion = [&]() -> Status {
    auto list = client->token_list(tokens);
    if (!list) return list.status();
    const auto first_block = static_cast<int64_t>(prefix.blocks.size());
    auto part = client->session->call_for<protocol::Prefix>(protocol::Lookup{
        id, adapter, std::move(*list), {extra.begin(), extra.end()}, hold, first_block});
    if (!part) return part.status();
    const auto blocks = from_wire(part->blocks);
    prefix.blocks.insert(prefix.blocks.end(), blocks.begin(), blocks.end());
    found = blocks.size();
    return map_blocks(part->blocks, hold);
  };
  do {
    if (Status status = look_up_portion(); !status.ok()) {
      if (hold && !prefix.blocks.empty()) (void)release(prefix.blocks);
      return status;
    }
  } while (found >= protocol::kMaxBlocksPerMessage);
  prefix.hit_tokens = static_cast<int64_t>(prefix.blocks.size()) * view.geometry.block_tokens;
  return prefix;
}

Status Pool::Impl::copy(std::span<const BlockHandle> from, std::span<const BlockHandle> to) {
  if (from.size() != to.size())
    return {ErrorCode::kInvalidArgument, "from has " + std::to_string(from.size()) +
                                             " blocks and to " + std::to_string(to.size())};
  return in_portions(
      from.size(), protocol::kMaxBlocksPerCopy, [&](size_t first, size_t count) -> Status {
        return client->session
            ->call_for<protocol::Done>(protocol::Copy{
                id, group, to_wire(from.subspan(first, count)), to_wire(to.subspan(first, count))})
            .status();
      });
}

}  // namespace larder
