#include "daemon/pool_identity.h"

#include <array>
#include <charconv>

#include <openssl/sha.h>

#include "client/group_view.h"
#include "protocol/limits.h"

namespace larder::daemon {
namespace {

// The shortest text that reads back as the same float, one for all layers where they agree.
std::string show_scales(const std::vector<float>& scales) {
  const auto show = [](float scale) {
    char text[32];
    const auto end = std::to_chars(text, text + sizeof text, scale).ptr;
    return std::string(text, end);
  };
  bool uniform = true;
  for (const float scale : scales) uniform = uniform && scale == scales.front();
  if (uniform) return show(scales.front());
  std::string joined;
  for (const float scale : scales) joined += (joined.empty() ? "" : ",") + show(scale);
  return joined;
}

// Sessions must agree on every float, so a digest stands for them.
std::string digest(const std::vector<float>& values) {
  if (values.empty()) return "none";
  std::array<uint8_t, SHA256_DIGEST_LENGTH> hash;
  SHA256(reinterpret_cast<const uint8_t*>(values.data()), values.size() * sizeof(float),
         hash.data());
  std::string text;
  for (const uint8_t byte : hash) {
    text += "0123456789abcdef"[byte >> 4];
    text += "0123456789abcdef"[byte & 15];
  }
  return text;
}

struct KindIdentity {
  const GroupView& view;

  Identity operator()(const protocol::AttentionGroup& group) const {
    return {
        {"kind", "attention"},
        {"num_layers", std::to_string(group.num_layers)},
        {"num_kv_heads", std::to_string(group.num_kv_heads)},
        {"k_dim", std::to_string(group.k_dim)},
        {"v_dim", std::to_string(group.v_dim)},
        {"k_format", group.k_format},
        {"v_format", group.v_format},
        {"encoder", group.encoder},
        {"key_transform", group.key_transform},
        {"key_offsets", digest(view.key_offsets)},
        {"layout", std::string(name(view.layout))},
        {"k_scales", show_scales(view.k_scales)},
        {"v_scales", show_scales(view.v_scales)},
    };
  }
  Identity operator()(const protocol::MlaGroup& group) const {
    return {
        {"kind", "mla"},
        {"num_layers", std::to_string(group.num_layers)},
        {"row_format", group.row_format},
        {"layout", std::string(name(view.layout))},
        {"k_scales", show_scales(view.k_scales)},
    };
  }
  Identity operator()(const protocol::OpaqueGroup& group) const {
    return {{"kind", "opaque"}, {"block_bytes", std::to_string(group.block_bytes)}};
  }
};

}  // namespace

Result<PoolSpec> to_machine_spec(const protocol::PoolSpec& spec) {
  if (spec.groups.size() != 1)
    return Status(ErrorCode::kUnsupported, "groups has " + std::to_string(spec.groups.size()) +
                                               " entries: pools with exactly one group are served");
  const protocol::GroupSpec& group = spec.groups[0];
  Result<GroupView> view = view_group(group);
  if (!view) return view.status();
  PoolSpec result;
  result.name = spec.name;
  result.model = spec.model;
  result.identity = std::visit(KindIdentity{*view}, group.kind);
  const bool one_segment = view->layout == KvLayout::kLbhnc;
  result.groups.push_back({group.name, block_bytes(*view), group.num_blocks, group.block_tokens,
                           one_segment, group.reserve_block_zero});
  Result<GroupLayout> layout = lay_out_group(block_bytes(*view), group.num_blocks, one_segment);
  if (!layout) return layout.status();
  if (layout->segment_bytes.size() > protocol::kMaxSegmentsPerGroup)
    return Status(ErrorCode::kInvalidArgument,
                  "num_blocks is " + std::to_string(group.num_blocks) + ": the pool would have " +
                      std::to_string(layout->segment_bytes.size()) + " segments, at most " +
                      std::to_string(protocol::kMaxSegmentsPerGroup) + " are allowed");
  return result;
}

}  // namespace larder::daemon
