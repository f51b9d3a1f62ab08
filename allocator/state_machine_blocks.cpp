// The state machine's handlers of blocks: allocate, release, publish, look up and copy.
#include <algorithm>
#include <iterator>
#include <span>

#include "allocator/state_machine.h"

namespace larder {
namespace {

// Publish and Lookup name no group: a pool has one.
constexpr uint32_t kOnlyGroup = 0;

Status check_tokens(const std::vector<int32_t>& tokens) {
  for (size_t i = 0; i < tokens.size(); ++i)
    if (tokens[i] < 0)
      return {ErrorCode::kInvalidArgument, "tokens[" + std::to_string(i) + "] is " +
                                               std::to_string(tokens[i]) +
                                               ", but must not be negative"};
  return {};
}

Status check_extra(const std::vector<std::string>& extra, int64_t at_least, int64_t at_most) {
  const int64_t size = std::ssize(extra);
  if (size == 0 || (size >= at_least && size <= at_most)) return {};
  return {ErrorCode::kInvalidArgument, "extra has " + std::to_string(size) +
                                           " entries, but must be empty or have one for each" +
                                           " of " + std::to_string(at_most) + " blocks"};
}

// Goes through the keys of the whole blocks of a token list, from the root.
class KeyWalk {
 public:
  // The lists must outlive the walk.
  KeyWalk(const BlockKey& root, const std::vector<int32_t>& tokens, int64_t block_tokens,
          const std::vector<std::string>& extra)
      : key_(root),
        tokens_(tokens),
        block_tokens_(static_cast<size_t>(block_tokens)),
        extra_(extra) {}

  // The key of the next whole block; there must be one.
  const BlockKey& next() {
    const std::string_view extra = extra_.empty() ? std::string_view() : extra_[next_block_];
    key_ = child_key(key_, tokens_.subspan(next_block_ * block_tokens_, block_tokens_), extra);
    ++next_block_;
    return key_;
  }
  const BlockKey& skip(int64_t num_blocks) {
    for (int64_t i = 0; i < num_blocks; ++i) next();
    return key_;
  }

