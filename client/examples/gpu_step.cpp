#include "client/examples/gpu_step.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <string>
#include <type_traits>

namespace larder::examples {
namespace {

constexpr int64_t kLeastTableStride = 64;  // blocks

// Where each table begins, in words of 4 bytes. Slots are two words each and come first.
struct TableLayout {
  int64_t slots = 0;
  int64_t tokens = 0;
  int64_t positions = 0;
  int64_t logit_rows = 0;
  int64_t q_lens = 0;
  int64_t seq_lens = 0;
  int64_t block_table = 0;
  int64_t end = 0;

  explicit TableLayout(const StepShape& shape) {
    tokens = slots + 2 * shape.num_rows;
    positions = tokens + shape.num_rows;
    logit_rows = positions + shape.num_rows;
    q_lens = logit_rows + shape.num_logits;
    seq_lens = q_lens + shape.num_seqs;
    block_table = seq_lens + shape.num_seqs;
    end = block_table + shape.num_seqs * shape.table_stride;
  }
};

template <typename T>
void copy(std::span<const T> values, int32_t* to) {
  std::memcpy(to, values.data(), values.size_bytes());
}

}  // namespace

StepShape step_shape(const Batch& batch, std::span<const int32_t> logit_rows) {
  const auto blocks = static_cast<uint64_t>(std::max(batch.most_blocks(), kLeastTableStride));
  return {batch.num_rows(), batch.num_seqs(), static_cast<int64_t>(logit_rows.size()),
          static_cast<int64_t>(std::bit_ceil(blocks))};
}

bool GpuStep::reserve(const StepShape& shape) {
  bool moved = false;
  if (const int64_t rows = std::max(shape.num_rows, shape.num_logits); rows > row_capacity_) {
    reserve_rows(rows);
    moved = true;
  }
  if (const int64_t words = TableLayout(shape).end; words > table_capacity_) {
    table_capacity_ = 0;
    host_table_.reset(
        static_cast<int32_t*>(allocate_pinned(static_cast<size_t>(words) * sizeof(int32_t))));
    device_table_ = {};  // gives back what it has first
    device_table_ = DeviceArray<int32_t>(words);
    table_capacity_ = words;
    moved = true;
  }
  return moved;
}

void GpuStep::reserve_rows(int64_t rows) {
  row_capacity_ = 0;
  const int64_t q_width = int64_t{config_.num_q_heads} * config_.head_dim;
  const int64_t kv_width = int64_t{config_.num_kv_heads} * config_.head_dim;
  const auto renew = [rows](auto& array, int64_t width) {
    array = {};  // gives back what it has first
    array = std::remove_reference_t<decltype(array)>(rows * width);
  };
  renew(x, config_.hidden_size);
  renew(normed, config_.hidden_size);
  renew(qkv, q_width + 2 * kv_width);
  renew(key_bits, kv_width);
  renew(value_bits, kv_width);
  renew(attended, q_width);
  renew(gate_up, 2 * int64_t{config_.intermediate_size});
  renew(gated, config_.intermediate_size);
  renew(logits, kByteVocabulary);
  row_capacity_ = rows;
}

void GpuStep::upload(const Batch& batch, std::span<const int32_t> logit_rows,
                     const StepShape& shape, cudaStream_t stream) {
  const TableLayout layout(shape);
  LARDER_CHECK(layout.end <= table_capacity_, layout.end, table_capacity_);
  int32_t* const words = host_table_.get();
  copy(batch.slots(), words + layout.slots);
  copy(batch.tokens(), words + layout.tokens);
  copy(batch.positions(), words + layout.positions);
  copy(logit_rows, words + layout.logit_rows);
  copy(batch.q_lens(), words + layout.q_lens);
  copy(batch.seq_lens(), words + layout.seq_lens);
  batch.write_block_table(
      {words + layout.block_table, static_cast<size_t>(shape.num_seqs * shape.table_stride)},
      shape.table_stride);
  const size_t size_bytes = static_cast<size_t>(layout.end) * sizeof(int32_t);
  check_cuda(
      cudaMemcpyAsync(device_table_.data(), words, size_bytes, cudaMemcpyHostToDevice, stream),
      "cudaMemcpyAsync(" + std::to_string(size_bytes) + " bytes of tables)");
}

StepTables GpuStep::tables(const StepShape& shape) const {
  const TableLayout layout(shape);
  const int32_t* const words = device_table_.data();
  StepTables tables;
  tables.slots = reinterpret_cast<const int64_t*>(words + layout.slots);
  tables.tokens = words + layout.tokens;
  tables.positions = words + layout.positions;
  tables.logit_rows = words + layout.logit_rows;
  tables.q_lens = words + layout.q_lens;
  tables.seq_lens = words + layout.seq_lens;
  tables.block_table = words + layout.block_table;
  return tables;
}

}  // namespace larder::examples
