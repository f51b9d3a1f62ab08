// Attention in parts on the device: what a CTA leaves of the keys it took, and the kernel that
// joins it. Parts are unnormalised sums, so a NaN shows in whichever part it lies.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "kernels/cuda/launch.h"
#include "kernels/cuda/output.cuh"
#include "kernels/kernel_table.h"

namespace larder::kernels::cuda {

// At most so many parts, whatever a call asks for: more of them cost memory and change nothing.
inline constexpr int32_t kMaxParts = 256;
// Parts that the rows choose themselves: enough CTAs for four on each of 132 multiprocessors, none
// for fewer keys than pay for its merge; and where there are not many CTAs anyway, so many that the
// longest sequence of a batch does not keep one CTA busy long after the others.
inline constexpr int32_t kMaxChosenParts = 64;
inline constexpr int64_t kWantedCtas = 132 * 4;
inline constexpr int64_t kMinChosenPartKeys = 256;
inline constexpr int64_t kMaxChosenPartKeys = 16384;
inline constexpr int64_t kManyCtas = 8 * kWantedCtas;
inline constexpr int64_t kMaxBalancingParts = 16;
// A call whose parts would take more device memory than this gets fewer of them.
inline constexpr int64_t kMaxPartBytes = int64_t{256} << 20;
// float32 sums of more keys than this carry what rounding takes from them along.
inline constexpr int64_t kMaxPlainKeys = 65536;
// Parts of a deterministic call, of kMinChosenPartKeys at least (see fixed_parts).
inline constexpr int32_t kFixedParts = 32;
inline constexpr int64_t kMaxGrid = int64_t{1} << 30;  // CTAs; kernels stride over the rest
inline constexpr int kThreads = 128;

// Online softmax of one row and head over the keys of a part.
struct PartState {
  double sum;    // of exp(logit - max); 0: no key with a logit above -inf
  double shift;  // what all logits of the row lack
  float max;
};

// Both [rows, heads, num_parts]; sums have v_dim floats each, not written where sum is 0. They are
// those of the output's rows from first_row to end_row, or to its last.
struct Parts {
  PartState* states = nullptr;
  float* sums = nullptr;
  int32_t count = 1;
  int64_t first_row = 0;
  int64_t end_row = std::numeric_limits<int64_t>::max();

