// The attention of shared prefixes: what its shapes decide, and its launches.
#include <algorithm>
#include <bit>
#include <cuda_runtime.h>
#include <limits>
#include <optional>

#include "kernels/cpu/layer_scale.h"
#include "kernels/cpu/rotate.h"
#include "kernels/cuda/attend_prefix.h"
#include "kernels/cuda/attend_prefix_plan.cuh"
#include "kernels/cuda/attend_prefix_wide.cuh"
#include "kernels/cuda/attend_state.cuh"
#include "kernels/cuda/launch.h"

namespace larder::kernels::cuda {
namespace {

using prefix::PlanCall;
using prefix::PlanHeader;
using prefix::PrefixGroup;
using prefix::WideCall;

constexpr int64_t kWideCtas = 132;  // at once on an H200
constexpr int64_t kMaxPrefixSplits = 64;
constexpr int64_t kMinGivenTokens = 256;  // fewer do not pay for the launches
constexpr int64_t kHeaderBytes = 256;

// What visit makes of an object of the type of a CTA's tiles; nothing where there is none.
template <KvFormat kFormat, typename Visit>
auto with_dims(int32_t dim, const Visit& visit)
    -> std::optional<decltype(visit(prefix::Tiles<kFormat, 64>()))> {
  if (dim == 64) return visit(prefix::Tiles<kFormat, 64>());
  if (dim == 128) return visit(prefix::Tiles<kFormat, 128>());
  if constexpr (kFormat != KvFormat::kFp16)
    if (dim == 256) return visit(prefix::Tiles<kFormat, 256>());
  return std::nullopt;
}
template <typename Visit>
auto with_tiles(const AttentionGeometry& geometry, const Visit& visit) {
  const int32_t dim = geometry.k_dim;
  switch (geometry.k_format) {
    case KvFormat::kNvfp4:
      return with_dims<KvFormat::kNvfp4>(dim, visit);
    case KvFormat::kFp8E4m3:
      return with_dims<KvFormat::kFp8E4m3>(dim, visit);
    case KvFormat::kFp16:
      return with_dims<KvFormat::kFp16>(dim, visit);
    default:
      return decltype(with_dims<KvFormat::kFp16>(dim, visit)){};
  }
}

bool is_aligned(const LayerView& layer, const TensorView& q) {
  const PageLayout& page = layer.page;
  const int64_t bytes[] = {reinterpret_cast<intptr_t>(layer.base),
                           layer.block_stride_bytes,
                           page.k_data_offset_bytes,
                           page.k_scale_offset_bytes,
                           page.v_data_offset_bytes,
                           page.v_scale_offset_bytes,
                           reinterpret_cast<intptr_t>(q.data),
                           2 * q.strides[0],
                           2 * q.strides[1]};
  return std::all_of(std::begin(bytes), std::end(bytes),
                     [](int64_t value) { return value % 16 == 0; }) &&
         q.strides[2] == 1;
}

bool takes(const AttendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const bool is_wanted = params.shared_prefix_tokens == kFindSharedPrefix ||
                         params.shared_prefix_tokens >= kMinGivenTokens;
  return is_wanted && !params.deterministic && params.window_left < 0 && params.mask == nullptr &&
         params.alibi_slopes == nullptr && params.shard.num_ranks == 1 && params.num_splits == 0 &&
         params.num_seqs >= 2 && params.q.shape[0] >= 2 && geometry.mla_row == MlaRow::kNone &&
         geometry.k_format == geometry.v_format && geometry.k_dim == geometry.v_dim &&
         geometry.block_tokens >= prefix::kRunTokens &&
         std::has_single_bit(static_cast<uint32_t>(geometry.block_tokens)) &&
         (params.q.dtype == Dtype::kBf16 || params.q.dtype == Dtype::kFp16) &&
         is_aligned(params.layer, params.q);
}

int64_t max_tokens_of(const AttendParams& params) {
  // Sums with some tiles more stay below 2^31.
  constexpr int64_t kMost = std::numeric_limits<int32_t>::max() - 4096;
  const int64_t block_tokens = params.layer.geometry.block_tokens;
  return params.block_table_stride <= kMost / block_tokens
             ? params.block_table_stride * block_tokens
             : kMost;
}

int64_t max_groups(const AttendParams& params) { return params.num_seqs / 2 + 1; }

int64_t list_bytes(const AttendParams& params) { return round_up_256(4 * params.num_seqs); }

// Of a plan: its header, the tokens, the groups; then, of the call that makes it, what sequences
// have in common.
PlanCall plan_call(const AttendParams& params, const PrefixLayout& layout, std::byte* workspace,
                   const SharedPlan& shared) {
  std::byte* memory = workspace;
  if (shared.memory != nullptr)
    memory = reinterpret_cast<std::byte*>(shared.memory) + shared.prefix_at;
  PlanCall call = {};
  call.q_lens = params.q_lens;
  call.seq_lens = params.seq_lens;
  call.block_table = params.block_table;
  call.num_seqs = params.num_seqs;
  call.block_table_stride = params.block_table_stride;
  call.num_rows = params.q.shape[0];
  call.max_tokens = max_tokens_of(params);
  call.block_tokens = params.layer.geometry.block_tokens;
  call.given_tokens = std::max(params.shared_prefix_tokens, 0);
  call.group_size = static_cast<int32_t>(params.q.shape[1] / params.layer.geometry.num_kv_heads);
  call.tile_pairs = layout.tile_pairs;
  call.header = reinterpret_cast<PlanHeader*>(memory);
  call.tokens = reinterpret_cast<int32_t*>(memory + kHeaderBytes);
  call.groups = reinterpret_cast<PrefixGroup*>(memory + kHeaderBytes + list_bytes(params));
  call.common = reinterpret_cast<int32_t*>(workspace + layout.kept_bytes);
  call.shared_key = reinterpret_cast<uint64_t*>(shared.memory);
  return call;
}

Status make_plan(const PlanCall& plan, cudaStream_t stream) {
  const bool is_found = plan.given_tokens == 0;
  if (is_found) {
    const int64_t ctas = std::min(plan.num_seqs - 1, kMaxGrid);
    if (Status s = launch("find_prefixes", prefix::find_prefixes, ctas, prefix::kFindThreads, 0,
                          plan, stream, false);
        !s.ok())
      return s;
  }
  return launch("plan_prefixes", prefix::plan_prefixes, 1, prefix::kPlanThreads, 0, plan, stream,
                is_found);
}

WideCall wide_call(const AttendParams& params, const Target& target, const PlanCall& plan,
                   const PrefixLayout& layout, std::byte* workspace) {
  WideCall call;
  call.layer = layer_rows(params.layer);
  call.q = StridedTensor(params.q);
  call.header = plan.header;
  call.groups = plan.groups;
  call.block_table = params.block_table;
  call.block_table_stride = params.block_table_stride;
  call.query_bytes = 2 * ((params.q.shape[0] - 1) * params.q.strides[0] +
                          (params.q.shape[1] - 1) * params.q.strides[1] + params.q.shape[2]);
  call.table_bytes = 4 * (params.num_seqs * params.block_table_stride);
  if (is_centred(params.layer.key_transform)) call.key_offset = params.layer.key_offset;
  call.states = reinterpret_cast<float2*>(workspace + layout.plan_bytes);
  call.sums = reinterpret_cast<float*>(workspace + layout.plan_bytes + layout.states_bytes);
  call.group_size = plan.group_size;
  call.block_shift = std::countr_zero(static_cast<uint32_t>(params.layer.geometry.block_tokens));
  call.scale = params.scale;
  call.logit_scale = params.scale * cpu::key_scale(params.layer);
  call.soft_cap = params.soft_cap;
  call.is_rotated = is_rotated(params.layer.key_transform);
  call.rotation_factor = rotation_factor(params.layer.geometry.k_dim);
  call.use = point_of_use(target);
  return call;
}

// As many stages as the device's shared memory holds; 0: too few, and prefixes are not used.
template <typename T>
Status find_stages(int& num_stages) {
  int device = 0;
  int bytes = 0;
  if (Status s = to_status("cudaGetDevice", cudaGetDevice(&device)); !s.ok()) return s;
  if (Status s = to_status(
          "cudaDevAttrMaxSharedMemoryPerBlockOptin",
          cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
      !s.ok())
    return s;
  num_stages = prefix::kMaxStages;
  while (num_stages >= T::kMinStages && T::bytes(num_stages) > bytes) --num_stages;
  if (num_stages < T::kMinStages) num_stages = 0;
  return {};
}

template <typename T>
Status launch_all(const AttendParams& params, const Target& target, const PrefixLayout& layout,
                  std::byte* workspace, const SharedPlan& shared, PrefixView* view) {
  int num_stages = 0;
  if (Status s = find_stages<T>(num_stages); !s.ok() || num_stages == 0) return s;
  const cudaStream_t stream = stream_of(target);
  const PlanCall plan = plan_call(params, layout, workspace, shared);
  WideCall wide = wide_call(params, target, plan, layout, workspace);
  const int64_t num_results = params.q.shape[0] * params.q.shape[1];
  *view = {plan.tokens, nullptr, 0, wide.states, wide.sums, num_results, layout.num_splits};
  if (shared.memory == nullptr || shared.is_made) {
    if (Status s = make_plan(plan, stream); !s.ok()) return s;
  } else {
    wide.taken = {plan.shared_key, shared.key};
    view->key = plan.shared_key;
    view->wanted_key = shared.key;
  }
  wide.num_stages = num_stages;
  const int shared_bytes = T::bytes(num_stages);
  if (Status s =
          to_status("attend_wide", cudaFuncSetAttribute(prefix::attend_wide<T>,
                                                        cudaFuncAttributeMaxDynamicSharedMemorySize,
                                                        shared_bytes));
      !s.ok())
    return s;
  const int64_t pairs = params.q.shape[0] * plan.group_size;
  const int64_t most_tiles = (pairs + T::kPairs - 1) / T::kPairs + max_groups(params);
  const int64_t layer_ctas = int64_t{layout.num_splits} * params.layer.geometry.num_kv_heads;
  const dim3 grid(
      static_cast<unsigned>(params.layer.geometry.num_kv_heads),
      static_cast<unsigned>(layout.num_splits),
      static_cast<unsigned>(std::clamp<int64_t>(kWideCtas / layer_ctas, 1, most_tiles)));
  return launch("attend_wide", prefix::attend_wide<T>, grid, T::kThreads, shared_bytes, wide,
                stream, true);
}

}  // namespace

PrefixLayout prefix_layout(const AttendParams& params) {
  PrefixLayout layout;
  if (!takes(params)) return layout;
  const AttentionGeometry& geometry = params.layer.geometry;
  const int64_t num_results = params.q.shape[0] * params.q.shape[1];
  const auto tile_pairs =
      with_tiles(geometry, [](auto tiles) { return int64_t{decltype(tiles)::kPairs}; });
  if (!tile_pairs) return layout;
  // As if all sequences were one group, the case that there is most to gain from.
  const int64_t pairs = num_results / geometry.num_kv_heads;
  const int64_t ctas = (pairs + *tile_pairs - 1) / *tile_pairs * geometry.num_kv_heads;
  int64_t max_tokens = max_tokens_of(params);
  if (params.shared_prefix_tokens > 0)
    max_tokens = std::min<int64_t>(max_tokens, params.shared_prefix_tokens);
  constexpr int64_t kMinTokens = int64_t{prefix::kKeys} * prefix::kMinSplitTiles;
  const int64_t bytes = num_results * (4 * geometry.v_dim + 8);
  const int64_t splits =
      std::min({std::max<int64_t>(kWideCtas / ctas, 1), kMaxPrefixSplits,
                std::max<int64_t>(max_tokens / kMinTokens, 1), kMaxPartBytes / bytes});
  if (splits == 0) return layout;
  layout.is_used = true;
  layout.num_splits = static_cast<int32_t>(splits);
  layout.tile_pairs = static_cast<int32_t>(*tile_pairs);
  layout.kept_bytes = kHeaderBytes + list_bytes(params) +
                      round_up_256(max_groups(params) * static_cast<int64_t>(sizeof(PrefixGroup)));
  layout.plan_bytes = layout.kept_bytes + list_bytes(params);
  layout.states_bytes = round_up_256(8 * splits * num_results);
  layout.sums_bytes = round_up_256(4 * splits * num_results * geometry.v_dim);
  layout.total_bytes = layout.plan_bytes + layout.states_bytes + layout.sums_bytes;
  return layout;
}

Status attend_prefix(const AttendParams& params, const Target& target, const PrefixLayout& layout,
                     std::byte* workspace, const SharedPlan& shared, PrefixView* view) {
  const auto status = with_tiles(params.layer.geometry, [&](auto tiles) {
    return launch_all<decltype(tiles)>(params, target, layout, workspace, shared, view);
  });
  if (!status) return {ErrorCode::kInternal, "attend_prefix: the layout is that of another call"};
  return *status;
}

}  // namespace larder::kernels::cuda
