// The capability query: what the rows of the kernel tables say they support.
#include "kernels/kernel_table.h"

namespace larder::kernels {
namespace {

template <typename Params>
Params params_for(const AttentionGeometry& geometry) {
  Params params;
  params.layer.geometry = geometry;
  params.layer.page = page_layout(geometry);
  return params;
}

template <typename Params>
void list_capabilities(std::string_view op, std::span<const Kernel<Params>> kernels,
                       std::vector<Capability>& out) {
  for (const Kernel<Params>& kernel : kernels) {
    for (size_t k = 0; k < kKvFormatNames.size(); ++k)
      for (size_t v = 0; v < kKvFormatNames.size(); ++v) {
        const auto k_format = static_cast<KvFormat>(k);
        const auto v_format = static_cast<KvFormat>(v);
        if (!kernel.supports(params_for<Params>({1, 1, 16, 64, 64, k_format, v_format})).ok())
          continue;
        const bool grouped = k_format == KvFormat::kNvfp4 || v_format == KvFormat::kNvfp4;
        out.push_back({std::string(op), std::string(name(kernel.backend)),
                       std::string(name(k_format)), std::string(name(v_format)),
                       grouped ? kNvfp4GroupElements : 1, kMaxHeadDim});
      }
    // Keys of 576 and values of 512: multiples of 64.
    for (size_t i = 1; i < kMlaRowNames.size(); ++i) {
      const auto row = static_cast<MlaRow>(i);
      if (!kernel.supports(params_for<Params>(mla_geometry(1, 64, row))).ok()) continue;
      out.push_back({std::string(op), std::string(name(kernel.backend)), std::string(name(row)),
                     std::string(name(row)), kMlaRopeDim, kMlaKeyDim});
    }
  }
}

// Of ops that do not look at formats.
template <typename Params>
void list_any_format(std::string_view op, std::span<const Kernel<Params>> kernels,
                     std::vector<Capability>& out) {
  for (const Kernel<Params>& kernel : kernels)
    out.push_back(
        {std::string(op), std::string(name(kernel.backend)), "any", "any", 1, kMaxHeadDim});
}

}  // namespace

std::vector<Capability> capabilities() {
  std::vector<Capability> out;
  list_capabilities("append", append_kernels(), out);
  list_capabilities("gather", gather_kernels(), out);
  list_capabilities("attend", attend_kernels(), out);
  list_capabilities("sparse_mla", sparse_mla_kernels(), out);
  list_any_format("merge", merge_kernels(), out);
  list_any_format("combine", combine_kernels(), out);
  list_any_format("convert", convert_kernels(), out);
  list_any_format("copy", copy_kernels(), out);
  list_any_format("scrub", scrub_kernels(), out);
  list_any_format("checksum", checksum_kernels(), out);
  return out;
}

}  // namespace larder::kernels
