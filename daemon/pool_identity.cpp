#include "daemon/pool_identity.h"

#include <algorithm>
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

namespace {

// What a prefix of this group must still have (allocator/pool_spec.h).
struct KindOf {
  GroupSpec& to;
  bool alone;
  void operator()(const protocol::AttentionGroup& group) const {
    if (group.window_tokens < 0) return;
    to.kind = GroupKind::kWindow;
    to.window_tokens = group.window_tokens;
  }
  void operator()(const protocol::MlaGroup&) const {}
  // The only group of a pool is one of blocks like others; beside layers a block is a state.
  void operator()(const protocol::OpaqueGroup&) const {
    if (!alone) to.kind = GroupKind::kState;
  }
};

Status check_segments(const GroupSpec& group) {
  const Result<GroupLayout> layout = lay_out_group(group);
  if (!layout) return layout.status();
  const size_t num_segments = layout->segment_bytes.size();
  if (num_segments <= protocol::kMaxSegmentsPerGroup) return {};
  return {ErrorCode::kInvalidArgument,
          "num_blocks is " + std::to_string(std::max(group.num_blocks, group.max_blocks)) +
              ": the pool would have " + std::to_string(num_segments) + " segments, at most " +
              std::to_string(protocol::kMaxSegmentsPerGroup) + " are allowed"};
}

}  // namespace

Result<PoolSpec> to_machine_spec(const protocol::PoolSpec& spec) {
  PoolSpec result;
  result.name = spec.name;
  result.model = spec.model;
  for (const protocol::GroupSpec& group : spec.groups) {
    const Result<GroupView> view = view_group(group);
    if (!view) return view.status();
    GroupSpec machine_group;
    machine_group.name = group.name;
    machine_group.block_bytes = block_bytes(*view);
    machine_group.num_blocks = group.num_blocks;
    machine_group.block_tokens = group.block_tokens;
    machine_group.one_segment = view->layout == KvLayout::kLbhnc;
    machine_group.reserve_block_zero = group.reserve_block_zero;
    machine_group.max_blocks = group.max_blocks == group.num_blocks ? 0 : group.max_blocks;
    machine_group.segment_bytes = group.segment_bytes;
    std::visit(KindOf{machine_group, spec.groups.size() == 1}, group.kind);
    if (Status status = check_segments(machine_group); !status.ok()) return status;
    // The keys of pools of one group do not depend on how many groups others have.
    const std::string prefix = spec.groups.size() > 1 ? group.name + "." : "";
    for (auto& [name, text] : std::visit(KindIdentity{*view}, group.kind))
      result.identity.emplace_back(prefix + name, std::move(text));
    result.groups.push_back(std::move(machine_group));
  }
  return result;
}

}  // namespace larder::daemon
