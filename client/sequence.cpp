#include <algorithm>

#include "client/client_impl.h"

namespace larder {

struct Sequence::Impl {
  Pool::Impl* pool;  // outlives the sequence
  std::vector<BlockHandle> blocks;
  std::vector<int32_t> block_ids;
  std::vector<int64_t> last_slots;
  int64_t num_tokens = 0;
  int64_t published_blocks = 0;  // of the first ones: read-only, perhaps shared

  int64_t block_tokens() const { return pool->view.geometry.block_tokens; }
  void add(const std::vector<BlockHandle>& more) {
    blocks.insert(blocks.end(), more.begin(), more.end());
    for (const BlockHandle& block : more) block_ids.push_back(block.id);
  }
  Status end();
};

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
    (void)impl_->end();
  } catch (...) {  // the end of the session releases the blocks too
  }
}

int64_t Sequence::num_tokens() const { return impl_->num_tokens; }
std::span<const BlockHandle> Sequence::blocks() const { return impl_->blocks; }
std::span<const int32_t> Sequence::block_ids() const { return impl_->block_ids; }
std::span<const int64_t> Sequence::last_slots() const { return impl_->last_slots; }

Result<int64_t> Sequence::adopt_prefix(std::span<const int32_t> tokens,
                                       const std::string& adapter) {
  if (impl_->num_tokens != 0)
    return Status(ErrorCode::kInvalidArgument,
                  "adopt_prefix needs an empty sequence, this one has " +
                      std::to_string(impl_->num_tokens) + " tokens");
  if (tokens.empty()) return int64_t{0};
  auto prefix = impl_->pool->lookup(tokens.first(tokens.size() - 1), true, adapter);
  if (!prefix) return prefix.status();
  impl_->add(prefix->blocks);
  impl_->num_tokens = prefix->hit_tokens;
  impl_->published_blocks = static_cast<int64_t>(prefix->blocks.size());
  return prefix->hit_tokens;
}

Status Sequence::extend(int64_t num_tokens) {
  const int64_t block_tokens = impl_->block_tokens();
  if (num_tokens < 0)
    return {ErrorCode::kInvalidArgument, "num_tokens is " + std::to_string(num_tokens)};
  const int64_t longest = impl_->pool->layout.num_blocks * block_tokens;
  if (num_tokens > longest - impl_->num_tokens)
    return {ErrorCode::kResourceExhausted,
            "the sequence has " + std::to_string(impl_->num_tokens) + " tokens and asks for " +
                std::to_string(num_tokens) + " more; the whole pool holds " +
                std::to_string(longest)};
  const int64_t needed = (impl_->num_tokens + num_tokens + block_tokens - 1) / block_tokens -
                         static_cast<int64_t>(impl_->blocks.size());
  if (needed > 0) {
    auto more = impl_->pool->allocate(needed);
    if (!more) return more.status();
    impl_->add(*more);
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
  const int64_t first = impl_->published_blocks;
  if (full_blocks <= first) return {};
  const auto fresh =
      std::span(impl_->blocks)
          .subspan(static_cast<size_t>(first), static_cast<size_t>(full_blocks - first));
  auto published = impl_->pool->publish(first, tokens, fresh, adapter);
  if (!published) return published.status();
  // Where an older block has the same content, that one is held now and ours is spare.
  std::vector<BlockHandle> spare;
  for (size_t i = 0; i < published->size(); ++i) {
    const BlockHandle& serving = (*published)[i].block;
    if (serving == fresh[i]) continue;
    spare.push_back(fresh[i]);
    fresh[i] = serving;
    impl_->block_ids[static_cast<size_t>(first) + i] = serving.id;
  }
  impl_->published_blocks = full_blocks;
  return spare.empty() ? Status() : impl_->pool->release(spare);
}

Status Sequence::end() { return impl_->end(); }

Status Sequence::Impl::end() {
  const std::vector<BlockHandle> held = std::exchange(blocks, {});
  block_ids.clear();
  last_slots.clear();
  num_tokens = 0;
  published_blocks = 0;
  return held.empty() ? Status() : pool->release(held);
}

}  // namespace larder
