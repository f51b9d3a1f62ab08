// Room for what gathers of a batch of sequences write at most: one reservation, made when an engine
// starts, that serves every step.
#pragma once

#include <cstdint>

#include "larder/kv_format.h"
#include "larder/status.h"

namespace larder {

struct GatherLimits {
  Dtype dtype = Dtype::kBf16;  // of the outputs: bf16, fp16 or fp32; of MLA rows also fp8_e4m3
  int64_t num_seqs = 0;        // of one call, at most
  int64_t context_tokens = 0;  // of the longest sequence, its query rows included
  int64_t chunk_rows = 0;      // query rows of a sequence in one step, at most: 1 in decode
};

struct GatherScratch {
  // GatherBatch::rows_per_sequence: the context, or where the group's layers have a window, at most
  // window_tokens + chunk_rows in whole blocks. A sequence then begins at its last
  // rows_per_sequence tokens: first_tokens[s] = max(0, seq_lens[s] - rows_per_sequence).
  int64_t rows_per_sequence = 0;
  int64_t rows = 0;     // num_seqs * rows_per_sequence
  int64_t k_bytes = 0;  // dense [rows, num_kv_heads, k_dim]
  int64_t v_bytes = 0;  // dense [rows, num_kv_heads, v_dim]; 0 of MLA rows
  int64_t bytes() const { return k_bytes + v_bytes; }
};

// Of a group with this geometry and this GroupOptions::window_tokens. INVALID_ARGUMENT with the
// field and the number for what cannot be, and where the bytes pass 2^63.
Result<GatherScratch> gather_scratch(const AttentionGeometry& geometry, int32_t window_tokens,
                                     const GatherLimits& limits);

}  // namespace larder
