// From unnormalised sums of pieces to results: those of a CTA's warps in shared memory, and what
// several CTAs have of one segment through the workspace. Pieces are added in the order of their
// tokens, so a call has the same bits whenever it is run.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_ends.cuh"
#include "kernels/cuda/attend_decode_products.cuh"

namespace larder::kernels::cuda {

// A column's row of the output, or none.
struct ColumnPlace {
  int32_t row;
  int32_t head;
  bool is_there;
};
__device__ inline ColumnPlace place_of(const DecodeCall& call, int32_t first_row, int32_t num_pairs,
                                       int32_t kv_head, int32_t pair) {
  const int32_t row = row_of(call, pair);
  return {first_row + row, (kv_head - row) * call.group + pair,
          pair < num_pairs && first_row + row < call.num_rows};
}

__device__ inline float log2_fast(float value) {
  float result;
  asm("lg2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(value));
  return result;
}

// log2(2^a + 2^b); a NaN shows, infinities are meant.
__device__ inline float log2_add(float a, float b) {
  const float higher = fmaxf(a, b);
  if (isnan(a + b) && !isinf(higher)) return NAN;
  if (isinf(higher)) return isnan(a) || isnan(b) ? NAN : higher;
  return higher + log2_fast(1.0f + exp2_fast(fminf(a, b) - higher));
}

// What sums of a column are multiplied by; stores its LSE where `stores_lse`.
template <typename Format>
__device__ inline float finish_column(const DecodeCall& call, const ColumnPlace& place, float max,
                                      float total, bool stores_lse) {
  const bool is_empty = total == 0.0f;
  float factor = is_empty ? 0.0f : __fdividef(call.value_factor * Format::kUndo, total);
  float lse = is_empty ? -INFINITY : max + log2_fast(total);  // base 2
  float sink = -INFINITY;
  if (call.sinks != nullptr) {
    sink = call.sinks[place.head] * kLog2E;
    if (!is_empty) factor *= __fdividef(1.0f, 1.0f + exp2_fast(sink - lse));
  }
  if (!stores_lse || call.output.lse == nullptr) return factor;
  const LseForm form = call.output.lse_form;
  if (form.includes_sink && call.sinks != nullptr) lse = log2_add(lse, sink);
  const auto heads = static_cast<int32_t>(call.output.out.shape[1]);
  const int64_t index = form.heads_first ? int64_t{place.head} * call.num_rows + place.row
                                         : int64_t{place.row} * heads + place.head;
  call.output.lse[index] = form.base2 ? lse : lse * kLn2;
  return factor;
}

// Four dims of a column. A factor of 0 makes zeros whatever the sums hold.
__device__ inline void store_four(const DecodeCall& call, const ColumnPlace& place, int dim,
                                  float4 sums, float factor) {
  const StridedTensor& out = call.output.out;
  const int64_t index = out.row_index(place.row, place.head) + dim;
  float4 values = {sums.x * factor, sums.y * factor, sums.z * factor, sums.w * factor};
  if (factor == 0.0f) values = {0.0f, 0.0f, 0.0f, 0.0f};
  if (out.dtype == Dtype::kFp32) {
    *reinterpret_cast<float4*>(static_cast<float*>(out.data) + index) = values;
    return;
  }
  uint2 packed;
  if (out.dtype == Dtype::kBf16)
    packed = {pack<true>(values.x, values.y), pack<true>(values.z, values.w)};
  else
    packed = {pack<false>(values.x, values.y), pack<false>(values.z, values.w)};
  *reinterpret_cast<uint2*>(static_cast<uint16_t*>(out.data) + index) = packed;
}

// Sums of four dims, as weights of a common maximum have them.
struct MergedSums {
  float4 sums = {0.0f, 0.0f, 0.0f, 0.0f};
  float total = 0.0f;
  float max = kLowestMax;

  __device__ void raise(float highest) {
    const float shrink = exp2_fast(max - highest);
    sums = {shrink * sums.x, shrink * sums.y, shrink * sums.z, shrink * sums.w};
    total *= shrink;
    max = highest;
  }
  // The state: maximum, which is no higher, and sum of weights.
  __device__ void add(const float2& state, const float4& others) {
    const float weight = exp2_fast(state.x - max);
    sums.x += weight * others.x;
    sums.y += weight * others.y;
    sums.z += weight * others.z;
    sums.w += weight * others.w;
    total += weight * state.y;
  }
};

// What is left of a piece: of a warp's in shared memory, of a CTA's in the workspace.
template <typename Shape>
class PieceSlot {
 public:
  __device__ explicit PieceSlot(uint8_t* memory)
      : states_(reinterpret_cast<float2*>(memory)),
        sums_(reinterpret_cast<float4*>(memory + Shape::kColumns * 8)) {}
  __device__ float2& state(int column) const { return states_[column]; }
  // Four dims from 4 * four on; columns of one four lie in different banks.
  __device__ float4& at(int column, int four) const {
    return sums_[column * (Shape::kDim / 4) + (four ^ (column >> 1 & 3))];
  }

 private:
  float2* states_;
  float4* sums_;
};

// Of the warp's first piece (0), beside the rings, or of its last (1), in its drained ring.
template <typename Shape>
__device__ inline uint8_t* slot_of(uint8_t* memory, int warp, int which) {
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  return which == 1 ? memory + warp * Shape::kRingBytes
                    : memory + num_warps * Shape::kRingBytes + warp * Shape::kSlotBytes;
}

// Adds up pieces of one segment, by `num_threads` threads: to results, or to the slot `whole` where
// that is not nullptr. They lie in slots of shared memory, the first anywhere, the others from
// `second` on. Not a function out of line: to that the call's words would be memory far away.
template <typename Shape>
__device__ inline void merge_pieces(const DecodeCall& call, const PieceNote& note, uint8_t* first,
                                    uint8_t* second, int32_t count, uint8_t* whole, int thread,
                                    int num_threads) {
  constexpr int kFours = Shape::kDim / 4;
  constexpr int kAtOnce = 6;
  const int items = min(Shape::kColumns, note.num_pairs - note.first_pair) * kFours;
#pragma unroll 1
  for (int item = thread; item < items; item += num_threads) {
    const int column = item / kFours;
    const int four = item % kFours;
    const ColumnPlace place =
        place_of(call, note.first_row, note.num_pairs, note.kv_head, note.first_pair + column);
    if (!place.is_there) continue;
    MergedSums merged;
#pragma unroll 1
    for (int32_t done = 0; done < count; done += kAtOnce) {
      float2 states[kAtOnce];
      float4 sums[kAtOnce];
      float highest = merged.max;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int32_t part = min(done + i, count - 1);
        const PieceSlot<Shape> slot(part == 0 ? first : second + (part - 1) * Shape::kSlotBytes);
        states[i] = slot.state(column);
        sums[i] = slot.at(column, four);
        highest = fmaxf(highest, states[i].x);
      }
      merged.raise(highest);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (done + i < count) merged.add(states[i], sums[i]);
    }
    if (whole != nullptr) {
      const PieceSlot<Shape> slot(whole);
      if (four == 0) slot.state(column) = {merged.max, merged.total};
      slot.at(column, four) = merged.sums;
    } else {
      const float factor =
          finish_column<typename Shape::Format>(call, place, merged.max, merged.total, four == 0);
      store_four(call, place, 4 * four, merged.sums, factor);
    }
  }
}

// What the CTA's warps have left, segment by segment, sets of warps side by side. A segment's
// pieces are one warp's first or last and the first ones of the warps after it. `choose_slot` says
// which slot of the workspace a part of a segment goes to.
template <typename Shape, typename ChooseSlot>
__device__ void merge_cta(const DecodeCall& call, const PieceNote* notes, uint8_t* memory,
                          const ChooseSlot& choose_slot) {
  const int num_warps = static_cast<int>(blockDim.x) / 32;
  const int thread = thread_index();
  const int lane = thread % 32;
  const int32_t segment = lane < 2 * num_warps ? notes[lane].segment : -1;
  const uint32_t same = __match_any_sync(~0u, segment);
  uint32_t leaders = __ballot_sync(~0u, segment >= 0 && __ffs(static_cast<int>(same)) - 1 == lane);
  const int num_sets = max(min(__popc(leaders), num_warps), 1);
  // Most CTAs have one set: that needs no divisions.
  const int set_warps = num_sets == 1 ? num_warps : num_warps / num_sets;
  const int set = num_sets == 1 ? 0 : thread / 32 / set_warps;
  if (set >= num_sets) return;
#pragma unroll 1
  for (int index = 0; leaders != 0; ++index, leaders &= leaders - 1) {
    const int first = __ffs(static_cast<int>(leaders)) - 1;
    const uint32_t entries = __shfl_sync(~0u, same, first);
    if (num_sets > 1 && index % num_sets != set) continue;
    const bool begins = notes[first].begins != 0;
    const bool ends = notes[31 - __clz(static_cast<int>(entries))].ends != 0;
    uint8_t* whole = begins && ends
                         ? nullptr
                         : call.space.parts + int64_t{choose_slot(begins)} * Shape::kSlotBytes;
    merge_pieces<Shape>(call, notes[first], slot_of<Shape>(memory, first / 2, first % 2),
                        slot_of<Shape>(memory, first / 2 + 1, 0), __popc(entries), whole,
                        thread - set * set_warps * 32, set_warps * 32);
  }
}

// What the CTA wrote before it met is there for whoever sees the stamp.
__device__ inline void publish_slot(const DecodeCall& call, int64_t slot) {
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(call.space.stamps + slot),
               "l"(call.stamp)
               : "memory");
}
// Gives up after some ten seconds and counts a fault: lengths that were changed during the call may
// have told CTAs different things.
__device__ inline void wait_for_slot(const DecodeCall& call, int64_t slot) {
  uint64_t stamp;
#pragma unroll 1
  for (uint32_t polls = 0; polls < 1u << 24; ++polls) {
    asm volatile("ld.acquire.gpu.global.u64 %0, [%1];"
                 : "=l"(stamp)
                 : "l"(call.space.stamps + slot)
                 : "memory");
    if (stamp == call.stamp) return;
  }
  call.use.report(slot);
}

