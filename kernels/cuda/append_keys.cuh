// What becomes of keys in registers before they are encoded: rotation by position, centring, and
// the Hadamard transform of kernels/cpu/rotate.h, with its bits.
#pragma once

#include "kernels/cuda/append_call.cuh"

namespace larder::kernels::cuda {

// `offsets`: of the group, four at a time, `stride` apart. kExact: NaNs get the bits of the CPU.
template <bool kExact>
__device__ inline void centre(Group& group, const float4* offsets, int stride) {
  const auto subtract = [](float& value, float offset) {
    value = kExact ? difference(value, offset) : __fsub_rn(value, offset);
  };
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float4 four = offsets[i * stride];
    subtract(group.values[4 * i], four.x);
    subtract(group.values[4 * i + 1], four.y);
    subtract(group.values[4 * i + 2], four.z);
    subtract(group.values[4 * i + 3], four.w);
  }
}

// Butterflies of values that are 1, 2, 4 and 8 apart, then of those in other threads. `groups`: of
// a row, a power of two, in neighbouring lanes. Every lane of the warp takes part. NaNs become the
// positive quiet one.
template <bool kExact>
__device__ inline void rotate_in_registers(Group& group, int index, int groups) {
#pragma unroll
  for (int h = 1; h < kGroup; h *= 2) {
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      if ((i & h) != 0) continue;
      const float a = group.values[i];
      const float b = group.values[i + h];
      group.values[i] = __fadd_rn(a, b);
      group.values[i + h] = __fsub_rn(a, b);
    }
  }
#pragma unroll
  for (int apart = 1; apart < kWarp; apart *= 2) {
    if (apart == groups) break;
    const float sign = (index & apart) != 0 ? -1.0f : 1.0f;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float other = __shfl_xor_sync(0xFFFFFFFFu, group.values[i], apart);
      // One rounding, as the product is exact.
      group.values[i] = __fmaf_rn(group.values[i], sign, other);
    }
  }
  const float factor = rotation_factor(groups * kGroup);
#pragma unroll
  for (int i = 0; i < kGroup; ++i) {
    group.values[i] = __fmul_rn(group.values[i], factor);
    if (kExact && isnan(group.values[i])) group.values[i] = __uint_as_float(0x7FC00000u);
  }
}

inline constexpr int kWarps = 4;          // of a CTA
inline constexpr int kMaxOffsets = 4096;  // floats that a CTA keeps

// Cosines and sines of a token: pair p lies at p % 16 * (pairs / 16) + p / 16, so that lanes with
// groups side by side read side by side. `pairs` of a token are followed by pairs / 16 unused ones,
// so that tokens lie in different banks.
__device__ inline int turn_place(int pair, int pairs) {
  return (pair & 15) * (pairs >> 4) + (pair >> 4);
}
__host__ __device__ inline int turns_stride(int pairs) { return pairs + (pairs >> 4); }
inline int tokens_of_cta(const RowsCall& call) { return kWarps * kWarp >> call.groups_shift; }

// Bytes of shared memory: [tokens][turns_stride] turns, then the offsets of the part's heads.
inline size_t key_tables_bytes(const RowsCall& call) {
  const int turns = tokens_of_cta(call) * turns_stride(call.rope.dim / 2);
  const int heads = (call.part_items >> call.head_shift) + 1;
  const int offsets = call.centred ? heads * (kGroup << call.groups_shift) : 0;
  return static_cast<size_t>(turns) * sizeof(CosineSine) +
         static_cast<size_t>(offsets) * sizeof(float);
}

// What the threads of a CTA share for its keys. Every thread takes part in what is found or copied.
struct KeyTables {
  const float4* offsets;
  int first_head;

  static __device__ CosineSine* turns() {
    extern __shared__ float4 key_tables[];
    return reinterpret_cast<CosineSine*>(key_tables);
  }
  __device__ const CosineSine* turns_of(const RowsCall& call, int token) const {
    return turns() + token * turns_stride(call.rope.dim / 2);
  }

