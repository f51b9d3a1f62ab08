// The C API: options of pools and of their groups.
#include "client/c_api_support.h"

namespace larder::c_api {
namespace {

constexpr std::array<std::string_view, 2> kExecutionNames = {"in_process", "on_request"};

template <typename T>
std::vector<T> copied(std::span<const T> values) {
  return {values.begin(), values.end()};
}

// What the options of a pool and of a further group name alike.
template <typename Options>
void read_group(Arguments& in, const Options& full, GroupOptions& options) {
  options.group_name = text_or(full.group_name, "");
  options.geometry = in.geometry(full.geometry);
  options.encoder = in.choice<Encoder>("encoder", full.encoder, kEncoderNames);
  options.key_transform =
      in.choice<KeyTransform>("key_transform", full.key_transform, kKeyTransformNames);
  options.key_offsets = copied(in.array("key_offsets", full.key_offsets, full.num_key_offsets));
  options.opaque_block_bytes = full.opaque_block_bytes;
  options.layout = in.choice<KvLayout>("layout", full.layout, kKvLayoutNames);
  options.num_blocks = full.num_blocks;
  options.max_blocks = full.max_blocks;
  options.segment_bytes = full.segment_bytes;
  options.window_tokens = full.window_tokens;
  options.reserve_block_zero = in.flag("reserve_block_zero", full.reserve_block_zero);
  options.k_scales = copied(in.array("k_scales", full.k_scales, full.num_k_scales));
  options.v_scales = copied(in.array("v_scales", full.v_scales, full.num_v_scales));
}

}  // namespace

PoolOptions pool_options(Arguments& in, const larder_pool_options* given) {
  const larder_pool_options full = in.complete("options", given);
  PoolOptions options;
  read_group(in, full, options);
  options.name = text_or(full.name, "");
  options.model = text_or(full.model, "");
  options.execution = in.choice<Execution>("execution", full.execution, kExecutionNames);
  for (const larder_group_options* more :
       in.array("more_groups", full.more_groups, full.num_more_groups)) {
    const larder_group_options group = in.complete("more_groups", more);
    in.reserved("more_groups", group.reserved);
    if (!in.ok()) break;
    read_group(in, group, options.more_groups.emplace_back());
  }
  return options;
}

Status expect_count(std::string_view field, size_t count, size_t expected) {
  if (count == expected) return {};
  return {ErrorCode::kInternal, "the daemon answered with " + std::to_string(count) + " " +
                                    std::string(field) + ", " + std::to_string(expected) +
                                    " were expected"};
}

}  // namespace larder::c_api