// What a thread adds up of a job: four dims of a column over slots [first, end), some at a time.
// Kept from being worked out later than it is said: that is done while others' slots are waited
// for.
template <typename Shape>
struct SlotShare {
  static constexpr int kFours = Shape::kDim / 4;
  static constexpr int kAtOnce = 6;
  int stretch;  // of those side by side
  int column;
  int four;
  int32_t first;
  int32_t end;
  uint8_t* slots[kAtOnce];  // from `first` on; past the end the last one again

  // Of item number `item`: fours of columns, then stretches of `each` slots.
  __device__ SlotShare(const DecodeCall& call, const MergeJob& job, int item, int items,
                       int32_t each)
      : stretch(item / items) {
    const int in_stretch = item - stretch * items;
    column = in_stretch / kFours;
    four = in_stretch % kFours;
    first = min(stretch * each, job.num_slots);
    end = min(first + each, job.num_slots);
    find_slots(call, job);
    asm volatile("" : "+r"(stretch), "+r"(column), "+r"(four), "+r"(first), "+r"(end));
  }

  __device__ void find_slots(const DecodeCall& call, const MergeJob& job) {
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int32_t at = max(min(first + i, end - 1), 0);
      slots[i] = call.space.parts + job.slot(at) * Shape::kSlotBytes;
      asm volatile("" : "+l"(slots[i]));
    }
  }

  __device__ MergedSums add_up(const DecodeCall& call, const MergeJob& job) {
    MergedSums merged;
#pragma unroll 1
    while (first < end) {
      float2 states[kAtOnce];
      float4 sums[kAtOnce];
      float highest = merged.max;
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const PieceSlot<Shape> slot(slots[i]);
        states[i] = __ldcg(&slot.state(column));
        sums[i] = __ldcg(&slot.at(column, four));
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) highest = fmaxf(highest, states[i].x);
      merged.raise(highest);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (first + i < end) merged.add(states[i], sums[i]);
      first += kAtOnce;
      if (first < end) find_slots(call, job);
    }
    return merged;
  }
};