  // `token`: of the thread, in the CTA; `leads`: for one thread per token. False if the token's
  // position is out of range, which is a fault.
  __device__ bool find_turns(const RowsCall& call, const PointOfUse& use, int64_t row,
                             bool is_written, int token, bool leads) {
    __shared__ int64_t positions[kWarps * kWarp / 2];
    if (leads) positions[token] = is_written ? position_of(call.rope, use, row) : -1;
    __syncthreads();
    const int pairs = call.rope.dim / 2;
    const int count = (kWarps * kWarp >> call.groups_shift) * pairs;
    for (int i = static_cast<int>(threadIdx.x); i < count; i += kWarps * kWarp) {
      const int64_t position = positions[i / pairs];
      if (position >= 0)
        turns()[i / pairs * turns_stride(pairs) + turn_place(i % pairs, pairs)] =
            cosine_sine(call.rope, position, i % pairs);
    }
    __syncthreads();
    return positions[token] >= 0;
  }

  // Of heads first to last: four values of a group at a time, those of all groups side by side.
  __device__ void copy_offsets(const RowsCall& call, const RowsLayer& layer, int first, int last) {
    if (!call.centred) return;
    const int turns_count = (kWarps * kWarp >> call.groups_shift) * turns_stride(call.rope.dim / 2);
    auto* const to = reinterpret_cast<float4*>(turns() + turns_count);
    const int groups = 1 << call.groups_shift;
    const auto* from =
        reinterpret_cast<const float4*>(layer.key_offset) + first * int64_t{4} * groups;
    for (int i = static_cast<int>(threadIdx.x); i < (last - first + 1) * 4 * groups;
         i += kWarps * kWarp)
      to[(i & -4 * groups) + (i & 3) * groups + (i >> 2 & (groups - 1))] = __ldg(from + i);
    __syncthreads();
    offsets = to;
    first_head = first;
  }
};

// Centred, then rotated, as the call says. Every lane of the warp takes part.
template <bool kExact>
__device__ inline void transform(const RowsCall& call, const KeyTables& tables, int head, int index,
                                 Group& group) {
  const int groups = 1 << call.groups_shift;
  if (call.centred)
    centre<kExact>(group, tables.offsets + (head - tables.first_head) * 4 * groups + index, groups);
  if (call.rotated) rotate_in_registers<kExact>(group, index, groups);
  look_again(group);
}

// Groups from the group to that which holds the other values of its pairs; 0 if it has them itself.
__device__ inline int groups_to_other(const RopeCall& rope, int index) {
  const int apart = rope.dim / 2 / kGroup;
  if (rope.interleaved || index >= 2 * apart) return 0;
  return index < apart ? apart : -apart;
}

// Group `index` of a row, turned. `others`: the group that groups_to_other leads to.
template <class Input>
__device__ inline void turn_group(const RopeCall& rope, int index, const Words& others,
                                  const CosineSine* turns /* of the token */, Words& words) {
  const int first = index * kGroup;
  if (first >= rope.dim) return;
  const int pairs = rope.dim / 2;
  const bool is_first = first < pairs;
  const auto half = [](const Words& w, int i) { return Input::exact(w.at[i / 2] >> 16 * (i % 2)); };
  uint32_t largest = 0;
#pragma unroll
  for (int i = 0; i < 8; ++i) {
    float turned[2];
    if (rope.interleaved) {
      const CosineSine turn = turns[turn_place(first / 2 + i, pairs)];
      turned[0] = rotated_first(half(words, 2 * i), half(words, 2 * i + 1), turn);
      turned[1] = rotated_second(half(words, 2 * i), half(words, 2 * i + 1), turn);
    } else {
#pragma unroll
      for (int k = 0; k < 2; ++k) {
        const float own = half(words, 2 * i + k);
        const float other = half(others, 2 * i + k);
        const CosineSine turn =
            turns[turn_place((is_first ? first : first - pairs) + 2 * i + k, pairs)];
        turned[k] = is_first ? rotated_first(own, other, turn) : rotated_second(other, own, turn);
      }
    }
    words.at[i] = Input::pair(turned[0], turned[1]);
    largest = Input::larger(largest, words.at[i]);
  }
  if (is_finite(larger_or_nan(fabsf(Input::low(largest)), fabsf(Input::high(largest))))) return;
#pragma unroll
  for (int i = 0; i < 8; ++i) words.at[i] = with_usual_nans<Input>(words.at[i]);
}

}  // namespace larder::kernels::cuda
