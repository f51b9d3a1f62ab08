// Which sequences of a batch share a prefix, found where lengths and tables lie: a comparison of
// neighbouring rows of the block table, and a plan of groups that one CTA makes of it.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_prefix_ops.cuh"
#include "kernels/cuda/early_launch.cuh"

namespace larder::kernels::cuda::prefix {

// A shorter prefix is not worth reading apart.
inline constexpr int32_t kMinPrefixTokens = 512;
inline constexpr int kFindThreads = 128;
inline constexpr int kFindEntries = 4;  // a thread and round
inline constexpr int kPlanThreads = 512;

// Neighbouring sequences with the same prefix. Their rows are consecutive.
struct PrefixGroup {
  int64_t first_row;
  int64_t num_rows;
  int64_t first_tile;  // of all groups' tiles of query pairs
  int32_t leader;      // whose row of the block table is read
  int32_t tokens;
};

struct PlanHeader {
  int64_t num_tiles;
  int32_t num_groups;
};

struct PlanCall {
  const int32_t* q_lens;
  const int32_t* seq_lens;
  const int32_t* block_table;
  int64_t num_seqs;
  int64_t block_table_stride;
  int64_t num_rows;
  int64_t max_tokens;  // what a row of the block table holds
  int32_t block_tokens;
  int32_t given_tokens;  // 0: to be found
  int32_t group_size;
  int32_t tile_pairs;
  PlanHeader* header;
  int32_t* tokens;  // [num_seqs]
  int32_t* common;  // [num_seqs], blocks: the head that a sequence shares with the one before it, 0
                    // if that is too short
  PrefixGroup* groups;
  uint64_t* shared_key;  // nullptr unless the plan is made for other calls too
};

// The key of a plan that an earlier call has made. What it says is safe whatever lengths and tables
// are by then: rows of q, rows of the block table and entries in them are bounded by shapes, which
// the key stands for.
struct TakenPlan {
  const uint64_t* shared_key = nullptr;  // nullptr: none, the plan is the call's own
  uint64_t key = 0;