// By all threads of the CTA, whose shared memory is free. Threads that columns do not need take
// stretches of the slots side by side, whose sums meet there; then the columns are written.
template <typename Shape>
__device__ void merge_slots(const DecodeCall& call, const MergeJob& job, uint8_t* memory) {
  const auto threads = static_cast<int>(blockDim.x);
  const int thread = thread_index();
  const int items =
      min(Shape::kColumns, job.note.num_pairs - job.note.first_pair) * SlotShare<Shape>::kFours;
  const int stretches = max(min(threads / items, job.num_slots), 1);
  const int32_t each = (job.num_slots + stretches - 1) / stretches;
  SlotShare<Shape> share(call, job, thread, items, each);
  for (int32_t i = thread; i < job.num_slots; i += threads) wait_for_slot(call, job.slot(i));
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < items * stretches;) {
    const MergedSums merged = share.add_up(call, job);
    const PieceSlot<Shape> slot(memory + share.stretch * Shape::kSlotBytes);
    if (share.four == 0) slot.state(share.column) = {merged.max, merged.total};
    slot.at(share.column, share.four) = merged.sums;
    i += threads;
    if (i < items * stretches) share = SlotShare<Shape>(call, job, i, items, each);
  }
  __syncthreads();
  for (int32_t i = thread; i < job.num_slots; i += threads) call.space.stamps[job.slot(i)] = 0;
  merge_pieces<Shape>(call, job.note, memory, memory + Shape::kSlotBytes, stretches, nullptr,
                      thread, threads);
  __syncthreads();
}

}  // namespace larder::kernels::cuda
