#include "client/pool_options.h"

#include <set>
#include <string>

namespace larder {
namespace {

protocol::AttentionGroup attention_group(const GroupOptions& options) {
  const AttentionGeometry& geometry = options.geometry;
  protocol::AttentionGroup group;
  group.num_layers = geometry.num_layers;
  group.num_kv_heads = geometry.num_kv_heads;
  group.k_dim = geometry.k_dim;
  group.v_dim = geometry.v_dim;
  group.k_format = name(geometry.k_format);
  group.v_format = name(geometry.v_format);
  group.encoder = name(options.encoder);
  group.key_transform = name(options.key_transform);
  group.key_offsets = options.key_offsets;
  group.k_scales = options.k_scales;
  group.v_scales = options.v_scales;
  group.window_tokens = options.window_tokens;
  return group;
}

std::string group_name(const GroupOptions& options) {
  if (!options.group_name.empty()) return options.group_name;
  if (options.opaque_block_bytes != 0) return "opaque";
  return options.geometry.mla_row != MlaRow::kNone ? "mla" : "attention";
}

protocol::GroupSpec to_wire(const GroupOptions& options) {
  protocol::GroupSpec group;
  group.name = group_name(options);
  group.block_tokens = options.geometry.block_tokens;
  group.num_blocks = options.num_blocks;
  group.max_blocks = options.max_blocks;
  group.segment_bytes = options.segment_bytes;
  group.layout = name(options.layout);
  group.reserve_block_zero = options.reserve_block_zero;
  if (options.opaque_block_bytes != 0)
    group.kind = protocol::OpaqueGroup{options.opaque_block_bytes};
  else if (options.geometry.mla_row != MlaRow::kNone)
    group.kind = protocol::MlaGroup{options.geometry.num_layers,
                                    std::string(name(options.geometry.mla_row)), options.k_scales};
  else
    group.kind = attention_group(options);
  return group;
}

// What the kind of group has no use for must not be stated: it would be ignored in silence.
Status check_kind(const GroupOptions& options) {
  const bool opaque = options.opaque_block_bytes != 0;
  const bool mla = options.geometry.mla_row != MlaRow::kNone;
  if (!opaque && !mla) return {};
  if (options.encoder == Encoder::kReference && options.key_transform == KeyTransform::kNone &&
      options.key_offsets.empty() && options.v_scales.empty() && options.window_tokens == -1 &&
      (mla ? !opaque : options.k_scales.empty()))
    return {};
  return {ErrorCode::kInvalidArgument,
          std::string("encoder, key_transform, key_offsets, v_scales, window_tokens") +
              (opaque ? ", k_scales and mla_row" : "") + " must keep their defaults in " +
              (opaque ? "an opaque" : "an MLA") + " pool"};
}

}  // namespace

Status check_options(const PoolOptions& options) {
  if (Status status = check_kind(options); !status.ok()) return status;
  std::set<std::string> names = {group_name(options)};
  for (size_t i = 0; i < options.more_groups.size(); ++i) {
    const std::string field = "more_groups[" + std::to_string(i) + "]";
    const GroupOptions& group = options.more_groups[i];
    if (Status status = check_kind(group); !status.ok())
      return {status.code(), field + ": " + status.message()};
    if (!names.insert(group_name(group)).second)
      return {ErrorCode::kInvalidArgument, field + ".group_name is \"" + group_name(group) +
                                               "\", which another group of the pool has"};
  }
  return {};
}

protocol::PoolSpec to_wire(const PoolOptions& options) {
  protocol::PoolSpec spec{options.name,
                          options.model,
                          {to_wire(static_cast<const GroupOptions&>(options))},
                          options.device};
  for (const GroupOptions& group : options.more_groups) spec.groups.push_back(to_wire(group));
  return spec;
}

}  // namespace larder
