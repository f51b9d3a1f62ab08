// From unnormalised sums of pieces to results: those of a CTA's warps in shared memory, and what
// several CTAs have of one segment through the workspace. Pieces are added in the order of their
// tokens, so a call has the same bits whenever it is run.
#pragma once

#include <cstdint>

#include "kernels/cuda/attend_decode_ends.cuh"
#include "kernels/cuda/attend_decode_packets.cuh"
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

// What is left of a piece, in shared memory.
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

// Adds up pieces of one segment, by `num_threads` threads: to results, or to packets of the slot
// `whole` where that is not nullptr. They lie in slots of shared memory, the first anywhere, the
// others from `second` on. Not a function out of line: to that the call's words would be memory far
// away.
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
      using Places = PacketPlaces<Shape>;
      store_sums(whole + Places::sums(column, four), merged.sums, call);
      if (four == 0) store_state(whole + Places::state(column), merged.max, merged.total, call);
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
    // There are no more than two sets' worth of them.
    if (index != set && index != set + num_sets) continue;
    const bool begins = notes[first].begins;
    const bool ends = notes[31 - __clz(static_cast<int>(entries))].ends;
    uint8_t* whole =
        begins && ends ? nullptr : call.parts + int64_t{choose_slot(begins)} * Shape::kPartBytes;
    merge_pieces<Shape>(call, notes[first], slot_of<Shape>(memory, first / 2, first % 2),
                        slot_of<Shape>(memory, first / 2 + 1, 0), __popc(entries), whole,
                        thread - set * set_warps * 32, set_warps * 32);
  }
}

// Of numbers below 2^12, in fewer steps than of any.
__device__ inline int divide_small(int a, int b) {
  return static_cast<int>(__fdividef(static_cast<float>(a) + 0.5f, static_cast<float>(b)));
}

// What a thread adds up of a job: four dims of a column over slots [first, end), some at a time.
// Offsets are of bytes of the parts, of which there are less than 2^31.
template <typename Shape>
struct SlotShare {
  using Places = PacketPlaces<Shape>;
  static constexpr int kFours = Places::kFours;
  static constexpr int kAtOnce = 6;
  int stretch;  // of those side by side
  int column;
  int four;
  int32_t first;
  int32_t end;
  uint32_t in_slot;  // to its sums
  uint32_t slot;     // number `first`
  uint32_t later;    // what would be number `first` if all were as far apart as from the second on
  uint32_t step;

  // Of item number `item`: fours of columns, then stretches of `each` slots.
  __device__ SlotShare(const DecodeCall& call, const MergeJob& job, int item, int items,
                       int32_t each)
      : stretch(divide_small(item, items)) {
    const int in_stretch = item - stretch * items;
    column = in_stretch / kFours;
    four = in_stretch % kFours;
    first = min(stretch * each, job.num_slots);
    end = min(first + each, job.num_slots);
    const PieceNote& note = job.note;
    // Nobody writes what is of no row.
    if (!place_of(call, note.first_row, note.num_pairs, note.kv_head, note.first_pair + column)
             .is_there)
      end = first;
    in_slot = Places::sums(column, four);
    step = job.slot_step * Shape::kPartBytes;
    later = (job.next_slot - job.slot_step) * Shape::kPartBytes + first * step;
    slot = first == 0 ? job.first_slot * Shape::kPartBytes : later;
    // Kept from being worked out later: here it is done while other warps of the CTA merge.
    asm volatile("" : "+r"(first), "+r"(end), "+r"(in_slot), "+r"(slot), "+r"(later));
  }

  // Of the next slots, the last one again past the end.
  __device__ uint8_t* at(const DecodeCall& call, int i) const {
    return call.parts + (i == 0 ? slot : later + min(i, end - first - 1) * step);
  }

