#include "client/group_view.h"

#include <algorithm>
#include <optional>
#include <string>

#include "kernels/kernel_table.h"
#include "larder/check.h"

namespace larder {
namespace {

template <typename Enum, size_t kCount>
std::optional<Enum> find_name(const std::array<std::string_view, kCount>& names,
                              const std::string& text) {
  const auto found = std::find(names.begin(), names.end(), text);
  if (found == names.end()) return std::nullopt;
  return static_cast<Enum>(found - names.begin());
}

Status unserved(const std::string& field, const std::string& value, const std::string& served) {
  return {ErrorCode::kUnsupported, field + " \"" + value + "\" is not served; served: " + served};
}

// 1, or one value for all layers, or one per layer, checked as the floats that the kernels use.
Result<std::vector<float>> expand_scales(const std::string& field,
                                         const std::vector<double>& values, int32_t num_layers) {
  if (values.size() > 1 && values.size() != static_cast<size_t>(num_layers))
    return Status(ErrorCode::kInvalidArgument, field + " has " + std::to_string(values.size()) +
                                                   " entries; 0, 1 or num_layers (" +
                                                   std::to_string(num_layers) + ") are allowed");
  for (const double value : values)
    if (Status status = kernels::validate_scale(field, value); !status.ok()) return status;
  std::vector<float> scales(static_cast<size_t>(num_layers), 1.0f);
  for (size_t i = 0; i < scales.size() && !values.empty(); ++i)
    scales[i] = static_cast<float>(values[values.size() == 1 ? 0 : i]);
  return scales;
}

Status check_group_fields(const protocol::GroupSpec& spec) {
  if (spec.max_blocks != 0 && spec.max_blocks != spec.num_blocks)
    return {ErrorCode::kUnsupported, "max_blocks is " + std::to_string(spec.max_blocks) +
                                         " and num_blocks " + std::to_string(spec.num_blocks) +
                                         ": pools that grow are not served"};
  if (!spec.layer_aliases.empty())
    return {ErrorCode::kUnsupported, "layer_aliases: layers that share memory are not served"};
  return {};
}

Status check_attention_fields(const protocol::AttentionGroup& group) {
  if (group.key_transform != "none") return unserved("key_transform", group.key_transform, "none");
  if (group.window_tokens != -1)
    return {ErrorCode::kUnsupported,
            "window_tokens is " + std::to_string(group.window_tokens) +
                ": groups with a window are not served; -1, with window_left at attend, is"};
  return {};
}

}  // namespace

Result<GroupView> view_group(const protocol::GroupSpec& spec) {
  const auto* group = std::get_if<protocol::AttentionGroup>(&spec.kind);
  if (group == nullptr)
    return Status(ErrorCode::kUnsupported,
                  "groups of kind mla and opaque are not served; served: attention");
  if (Status status = check_group_fields(spec); !status.ok()) return status;
  if (Status status = check_attention_fields(*group); !status.ok()) return status;
  GroupView view;
  const auto k_format = parse_kv_format(group->k_format);
  const auto v_format = parse_kv_format(group->v_format);
  if (!k_format) return unserved("k_format", group->k_format, "bf16, nvfp4");
  if (!v_format) return unserved("v_format", group->v_format, "bf16, nvfp4");
  const auto encoder = find_name<Encoder>(kEncoderNames, group->encoder);
  if (!encoder) return unserved("encoder", group->encoder, "reference");
  const auto layout = find_name<KvLayout>(kKvLayoutNames, spec.layout);
  if (!layout) return unserved("layout", spec.layout, "BLHNC, LBHNC");
  view.encoder = *encoder;
  view.layout = *layout;
  view.geometry = {group->num_layers, group->num_kv_heads, spec.block_tokens, group->k_dim,
                   group->v_dim,      *k_format,           *v_format};
  if (Status status = kernels::validate_geometry(view.geometry, view.encoder); !status.ok())
    return status;
  auto k_scales = expand_scales("k_scales", group->k_scales, group->num_layers);
  if (!k_scales) return k_scales.status();
  auto v_scales = expand_scales("v_scales", group->v_scales, group->num_layers);
  if (!v_scales) return v_scales.status();
  view.k_scales = std::move(*k_scales);
  view.v_scales = std::move(*v_scales);
  view.page = page_layout(view.geometry);
  return view;
}

int64_t block_bytes(const GroupView& view) {
  return view.page.page_bytes * view.geometry.num_layers;
}

int64_t layer_stride_bytes(const GroupView& view, int64_t num_blocks) {
  return view.layout == KvLayout::kBlhnc ? view.page.page_bytes : view.page.page_bytes * num_blocks;
}

kernels::LayerView view_layer(const GroupView& view, const protocol::GroupLayout& layout,
                              std::byte* base, int32_t layer) {
  LARDER_CHECK(layer >= 0 && layer < view.geometry.num_layers, layer);
  kernels::LayerView result;
  result.base = base + layer * layout.layer_stride_bytes;
  result.block_stride_bytes = layout.block_stride_bytes;
  result.num_blocks = layout.num_blocks;
  result.geometry = view.geometry;
  result.page = view.page;
  result.encoder = view.encoder;
  result.k_scale = view.k_scales[static_cast<size_t>(layer)];
  result.v_scale = view.v_scales[static_cast<size_t>(layer)];
  return result;
}

}  // namespace larder
