#include "larder/gather_scratch.h"

#include <algorithm>
#include <limits>
#include <string>

#include "kernels/checked_int64.h"
#include "kernels/kernel_table.h"

namespace larder {
namespace {

Status refuse(std::string text) { return {ErrorCode::kInvalidArgument, std::move(text)}; }

Status check_count(const char* field, int64_t value, int64_t largest) {
  if (value >= 1 && value <= largest) return {};
  return refuse(std::string(field) + " is " + std::to_string(value) + ": expected 1 to " +
                std::to_string(largest));
}

Status check_dtype(const AttentionGeometry& geometry, Dtype dtype) {
  const bool is_mla = geometry.mla_row != MlaRow::kNone;
  if (dtype == Dtype::kBf16 || dtype == Dtype::kFp16 || dtype == Dtype::kFp32 ||
      (is_mla && dtype == Dtype::kFp8E4m3))
    return {};
  const bool is_named = static_cast<size_t>(dtype) < kDtypeNames.size();
  return refuse("dtype is " +
                (is_named ? std::string(name(dtype)) : std::to_string(static_cast<int>(dtype))) +
                ": expected bf16, fp16 or fp32" + (is_mla ? ", or fp8_e4m3 for staging" : ""));
}

}  // namespace

Result<GatherScratch> gather_scratch(const AttentionGeometry& geometry, int32_t window_tokens,
                                     const GatherLimits& limits) {
  constexpr int64_t kMaxTokens = std::numeric_limits<int32_t>::max();  // lengths are int32
  if (Status s = kernels::validate_geometry(geometry, Encoder::kReference); !s.ok()) return s;
  if (window_tokens != -1 && window_tokens < 1)
    return refuse("window_tokens is " + std::to_string(window_tokens) +
                  ": expected 1 or more, or -1 for none");
  if (Status s = check_dtype(geometry, limits.dtype); !s.ok()) return s;
  if (Status s = check_count("num_seqs", limits.num_seqs, std::numeric_limits<int64_t>::max());
      !s.ok())
    return s;
  if (Status s = check_count("context_tokens", limits.context_tokens, kMaxTokens); !s.ok())
    return s;
  if (Status s = check_count("chunk_rows", limits.chunk_rows, kMaxTokens); !s.ok()) return s;

  GatherScratch scratch;
  scratch.rows_per_sequence = limits.context_tokens;
  if (window_tokens != -1) {
    const int64_t block_tokens = geometry.block_tokens;
    const int64_t seen = window_tokens + limits.chunk_rows;
    const int64_t whole_blocks = (seen + block_tokens - 1) / block_tokens * block_tokens;
    scratch.rows_per_sequence = std::min(whole_blocks, limits.context_tokens);
  }
  const bool is_mla = geometry.mla_row != MlaRow::kNone;
  const int64_t element_bytes = dtype_bytes(limits.dtype);
  const CheckedInt64 rows = CheckedInt64(limits.num_seqs) * scratch.rows_per_sequence;
  const CheckedInt64 values = rows * geometry.num_kv_heads;
  const CheckedInt64 k_bytes = values * (geometry.k_dim * element_bytes);
  const CheckedInt64 v_bytes = values * (is_mla ? 0 : geometry.v_dim * element_bytes);
  if (!(k_bytes + v_bytes).fits)
    return refuse("num_seqs is " + std::to_string(limits.num_seqs) + " with " +
                  std::to_string(scratch.rows_per_sequence) +
                  " rows a sequence: the scratch passes 2^63 bytes");
  scratch.rows = rows.value;
  scratch.k_bytes = k_bytes.value;
  scratch.v_bytes = v_bytes.value;
  return scratch;
}

}  // namespace larder
