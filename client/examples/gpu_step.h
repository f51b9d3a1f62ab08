// What one pass on a GPU works on: the batch's tables, which go up in one copy, and the memory for
// what the layers compute. Where they lie depends on the shape of the pass alone, as long as
// nothing has to grow, so that a captured graph finds the tables of the pass that replays it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>

#include "client/examples/batch.h"
#include "client/examples/gpu_memory.h"
#include "client/examples/model_config.h"

namespace larder::examples {

struct StepShape {
  int64_t num_rows = 0;
  int64_t num_seqs = 0;
  int64_t num_logits = 0;
  int64_t table_stride = 0;  // blocks
  bool operator==(const StepShape&) const = default;
};
// The stride is a power of two, so that it changes seldom while sequences grow.
StepShape step_shape(const Batch& batch, std::span<const int32_t> logit_rows);

// In device memory.
struct StepTables {
  const int64_t* slots = nullptr;        // [num_rows]
  const int32_t* tokens = nullptr;       // [num_rows]
  const int32_t* positions = nullptr;    // [num_rows]
  const int32_t* logit_rows = nullptr;   // [num_logits]
  const int32_t* q_lens = nullptr;       // [num_seqs]
  const int32_t* seq_lens = nullptr;     // [num_seqs]
  const int32_t* block_table = nullptr;  // [num_seqs, table_stride]
};

class GpuStep {
 public:
  explicit GpuStep(const ModelConfig& config) : config_(config) {}

  // Makes room. True when memory that passes have used before is another one now. Throws GpuError.
  bool reserve(const StepShape& shape);
  // Enqueues the copy of the batch's tables. The copy of the pass before must be done.
  void upload(const Batch& batch, std::span<const int32_t> logit_rows, const StepShape& shape,
              cudaStream_t stream);
  StepTables tables(const StepShape& shape) const;

  // Of the rows that there was room for at last.
  DeviceArray<float> x;              // [rows, hidden_size]
  DeviceArray<float> normed;         // [rows, hidden_size]
  DeviceArray<float> qkv;            // [rows, (num_q_heads + 2 * num_kv_heads) * head_dim]
  DeviceArray<uint16_t> key_bits;    // [rows, num_kv_heads * head_dim], bf16
  DeviceArray<uint16_t> value_bits;  // the same
  DeviceArray<float> attended;       // [rows, num_q_heads * head_dim]
  DeviceArray<float> gate_up;        // [rows, 2 * intermediate_size]
  DeviceArray<float> gated;          // [rows, intermediate_size]
  DeviceArray<float> logits;         // [rows, 256]

 private:
  void reserve_rows(int64_t rows);

  const ModelConfig config_;
  int64_t row_capacity_ = 0;
  int64_t table_capacity_ = 0;                       // words of 4 bytes
  std::unique_ptr<int32_t, FreePinned> host_table_;  // [table_capacity_]
  DeviceArray<int32_t> device_table_;                // the same
};

}  // namespace larder::examples
