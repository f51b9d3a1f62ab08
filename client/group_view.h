// What a group description on the wire means for the kernels: the one translation between protocol
// and kernels, used by larderd (to refuse), by the executor and by clients (to run).
#pragma once

#include <cstddef>
#include <vector>

#include "kernels/params.h"
#include "larder/kv_format.h"
#include "larder/status.h"
#include "protocol/messages.h"

namespace larder {

struct GroupView {
  AttentionGeometry geometry;  // of an opaque group: block_tokens and one layer, no heads
  PageLayout page;             // of an opaque group: page_bytes alone
  bool opaque = false;         // bytes that no kernel reads
  Encoder encoder = Encoder::kReference;
  KeyTransform key_transform = KeyTransform::kNone;
  KvLayout layout = KvLayout::kBlhnc;
  std::vector<float> k_scales;     // [num_layers]
  std::vector<float> v_scales;     // [num_layers]
  std::vector<float> key_offsets;  // [num_layers, num_kv_heads, k_dim] where keys are centred
};

// INVALID_ARGUMENT for a value that no group can have, UNSUPPORTED for one that this build does not
// serve; the message names the field, the value and what is served. Key offsets must be inline.
Result<GroupView> view_group(const protocol::GroupSpec& spec);

// Bytes of one block, all layers, without padding.
int64_t block_bytes(const GroupView& view);

// From the machine's figures: where layers lie, given how blocks lie.
int64_t layer_stride_bytes(const GroupView& view, int64_t num_blocks);

// One layer in a mapped group. `base` is block 0 of layer 0; the group is not opaque and
// layer < num_layers (bugs). Key offsets point into `view`.
kernels::LayerView view_layer(const GroupView& view, const protocol::GroupLayout& layout,
                              std::byte* base, int32_t layer);

// All layers of a group's blocks, as bytes.
kernels::BlocksView view_blocks(const GroupView& view, const protocol::GroupLayout& layout,
                                std::byte* base);

}  // namespace larder
