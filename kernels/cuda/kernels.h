// The CUDA rows of the kernel tables: any GPU from compute capability 8.0 on, every format, dim,
// group and block size, as loops over run-time figures. Correct first; tuned rows stand before them
// in the tables where they serve a call faster.
//
// Bytes that append writes are the CPU's; sums of attention may differ in rounding. Of two rows of
// an append with one slot in device memory, either stays, or a mixture of both.
#pragma once

#include "kernels/params.h"
#include "kernels/target.h"
#include "larder/status.h"

namespace larder::kernels::cuda {

Status supports_append(const AppendParams& params);
Status append(const AppendParams& params, const Target& target);
Status supports_append_rows(const AppendParams& params);
Status append_rows(const AppendParams& params, const Target& target);
Status supports_append_mla(const AppendParams& params);
Status append_mla(const AppendParams& params, const Target& target);

Status supports_gather(const GatherParams& params);
Status gather(const GatherParams& params, const Target& target);

Status supports_gather_rows(const GatherParams& params);
Status gather_rows(const GatherParams& params, const Target& target);

Status supports_attend(const AttendParams& params);
int64_t attend_workspace_bytes(const AttendParams& params);
Status attend(const AttendParams& params, const Target& target);

Status supports_attend_decode(const AttendParams& params);
int64_t attend_decode_workspace_bytes(const AttendParams& params);
Status attend_decode(const AttendParams& params, const Target& target);

Status supports_sparse_mla(const SparseMlaParams& params);
int64_t sparse_mla_workspace_bytes(const SparseMlaParams& params);
Status sparse_mla(const SparseMlaParams& params, const Target& target);

Status supports_merge(const MergeParams& params);
int64_t merge_workspace_bytes(const MergeParams& params);
Status merge(const MergeParams& params, const Target& target);

Status supports_combine(const CombineParams& params);
Status combine(const CombineParams& params, const Target& target);

Status supports_convert(const ConvertParams& params);
Status convert(const ConvertParams& params, const Target& target);

Status supports_copy(const CopyParams& params);
Status copy(const CopyParams& params, const Target& target);

Status supports_scrub(const ScrubParams& params);
Status scrub(const ScrubParams& params, const Target& target);

Status supports_checksum(const ChecksumParams& params);
Status checksum(const ChecksumParams& params, const Target& target);

}  // namespace larder::kernels::cuda