  __device__ bool is_there() const {
    return shared_key == nullptr || load_and_rely(shared_key) == key;
  }
};

// Rows of q, none where the length is wrong.
__device__ inline int32_t rows_of(const PlanCall& call, int64_t sequence) {
  return max(call.q_lens[sequence], 0);
}
// Tokens that every row of the sequence sees; not negative.
__device__ inline int32_t tokens_before_rows(const PlanCall& call, int64_t sequence) {
  const int64_t seq_len = min(max(int64_t{call.seq_lens[sequence]}, int64_t{0}), call.max_tokens);
  return static_cast<int32_t>(max(seq_len - rows_of(call, sequence), int64_t{0}));
}

// Grid: a CTA per sequence but the first, in strides. Compares its row of the block table with the
// one before it: 8 bytes per block of the common head. Bound by latency.
static __global__ __launch_bounds__(kFindThreads) void find_prefixes(PlanCall call) {
  __shared__ int32_t first_different;
  for (int64_t sequence = 1 + int64_t{blockIdx.x}; sequence < call.num_seqs;
       sequence += gridDim.x) {
    const bool have_rows = rows_of(call, sequence) > 0 && rows_of(call, sequence - 1) > 0;
    const int32_t limit =
        min(tokens_before_rows(call, sequence), tokens_before_rows(call, sequence - 1)) /
        call.block_tokens;
    const int32_t* own = call.block_table + sequence * call.block_table_stride;
    const int32_t* left = own - call.block_table_stride;
    if (threadIdx.x == 0) first_different = limit;
    __syncthreads();
    const bool is_worth_it = have_rows && int64_t{limit} * call.block_tokens >= kMinPrefixTokens;
    for (int64_t round = 0; is_worth_it && round < limit; round += kFindThreads * kFindEntries) {
      bool differs[kFindEntries];
#pragma unroll
      for (int n = 0; n < kFindEntries; ++n) {
        const int64_t i = round + n * kFindThreads + threadIdx.x;
        differs[n] = i < limit && own[i] != left[i];
      }
      bool any = false;
#pragma unroll
      for (int n = 0; n < kFindEntries; ++n) {
        any |= differs[n];
        if (differs[n])
          atomicMin(&first_different, static_cast<int32_t>(round + n * kFindThreads + threadIdx.x));
      }
      if (__syncthreads_or(static_cast<int>(any)) != 0) break;
    }
    if (threadIdx.x == 0) {
      const bool is_long =
          is_worth_it && int64_t{first_different} * call.block_tokens >= kMinPrefixTokens;
      call.common[sequence] = is_long ? first_different : 0;
    }
    __syncthreads();  // before the next sequence's first_different
  }
}

__device__ inline int64_t tiles_of(const PlanCall& call, int64_t num_rows) {
  return (num_rows * call.group_size + call.tile_pairs - 1) / call.tile_pairs;
}

struct PlanMemory {
  int64_t warp_totals[kPlanThreads / 32];
  int64_t end_row[kPlanThreads];  // by the index of the run's first sequence
  int32_t shared_blocks[kPlanThreads];
  bool is_linked[kPlanThreads + 1];
};

// Of the values of threads 0 to this one. All threads call it.
template <typename Combine>
__device__ int64_t scan(int64_t value, PlanMemory& memory, const Combine& combine) {
  const int lane = static_cast<int>(threadIdx.x) % 32;
  const int warp = static_cast<int>(threadIdx.x) / 32;
  for (int step = 1; step < 32; step *= 2) {
    const int64_t other = __shfl_up_sync(~0u, value, step);
    if (lane >= step) value = combine(other, value);
  }
  if (lane == 31) memory.warp_totals[warp] = value;
  __syncthreads();
  int64_t before = memory.warp_totals[0];
  for (int other = 1; other < warp; ++other) before = combine(before, memory.warp_totals[other]);
  __syncthreads();
  return warp == 0 ? value : combine(before, value);
}
__device__ inline int64_t broadcast_last(int64_t value, PlanMemory& memory) {
  if (threadIdx.x == kPlanThreads - 1) memory.warp_totals[0] = value;
  __syncthreads();
  const int64_t last = memory.warp_totals[0];
  __syncthreads();
  return last;
}

// One group of all sequences that have rows, with the tokens that the caller gave: those that every
// one of them has before its rows.
__device__ inline void plan_given(const PlanCall& call, PlanMemory& memory) {
  const auto sum = [](int64_t a, int64_t b) { return a + b; };
  const auto least = [](int64_t a, int64_t b) { return min(a, b); };
  int64_t rows = 0;
  int64_t tokens = call.given_tokens;
  int64_t leader = call.num_seqs;
  for (int64_t s = threadIdx.x; s < call.num_seqs; s += kPlanThreads) {
    if (rows_of(call, s) == 0) continue;
    rows += rows_of(call, s);
    tokens = min(tokens, int64_t{tokens_before_rows(call, s)});
    leader = min(leader, s);
  }
  rows = min(broadcast_last(scan(rows, memory, sum), memory), call.num_rows);
  tokens = broadcast_last(scan(tokens, memory, least), memory);
  leader = broadcast_last(scan(leader, memory, least), memory);
  tokens -= tokens % call.block_tokens;
  const bool is_group = rows > 0 && tokens > 0;
  for (int64_t s = threadIdx.x; s < call.num_seqs; s += kPlanThreads)
    call.tokens[s] = is_group && rows_of(call, s) > 0 ? static_cast<int32_t>(tokens) : 0;
  if (threadIdx.x != 0) return;
  *call.header = {is_group ? tiles_of(call, rows) : 0, is_group ? 1 : 0};
  if (is_group)
    call.groups[0] = {0, rows, 0, static_cast<int32_t>(leader), static_cast<int32_t>(tokens)};
}

// Runs of sequences that share enough with the one before them. kPlanThreads sequences at a time: a
// run that goes on beyond them begins anew there, which only costs its prefix being read twice.
__device__ inline void plan_found(const PlanCall& call, PlanMemory& memory) {
  const auto sum = [](int64_t a, int64_t b) { return a + b; };
  const auto greatest = [](int64_t a, int64_t b) { return max(a, b); };
  constexpr int kTileBits = 40;  // of a scan over tiles in the lower bits and groups above
  const auto me = static_cast<int>(threadIdx.x);
  int64_t rows_before = 0;
  int64_t made = 0;
  for (int64_t first = 0; first < call.num_seqs; first += kPlanThreads) {
    const int64_t sequence = first + me;
    const bool is_there = sequence < call.num_seqs;
    const int64_t rows = is_there ? rows_of(call, sequence) : 0;
    const int64_t end = rows_before + scan(rows, memory, sum);
    const int32_t common = is_there && me > 0 ? call.common[sequence] : 0;
    memory.is_linked[me] = common > 0;
    if (me == 0) memory.is_linked[kPlanThreads] = false;
    memory.shared_blocks[me] = INT32_MAX;
    const auto head = static_cast<int>(scan(common > 0 ? 0 : me, memory, greatest));
    if (common > 0) {  // a warp is mostly in one run
      const unsigned run = __match_any_sync(__activemask(), head);
      const int32_t least = __reduce_min_sync(run, common);
      if (me % 32 == __ffs(static_cast<int>(run)) - 1)
        atomicMin(&memory.shared_blocks[head], least);
    }
    if (!memory.is_linked[me + 1]) memory.end_row[head] = end;
    __syncthreads();
    const int64_t first_row = min(end - rows, call.num_rows);
    const int64_t num_rows = min(memory.end_row[head], call.num_rows) - first_row;
    const bool is_shared = memory.shared_blocks[head] != INT32_MAX;
    const bool is_group = is_shared && head == me && num_rows > 0;
    const auto tokens =
        is_shared ? static_cast<int32_t>(memory.shared_blocks[head] * call.block_tokens) : 0;
    if (is_there) call.tokens[sequence] = tokens;
    const int64_t counted = is_group ? (int64_t{1} << kTileBits) + tiles_of(call, num_rows) : 0;
    const int64_t total = made + scan(counted, memory, sum);
    if (is_group) {
      const int64_t before = total - counted;
      call.groups[before >> kTileBits] = {first_row, num_rows,
                                          before & ((int64_t{1} << kTileBits) - 1),
                                          static_cast<int32_t>(sequence), tokens};
    }
    made = broadcast_last(total, memory);
    rows_before = broadcast_last(end, memory);
  }
  if (me == 0)
    *call.header = {made & ((int64_t{1} << kTileBits) - 1),
                    static_cast<int32_t>(made >> kTileBits)};
}

// Grid: one CTA. Some 10 bytes per sequence, bound by latency.
static __global__ __launch_bounds__(kPlanThreads) void plan_prefixes(PlanCall call) {
  __shared__ PlanMemory memory;
  wait_for_previous_kernel();
  // Until the whole plan is there. The kernels that took the one before have ended, and the one
  // that writes the key begins after this one.
  if (call.shared_key != nullptr && threadIdx.x == 0) *call.shared_key = 0;
  if (call.given_tokens > 0)
    plan_given(call, memory);
  else
    plan_found(call, memory);
}

}  // namespace larder::kernels::cuda::prefix
