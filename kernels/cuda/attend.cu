// attend on any GPU: decode and chunked prefill over one layer's blocks.
//
// Two or three launches: lengths to a plan (what is wrong in them is found and counted there,
// once), attention of tiles of pairs over parts of the keys, and where there are several parts
// their join. Lengths are read by the first alone, so all CTAs agree on them whatever else writes
// there.
//
// A pair's result depends on where its keys are cut and on nothing else of the call: tiles of keys
// lie at multiples of kTileKeys, keys that a row does not see change no bit of it, and pairs of a
// CTA share nothing but decoded keys. So a deterministic call is one with fixed cuts.
#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/attend_shared_plan.h"
#include "kernels/cuda/attend_tile.cuh"
#include "kernels/cuda/kernels.h"
#include "kernels/cuda/shard.cuh"

namespace larder::kernels::cuda {
namespace {

constexpr int kPlanThreads = 1024;

// A sequence as it can be served.
struct PlannedSequence {
  int64_t first_row;    // of its rows in q
  int64_t mask_offset;  // -1: no mask, or one that does not fit, with which no row sees anything
  int32_t q_len;
  int32_t seq_len;
};

struct PlanCall {
  const int32_t* q_lens;
  const int32_t* seq_lens;
  const int64_t* mask_offsets;  // nullptr: no mask
  int64_t mask_bytes;
  int64_t num_seqs;
  int64_t num_rows;
  int64_t max_tokens;  // what a row of the block table holds
  Shard shard;
  PlannedSequence* plan;
  PointOfUse use;
};

struct AttendCall {
  AttendCore core;
  const PlannedSequence* plan;  // [num_seqs], by first_row
  const int32_t* block_table;
  const uint8_t* mask;
  int64_t num_seqs;
  int64_t block_table_stride;
  int64_t num_items;
  Shard shard;
  int32_t window_left;
  // A sequence's keys are cut into num_cuts parts of one length, a multiple of cut_keys and
  // min_cut_keys at least; there are num_cuts of them, or as many as can have keys.
  int32_t num_cuts;
  int32_t cut_keys;
  int32_t min_cut_keys;
  bool is_causal;  // and has no mask
};

__device__ PlannedSequence plan_sequence(const PlanCall& call, int64_t sequence, int32_t q_len,
                                         int64_t first_row) {
  PlannedSequence planned = {first_row, -1, q_len, call.seq_lens[sequence]};
  if (planned.seq_len < 0 || call.shard.local_tokens(planned.seq_len) > call.max_tokens) {
    call.use.report(planned.seq_len);
    // Up to the first token that the table has no room for, which lies before the given end.
    planned.seq_len =
        planned.seq_len < 0 ? 0 : static_cast<int32_t>(call.shard.global_token(call.max_tokens));
  }
  // The one that passes the last row.
  if (first_row <= call.num_rows && q_len > call.num_rows - first_row) call.use.report(q_len);
  if (call.mask_offsets == nullptr) return planned;
  const int64_t offset = call.mask_offsets[sequence];
  const int64_t needed = (int64_t{q_len} * planned.seq_len + 7) / 8;
  if (offset >= 0 && offset <= call.mask_bytes && needed <= call.mask_bytes - offset)
    planned.mask_offset = offset;
  else
    call.use.report(offset);
  return planned;
}

// Grid: one CTA, which takes kPlanThreads sequences at a time, a thread each: a prefix sum over
// q_lens, by warps and then over them.
__global__ __launch_bounds__(kPlanThreads) void plan_kernel(PlanCall call) {
  __shared__ int64_t warp_rows[kPlanThreads / 32];
  const int warp = warp_index();
  const int lane = lane_index();
  int64_t before = 0;  // rows of sequences before this round
  for (int64_t first = 0; first < call.num_seqs; first += kPlanThreads) {
    const int64_t sequence = first + threadIdx.x;
    int32_t q_len = sequence < call.num_seqs ? call.q_lens[sequence] : 0;
    if (q_len < 0) {
      call.use.report(q_len);
      q_len = 0;
    }
    int64_t rows = q_len;  // of this sequence and those before it in the warp
    for (int step = 1; step < 32; step *= 2) {
      const int64_t other = __shfl_up_sync(~0u, rows, step);
      if (lane >= step) rows += other;
    }
    if (lane == 31) warp_rows[warp] = rows;
    __syncthreads();
    int64_t start = before + rows - q_len;
    for (int other = 0; other < kPlanThreads / 32; ++other) {
      if (other < warp) start += warp_rows[other];
      before += warp_rows[other];
    }
    if (sequence < call.num_seqs) call.plan[sequence] = plan_sequence(call, sequence, q_len, start);
    __syncthreads();  // before the next round's warp_rows
  }
}

// Rows [first_token, ...) of one sequence, as attend_pairs asks for them, and a part of its keys.
// begin, end and what is located are places among the keys in the cache, all others places in the
// sequence; they differ with a shard alone.
struct PagedKeys {
  const AttendCall* call;
  const int32_t* blocks;
  const uint8_t* mask;  // nullptr: none
  int64_t begin;
  int64_t end;
  int64_t seq_len;
  int64_t before;  // seq_len - q_len; negative with more rows than tokens
  int64_t first_token;

