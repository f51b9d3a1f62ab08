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
#include "kernels/refuse.h"

namespace larder::kernels {
namespace {

constexpr std::array kAppendKernels = {
    Kernel<AppendParams>{"cpu_append", "cpu", cpu::supports_append, cpu::append},
};
constexpr std::array kGatherKernels = {
    Kernel<GatherParams>{"cpu_gather", "cpu", cpu::supports_gather, cpu::gather},
};
constexpr std::array kAttendKernels = {
    Kernel<AttendParams>{"cpu_attend", "cpu", cpu::supports_attend, cpu::attend},
};
constexpr std::array kSparseMlaKernels = {
    Kernel<SparseMlaParams>{"cpu_sparse_mla", "cpu", cpu::supports_sparse_mla, cpu::sparse_mla},
};
constexpr std::array kMergeKernels = {
    Kernel<MergeParams>{"cpu_merge", "cpu", cpu::supports_merge, cpu::merge},
};
constexpr std::array kCombineKernels = {
    Kernel<CombineParams>{"cpu_combine", "cpu", cpu::supports_combine, cpu::combine},
};
constexpr std::array kConvertKernels = {
    Kernel<ConvertParams>{"cpu_convert", "cpu", cpu::supports_convert, cpu::convert},
};
constexpr std::array kCopyKernels = {
    Kernel<CopyParams>{"cpu_copy", "cpu", cpu::supports_copy, cpu::copy},
};
constexpr std::array kScrubKernels = {
    Kernel<ScrubParams>{"cpu_scrub", "cpu", cpu::supports_scrub, cpu::scrub},
};
constexpr std::array kChecksumKernels = {
    Kernel<ChecksumParams>{"cpu_checksum", "cpu", cpu::supports_checksum, cpu::checksum},
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
    return check_mapped(params.layer.base, params.layer.num_blocks);
  } else if constexpr (requires { params.view; }) {
    return check_mapped(params.view.base, params.view.num_blocks);
  } else {
    return {};
  }
}

template <typename Params>
Status run(Status (*validate)(const Params&), std::span<const Kernel<Params>> kernels,
           const Params& params) {
  if (Status s = validate(params); !s.ok()) return s;
  if (Status s = check_mapped(params); !s.ok()) return s;
  const auto row = choose(kernels, params);
  if (!row) return row.status();
  row.value()->launch(params);
  return {};
}

}  // namespace

Status run_append(const AppendParams& params) {
  return run(validate_append, append_kernels(), params);
}
Status run_gather(const GatherParams& params) {
  return run(validate_gather, gather_kernels(), params);
}
Status run_attend(const AttendParams& params) {
  return run(validate_attend, attend_kernels(), params);
}
Status run_sparse_mla(const SparseMlaParams& params) {
  return run(validate_sparse_mla, sparse_mla_kernels(), params);
}
Status run_merge(const MergeParams& params) { return run(validate_merge, merge_kernels(), params); }
Status run_combine(const CombineParams& params) {
  return run(validate_combine, combine_kernels(), params);
}
Status run_convert(const ConvertParams& params) {
  return run(validate_convert, convert_kernels(), params);
}
Status run_copy(const CopyParams& params) { return run(validate_copy, copy_kernels(), params); }
Status run_scrub(const ScrubParams& params) { return run(validate_scrub, scrub_kernels(), params); }
Status run_checksum(const ChecksumParams& params) {
  return run(validate_checksum, checksum_kernels(), params);
}

}  // namespace larder::kernels
