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

int64_t Batch::most_blocks() const {
  size_t most = 0;
  for (const auto& ids : block_ids_) most = std::max(most, ids.size());
  return static_cast<int64_t>(most);
}

void Batch::write_block_table(std::span<int32_t> table, int64_t stride) const {
  LARDER_CHECK(stride >= most_blocks(), stride, most_blocks());
  LARDER_CHECK(static_cast<int64_t>(table.size()) == num_seqs() * stride, table.size(), stride);
  std::fill(table.begin(), table.end(), -1);
  auto row = table.begin();
  for (const auto& ids : block_ids_) {
    std::copy(ids.begin(), ids.end(), row);
    row += static_cast<std::ptrdiff_t>(stride);
  }
}

AttendBatch Batch::attend_batch(const TensorView& q, const TensorView& out) {
  if (block_table_.empty()) {
    block_table_stride_ = most_blocks();
    block_table_.resize(static_cast<size_t>(num_seqs() * block_table_stride_));
    write_block_table(block_table_, block_table_stride_);
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