 private:
  BlockKey key_;
  const std::span<const int32_t> tokens_;
  const size_t block_tokens_;
  const std::vector<std::string>& extra_;
  size_t next_block_ = 0;
};

Status check_first_block(int64_t first_block, int64_t whole_blocks) {
  if (first_block >= 0 && first_block <= whole_blocks) return {};
  return {ErrorCode::kInvalidArgument, "first_block is " + std::to_string(first_block) +
                                           ", but the tokens fill " + std::to_string(whole_blocks) +
                                           " blocks"};
}

Status check_publish(const Publish& event, int64_t block_tokens) {
  const int64_t whole_blocks = std::ssize(event.tokens) / block_tokens;
  const int64_t num_blocks = std::ssize(event.blocks);
  if (Status status = check_tokens(event.tokens); !status.ok()) return status;
  if (Status status = check_first_block(event.first_block, whole_blocks); !status.ok())
    return status;
  if (num_blocks > whole_blocks - event.first_block)
    return {ErrorCode::kInvalidArgument,
            std::to_string(num_blocks) + " blocks are named from block " +
                std::to_string(event.first_block) + " on, but " +
                std::to_string(event.tokens.size()) + " tokens fill only " +
                std::to_string(whole_blocks) + " blocks of " + std::to_string(block_tokens)};
  return check_extra(event.extra, event.first_block + num_blocks, whole_blocks);
}

Status check_lookup(const Lookup& event, int64_t whole_blocks) {
  if (Status status = check_tokens(event.tokens); !status.ok()) return status;
  if (Status status = check_first_block(event.first_block, whole_blocks); !status.ok())
    return status;
  if (event.max_blocks < 0)
    return {ErrorCode::kInvalidArgument,
            "max_blocks is " + std::to_string(event.max_blocks) + ", but must not be negative"};
  return check_extra(event.extra, whole_blocks, whole_blocks);
}

std::vector<int32_t> ids_of(const std::vector<BlockRef>& blocks) {
  std::vector<int32_t> ids;
  ids.reserve(blocks.size());
  for (const BlockRef& block : blocks) ids.push_back(block.id);
  return ids;
}

}  // namespace

StateMachine::Answer StateMachine::handle(const Allocate& event) {
  const auto target =
      find_target(event.session, event.pool, event.group, Role::kAppend, "allocate blocks");
  if (!target) return target.status();
  auto blocks = target->blocks->allocate(event.session, event.num_blocks,
                                         std::max(event.num_blocks, event.total_blocks));
  if (!blocks) return blocks.status();
  emit_words(*target->pool);
  return BlocksAllocated{std::move(*blocks)};
}

StateMachine::Answer StateMachine::handle(const Release& event) {
  const auto target =
      find_target(event.session, event.pool, event.group, Role::kRead, "release blocks");
  if (!target) return target.status();
  Status status = target->blocks->release(event.session, event.blocks, now_us_);
  if (!status.ok()) return status;
  emit_words(*target->pool);
  return Done{};
}

StateMachine::Answer StateMachine::handle(const Publish& event) {
  const auto target =
      find_target(event.session, event.pool, kOnlyGroup, Role::kAppend, "publish blocks");
  if (!target) return target.status();
  const Pool& pool = *target->pool;
  const int64_t block_tokens = pool.spec.groups[kOnlyGroup].block_tokens;
  if (Status status = check_publish(event, block_tokens); !status.ok()) return status;

  KeyWalk walk(root_key_of(pool, event.adapter), event.tokens, block_tokens, event.extra);
  int32_t parent = PrefixIndex::kNoBlock;
  if (event.first_block > 0) {
    parent = target->blocks->find(walk.skip(event.first_block)).id;
    if (parent == PrefixIndex::kNoBlock)
      return Status(ErrorCode::kNotFound,
                    "first_block is " + std::to_string(event.first_block) +
                        ", but the block before it is not published (any more)");
  }
  std::vector<BlockKey> keys;
  keys.reserve(event.blocks.size());
  for (size_t i = 0; i < event.blocks.size(); ++i) keys.push_back(walk.next());
  auto serving = target->blocks->publish(event.session, parent, keys, event.blocks, now_us_);
  if (!serving) return serving.status();
  emit_words(*target->pool);
  return BlocksPublished{std::move(keys), std::move(*serving)};
}

StateMachine::Answer StateMachine::handle(const Lookup& event) {
  const auto target =
      find_target(event.session, event.pool, kOnlyGroup, Role::kRead, "look up prefixes");
  if (!target) return target.status();
  Pool& pool = *target->pool;
  const int64_t block_tokens = pool.spec.groups[kOnlyGroup].block_tokens;
  const int64_t whole_blocks = std::ssize(event.tokens) / block_tokens;
  if (Status status = check_lookup(event, whole_blocks); !status.ok()) return status;

  std::vector<BlockRef> blocks;
  KeyWalk walk(root_key_of(pool, event.adapter), event.tokens, block_tokens, event.extra);
  walk.skip(event.first_block);
  const int64_t most = std::min(event.max_blocks, whole_blocks - event.first_block);
  while (std::ssize(blocks) < most) {
    const BlockRef block = target->blocks->find(walk.next());
    if (block.id == PrefixIndex::kNoBlock) break;
    blocks.push_back(block);
  }
  if (event.hold) {
    target->blocks->hold(event.session, blocks, now_us_);
  } else {
    target->blocks->touch(blocks, now_us_);
  }
  const int64_t hit_tokens = std::ssize(blocks) * block_tokens;
  // A lookup that goes on where another one has ended counts its tokens once.
  if (event.first_block == 0) pool.lookup_tokens_total += event.tokens.size();
  pool.lookup_hit_tokens_total += static_cast<uint64_t>(hit_tokens);
  return PrefixFound{hit_tokens, std::move(blocks)};
}

StateMachine::Answer StateMachine::handle(const Copy& event) {
  const auto target =
      find_target(event.session, event.pool, event.group, Role::kAppend, "copy blocks");
  if (!target) return target.status();
  Status status = target->blocks->begin_copy(event.session, event.from, event.to);
  if (!status.ok()) return status;
  if (event.from.empty()) return Done{};
  RunningCopy copy{event.request, event.session,      event.pool,
                   event.group,   ids_of(event.from), ids_of(event.to)};
  effects_.emplace_back(RunCopy{++last_copy_, copy.pool, copy.group, copy.from, copy.to});
  copies_.emplace(last_copy_, std::move(copy));
  return std::nullopt;
}

void StateMachine::handle(const CopyDone& event) {
  const auto found = copies_.find(event.copy);
  if (found == copies_.end()) return;
  const RunningCopy copy = std::move(found->second);
  copies_.erase(found);
  // The blocks written are open or quarantined, so the pool cannot have been destroyed.
  Pool& pool = pools_.at(copy.pool);
  pool.block_pools[copy.group].end_copy(copy.session, copy.from, copy.to);
  emit_words(pool);
  if (!sessions_.contains(copy.session)) return;
  effects_.emplace_back(
      Reply{copy.request, event.status.ok() ? ReplyBody(Done{}) : ReplyBody(event.status)});
}

BlockKey StateMachine::root_key_of(const Pool& pool, const std::string& adapter) const {
  return root_key(config_.salts.at(pool.tenant), pool.spec.model, adapter, pool.spec.identity);
}

}  // namespace larder
