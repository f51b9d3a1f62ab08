// sparse_mla on any GPU: every row attends to its own list of tokens of MLA rows.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/attend_tile.cuh"
#include "kernels/cuda/kernels.h"

namespace larder::kernels::cuda {
namespace {

struct SparseCall {
  AttendCore core;
  const int32_t* indices;    // [num_rows, top_k]
  const int32_t* topk_lens;  // [num_rows] or nullptr
  int64_t top_k;
  int64_t num_items;
};

// Entries [begin, end) of a row's list; a "key" of the tile is an entry.
struct ListedKeys {
  const int32_t* entries;
  int64_t begin;
  int64_t end;

  // There are neither positions nor ALiBi here: what is located is seen.
  __device__ int64_t place(int64_t entry) const { return entry; }
  __device__ bool sees(int32_t, int64_t) const { return true; }
  __device__ int64_t position(int32_t) const { return 0; }
  __device__ int64_t tokens_before() const { return 0; }

  // An entry that is negative or past the pool is ignored; one of a block without the right is a
  // fault.
  __device__ bool locate(const AttendCore& core, int64_t entry, int64_t& block,
                         int32_t& offset) const {
    const int64_t slot = load_once(entries + entry);
    const int32_t block_tokens = core.layer.block_tokens;
    if (slot < 0 || slot >= core.layer.num_blocks * block_tokens) return false;
    block = slot / block_tokens;
    offset = static_cast<int32_t>(slot % block_tokens);
    return core.use.may_use(block, core.layer.num_blocks, false, slot);
  }
};

// How many entries of a row's list count. Called by one thread, so that all agree.
__device__ int64_t list_length(const SparseCall& call, int64_t row) {
  if (call.topk_lens == nullptr) return call.top_k;
  const int64_t length = load_once(call.topk_lens + row);
  if (length >= 0 && length <= call.top_k) return length;
  call.core.use.report(length);
  return length < 0 ? 0 : call.top_k;
}

// Grid: an item per row, tile of heads and part of the list, in strides; CTA: up to 16 heads, as
// attend_kernel. A row's stored bytes (352 to 1152 a token) are read once a tile of heads.
__global__ __launch_bounds__(kThreads) void sparse_mla_kernel(
    const __grid_constant__ SparseCall call) {
  extern __shared__ float4 memory[];
  __shared__ TileState state;
  __shared__ int64_t length;
  const TileMemory space = place(call.core, reinterpret_cast<float*>(memory));
  const TileShape& shape = call.core.shape;
  const int32_t num_parts = call.core.parts.count;
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    const auto part = static_cast<int32_t>(item % num_parts);
    const auto head_tile = static_cast<int32_t>(item / num_parts % shape.head_tiles);
    const int64_t row = item / num_parts / shape.head_tiles;
    const int32_t first_head = head_tile * shape.heads;
    const Pairs pairs = {row, 1, 0, first_head, min(shape.heads, call.core.group_size - first_head),
                         part};
    if (threadIdx.x == 0) length = list_length(call, row);
    __syncthreads();
    int64_t part_entries = (length + num_parts - 1) / num_parts;
    part_entries = (part_entries + kTileKeys - 1) / kTileKeys * kTileKeys;
    const int64_t begin = part * part_entries;
    const ListedKeys keys = {call.indices + row * call.top_k, begin,
                             min(begin + part_entries, length)};
    attend_pairs(call.core, pairs, keys, state, space);
  }
}

struct SparseLayout {
  TileShape shape;
  PartsLayout parts;
  int64_t num_items = 0;
};

SparseLayout sparse_layout(const SparseMlaParams& params) {
  const int64_t num_rows = params.q.shape[0];
  const int64_t num_heads = params.q.shape[1];
  const LayerRows rows = layer_rows(params.layer);
  SparseLayout layout;
  const auto choose = [&](bool is_compensated) {
    layout.shape = choose_tile(rows, num_heads, 1, is_compensated);
    layout.num_items = num_rows * layout.shape.head_tiles;
    layout.parts =
        choose_parts(0, layout.num_items, params.top_k, num_rows * num_heads, rows.v_dim);
  };
  choose(false);
  if (params.top_k / layout.parts.count > kMaxPlainKeys) choose(true);
  layout.num_items *= layout.parts.count;
  return layout;
}

}  // namespace

Status supports_sparse_mla(const SparseMlaParams& params) {
  if (params.layer.geometry.mla_row == MlaRow::kNone)
    return {ErrorCode::kUnsupported, "mla_row is none: sparse_mla reads MLA rows"};
  return {};
}

int64_t sparse_mla_workspace_bytes(const SparseMlaParams& params) {
  const PartsLayout parts = sparse_layout(params).parts;
  return parts.states_bytes + parts.sums_bytes;
}

Status sparse_mla(const SparseMlaParams& params, const Target& target) {
  if (params.q.shape[0] == 0) return {};
  const SparseLayout layout = sparse_layout(params);
  SparseCall call;
  call.core = make_core(params.layer, params.q, params.output, params.scale, params.sinks, target);
  call.core.parts = place_parts(layout.parts, target.workspace);
  call.core.shape = layout.shape;
  call.indices = params.indices;
  call.topk_lens = params.topk_lens;
  call.top_k = params.top_k;
  call.num_items = layout.num_items;
  if (Status s = to_status(
          "sparse_mla_kernel",
          cudaFuncSetAttribute(sparse_mla_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                               kMaxDynamicBytes));
      !s.ok())
    return s;
  const cudaStream_t stream = stream_of(target);
  sparse_mla_kernel<<<static_cast<unsigned>(std::min(layout.num_items, kMaxGrid)), kThreads,
                      static_cast<size_t>(layout.shape.shared_bytes), stream>>>(call);
  if (Status s = launched("sparse_mla_kernel"); !s.ok()) return s;
  return join_parts(join_call(call.core), stream);
}

}  // namespace larder::kernels::cuda
