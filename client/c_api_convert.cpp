// C structs as the C++ API takes them.
#include <algorithm>

#include "client/c_api_support.h"
#include "kernels/kernel_table.h"

namespace larder::c_api {

TensorView Arguments::tensor(std::string_view field, const larder_tensor* tensor) {
  if (!required(field, tensor)) return {};
  const std::string name(field);
  TensorView view;
  view.data = tensor->data;
  view.dtype = choice<Dtype>(name + ": dtype", tensor->dtype, kDtypeNames);
  reserved(name, tensor->reserved);
  std::copy_n(tensor->shape, 3, view.shape.begin());
  std::copy_n(tensor->strides, 3, view.strides.begin());
  if (std::all_of(view.shape.begin(), view.shape.end(), [](int64_t size) { return size > 0; }))
    required(name + ": data", view.data);
  return view;
}

AttentionGeometry Arguments::geometry(const larder_geometry& given) {
  AttentionGeometry geometry;
  geometry.num_layers = given.num_layers;
  geometry.num_kv_heads = given.num_kv_heads;
  geometry.block_tokens = given.block_tokens;
  geometry.k_dim = given.k_dim;
  geometry.v_dim = given.v_dim;
  geometry.k_format = choice<KvFormat>("k_format", given.k_format, kKvFormatNames);
  geometry.v_format = choice<KvFormat>("v_format", given.v_format, kKvFormatNames);
  geometry.mla_row = choice<MlaRow>("mla_row", given.mla_row, kMlaRowNames);
  return geometry;
}

larder_geometry to_c(const AttentionGeometry& geometry) {
  return {geometry.num_layers,
          geometry.num_kv_heads,
          geometry.block_tokens,
          geometry.k_dim,
          geometry.v_dim,
          static_cast<larder_kv_format>(geometry.k_format),
          static_cast<larder_kv_format>(geometry.v_format),
          static_cast<larder_mla_row>(geometry.mla_row)};
}

std::vector<BlockHandle> Arguments::blocks(std::string_view field, const larder_block* blocks,
                                           size_t count) {
  std::vector<BlockHandle> result;
  for (const larder_block& block : array(field, blocks, count))
    result.push_back({block.id, block.generation});
  return result;
}

std::vector<std::string> Arguments::strings(std::string_view field, const larder_bytes* bytes,
                                            size_t count) {
  std::vector<std::string> result;
  for (const larder_bytes& entry : array(field, bytes, count)) {
    const std::string name = std::string(field) + "[" + std::to_string(result.size()) + "]";
    const auto text = array(name, static_cast<const char*>(entry.data), entry.size);
    result.emplace_back(text.begin(), text.end());
  }
  return result;
}

PagedKv Arguments::paged_kv(const larder_paged_kv* given) {
  const larder_paged_kv full = complete("paged", given);
  const auto rows = [](const larder_paged_rows& from) {
    return PagedRows{static_cast<std::byte*>(from.base), from.page_stride_bytes,
                     from.head_stride_bytes, from.token_stride_bytes};
  };
  PagedKv paged;
  paged.k_data = rows(full.k_data);
  paged.k_scale = rows(full.k_scale);
  paged.v_data = rows(full.v_data);
  paged.v_scale = rows(full.v_scale);
  paged.geometry = geometry(full.geometry);
  paged.num_pages = full.num_pages;
  paged.v_scale_order = choice<VScaleOrder>("v_scale_order", full.v_scale_order, kVScaleOrderNames);
  reserved("paged", full.reserved);
  return paged;
}

ContextShard Arguments::context_shard(const larder_context_shard& given) {
  if (given.num_ranks == 0 && given.rank == 0 && given.interleave == 0) return {};
  const ContextShard shard = {given.num_ranks, given.rank, given.interleave};
  if (const Status status = kernels::validate_shard(shard); !status.ok()) refuse(status.message());
  return shard;
}

AttendOptions Arguments::attend_options(const larder_attend_options* given) {
  const larder_attend_options full = complete_or_defaults("options", given);
  AttendOptions options;
  options.scale = full.scale;
  options.causal = flag("causal", full.causal);
  options.window_left = full.window_left;
  options.soft_cap = full.soft_cap;
  options.sinks = array("sinks", full.sinks, full.num_sinks);
  options.alibi_slopes = array("alibi_slopes", full.alibi_slopes, full.num_alibi_slopes);
  options.partial = flag("partial", full.partial);
  options.num_splits = full.num_splits;
  options.lse_form = lse_form("lse_form", full.lse_form);
  options.out_scale = full.out_scale;
  options.out_sf_scale = full.out_sf_scale;
  options.out_sf_first_row = full.out_sf_first_row;
  reserved("options", full.reserved);
  options.deterministic = flag("deterministic", full.deterministic);
  options.shared_prefix_tokens = full.shared_prefix_tokens;
  options.shard = context_shard(full.shard);
  reserved("options", full.reserved_2);
  return options;
}

}  // namespace larder::c_api