  __device__ int64_t tokens_before() const { return before; }
  __device__ int64_t position(int32_t token) const { return before + first_token + token; }
  __device__ int64_t place(int64_t key) const { return call->shard.global_token(key); }
  __device__ int64_t visible_begin(int64_t at) const {
    return call->window_left < 0 ? 0 : max(at - call->window_left, int64_t{0});
  }
  __device__ int64_t visible_end(int64_t at) const {
    return call->is_causal ? min(max(at + 1, int64_t{0}), seq_len) : seq_len;
  }
  __device__ bool sees(int32_t token, int64_t place) const {
    const int64_t at = position(token);
    if (place < visible_begin(at) || place >= visible_end(at)) return false;
    if (mask == nullptr) return true;
    const int64_t bit = (first_token + token) * seq_len + place;
    return (mask[bit >> 3] >> (bit & 7) & 1) != 0;
  }
  __device__ bool locate(const AttendCore& core, int64_t key, int64_t& block,
                         int32_t& offset) const {
    const auto tokens = static_cast<uint32_t>(core.layer.block_tokens);
    const uint32_t index = static_cast<uint32_t>(key) / tokens;
    offset = static_cast<int32_t>(static_cast<uint32_t>(key) - index * tokens);
    block = load_once(blocks + index);
    return core.use.may_use(block, core.layer.num_blocks, false, block);
  }
};

// Cuts the keys that the sequence's rows touch to those that `num_tokens` rows from first_token on
// see of part `part`.
__device__ void choose_keys(const AttendCall& call, int32_t part, int32_t num_tokens,
                            PagedKeys& keys) {
  const Shard& shard = call.shard;
  const int64_t touched = shard.local_tokens(keys.visible_begin(keys.before));
  const int64_t num_keys = max(shard.local_tokens(keys.seq_len) - touched, int64_t{0});
  int64_t part_keys = (num_keys + call.num_cuts - 1) / call.num_cuts;
  part_keys = (part_keys + call.cut_keys - 1) / call.cut_keys * call.cut_keys;
  part_keys = max(part_keys, int64_t{call.min_cut_keys});
  const int64_t part_begin = touched + part * part_keys;
  keys.begin = max(part_begin, shard.local_tokens(keys.visible_begin(keys.position(0))));
  keys.end = min(part_begin + part_keys,
                 shard.local_tokens(keys.visible_end(keys.position(num_tokens - 1))));
}

// The last sequence that begins at `row` or before it, -1 without sequences. Those without rows are
// passed over, as the next one begins at the same row.
__device__ int64_t find_sequence(const AttendCall& call, int64_t row) {
  int64_t low = 0;
  int64_t high = call.num_seqs;  // the first one known to begin later
  while (low < high) {
    const int64_t middle = low + (high - low) / 2;
    if (call.plan[middle].first_row <= row)
      low = middle + 1;
    else
      high = middle;
  }
  return low - 1;
}

// Of the rows [pairs.first_row, last_row), those of the first row's sequence. Rows that no sequence
// covers see nothing. Returns how many have been dealt with.
__device__ int32_t attend_segment(const AttendCall& call, Pairs pairs, int64_t last_row,
                                  TileState& state, const TileMemory& space) {
  const int64_t sequence = find_sequence(call, pairs.first_row);
  PagedKeys keys = {&call, nullptr, nullptr, 0, 0, 0, 0, 0};
  int64_t end_row = last_row;
  if (sequence >= 0) {
    const PlannedSequence planned = call.plan[sequence];
    if (pairs.first_row < planned.first_row + planned.q_len) {
      end_row = min(end_row, planned.first_row + planned.q_len);
      keys.first_token = pairs.first_row - planned.first_row;
      keys.seq_len = planned.seq_len;
      keys.before = int64_t{planned.seq_len} - planned.q_len;
      keys.blocks = call.block_table + sequence * call.block_table_stride;
      if (call.mask != nullptr && planned.mask_offset >= 0)
        keys.mask = call.mask + planned.mask_offset;
      if (call.mask == nullptr || planned.mask_offset >= 0)
        choose_keys(call, pairs.part, static_cast<int32_t>(end_row - pairs.first_row), keys);
    }
  }
  pairs.num_tokens = static_cast<int32_t>(end_row - pairs.first_row);
  attend_pairs(call.core, pairs, keys, state, space);
  return pairs.num_tokens;
}

// Grid: an item per tile of rows, KV head, tile of its heads and part of the keys, in strides; CTA:
// up to 16 pairs. Warps decode 32 keys of K a time, multiply them with the queries (lane: key) and
// soften the logits; then threads take dims of V. Per token and KV head the stored bytes of K and V
// are read once a tile of pairs: bound by decoding and by arithmetic, not by memory.
__global__ __launch_bounds__(kThreads,
                             5) void attend_kernel(const __grid_constant__ AttendCall call) {
  extern __shared__ float4 memory[];
  __shared__ TileState state;
  const TileMemory space = place(call.core, reinterpret_cast<float*>(memory));
  const TileShape& shape = call.core.shape;
  const int64_t end_row = call.core.parts.last_row(call.core.q.shape[0]);
  for (int64_t item = blockIdx.x; item < call.num_items; item += gridDim.x) {
    int64_t rest = item;
    Pairs pairs = {};
    pairs.part = static_cast<int32_t>(rest % call.core.parts.count);
    rest /= call.core.parts.count;
    const auto head_tile = static_cast<int32_t>(rest % shape.head_tiles);
    rest /= shape.head_tiles;
    pairs.kv_head = static_cast<int32_t>(rest % call.core.layer.num_kv_heads);
    rest /= call.core.layer.num_kv_heads;
    pairs.first_head = pairs.kv_head * call.core.group_size + head_tile * shape.heads;
    pairs.num_heads = min(shape.heads, call.core.group_size - head_tile * shape.heads);
    pairs.first_row = call.core.parts.first_row + rest * shape.tokens;
    const int64_t last_row = min(pairs.first_row + shape.tokens, end_row);
    while (pairs.first_row < last_row)
      pairs.first_row += attend_segment(call, pairs, last_row, state, space);
  }
}

// Everything about a call that its shapes decide, so that a captured launch serves other lengths.
struct AttendLayout {
  TileShape shape;
  PartsLayout parts;
  int32_t num_cuts = 1;
  int64_t num_rows = 0;  // of a launch
  int64_t plan_bytes = 0;
  int64_t max_tokens = 0;

