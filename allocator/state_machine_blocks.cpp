// The state machine's handlers of blocks: release, publish, look up and copy. Allocation, which can
// need memory, is in state_machine_growth.cpp.
#include <algorithm>
#include <iterator>
#include <span>

#include "allocator/state_machine.h"

namespace larder {
namespace {

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

Status check_first_block(int64_t first_block, int64_t whole_units) {
  if (first_block >= 0 && first_block <= whole_units) return {};
  return {ErrorCode::kInvalidArgument, "first_block is " + std::to_string(first_block) +
                                           ", but the tokens fill " + std::to_string(whole_units) +
                                           " blocks"};
}

Status check_publish(const Publish& event, int64_t unit_tokens, int64_t unit_blocks) {
  const int64_t whole_units = std::ssize(event.tokens) / unit_tokens;
  const int64_t num_blocks = std::ssize(event.blocks);
  if (Status status = check_tokens(event.tokens); !status.ok()) return status;
  if (Status status = check_first_block(event.first_block, whole_units); !status.ok())
    return status;
  if (num_blocks % unit_blocks != 0)
    return {ErrorCode::kInvalidArgument,
            std::to_string(num_blocks) + " blocks are named, but a unit of " +
                std::to_string(unit_tokens) + " tokens has " + std::to_string(unit_blocks)};
  const int64_t num_units = num_blocks / unit_blocks;
  if (num_units > whole_units - event.first_block)
    return {ErrorCode::kInvalidArgument,
            std::to_string(num_units) + " blocks are named from block " +
                std::to_string(event.first_block) + " on, but " +
                std::to_string(event.tokens.size()) + " tokens fill only " +
                std::to_string(whole_units) + " blocks of " + std::to_string(unit_tokens)};
  return check_extra(event.extra, event.first_block + num_units, whole_units);
}

Status check_lookup(const Lookup& event, int64_t whole_units) {
  if (Status status = check_tokens(event.tokens); !status.ok()) return status;
  if (Status status = check_first_block(event.first_block, whole_units); !status.ok())
    return status;
  if (event.max_blocks < 0)
    return {ErrorCode::kInvalidArgument,
            "max_blocks is " + std::to_string(event.max_blocks) + ", but must not be negative"};
  return check_extra(event.extra, whole_units, whole_units);
}

std::vector<int32_t> ids_of(const std::vector<BlockRef>& blocks) {
  std::vector<int32_t> ids;
  ids.reserve(blocks.size());
  for (const BlockRef& block : blocks) ids.push_back(block.id);
  return ids;
}

}  // namespace

StateMachine::Answer StateMachine::handle(const Release& event) {
  const auto target =
      find_target(event.session, event.pool, event.group, Role::kRead, "release blocks");
  if (!target) return target.status();
  Status status = target->pool->blocks.release(event.session, event.group, event.blocks, now_us_);
  if (!status.ok()) return status;
  emit_words(*target->pool);
  memory_news_ = memory_news_ || !waiting_.empty();
  return Done{};
}

// ----------------------------------------------------------------------------------------- publish

Status StateMachine::make_keys(Pool& pool, Publish& event) const {
  const int64_t unit_tokens = pool.blocks.unit_tokens();
  const int64_t unit_blocks = pool.blocks.index().slots_per_unit();
  if (Status status = check_publish(event, unit_tokens, unit_blocks); !status.ok()) return status;
  KeyWalk walk(root_key_of(pool, event.adapter), event.tokens, unit_tokens, event.extra);
  if (event.first_block > 0) event.parent = {walk.skip(event.first_block)};
  const int64_t num_units = std::ssize(event.blocks) / unit_blocks;
  event.keys.reserve(static_cast<size_t>(num_units));
  for (int64_t i = 0; i < num_units; ++i) event.keys.push_back(walk.next());
  return {};
}

StateMachine::Answer StateMachine::handle(Publish& event) {
  const auto target = find_target(event.session, event.pool, 0, Role::kAppend, "publish blocks");
  if (!target) return target.status();
  Pool& pool = *target->pool;
  if (!choices_.replaying())
    if (Status status = make_keys(pool, event); !status.ok()) return status;
  const int64_t unit_blocks = pool.blocks.index().slots_per_unit();
  if (std::ssize(event.keys) * unit_blocks != std::ssize(event.blocks))
    throw ReplayError("keys and blocks do not fit together");
  int32_t parent = PrefixIndex::kNone;
  if (!event.parent.empty()) {
    parent = pool.blocks.index().find(event.parent[0]);
    if (parent == PrefixIndex::kNone)
      return Status(ErrorCode::kNotFound,
                    "first_block is " + std::to_string(event.first_block) +
                        ", but the block before it is not published (any more)");
  }
  auto serving = pool.blocks.publish(event.session, parent, event.keys, event.blocks, now_us_);
  if (!serving) return serving.status();
  emit_words(pool);
  if (event.blocks.empty()) changed_ = false;
  return BlocksPublished{event.keys, std::move(*serving)};
}

// ------------------------------------------------------------------------------------------ lookup

Status StateMachine::find_keys(Pool& pool, Lookup& event) const {
  const int64_t whole_units = std::ssize(event.tokens) / pool.blocks.unit_tokens();
  if (Status status = check_lookup(event, whole_units); !status.ok()) return status;
  const bool all_full =
      std::all_of(pool.spec.groups.begin(), pool.spec.groups.end(),
                  [](const GroupSpec& group) { return group.kind == GroupKind::kFull; });
  if (event.first_block > 0 && !all_full) return {};
  const PrefixIndex& index = pool.blocks.index();
  KeyWalk walk(root_key_of(pool, event.adapter), event.tokens, pool.blocks.unit_tokens(),
               event.extra);
  walk.skip(event.first_block);
  const int64_t most =
      std::min(event.max_blocks / index.slots_per_unit(), whole_units - event.first_block);
  std::vector<int32_t> units;
  while (std::ssize(units) < most) {
    const BlockKey key = walk.next();
    const int32_t unit = index.find(key);
    if (unit == PrefixIndex::kNone) break;
    units.push_back(unit);
    event.keys.push_back(key);
  }
  event.keys.resize(static_cast<size_t>(pool.blocks.longest_prefix(units)));
  return {};
}

std::vector<int32_t> StateMachine::units_of(const Pool& pool,
                                            const std::vector<BlockKey>& keys) const {
  std::vector<int32_t> units;
  units.reserve(keys.size());
  for (const BlockKey& key : keys) {
    units.push_back(pool.blocks.index().find(key));
    if (units.back() == PrefixIndex::kNone) throw ReplayError("a prefix is not there");
  }
  return units;
}

StateMachine::Answer StateMachine::handle(Lookup& event) {
  const auto target = find_target(event.session, event.pool, 0, Role::kRead, "look up prefixes");
  if (!target) return target.status();
  Pool& pool = *target->pool;
  if (!choices_.replaying())
    if (Status status = find_keys(pool, event); !status.ok()) return status;
  const std::vector<int32_t> units = units_of(pool, event.keys);
  std::vector<BlockRef> blocks = pool.blocks.prefix_blocks(units);
  if (event.hold && !units.empty()) {
    pool.blocks.hold(event.session, blocks, now_us_);
    emit_words(pool);
  } else {
    changed_ = false;
  }
  const int64_t hit_tokens = std::ssize(units) * pool.blocks.unit_tokens();
  // A lookup that goes on where another one has ended counts its tokens once.
  if (event.first_block == 0) pool.lookup_tokens_total += event.tokens.size();
  pool.lookup_hit_tokens_total += static_cast<uint64_t>(hit_tokens);
  return PrefixFound{hit_tokens, std::move(blocks)};
}

// ------------------------------------------------------------------------------------------ copies

StateMachine::Answer StateMachine::handle(const Copy& event) {
  const auto target =
      find_target(event.session, event.pool, event.group, Role::kAppend, "copy blocks");
  if (!target) return target.status();
  Status status = target->pool->blocks.begin_copy(event.session, event.group, event.from, event.to);
  if (!status.ok()) return status;
  if (event.from.empty()) {
    changed_ = false;
    return Done{};
  }
  RunningCopy copy{event.request, event.session,      event.pool,
                   event.group,   ids_of(event.from), ids_of(event.to)};
  effects_.emplace_back(RunCopy{++last_copy_, copy.pool, copy.group, copy.from, copy.to});
  copies_.emplace(last_copy_, std::move(copy));
  return std::nullopt;
}

void StateMachine::handle(const CopyDone& event) {
  const auto found = copies_.find(event.copy);
  if (found == copies_.end()) {
    changed_ = false;
    return;
  }
  const RunningCopy copy = std::move(found->second);
  copies_.erase(found);
  // The blocks written are open or quarantined, so the pool cannot have been destroyed.
  Pool& pool = pools_.at(copy.pool);
  pool.blocks.end_copy(copy.session, copy.group, copy.from, copy.to);
  emit_words(pool);
  memory_news_ = memory_news_ || !waiting_.empty();
  if (!sessions_.contains(copy.session)) return;
  reply(copy.session, copy.request, event.status.ok() ? ReplyBody(Done{}) : ReplyBody(event.status),
        0);
}

// A tenant's salt never changes, nor does what else a pool's keys begin with.
const BlockKey& StateMachine::root_key_of(Pool& pool, const std::string& adapter) const {
  if (!pool.root || pool.root->first != adapter)
    pool.root.emplace(adapter, root_key(ledger_.at(pool.tenant).salt, pool.spec.model, adapter,
                                        pool.spec.identity));
  return pool.root->second;
}

}  // namespace larder
