#include "client/group_view.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <span>
#include <string>

#include "kernels/kernel_table.h"
#include "larder/check.h"

namespace larder {
namespace {

// A block lies in one segment, and segments of at most 256 MiB are what pools are made of.
constexpr int64_t kMaxOpaqueBlockBytes = int64_t{64} << 20;

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

Status set_scales(const std::vector<double>& k_scales, const std::vector<double>& v_scales,
                  GroupView& view) {
  auto k = expand_scales("k_scales", k_scales, view.geometry.num_layers);
  if (!k) return k.status();
  auto v = expand_scales("v_scales", v_scales, view.geometry.num_layers);
  if (!v) return v.status();
  view.k_scales = std::move(*k);
  view.v_scales = std::move(*v);
  return {};
}

Status check_group_fields(const protocol::GroupSpec& spec) {
  if (spec.max_blocks != 0 && spec.max_blocks < spec.num_blocks)
    return {ErrorCode::kInvalidArgument, "max_blocks is " + std::to_string(spec.max_blocks) +
                                             ": expected 0, or at least num_blocks, which is " +
                                             std::to_string(spec.num_blocks)};
  if (spec.segment_bytes < 0)
    return {ErrorCode::kInvalidArgument,
            "segment_bytes is " + std::to_string(spec.segment_bytes) + ": expected 0 or more"};
  if (!spec.layer_aliases.empty())
    return {ErrorCode::kUnsupported, "layer_aliases: layers that share memory are not served"};
  return {};
}

std::string join(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

// A name that some other system has, or none, is not served; the sentence says what is.
template <typename Enum, size_t kCount>
Result<Enum> parse_name(const std::string& field, const std::string& text,
                        const std::array<std::string_view, kCount>& names) {
  if (const auto found = find_name<Enum>(names, text)) return *found;
  return unserved(field, text, join(names));
}

Status check_key_offsets(const GroupView& view) {
  const AttentionGeometry& geometry = view.geometry;
  const size_t wanted = !is_centred(view.key_transform)
                            ? 0
                            : static_cast<size_t>(geometry.num_layers) *
                                  static_cast<size_t>(geometry.num_kv_heads) *
                                  static_cast<size_t>(geometry.k_dim);
  if (view.key_offsets.size() != wanted)
    return {ErrorCode::kInvalidArgument,
            "key_offsets has " + std::to_string(view.key_offsets.size()) + " entries, expected " +
                std::to_string(wanted) + " with key_transform " +
                std::string(name(view.key_transform)) +
                " (num_layers * num_kv_heads * k_dim where keys are centred)"};
  for (size_t i = 0; i < view.key_offsets.size(); ++i)
    if (!std::isfinite(view.key_offsets[i]))
      return {ErrorCode::kInvalidArgument, "key_offsets[" + std::to_string(i) + "] is " +
                                               std::to_string(view.key_offsets[i]) +
                                               ": expected a finite number"};
  return {};
}

Status view_kind(const protocol::AttentionGroup& group, int32_t block_tokens, GroupView& view) {
  if (group.window_tokens != -1 && group.window_tokens < 1)
    return {ErrorCode::kInvalidArgument, "window_tokens is " + std::to_string(group.window_tokens) +
                                             ": expected -1 (none), or 1 or more"};
  const auto k_format = parse_name<KvFormat>("k_format", group.k_format, kKvFormatNames);
  if (!k_format) return k_format.status();
  const auto v_format = parse_name<KvFormat>("v_format", group.v_format, kKvFormatNames);
  if (!v_format) return v_format.status();
  const auto encoder = parse_name<Encoder>("encoder", group.encoder, kEncoderNames);
  if (!encoder) return encoder.status();
  const auto transform =
      parse_name<KeyTransform>("key_transform", group.key_transform, kKeyTransformNames);
  if (!transform) return transform.status();
  view.encoder = *encoder;
  view.key_transform = *transform;
  view.geometry = {group.num_layers, group.num_kv_heads, block_tokens, group.k_dim,
                   group.v_dim,      *k_format,          *v_format};
  if (Status status = kernels::validate_geometry(view.geometry, view.encoder, view.key_transform);
      !status.ok())
    return status;
  view.key_offsets = std::get<std::vector<float>>(group.key_offsets);
  if (Status status = check_key_offsets(view); !status.ok()) return status;
  return set_scales(group.k_scales, group.v_scales, view);
}

Status view_kind(const protocol::MlaGroup& group, int32_t block_tokens, GroupView& view) {
  // "none" is the name of no row format.
  const auto names = std::span(kMlaRowNames).subspan<1>();
  const auto found = std::find(names.begin(), names.end(), group.row_format);
  if (found == names.end()) return unserved("row_format", group.row_format, join(names));
  view.geometry =
      mla_geometry(group.num_layers, block_tokens, static_cast<MlaRow>(found - names.begin() + 1));
  if (Status status = kernels::validate_geometry(view.geometry, view.encoder); !status.ok())
    return status;
  return set_scales(group.k_scales, {}, view);
}

Status view_kind(const protocol::OpaqueGroup& group, int32_t block_tokens, GroupView& view) {
  const auto check = [](const char* field, int64_t value, int64_t limit) -> Status {
    if (value >= 1 && value <= limit) return {};
    return {ErrorCode::kInvalidArgument, std::string(field) + " is " + std::to_string(value) +
                                             ": expected 1 to " + std::to_string(limit)};
  };
  if (Status status = check("block_tokens", block_tokens, kernels::kMaxBlockTokens); !status.ok())
    return status;
  if (Status status = check("block_bytes", group.block_bytes, kMaxOpaqueBlockBytes); !status.ok())
    return status;
  view.opaque = true;
  view.geometry.num_layers = 1;
  view.geometry.block_tokens = block_tokens;
  view.page.page_bytes = group.block_bytes;
  return {};
}

}  // namespace

Result<GroupView> view_group(const protocol::GroupSpec& spec) {
  if (Status status = check_group_fields(spec); !status.ok()) return status;
  GroupView view;
  const auto layout = parse_name<KvLayout>("layout", spec.layout, kKvLayoutNames);
  if (!layout) return layout.status();
  view.layout = *layout;
  if (view.layout == KvLayout::kLbhnc && spec.max_blocks > spec.num_blocks)
    return Status(ErrorCode::kUnsupported, "max_blocks is " + std::to_string(spec.max_blocks) +
                                               " and num_blocks " +
                                               std::to_string(spec.num_blocks) +
                                               ": pools of layout LBHNC have a fixed size");
  const Status status = std::visit(
      [&](const auto& group) { return view_kind(group, spec.block_tokens, view); }, spec.kind);
  if (!status.ok()) return status;
  if (!view.opaque) view.page = page_layout(view.geometry);
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
  LARDER_CHECK(!view.opaque && layer >= 0 && layer < view.geometry.num_layers, layer);
  kernels::LayerView result;
  result.base = base + layer * layout.layer_stride_bytes;
  result.block_stride_bytes = layout.block_stride_bytes;
  result.num_blocks = layout.num_ids();
  result.geometry = view.geometry;
  result.page = view.page;
  result.encoder = view.encoder;
  result.key_transform = view.key_transform;
  if (!view.key_offsets.empty())
    result.key_offset = view.key_offsets.data() + static_cast<int64_t>(layer) *
                                                      view.geometry.num_kv_heads *
                                                      view.geometry.k_dim;
  result.k_scale = view.k_scales[static_cast<size_t>(layer)];
  result.v_scale = view.v_scales[static_cast<size_t>(layer)];
  return result;
}

kernels::BlocksView view_blocks(const GroupView& view, const protocol::GroupLayout& layout,
                                std::byte* base) {
  return {base,
          layout.block_stride_bytes,
          layout.layer_stride_bytes,
          view.page.page_bytes,
          view.geometry.num_layers,
          layout.num_ids()};
}

}  // namespace larder