  // CTAs of a launch of so many rows, if there are enough.
  int64_t num_items(const LayerRows& rows, int64_t launched_rows) const {
    return (launched_rows + shape.tokens - 1) / shape.tokens * rows.num_kv_heads *
           shape.head_tiles * parts.count;
  }
};

AttendLayout attend_layout(const AttendParams& params) {
  const AttentionGeometry& geometry = params.layer.geometry;
  const auto& num_rows = params.q.shape[0];
  const auto& num_heads = params.q.shape[1];
  const int64_t group_size = num_heads / geometry.num_kv_heads;
  AttendLayout layout;
  layout.max_tokens = std::numeric_limits<int32_t>::max();
  if (params.block_table_stride <= layout.max_tokens / geometry.block_tokens)
    layout.max_tokens = params.block_table_stride * geometry.block_tokens;
  const LayerRows rows = layer_rows(params.layer);
  const int64_t rows_per_sequence = num_rows / std::max<int64_t>(params.num_seqs, 1);
  const auto choose = [&](bool is_compensated) {
    layout.shape = choose_tile(rows, group_size, rows_per_sequence, is_compensated);
    layout.parts.count = 1;
    layout.parts = choose_parts(params.num_splits, layout.num_items(rows, num_rows),
                                layout.max_tokens, num_rows * num_heads, geometry.v_dim);
    layout.num_cuts = layout.parts.count;
    layout.num_rows = num_rows;
  };
  if (params.deterministic) {
    const FixedParts fixed =
        fixed_parts(params.num_splits, layout.max_tokens, num_rows, num_heads, geometry.v_dim);
    layout.shape = choose_tile(rows, group_size, rows_per_sequence, true);
    layout.parts = fixed.layout;
    layout.num_cuts = fixed.num_cuts;
    layout.num_rows = fixed.num_rows;
  } else {
    choose(false);
    if (layout.max_tokens / layout.parts.count > kMaxPlainKeys) choose(true);
  }
  // Of more sequences than fit any memory, more bytes than any memory has.
  layout.plan_bytes = round_up_256(std::min(params.num_seqs, int64_t{1} << 40) *
                                   static_cast<int64_t>(sizeof(PlannedSequence)));
  return layout;
}

}  // namespace

// Whatever passes the validation.
Status supports_attend(const AttendParams&) { return {}; }

int64_t attend_workspace_bytes(const AttendParams& params) {
  const AttendLayout layout = attend_layout(params);
  return layout.plan_bytes + layout.parts.states_bytes + layout.parts.sums_bytes;
}

Status attend(const AttendParams& params, const Target& target) {
  if (Status s = leave_no_plan(params, target); !s.ok()) return s;
  if (params.q.shape[0] == 0) return {};
  const AttendLayout layout = attend_layout(params);
  const cudaStream_t stream = stream_of(target);
  auto* plan = reinterpret_cast<PlannedSequence*>(target.workspace);
  AttendCall call;
  call.core = make_core(params.layer, params.q, params.output, params.scale, params.sinks, target);
  call.core.parts = place_parts(layout.parts, target.workspace + layout.plan_bytes);
  call.core.shape = layout.shape;
  call.core.alibi_slopes = params.alibi_slopes;
  call.core.soft_cap = params.soft_cap;
  call.plan = plan;
  call.block_table = params.block_table;
  call.mask = params.mask;
  call.num_seqs = params.num_seqs;
  call.block_table_stride = params.block_table_stride;
  call.shard = Shard(params.shard);
  call.window_left = params.window_left;
  call.num_cuts = layout.num_cuts;
  // Parts that the caller asks for begin at any key.
  call.cut_keys = params.num_splits > 0 || layout.num_cuts == 1 ? 1 : kTileKeys;
  call.min_cut_keys =
      params.deterministic && params.num_splits == 0 ? static_cast<int32_t>(kMinChosenPartKeys) : 0;
  call.is_causal = params.causal && params.mask == nullptr;

  if (params.num_seqs > 0) {
    plan_kernel<<<1, kPlanThreads, 0, stream>>>(
        {params.q_lens, params.seq_lens, params.mask == nullptr ? nullptr : params.mask_offsets,
         params.mask_bytes, params.num_seqs, params.q.shape[0], layout.max_tokens, call.shard, plan,
         call.core.use});
    if (Status s = launched("plan_kernel"); !s.ok()) return s;
  }
  if (Status s =
          to_status("attend_kernel",
                    cudaFuncSetAttribute(attend_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                         kMaxDynamicBytes));
      !s.ok())
    return s;
  for (int64_t row = 0; row < params.q.shape[0]; row += layout.num_rows) {
    call.core.parts.first_row = row;
    call.core.parts.end_row = std::min(row + layout.num_rows, params.q.shape[0]);
    call.num_items = layout.num_items(call.core.layer, call.core.parts.end_row - row);
    attend_kernel<<<static_cast<unsigned>(std::min(call.num_items, kMaxGrid)), kThreads,
                    static_cast<size_t>(layout.shape.shared_bytes), stream>>>(call);
    if (Status s = launched("attend_kernel"); !s.ok()) return s;
    if (Status s = join_parts(join_call(call.core), stream); !s.ok()) return s;
  }
  return {};
}

}  // namespace larder::kernels::cuda
