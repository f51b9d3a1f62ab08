// The checks of gather calls, and those that they share with append calls.
#include <cstdint>
#include <limits>
#include <string>

#include "kernels/kernel_table.h"
#include "kernels/refuse.h"
#include "kernels/validate.h"

namespace larder::kernels {

Status validate_float_dtype(std::string_view field, Dtype dtype) {
  if (dtype == Dtype::kBf16 || dtype == Dtype::kFp16 || dtype == Dtype::kFp32) return {};
  return refuse(kInvalid, field, ": dtype is ", name(dtype), ": expected bf16, fp16 or fp32");
}

Status refuse_slot(const LayerView& layer, std::string_view field, int64_t row, int64_t slot) {
  const int64_t block_tokens = layer.geometry.block_tokens;
  return refuse(kInvalid, field, "[", row, "] is ", slot, ": the pool has ",
                layer.num_blocks * block_tokens, " slots (", layer.num_blocks, " blocks of ",
                block_tokens, " tokens)");
}

namespace {

// An output of gather: where it is wanted, `rows` rows must fit.
Status validate_gathered(std::string_view field, const TensorView& view, int64_t num_heads,
                         int64_t dim, int64_t rows) {
  if (view.shape[0] == 0) return {};
  if (Status s = validate_tensor(field, view, num_heads, dim); !s.ok()) return s;
  if (view.shape[0] < rows)
    return refuse(kInvalid, field, " has ", view.shape[0], " rows: the tokens take ", rows);
  // Rows on top of each other would leave the result to chance.
  for (size_t axis = 0; axis < 3; ++axis)
    if (view.shape[axis] > 1 && view.strides[axis] == 0)
      return refuse(kInvalid, field, ": the stride of axis ", axis, " is 0 with size ",
                    view.shape[axis]);
  return {};
}

Status validate_gather_outputs(const GatherParams& params, int64_t rows) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const bool is_mla = geometry.mla_row != MlaRow::kNone;
  if (Status s =
          validate_gathered("k_out", params.k_out, geometry.num_kv_heads, geometry.k_dim, rows);
      !s.ok())
    return s;
  if (is_mla && params.v_out.shape[0] != 0)
    return refuse(kInvalid, "v_out has ", params.v_out.shape[0],
                  " rows: of MLA rows k_out is all that there is, so expected 0");
  if (Status s =
          validate_gathered("v_out", params.v_out, geometry.num_kv_heads, geometry.v_dim, rows);
      !s.ok())
    return s;
  if (params.k_out.shape[0] != 0 && !(is_mla && params.k_out.dtype == Dtype::kFp8E4m3))
    if (Status s = validate_float_dtype("k_out", params.k_out.dtype); !s.ok())
      return is_mla ? refuse(kInvalid, s.message(), ", or fp8_e4m3 for staging") : s;
  if (params.v_out.shape[0] != 0) return validate_float_dtype("v_out", params.v_out.dtype);
  return {};
}

Status validate_gather_fields(const GatherParams& params) {
  if (params.num_slots < 0) return refuse(kInvalid, "num_slots is ", params.num_slots);
  if (params.num_seqs < 0) return refuse(kInvalid, "num_seqs is ", params.num_seqs);
  if (params.num_slots > 0 && params.num_seqs > 0)
    return refuse(kInvalid, "num_slots is ", params.num_slots, " with num_seqs ", params.num_seqs,
                  ": expected slots or a block table, not both");
  if (params.block_table_stride < 0)
    return refuse(kInvalid, "block_table_stride is ", params.block_table_stride);
  if (params.rows_per_sequence < 0)
    return refuse(kInvalid, "rows_per_sequence is ", params.rows_per_sequence);
  if (params.num_seqs > 0 && params.seq_lens == nullptr)
    return refuse(kInvalid, "seq_lens is null with ", params.num_seqs, " sequences");
  if (Status s = validate_array("seq_lens", params.seq_lens, alignof(int32_t)); !s.ok()) return s;
  if (Status s = validate_array("block_table", params.block_table, alignof(int32_t)); !s.ok())
    return s;
  if (Status s = validate_array("first_tokens", params.first_tokens, alignof(int32_t)); !s.ok())
    return s;
  constexpr int64_t kMaxSeqs =
      std::numeric_limits<int64_t>::max() / std::numeric_limits<int32_t>::max();
  if (params.num_seqs > kMaxSeqs)
    return refuse(kInvalid, "num_seqs is ", params.num_seqs, ": expected at most ", kMaxSeqs);
  int64_t unused = 0;
  if (__builtin_mul_overflow(params.num_seqs, params.block_table_stride, &unused))
    return refuse(kInvalid, "block_table_stride is ", params.block_table_stride, " with ",
                  params.num_seqs, " sequences: the table passes 2^63 entries");
  if (__builtin_mul_overflow(params.num_seqs, params.rows_per_sequence, &unused))
    return refuse(kInvalid, "rows_per_sequence is ", params.rows_per_sequence, " with ",
                  params.num_seqs, " sequences: they pass 2^63 rows");
  return {};
}

Status validate_gather_sequence(const GatherParams& params, int64_t sequence) {
  const int64_t seq_len = params.seq_lens[sequence];
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  if (seq_len < 0) return refuse(kInvalid, "seq_lens[", sequence, "] is ", seq_len);
  const int64_t first_token = first_token_of(params, sequence);
  if (first_token < 0 || first_token > seq_len)
    return refuse(kInvalid, "first_tokens[", sequence, "] is ", first_token,
                  ": expected 0 to seq_lens[", sequence, "], which is ", seq_len);
  if (params.rows_per_sequence > 0 && seq_len - first_token > params.rows_per_sequence)
    return refuse(
        kInvalid, "seq_lens[", sequence, "] is ", seq_len,
        params.first_tokens == nullptr
            ? std::string()
            : " with first_tokens[" + std::to_string(sequence) + "] " + std::to_string(first_token),
        ": rows_per_sequence is ", params.rows_per_sequence);
  const int64_t num_blocks = (seq_len + block_tokens - 1) / block_tokens;
  if (num_blocks > params.block_table_stride)
    return refuse(kInvalid, "seq_lens[", sequence, "] is ", seq_len, ": its block_table row has ",
                  params.block_table_stride, " blocks of ", block_tokens, " tokens");
  if (num_blocks > 0 && params.block_table == nullptr)
    return refuse(kInvalid, "block_table is null with seq_lens[", sequence, "] ", seq_len);
  const int32_t* row = params.block_table + sequence * params.block_table_stride;
  const int64_t first_block = first_token == seq_len ? num_blocks : first_token / block_tokens;
  for (int64_t i = first_block; i < num_blocks; ++i)
    if (row[i] < 0 || row[i] >= params.layer.num_blocks)
      return refuse(kInvalid, "block_table[", sequence, ", ", i, "] is ", row[i], ": the pool has ",
                    params.layer.num_blocks, " blocks");
  return {};
}

}  // namespace

Status validate_gather(const GatherParams& params, Tables tables) {
  if (Status s = validate_layer(params.layer); !s.ok()) return s;
  if (Status s = validate_gather_fields(params); !s.ok()) return s;
  int64_t rows = params.num_slots;
  if (tables == Tables::kDevice)
    if (Status s = validate_array("block_table", params.block_table, alignof(int32_t),
                                  params.num_seqs * params.block_table_stride);
        !s.ok())
      return s;
  const int64_t num_seqs = tables == Tables::kHost ? params.num_seqs : 0;
  for (int64_t sequence = 0; sequence < num_seqs; ++sequence) {
    if (Status s = validate_gather_sequence(params, sequence); !s.ok()) return s;
    // Rows after a sequence's last token are needed only if another sequence follows.
    const int64_t tokens = params.seq_lens[sequence] - first_token_of(params, sequence);
    rows =
        params.rows_per_sequence > 0 ? sequence * params.rows_per_sequence + tokens : rows + tokens;
  }
  if (Status s = validate_slots(params.layer, "slots", params.slots, params.num_slots, tables);
      !s.ok())
    return s;
  return validate_gather_outputs(params, rows);
}

}  // namespace larder::kernels