  // What the next kCount slots have, once they all have it: their loads are on their way at once,
  // and all are begun again where one has come too soon; to do that with those alone takes more
  // registers than there are. Gives up when no polls are left, and counts a fault: lengths that
  // were changed during the call may have told CTAs different things.
  template <int kCount>
  __device__ void wait(const DecodeCall& call, const MergeJob& job, uint32_t& polls,
                       FourPackets (&packets)[kCount]) const {
#pragma unroll 1
    for (;; --polls) {
#pragma unroll
      for (int i = 0; i < kCount; ++i) {
        const uint8_t* from = at(call, i);
        packets[i] = {load_state(from + Places::state(column)), load_sums(from + in_slot)};
      }
      bool is_there = true;
#pragma unroll
      for (int i = 0; i < kCount; ++i) is_there &= packets[i].are_of(call);
      if (is_there) return;
      if (polls == 0) break;
    }
    if (four == 0) call.use.report(job.slot(first));
  }

  // Of kCount slots, or as many as there are.
  template <int kCount>
  __device__ void add_next(const DecodeCall& call, const MergeJob& job, uint32_t& polls,
                           MergedSums& merged) const {
    FourPackets packets[kCount];
    wait(call, job, polls, packets);
    float highest = merged.max;
#pragma unroll
    for (int i = 0; i < kCount; ++i) highest = fmaxf(highest, packets[i].state.max);
    merged.raise(highest);
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const FourPackets& of = packets[i];
      if (i == 0 || first + i < end) merged.add({of.state.max, of.state.total}, of.sums.sums());
    }
    // Of sums alone, which no other thread wants; past the end those of the last slot again.
#pragma unroll
    for (int i = 0; i < kCount; ++i) take_back(at(call, i) + in_slot);
  }

  // With no more loads than the slots need, or nearly so: the bytes of others would be in the way.
  __device__ MergedSums add_up(const DecodeCall& call, const MergeJob& job, uint32_t& polls) {
    MergedSums merged;
#pragma unroll 1
    while (first < end) {
      if (end - first == 1)
        add_next<1>(call, job, polls, merged);
      else if (end - first <= 3)
        add_next<3>(call, job, polls, merged);
      else
        add_next<kAtOnce>(call, job, polls, merged);
      first += kAtOnce;
      later += kAtOnce * step;
      slot = later;
    }
    return merged;
  }
};

// By all threads of the CTA. Threads that columns do not need take stretches of the slots side by
// side, whose sums meet in shared memory; then the columns are written.
template <typename Shape>
__device__ void merge_slots(const DecodeCall& call, const MergeJob& job, uint8_t* memory) {
  constexpr uint32_t kMostPolls = 1u << 24;  // some ten seconds
  const auto threads = static_cast<int>(blockDim.x);
  const int thread = thread_index();
  const int columns = min(Shape::kColumns, job.note.num_pairs - job.note.first_pair);
  const int items = columns * SlotShare<Shape>::kFours;
  const int stretches = max(min(divide_small(threads, items), job.num_slots), 1);
  const int32_t each = divide_small(job.num_slots + stretches - 1, stretches);
  uint32_t polls = kMostPolls;
  SlotShare<Shape> share(call, job, thread, items, each);
  // Shared memory still holds what the CTA's warps had, until the last of it has been added.
  __syncthreads();
#pragma unroll 1
  for (int i = thread; i < items * stretches;) {
    const MergedSums merged = share.add_up(call, job, polls);
    const PieceSlot<Shape> slot(memory + share.stretch * Shape::kSlotBytes);
    if (share.four == 0) slot.state(share.column) = {merged.max, merged.total};
    slot.at(share.column, share.four) = merged.sums;
    i += threads;
    if (i < items * stretches) share = SlotShare<Shape>(call, job, i, items, each);
  }
  __syncthreads();
  // All have read the states. By the last warps first, which have fewer columns to write.
  for (int32_t i = threads - 1 - thread; i < job.num_slots * Shape::kColumns; i += threads)
    if (i % Shape::kColumns < columns)
      take_back(call.parts + job.slot(i / Shape::kColumns) * Shape::kPartBytes +
                PacketPlaces<Shape>::state(i % Shape::kColumns));
  merge_pieces<Shape>(call, job.note, memory, memory + Shape::kSlotBytes, stretches, nullptr,
                      thread, threads);
}

}  // namespace larder::kernels::cuda
