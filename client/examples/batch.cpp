#include "client/examples/batch.h"

#include <algorithm>

namespace larder::examples {

Status Batch::add(Sequence& sequence, std::span<const int32_t> tokens) {
  LARDER_CHECK(!tokens.empty());
  const auto first_position = static_cast<int32_t>(sequence.num_tokens());
  if (Status status = sequence.extend(static_cast<int64_t>(tokens.size())); !status.ok())
    return status;
  const auto slots = sequence.last_slots();
  LARDER_CHECK(slots.size() == tokens.size(), slots.size(), tokens.size());
  tokens_.insert(tokens_.end(), tokens.begin(), tokens.end());
  slots_.insert(slots_.end(), slots.begin(), slots.end());
  for (size_t i = 0; i < tokens.size(); ++i)
    positions_.push_back(first_position + static_cast<int32_t>(i));
  last_rows_.push_back(static_cast<int32_t>(tokens_.size()) - 1);
  q_lens_.push_back(static_cast<int32_t>(tokens.size()));
  seq_lens_.push_back(static_cast<int32_t>(sequence.num_tokens()));
  const auto ids = sequence.block_ids();
  block_ids_.emplace_back(ids.begin(), ids.end());
  block_table_.clear();
  return {};
}

AttendBatch Batch::attend_batch(const TensorView& q, const TensorView& out) {
  if (block_table_.empty()) {
    size_t stride = 1;
    for (const auto& ids : block_ids_) stride = std::max(stride, ids.size());
    block_table_.assign(block_ids_.size() * stride, -1);
    for (size_t i = 0; i < block_ids_.size(); ++i)
      std::copy(block_ids_[i].begin(), block_ids_[i].end(),
                block_table_.begin() + static_cast<std::ptrdiff_t>(i * stride));
    block_table_stride_ = static_cast<int64_t>(stride);
  }
  AttendBatch batch;
  batch.q = q;
  batch.out = out;
  batch.q_lens = q_lens_;
  batch.seq_lens = seq_lens_;
  batch.block_table = block_table_;
  batch.block_table_stride = block_table_stride_;
  return batch;
}

}  // namespace larder::examples
