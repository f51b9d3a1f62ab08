#include "kernels/kernel_table.h"

#include <array>

#include "kernels/choose.h"
#include "kernels/cpu/append.h"
#include "kernels/cpu/attend.h"
#include "kernels/cpu/blocks.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/gather.h"
#include "kernels/cpu/merge.h"
#include "kernels/cpu/sparse_mla.h"
#if LARDER_HAS_CUDA
#include "kernels/cuda/kernels.h"
#endif
#include "kernels/refuse.h"
#include "kernels/validate.h"

namespace larder::kernels {
namespace {

// A CPU kernel as a row: it needs nothing of the target and cannot fail.
template <auto kKernel, typename Params>
Status launch_cpu(const Params& params, const Target&) {
  kKernel(params);
  return {};
}

template <auto kKernel, typename Params>
constexpr Kernel<Params> cpu_row(std::string_view name, Status (*supports)(const Params&)) {
  return {name, Backend::kCpu, supports, nullptr, launch_cpu<kKernel, Params>};
}

constexpr std::array kAppendKernels = {
    cpu_row<cpu::append>("cpu_append", cpu::supports_append),
#if LARDER_HAS_CUDA
    Kernel<AppendParams>{"cuda_append_rows", Backend::kCuda, cuda::supports_append_rows, nullptr,
                         cuda::append_rows},
    Kernel<AppendParams>{"cuda_append_mla", Backend::kCuda, cuda::supports_append_mla, nullptr,
                         cuda::append_mla},
    Kernel<AppendParams>{"cuda_append", Backend::kCuda, cuda::supports_append, nullptr,
                         cuda::append},
#endif
};
constexpr std::array kGatherKernels = {
    cpu_row<cpu::gather>("cpu_gather", cpu::supports_gather),
#if LARDER_HAS_CUDA
    Kernel<GatherParams>{"cuda_gather_rows", Backend::kCuda, cuda::supports_gather_rows, nullptr,
                         cuda::gather_rows},
    Kernel<GatherParams>{"cuda_gather", Backend::kCuda, cuda::supports_gather, nullptr,
                         cuda::gather},
#endif
};
constexpr std::array kAttendKernels = {
    cpu_row<cpu::attend>("cpu_attend", cpu::supports_attend),
#if LARDER_HAS_CUDA
    Kernel<AttendParams>{"cuda_attend_decode", Backend::kCuda, cuda::supports_attend_decode,
                         cuda::attend_decode_workspace_bytes, cuda::attend_decode},
    Kernel<AttendParams>{"cuda_attend", Backend::kCuda, cuda::supports_attend,
                         cuda::attend_workspace_bytes, cuda::attend},
#endif
};
constexpr std::array kSparseMlaKernels = {
    cpu_row<cpu::sparse_mla>("cpu_sparse_mla", cpu::supports_sparse_mla),
#if LARDER_HAS_CUDA
    Kernel<SparseMlaParams>{"cuda_sparse_mla", Backend::kCuda, cuda::supports_sparse_mla,
                            cuda::sparse_mla_workspace_bytes, cuda::sparse_mla},
#endif
};
constexpr std::array kMergeKernels = {
    cpu_row<cpu::merge>("cpu_merge", cpu::supports_merge),
#if LARDER_HAS_CUDA
    Kernel<MergeParams>{"cuda_merge", Backend::kCuda, cuda::supports_merge,
                        cuda::merge_workspace_bytes, cuda::merge},
#endif
};
constexpr std::array kCombineKernels = {
    cpu_row<cpu::combine>("cpu_combine", cpu::supports_combine),
#if LARDER_HAS_CUDA
    Kernel<CombineParams>{"cuda_combine", Backend::kCuda, cuda::supports_combine, nullptr,
                          cuda::combine},
#endif
};
constexpr std::array kConvertKernels = {
    cpu_row<cpu::convert>("cpu_convert", cpu::supports_convert),
#if LARDER_HAS_CUDA
    Kernel<ConvertParams>{"cuda_convert", Backend::kCuda, cuda::supports_convert, nullptr,
                          cuda::convert},
#endif
};
constexpr std::array kCopyKernels = {
    cpu_row<cpu::copy>("cpu_copy", cpu::supports_copy),
#if LARDER_HAS_CUDA
    Kernel<CopyParams>{"cuda_copy", Backend::kCuda, cuda::supports_copy, nullptr, cuda::copy},
#endif
};
constexpr std::array kScrubKernels = {
    cpu_row<cpu::scrub>("cpu_scrub", cpu::supports_scrub),
#if LARDER_HAS_CUDA
    Kernel<ScrubParams>{"cuda_scrub", Backend::kCuda, cuda::supports_scrub, nullptr, cuda::scrub},
#endif
};
constexpr std::array kChecksumKernels = {
    cpu_row<cpu::checksum>("cpu_checksum", cpu::supports_checksum),
#if LARDER_HAS_CUDA
    Kernel<ChecksumParams>{"cuda_checksum", Backend::kCuda, cuda::supports_checksum, nullptr,
                           cuda::checksum},
#endif
};

}  // namespace

std::span<const Kernel<AppendParams>> append_kernels() { return kAppendKernels; }
std::span<const Kernel<GatherParams>> gather_kernels() { return kGatherKernels; }
std::span<const Kernel<AttendParams>> attend_kernels() { return kAttendKernels; }
std::span<const Kernel<SparseMlaParams>> sparse_mla_kernels() { return kSparseMlaKernels; }
std::span<const Kernel<MergeParams>> merge_kernels() { return kMergeKernels; }
std::span<const Kernel<CombineParams>> combine_kernels() { return kCombineKernels; }
std::span<const Kernel<ConvertParams>> convert_kernels() { return kConvertKernels; }
std::span<const Kernel<CopyParams>> copy_kernels() { return kCopyKernels; }
std::span<const Kernel<ScrubParams>> scrub_kernels() { return kScrubKernels; }
std::span<const Kernel<ChecksumParams>> checksum_kernels() { return kChecksumKernels; }

namespace {

// Validation does without them, so that a call can be checked where the pool is not mapped.
Status check_mapped(const std::byte* base, int64_t num_blocks) {
  if (num_blocks == 0 || base != nullptr) return {};
  return refuse(ErrorCode::kInvalidArgument, "base is null with ", num_blocks, " blocks");
}
Status check_key_offset(const LayerView& layer) {
  if (!is_centred(layer.key_transform) || layer.key_offset != nullptr) return {};
  return refuse(ErrorCode::kInvalidArgument, "key_offset is null with key_transform ",
                name(layer.key_transform));
}
template <typename Params>
Status check_mapped(const Params& params) {
  if constexpr (requires { params.layer; }) {
    if (Status s = check_key_offset(params.layer); !s.ok()) return s;
    if constexpr (requires { params.further_layers; })
      if (Status s = check_further_layers(params); !s.ok()) return s;
    return check_mapped(params.layer.base, params.layer.num_blocks);
  } else if constexpr (requires { params.view; }) {
    return check_mapped(params.view.base, params.view.num_blocks);
  } else {
    return {};
  }
}

template <typename Params>
Status validate_for(Status (*validate)(const Params&, Tables), const Params& params,
                    Backend backend) {
  return validate(params, backend == Backend::kCpu ? Tables::kHost : Tables::kDevice);
}
template <typename Params>
Status validate_for(Status (*validate)(const Params&), const Params& params, Backend) {
  return validate(params);
}

template <typename Params>
int64_t workspace_of(const Kernel<Params>& row, const Params& params) {
  return row.workspace_bytes == nullptr ? 0 : row.workspace_bytes(params);
}

template <typename Params, typename Validate>
Status run(Validate validate, std::span<const Kernel<Params>> kernels, const Params& params,
           const Target& target) {
  if (Status s = validate_for(validate, params, target.backend); !s.ok()) return s;
  if (Status s = check_mapped(params); !s.ok()) return s;
  const auto row = choose(kernels, params, target.backend);
  if (!row) return row.status();
  const int64_t needed = workspace_of(**row, params);
  if (needed > target.workspace_bytes)
    return refuse(ErrorCode::kInvalidArgument, "workspace_bytes is ", target.workspace_bytes, ": ",
                  (*row)->name, " needs ", needed);
  return (*row)->launch(params, target);
}

template <typename Params>
Result<int64_t> workspace(std::span<const Kernel<Params>> kernels, const Params& params,
                          Backend backend) {
  const auto row = choose(kernels, params, backend);
  if (!row) return row.status();
  return workspace_of(**row, params);
}

}  // namespace

Status run_append(const AppendParams& params, const Target& target) {
  return run(validate_append, append_kernels(), params, target);
}
Status run_gather(const GatherParams& params, const Target& target) {
  return run(validate_gather, gather_kernels(), params, target);
}
Status run_attend(const AttendParams& params, const Target& target) {
  return run(validate_attend, attend_kernels(), params, target);
}
Status run_sparse_mla(const SparseMlaParams& params, const Target& target) {
  return run(validate_sparse_mla, sparse_mla_kernels(), params, target);
}
Status run_merge(const MergeParams& params, const Target& target) {
  return run(validate_merge, merge_kernels(), params, target);
}
Status run_combine(const CombineParams& params, const Target& target) {
  return run(validate_combine, combine_kernels(), params, target);
}
Status run_convert(const ConvertParams& params, const Target& target) {
  return run(validate_convert, convert_kernels(), params, target);
}
Status run_copy(const CopyParams& params, const Target& target) {
  return run(validate_copy, copy_kernels(), params, target);
}
Status run_scrub(const ScrubParams& params, const Target& target) {
  return run(validate_scrub, scrub_kernels(), params, target);
}
Status run_checksum(const ChecksumParams& params, const Target& target) {
  return run(validate_checksum, checksum_kernels(), params, target);
}

Result<int64_t> append_workspace_bytes(const AppendParams& params, Backend backend) {
  return workspace(append_kernels(), params, backend);
}
Result<int64_t> gather_workspace_bytes(const GatherParams& params, Backend backend) {
  return workspace(gather_kernels(), params, backend);
}
Result<int64_t> merge_workspace_bytes(const MergeParams& params, Backend backend) {
  return workspace(merge_kernels(), params, backend);
}
Result<int64_t> attend_workspace_bytes(const AttendParams& params, Backend backend) {
  return workspace(attend_kernels(), params, backend);
}
Result<int64_t> sparse_mla_workspace_bytes(const SparseMlaParams& params, Backend backend) {
  return workspace(sparse_mla_kernels(), params, backend);
}

}  // namespace larder::kernels