  __host__ __device__ int64_t last_row(int64_t num_rows) const {
    return end_row < num_rows ? end_row : num_rows;
  }
};

struct PartsLayout {
  int32_t count = 1;
  int64_t states_bytes = 0;  // 0 with one part, whose result is stored at once
  int64_t sums_bytes = 0;
};

inline int64_t round_up_256(int64_t bytes) { return (bytes + 255) / 256 * 256; }

// Room for the parts of so many rows and heads. With one part there is none.
inline void lay_out(PartsLayout& layout, int64_t num_results, int64_t v_dim) {
  if (layout.count == 1) return;
  const int64_t num_states = num_results * layout.count;
  layout.states_bytes = round_up_256(num_states * static_cast<int64_t>(sizeof(PartState)));
  layout.sums_bytes = round_up_256(num_states * v_dim * 4);
}

// How many parts a call of `num_ctas` CTAs per part takes, over at most max_keys keys.
inline PartsLayout choose_parts(int32_t wanted, int64_t num_ctas, int64_t max_keys,
                                int64_t num_results, int64_t v_dim) {
  PartsLayout layout;
  int64_t count = std::min(wanted, kMaxParts);
  if (wanted == 0) {
    count = (kWantedCtas + num_ctas - 1) / std::max<int64_t>(num_ctas, 1);
    if (num_ctas <= kManyCtas)
      count = std::max(count, std::min(max_keys / kMaxChosenPartKeys, kMaxBalancingParts));
    count = std::min({count, int64_t{kMaxChosenParts}, max_keys / kMinChosenPartKeys});
  }
  // In floating point, which does not overflow.
  const double bytes = static_cast<double>(num_results) *
                       static_cast<double>(static_cast<int64_t>(sizeof(PartState)) + 4 * v_dim);
  if (bytes * static_cast<double>(count) > static_cast<double>(kMaxPartBytes))
    count = static_cast<int64_t>(static_cast<double>(kMaxPartBytes) / bytes);
  layout.count = static_cast<int32_t>(std::max<int64_t>(count, 1));
  lay_out(layout, num_results, v_dim);
  return layout;
}

// Parts that no other row of a batch, no stride and no length of another sequence has a say in.
struct FixedParts {
  PartsLayout layout;
  int32_t num_cuts = 1;  // a sequence's keys are cut into so many, of which layout.count are taken
  int64_t num_rows = 0;  // whose parts have room at a time
};

// A deterministic call asks for the parts that it is given, or for kFixedParts. Only heads and
// dims, which are the same in every batch, can make them fewer. What differs from call to call is
// how many of the last parts, which can have no key of a row of the table, are left out; that
// changes nothing, as long as there is a join. Where all rows' parts would take more than
// kMaxPartBytes, the rows are taken in turns, in one memory.
//
// What it costs beside choose_parts: up to 32 parts of every row and head are written and read,
// where a large batch has one (32 * (24 + 4 * v_dim) bytes: 17 KiB of 128 dims), and a launch more
// for every turn (489 rows of 32 heads of 128 dims). A single sequence of few KV heads has half the
// CTAs. Sums carry what rounding takes from them along, whatever the length.
inline FixedParts fixed_parts(int32_t wanted, int64_t max_keys, int64_t num_rows, int64_t num_heads,
                              int64_t v_dim) {
  // Of a row: at most 17 MB, so that there is room for 15 parts.
  const int64_t part_bytes = num_heads * (static_cast<int64_t>(sizeof(PartState)) + 4 * v_dim);
  const int64_t wanted_parts = wanted == 0 ? kFixedParts : std::min(wanted, kMaxParts);
  FixedParts fixed;
  fixed.num_cuts = static_cast<int32_t>(std::min(wanted_parts, kMaxPartBytes / part_bytes));
  fixed.layout.count = fixed.num_cuts;
  if (wanted == 0) {
    const int64_t with_keys = (max_keys + kMinChosenPartKeys - 1) / kMinChosenPartKeys;
    fixed.layout.count = static_cast<int32_t>(std::clamp<int64_t>(with_keys, 2, fixed.num_cuts));
  }
  fixed.num_rows = fixed.layout.count == 1
                       ? num_rows
                       : std::min(num_rows, kMaxPartBytes / (part_bytes * fixed.layout.count));
  lay_out(fixed.layout, fixed.num_rows * num_heads, v_dim);
  return fixed;
}

inline Parts place_parts(const PartsLayout& layout, std::byte* memory) {
  if (layout.count == 1) return {};
  return {reinterpret_cast<PartState*>(memory),
          reinterpret_cast<float*>(memory + layout.states_bytes), layout.count};
}

// How a state becomes a result. out = sum of V * factor, or 0 whatever that sum holds.
struct Normaliser {
  double lse;
  float factor;
  bool is_zero;
};

// A row without a key, or with no logit above -inf, is zeros, whatever its sink; and a sink that
// outweighs every key hides infinities too.
__device__ inline Normaliser normaliser(const PartState& state, float value_scale,
                                        const float* sinks, int64_t head) {
  const bool empty = state.sum == 0.0;
  const double lse = empty ? no_keys() : double{state.max} + log(state.sum) + state.shift;
  const double kept = kept_of(lse, sinks, head);
  return {lse, static_cast<float>(value_scale / state.sum * kept), empty || kept == 0.0};
}

struct JoinCall {
  Parts parts;
  OutputView output;
  const float* sinks;
  float value_scale;
  int32_t v_dim;
};

// Grid: a CTA per row and head, in strides. Reads count * (v_dim + 6) floats and writes a result:
// bound by memory.
static __global__ __launch_bounds__(kThreads) void join_parts_kernel(JoinCall call) {
  __shared__ double weights[kMaxParts];
  __shared__ float values[kMaxHeadDim];
  const int32_t count = call.parts.count;
  const int64_t num_heads = call.output.out.shape[1];
  const int64_t first_row = call.parts.first_row;
  const int64_t num_results =
      (call.parts.last_row(call.output.out.shape[0]) - first_row) * num_heads;
  for (int64_t result = blockIdx.x; result < num_results; result += gridDim.x) {
    const PartState* states = call.parts.states + result * count;
    PartState total = {0.0, states[0].shift, -INFINITY};
    for (int32_t part = 0; part < count; ++part)
      if (states[part].sum != 0.0) total.max = fmaxf(total.max, states[part].max);
    for (auto part = static_cast<int32_t>(threadIdx.x); part < count; part += kThreads)
      weights[part] =
          states[part].sum != 0.0 ? exp(double{states[part].max} - double{total.max}) : 0.0;
    __syncthreads();
    for (int32_t part = 0; part < count; ++part)
      if (states[part].sum != 0.0) total.sum += states[part].sum * weights[part];

    const int64_t row = first_row + result / num_heads;
    const int64_t head = result % num_heads;
    const Normaliser made = normaliser(total, call.value_scale, call.sinks, head);
    for (auto i = static_cast<int32_t>(threadIdx.x); i < call.v_dim; i += kThreads) {
      double sum = 0.0;
      for (int32_t part = 0; part < count; ++part)
        if (states[part].sum != 0.0)
          sum += call.parts.sums[(result * count + part) * call.v_dim + i] * weights[part];
      values[i] = made.is_zero ? 0.0f : static_cast<float>(sum) * made.factor;
    }
    __syncthreads();
    store_output(call.output, row, head, values, call.v_dim, static_cast<int>(threadIdx.x),
                 kThreads);
    if (threadIdx.x == 0) store_lse(call.output, row, head, made.lse, call.sinks);
    __syncthreads();  // before the next result takes `weights` and `values`
  }
}

// Nothing to do with one part.
inline Status join_parts(const JoinCall& call, cudaStream_t stream) {
  const int64_t num_rows = call.parts.last_row(call.output.out.shape[0]) - call.parts.first_row;
  const int64_t num_results = num_rows * call.output.out.shape[1];
  if (call.parts.count == 1 || num_results == 0) return {};
  join_parts_kernel<<<static_cast<unsigned>(std::min(num_results, kMaxGrid)), kThreads, 0,
                      stream>>>(call);
  return launched("join_parts_kernel");
}

}  // namespace larder::kernels::cuda
