// One table of kernels per op, most specific row first; the first row that supports a call wins.
//
// Tests and benchmarks loop over the same tables, and the capability query reads them. A call that
// no row supports is answered UNSUPPORTED with the field and what is supported. Thread rule: the
// tables are constant; launch may be called from any thread, and two calls may run side by side if
// they do not write the same slots or outputs.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "kernels/params.h"
#include "kernels/target.h"
#include "larder/status.h"

namespace larder::kernels {

// The largest dims and counts that any kernel takes; a pool beyond them is refused at creation.
inline constexpr int32_t kMaxHeadDim = 1024;
inline constexpr int32_t kMaxKvHeads = 1024;
inline constexpr int32_t kMaxQueryHeads = 4096;
inline constexpr int32_t kMaxBlockTokens = 4096;
inline constexpr int32_t kMaxLayers = 4096;
inline constexpr int32_t kMaxSplits = 4096;
inline constexpr int64_t kMaxMergeStates = 4096;

template <typename Params>
struct Kernel {
  std::string_view name;  // "cpu_append"
  Backend backend;
  Status (*supports)(const Params& params);  // looks at everything but the data
  // Of device memory that launch needs; nullptr: none.
  int64_t (*workspace_bytes)(const Params& params);
  // INTERNAL with the CUDA error when the launch failed; the CPU's always succeed.
  Status (*launch)(const Params& params, const Target& target);
};

std::span<const Kernel<AppendParams>> append_kernels();
std::span<const Kernel<GatherParams>> gather_kernels();
std::span<const Kernel<AttendParams>> attend_kernels();
std::span<const Kernel<SparseMlaParams>> sparse_mla_kernels();
std::span<const Kernel<MergeParams>> merge_kernels();
std::span<const Kernel<CombineParams>> combine_kernels();
std::span<const Kernel<ConvertParams>> convert_kernels();
std::span<const Kernel<CopyParams>> copy_kernels();
std::span<const Kernel<ScrubParams>> scrub_kernels();
std::span<const Kernel<ChecksumParams>> checksum_kernels();

// INVALID_ARGUMENT for a field that no pool can have (zero, negative, past the limits above, dim
// not a multiple of 16 with nvfp4), UNSUPPORTED for a format or encoder that no kernel serves yet.
// The message names the field, the value and what is supported.
Status validate_geometry(const AttentionGeometry& geometry, Encoder encoder,
                         KeyTransform key_transform = KeyTransform::kNone);

// INVALID_ARGUMENT unless the value, as a float, is finite and a normal number > 0. `field` is
// named in the message. Takes a double so that a value which is lost in the conversion is refused.
Status validate_scale(std::string_view field, double value);

// Shapes, strides, slots, lengths and tables of a call; the pool's memory need not be mapped here.
// Nothing is written and no tensor element is read. INVALID_ARGUMENT names the field and numbers:
// shape mismatch with the pool, more slots than rows, a slot past the pool, a seq_len that its
// block-table row cannot hold, a block id outside the pool within the used part of a row, options
// that exclude each other.
Status validate_append(const AppendParams& params, Tables tables = Tables::kHost);
Status validate_gather(const GatherParams& params, Tables tables = Tables::kHost);
Status validate_attend(const AttendParams& params, Tables tables = Tables::kHost);
Status validate_shard(const ContextShard& shard);
Status validate_sparse_mla(const SparseMlaParams& params, Tables tables = Tables::kHost);
Status validate_merge(const MergeParams& params);
Status validate_combine(const CombineParams& params);
Status validate_convert(const ConvertParams& params, Tables tables = Tables::kHost);
Status validate_copy(const CopyParams& params, Tables tables = Tables::kHost);
Status validate_scrub(const ScrubParams& params, Tables tables = Tables::kHost);
Status validate_checksum(const ChecksumParams& params, Tables tables = Tables::kHost);

// Validates, picks the first row of the target's backend that supports the call, and launches it.
// On CUDA, tables are in device memory; INVALID_ARGUMENT when the workspace is too small.
Status run_append(const AppendParams& params, const Target& target = {});
Status run_gather(const GatherParams& params, const Target& target = {});
Status run_attend(const AttendParams& params, const Target& target = {});
Status run_sparse_mla(const SparseMlaParams& params, const Target& target = {});
Status run_merge(const MergeParams& params, const Target& target = {});
Status run_combine(const CombineParams& params, const Target& target = {});
Status run_convert(const ConvertParams& params, const Target& target = {});
Status run_copy(const CopyParams& params, const Target& target = {});
Status run_scrub(const ScrubParams& params, const Target& target = {});
Status run_checksum(const ChecksumParams& params, const Target& target = {});

// Device memory that a call needs on a backend; UNSUPPORTED as from run_*.
Result<int64_t> append_workspace_bytes(const AppendParams& params, Backend backend);
Result<int64_t> merge_workspace_bytes(const MergeParams& params, Backend backend);
Result<int64_t> gather_workspace_bytes(const GatherParams& params, Backend backend);
Result<int64_t> attend_workspace_bytes(const AttendParams& params, Backend backend);
Result<int64_t> sparse_mla_workspace_bytes(const SparseMlaParams& params, Backend backend);

// One line of the capability query: an op on a pair of formats (or an MLA row format, or "any"
// where the op does not look at formats), and the dims it takes.
struct Capability {
  std::string op;       // "append", "gather", "attend", "sparse_mla", "merge", ...
  std::string backend;  // "cpu", "cuda"
  std::string k_format;
  std::string v_format;
  int32_t dim_multiple;  // k_dim and v_dim must be multiples of this
  int32_t dim_max;
};
std::vector<Capability> capabilities();

}  // namespace larder::kernels
