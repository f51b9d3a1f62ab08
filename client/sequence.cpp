#include <algorithm>
#include <memory>
#include <utility>

#include "client/client_impl.h"
#include "protocol/limits.h"

namespace larder {

namespace {

// One hold of the session on one block. Its owners are the sequences whose tables name the block:
// the last one to let go of it releases it.
struct HeldBlock {
  BlockHandle block;
  bool published = false;  // read-only
};
using HeldBlocks = std::vector<std::shared_ptr<HeldBlock>>;

}  // namespace

struct Sequence::Impl {
  Pool::Impl* pool;  // outlives the sequence
  HeldBlocks held;
  std::vector<BlockHandle> blocks;  // of `held`, and their ids
  std::vector<int32_t> block_ids;
  std::vector<int64_t> last_slots;
  int64_t num_tokens = 0;
  int64_t published_blocks = 0;  // of the first ones

  int64_t block_tokens() const { return pool->view.geometry.block_tokens; }
  void add(const std::vector<BlockHandle>& more, bool published);
  void replace(size_t index, std::shared_ptr<HeldBlock> with);
  Status let_go(const HeldBlocks& dropped, Session::Patience patience = Session::Patience::kCall);
  Status own_tail();
  Status publish_part(int64_t first, int64_t count, std::span<const int32_t> tokens,
                      const std::string& adapter);
  Status end(Session::Patience patience = Session::Patience::kCall);
  Status check_single_group() const;
};

void Sequence::Impl::add(const std::vector<BlockHandle>& more, bool published) {
  for (const BlockHandle& block : more) {
    held.push_back(std::make_shared<HeldBlock>(HeldBlock{block, published}));
    blocks.push_back(block);
    block_ids.push_back(block.id);
  }
}

void Sequence::Impl::replace(size_t index, std::shared_ptr<HeldBlock> with) {
  blocks[index] = with->block;
  block_ids[index] = with->block.id;
  held[index] = std::move(with);
}

// Releases those that nobody but `dropped` holds.
Status Sequence::Impl::let_go(const HeldBlocks& dropped, Session::Patience patience) {
  std::vector<BlockHandle> last;
  for (const auto& block : dropped)
    if (block.use_count() == 1) last.push_back(block->block);
  return last.empty() ? Status() : pool->release(last, patience);
}

// Before a token is written into a partly filled block: it must be open, and nobody else's.
Status Sequence::Impl::own_tail() {
  if (num_tokens % block_tokens() == 0) return {};
  const auto index = static_cast<size_t>(num_tokens / block_tokens());
  if (!held[index]->published && held[index].use_count() == 1) return {};
  auto fresh = pool->allocate(1);
  if (!fresh) return fresh.status();
  if (Status status = pool->copy(std::span(&blocks[index], 1), *fresh); !status.ok()) {
    (void)pool->release(*fresh);
    return status;
  }
  const HeldBlocks shared = {held[index]};
  replace(index, std::make_shared<HeldBlock>(HeldBlock{fresh->front(), false}));
  published_blocks = std::min(published_blocks, static_cast<int64_t>(index));
  return let_go(shared);
}

Status Sequence::Impl::check_single_group() const {
  const size_t num_groups = pool->opened.groups.size();
  if (num_groups == 1) return {};
  return {ErrorCode::kUnsupported, "the pool has " + std::to_string(num_groups) +
                                       " groups: sequences are served for pools with one; use "
                                       "allocate, publish_units and lookup_units"};
}

Sequence Pool::begin_sequence() {
  auto sequence = std::make_unique<Sequence::Impl>();
  sequence->pool = impl_.get();
  return Sequence(std::move(sequence));
}

Sequence::Sequence(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Sequence::Sequence(Sequence&&) noexcept = default;

Sequence& Sequence::operator=(Sequence&& other) noexcept {
  Sequence old(std::move(impl_));  // ends what this one held
  impl_ = std::move(other.impl_);
  return *this;
}

Sequence::~Sequence() {
  if (impl_ == nullptr) return;
  try {
    (void)impl_->end(Session::Patience::kEnd);
  } catch (...) {  // the end of the session releases the blocks too
  }
}

int64_t Sequence::num_tokens() const { return impl_->num_tokens; }
std::span<const BlockHandle> Sequence::blocks() const { return impl_->blocks; }
std::span<const int32_t> Sequence::block_ids() const { return impl_->block_ids; }
std::span<const int64_t> Sequence::last_slots() const { return impl_->last_slots; }

Result<int64_t> Sequence::adopt_prefix(std::span<const int32_t> tokens,
                                       const std::string& adapter) {
  if (Status status = impl_->check_single_group(); !status.ok()) return status;
  if (impl_->num_tokens != 0)
    return Status(ErrorCode::kInvalidArgument,
                  "adopt_prefix needs an empty sequence, this one has " +
                      std::to_string(impl_->num_tokens) + " tokens");
  if (tokens.empty()) return int64_t{0};
  auto prefix = impl_->pool->lookup(tokens.first(tokens.size() - 1), true, adapter, {});
  if (!prefix) return prefix.status();
  impl_->add(prefix->blocks, true);
  impl_->num_tokens = prefix->hit_tokens;
  impl_->published_blocks = static_cast<int64_t>(prefix->blocks.size());
  return prefix->hit_tokens;
}

Status Sequence::extend(int64_t num_tokens) {
  const int64_t block_tokens = impl_->block_tokens();
  if (Status status = impl_->check_single_group(); !status.ok()) return status;
  if (num_tokens < 0)
    return {ErrorCode::kInvalidArgument, "num_tokens is " + std::to_string(num_tokens)};
  const int64_t longest = impl_->pool->layout.num_ids() * block_tokens;
  if (num_tokens > longest - impl_->num_tokens)
    return {ErrorCode::kResourceExhausted,
            "the sequence has " + std::to_string(impl_->num_tokens) + " tokens and asks for " +
                std::to_string(num_tokens) + " more; the whole pool holds " +
                std::to_string(longest)};
  if (num_tokens > 0)
    if (Status status = impl_->own_tail(); !status.ok()) return status;
  const int64_t needed = (impl_->num_tokens + num_tokens + block_tokens - 1) / block_tokens -
                         static_cast<int64_t>(impl_->blocks.size());
  if (needed > 0) {
    auto more = impl_->pool->allocate(needed);
    if (!more) return more.status();
    impl_->add(*more, false);
  }
  impl_->last_slots.clear();
  for (int64_t token = impl_->num_tokens; token < impl_->num_tokens + num_tokens; ++token) {
    const int64_t block = impl_->block_ids[static_cast<size_t>(token / block_tokens)];
    impl_->last_slots.push_back(block * block_tokens + token % block_tokens);
  }
  impl_->num_tokens += num_tokens;
  return {};
}

Status Sequence::append(int32_t layer, const TensorView& k, const TensorView& v) {
  return impl_->pool->append(layer, k, v, impl_->last_slots);
}

Status Sequence::attend(int32_t layer, const TensorView& q, const TensorView& out, float* lse,
                        const AttendOptions& options) {
  if (options.shard != ContextShard())
    return {ErrorCode::kInvalidArgument,
            "shard.num_ranks is " + std::to_string(options.shard.num_ranks) +
                ", shard.interleave " + std::to_string(options.shard.interleave) +
                ": a Sequence knows this rank's tokens alone, Pool::attend takes shards"};
  // Both are checked against the tensors by the kernels' own validation, as int64.
  const int64_t rows = q.shape[0];
  if (rows < 0 || rows > impl_->num_tokens)
    return {ErrorCode::kInvalidArgument, "q has " + std::to_string(rows) + " rows, the sequence " +
                                             std::to_string(impl_->num_tokens) + " tokens"};
  const auto q_len = static_cast<int32_t>(rows);
  const auto seq_len = static_cast<int32_t>(impl_->num_tokens);
  AttendBatch batch;
  batch.q = q;
  batch.out = out;
  batch.lse = lse;
  batch.q_lens = std::span(&q_len, 1);
  batch.seq_lens = std::span(&seq_len, 1);
  batch.block_table = impl_->block_ids;
  batch.block_table_stride = static_cast<int64_t>(impl_->block_ids.size());
  return impl_->pool->attend(layer, batch, options);
}

Status Sequence::publish(std::span<const int32_t> tokens, const std::string& adapter) {
  const auto num_tokens = static_cast<int64_t>(tokens.size());
  if (num_tokens > impl_->num_tokens)
    return {ErrorCode::kInvalidArgument, "tokens has " + std::to_string(num_tokens) +
                                             " entries, the sequence has " +
                                             std::to_string(impl_->num_tokens)};
  const int64_t full_blocks = num_tokens / impl_->block_tokens();
  // In parts that fit a message, each with all its consequences: what is published stays so.
  for (int64_t first = impl_->published_blocks; first < full_blocks;) {
    const auto count =
        std::min(full_blocks - first, static_cast<int64_t>(protocol::kMaxBlocksPerPublish));
    if (Status status = impl_->publish_part(first, count, tokens, adapter); !status.ok())
      return status;
    first += count;
  }
  return {};
}

// Blocks [first, first + count). Where an older block has the same content, that one is held now
// and ours is let go of.
Status Sequence::Impl::publish_part(int64_t first, int64_t count, std::span<const int32_t> tokens,
                                    const std::string& adapter) {
  const auto fresh =
      std::span(blocks).subspan(static_cast<size_t>(first), static_cast<size_t>(count));
  auto published = pool->publish(first, tokens, fresh, adapter, {});
  if (!published) return published.status();
  HeldBlocks spare;
  for (size_t i = 0; i < published->size(); ++i) {
    const size_t index = static_cast<size_t>(first) + i;
    const BlockHandle serving = (*published)[i].block;
    if (serving == fresh[i]) {
      held[index]->published = true;
      continue;
    }
    spare.push_back(held[index]);
    replace(index, std::make_shared<HeldBlock>(HeldBlock{serving, true}));
  }
  published_blocks = first + count;
  return let_go(spare);
}

Sequence Sequence::fork() const {
  auto twin = std::make_unique<Impl>(*impl_);
  twin->last_slots.clear();
  return Sequence(std::move(twin));
}

Status Sequence::truncate(int64_t num_tokens) {
  if (num_tokens < 0 || num_tokens > impl_->num_tokens)
    return {ErrorCode::kInvalidArgument, "num_tokens is " + std::to_string(num_tokens) +
                                             ", the sequence has " +
                                             std::to_string(impl_->num_tokens)};
  const auto kept =
      static_cast<size_t>((num_tokens + impl_->block_tokens() - 1) / impl_->block_tokens());
  const HeldBlocks dropped(impl_->held.begin() + static_cast<std::ptrdiff_t>(kept),
                           impl_->held.end());
  impl_->held.resize(kept);
  impl_->blocks.resize(kept);
  impl_->block_ids.resize(kept);
  impl_->last_slots.clear();
  impl_->num_tokens = num_tokens;
  impl_->published_blocks = std::min(impl_->published_blocks, num_tokens / impl_->block_tokens());
  return impl_->let_go(dropped);
}

Status Sequence::end() { return impl_->end(); }

Status Sequence::Impl::end(Session::Patience patience) {
  const HeldBlocks all = std::exchange(held, {});
  blocks.clear();
  block_ids.clear();
  last_slots.clear();
  num_tokens = 0;
  published_blocks = 0;
  return let_go(all, patience);
}

}  // namespace larder
