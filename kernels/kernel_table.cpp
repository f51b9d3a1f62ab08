#include "kernels/kernel_table.h"

#include <array>

#include "kernels/cpu/append.h"
#include "kernels/cpu/attend.h"
#include "kernels/refuse.h"

namespace larder::kernels {
namespace {

constexpr std::array kAppendKernels = {
    AppendKernel{"cpu_append", "cpu", cpu::supports_append, cpu::append},
};
constexpr std::array kAttendKernels = {
    AttendKernel{"cpu_attend", "cpu", cpu::supports_attend, cpu::attend},
};

// The first row that supports the call, or the refusal of the last row that was asked.
template <typename Kernel, typename Params>
Result<const Kernel*> choose(std::span<const Kernel> kernels, const Params& params) {
  Status refusal(ErrorCode::kUnsupported, "this build has no kernel for the operation");
  for (const Kernel& kernel : kernels) {
    refusal = kernel.supports(params);
    if (refusal.ok()) return &kernel;
  }
  return refusal;
}

Status validate_field(std::string_view field, int32_t value, int32_t limit) {
  if (value >= 1 && value <= limit) return {};
  return refuse(ErrorCode::kInvalidArgument, field, " is ", value, ": expected 1 to ", limit);
}

Status validate_dim(std::string_view side, int32_t dim, KvFormat format) {
  const std::string field = std::string(side) + "_dim";
  if (Status s = validate_field(field, dim, kMaxHeadDim); !s.ok()) return s;
  if (format == KvFormat::kNvfp4 && dim % kNvfp4GroupElements != 0)
    return refuse(ErrorCode::kInvalidArgument, field, " is ", dim, ": nvfp4 needs a multiple of ",
                  kNvfp4GroupElements);
  return {};
}

template <typename Params>
Params params_for(KvFormat k_format, KvFormat v_format) {
  Params params;
  params.layer.geometry = {1, 1, 16, 64, 64, k_format, v_format};
  params.layer.page = page_layout(params.layer.geometry);
  return params;
}

template <typename Kernel, typename Params>
void list_capabilities(std::string_view op, std::span<const Kernel> kernels,
                       std::vector<Capability>& out) {
  for (const Kernel& kernel : kernels)
    for (size_t k = 0; k < kKvFormatNames.size(); ++k)
      for (size_t v = 0; v < kKvFormatNames.size(); ++v) {
        const auto k_format = static_cast<KvFormat>(k);
        const auto v_format = static_cast<KvFormat>(v);
        if (!kernel.supports(params_for<Params>(k_format, v_format)).ok()) continue;
        const bool grouped = k_format == KvFormat::kNvfp4 || v_format == KvFormat::kNvfp4;
        out.push_back({std::string(op), std::string(kernel.backend), k_format, v_format,
                       grouped ? kNvfp4GroupElements : 1, kMaxHeadDim});
      }
}

}  // namespace

std::span<const AppendKernel> append_kernels() { return kAppendKernels; }
std::span<const AttendKernel> attend_kernels() { return kAttendKernels; }

Status validate_geometry(const AttentionGeometry& geometry, Encoder encoder) {
  if (static_cast<size_t>(geometry.k_format) >= kKvFormatNames.size())
    return refuse(ErrorCode::kInvalidArgument, "k_format is ", static_cast<int>(geometry.k_format));
  if (static_cast<size_t>(geometry.v_format) >= kKvFormatNames.size())
    return refuse(ErrorCode::kInvalidArgument, "v_format is ", static_cast<int>(geometry.v_format));
  if (static_cast<size_t>(encoder) >= kEncoderNames.size())
    return refuse(ErrorCode::kInvalidArgument, "encoder is ", static_cast<int>(encoder));
  if (Status s = validate_field("num_layers", geometry.num_layers, kMaxLayers); !s.ok()) return s;
  if (Status s = validate_field("num_kv_heads", geometry.num_kv_heads, kMaxKvHeads); !s.ok())
    return s;
  if (Status s = validate_field("block_tokens", geometry.block_tokens, kMaxBlockTokens); !s.ok())
    return s;
  if (Status s = validate_dim("k", geometry.k_dim, geometry.k_format); !s.ok()) return s;
  if (Status s = validate_dim("v", geometry.v_dim, geometry.v_format); !s.ok()) return s;

  AppendParams append;
  append.layer.geometry = geometry;
  append.layer.encoder = encoder;
  if (auto row = choose(append_kernels(), append); !row) return row.status();
  AttendParams attend;
  attend.layer = append.layer;
  if (auto row = choose(attend_kernels(), attend); !row) return row.status();
  return {};
}

// Validation does without it, so that a call can be checked where the pool is not mapped.
static Status check_mapped(const LayerView& layer) {
  if (layer.num_blocks == 0 || layer.base != nullptr) return {};
  return refuse(ErrorCode::kInvalidArgument, "base is null with ", layer.num_blocks, " blocks");
}

Status run_append(const AppendParams& params) {
  if (Status s = validate_append(params); !s.ok()) return s;
  if (Status s = check_mapped(params.layer); !s.ok()) return s;
  const auto row = choose(append_kernels(), params);
  if (!row) return row.status();
  row.value()->launch(params);
  return {};
}

Status run_attend(const AttendParams& params) {
  if (Status s = validate_attend(params); !s.ok()) return s;
  if (Status s = check_mapped(params.layer); !s.ok()) return s;
  const auto row = choose(attend_kernels(), params);
  if (!row) return row.status();
  row.value()->launch(params);
  return {};
}

std::vector<Capability> capabilities() {
  std::vector<Capability> out;
  list_capabilities<AppendKernel, AppendParams>("append", append_kernels(), out);
  list_capabilities<AttendKernel, AttendParams>("attend", attend_kernels(), out);
  return out;
}

}  // namespace larder::kernels
