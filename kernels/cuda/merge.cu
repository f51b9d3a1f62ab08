// merge and combine on any GPU: results over disjoint keys are joined, in float64, so that a state
// that counts alone comes through exactly.
#include <algorithm>
#include <cstdint>

#include "kernels/cuda/kernels.h"
#include "kernels/cuda/launch.h"
#include "kernels/cuda/output.cuh"
#include "kernels/kernel_table.h"

namespace larder::kernels::cuda {
namespace {

constexpr int kThreads = 128;
constexpr int kWarps = kThreads / 32;
constexpr int64_t kMaxGrid = int64_t{1} << 30;
// States that travel in the parameters of one launch, which has room for 4 KB; more of them are
// first written to the workspace, so many a launch.
constexpr int64_t kStatesPerLaunch = 48;

// outs[i] and lses[i]; the shape is that of all.
struct MergeState {
  const void* data = nullptr;
  const float* lse = nullptr;
  int64_t strides[3] = {};
  Dtype dtype = Dtype::kFp32;
};

struct StateList {
  MergeState states[kStatesPerLaunch];
};

struct MergeCall {
  const MergeState* listed;  // in the workspace, or nullptr: in `list`
  StateList list;
  int64_t num_rows;
  int64_t num_heads;
  int32_t dim;
  int32_t num_states;
  LseForm state_form;
  const float* sinks;
  OutputView output;
};
static_assert(sizeof(MergeCall) < 4096);

struct CombineCall {
  StridedTensor out;
  const float* lses;
  int64_t num_ranks;
  int64_t rank;
  LseForm lse_form;
  const float* sinks;
  float* total_lse;
};

// NaN and +inf are what broken or empty results of other libraries carry: such a state has no keys.
__device__ double counted_lse(float value, LseForm form) {
  const double lse = lse_from_form(value, form);
  return isfinite(lse) ? lse : no_keys();
}

struct MaxOf {
  __device__ double operator()(double a, double b) const { return a > b ? a : b; }
};
struct SumOf {
  __device__ double operator()(double a, double b) const { return a + b; }
};

// Of all threads' values, for all of them. `scratch`: [kWarps].
template <typename Op>
__device__ double reduce(double value, Op op, double* scratch) {
  for (int step = 16; step > 0; step /= 2) value = op(value, __shfl_xor_sync(~0u, value, step));
  __syncthreads();  // an earlier result has been read
  if (threadIdx.x % 32 == 0) scratch[threadIdx.x / 32] = value;
  __syncthreads();
  value = scratch[0];
  for (int warp = 1; warp < kWarps; ++warp) value = op(value, scratch[warp]);
  return value;
}

__device__ double weight_of(double lse, double max) {
  return lse == no_keys() ? 0.0 : exp(lse - max);
}

// Log of the sum of exp(lse) over the states; their sum of exp(lse - max).
struct Total {
  double max;
  double weight_sum;
  double lse;
};

// Of `count` states, whose LSEs lse_of(i) gives.
template <typename LseOf>
__device__ Total total_of(int64_t count, const LseOf& lse_of, double* scratch) {
  Total total;
  double value = no_keys();
  for (int64_t i = threadIdx.x; i < count; i += kThreads) value = MaxOf{}(value, lse_of(i));
  total.max = reduce(value, MaxOf{}, scratch);
  value = 0.0;
  for (int64_t i = threadIdx.x; i < count; i += kThreads) value += weight_of(lse_of(i), total.max);
  total.weight_sum = reduce(value, SumOf{}, scratch);
  total.lse = total.weight_sum == 0.0 ? no_keys() : total.max + log(total.weight_sum);
  return total;
}

// One thread per state of the list.
__global__ __launch_bounds__(64) void list_states_kernel(const __grid_constant__ StateList list,
                                                         int32_t count, MergeState* target) {
  const auto i = static_cast<int32_t>(threadIdx.x);
  if (i < count) target[i] = list.states[i];
}

// Grid: a CTA per row and head, in strides. It reads num_states results and writes one: bound by
// memory, but for the float64 arithmetic of GPUs that have little of it. Dynamic shared memory:
// weights [num_states]. The output may be a state's memory: of that, this row and head alone has
// been read, all of it before the first write.
__global__ __launch_bounds__(kThreads) void merge_kernel(const __grid_constant__ MergeCall call) {
  extern __shared__ double weights[];
  __shared__ double scratch[kWarps];
  __shared__ float values[kMaxHeadDim];
  const MergeState* states = call.listed != nullptr ? call.listed : call.list.states;
  const int64_t num_results = call.num_rows * call.num_heads;
  for (int64_t result = blockIdx.x; result < num_results; result += gridDim.x) {
    const int64_t row = result / call.num_heads;
    const int64_t head = result % call.num_heads;
    const int64_t index = lse_index(call.state_form, row, head, call.num_rows, call.num_heads);
    const auto lse_of = [&](int64_t state) {
      return counted_lse(states[state].lse[index], call.state_form);
    };
    const Total total = total_of(call.num_states, lse_of, scratch);
    for (auto state = static_cast<int32_t>(threadIdx.x); state < call.num_states; state += kThreads)
      weights[state] = weight_of(lse_of(state), total.max);
    __syncthreads();
    const double kept = kept_of(total.lse, call.sinks, head);
    const bool is_zero = total.weight_sum == 0.0 || kept == 0.0;
    for (auto i = static_cast<int32_t>(threadIdx.x); i < call.dim; i += kThreads) {
      double sum = -0.0;  // which leaves what is added to it as it is, -0 too
      for (int32_t state = 0; state < call.num_states; ++state) {
        const double weight = weights[state];
        if (weight == 0.0) continue;
        const MergeState& from = states[state];
        sum += weight *
               load_value(from.dtype, from.data,
                          row * from.strides[0] + head * from.strides[1] + i * from.strides[2]);
      }
      values[i] = is_zero ? 0.0f : static_cast<float>(sum / total.weight_sum * kept);
    }
    __syncthreads();
    store_output(call.output, row, head, values, call.dim, static_cast<int>(threadIdx.x), kThreads);
    if (threadIdx.x == 0) store_lse(call.output, row, head, total.lse, call.sinks);
    __syncthreads();  // before the next result takes the shared memory
  }
}

// Grid: a CTA per row and head, in strides. Reads num_ranks LSEs, reads and writes one result.
__global__ __launch_bounds__(kThreads) void combine_kernel(CombineCall call) {
  __shared__ double scratch[kWarps];
  const int64_t num_rows = call.out.shape[0];
  const int64_t num_heads = call.out.shape[1];
  const int64_t num_results = num_rows * num_heads;
  for (int64_t result = blockIdx.x; result < num_results; result += gridDim.x) {
    const int64_t row = result / num_heads;
    const int64_t head = result % num_heads;
    const int64_t index = lse_index(call.lse_form, row, head, num_rows, num_heads);
    const auto lse_of = [&](int64_t rank) {
      return counted_lse(call.lses[rank * num_results + index], call.lse_form);
    };
    const Total total = total_of(call.num_ranks, lse_of, scratch);
    const double weight = weight_of(lse_of(call.rank), total.max);
    const double factor =
        weight == 0.0 ? 0.0 : weight / total.weight_sum * kept_of(total.lse, call.sinks, head);
    const int64_t first = call.out.row_index(row, head);
    for (int64_t i = threadIdx.x; i < call.out.shape[2]; i += kThreads) {
      const int64_t at = first + i * call.out.strides[2];
      const float value = load_value(call.out.dtype, call.out.data, at);
      store_value(call.out.dtype, call.out.data, at,
                  factor == 0.0 ? 0.0f : static_cast<float>(value * factor));
    }
    __syncthreads();  // total_lse may be the memory of one of the ranks' LSEs
    if (threadIdx.x == 0 && call.total_lse != nullptr)
      call.total_lse[index] = lse_to_form(total.lse, call.lse_form, call.sinks, head);
  }
}

unsigned grid_of(int64_t num_results) {
  return static_cast<unsigned>(std::min(num_results, kMaxGrid));
}

// States [first, first + kStatesPerLaunch) as far as there are so many.
StateList list_states(const MergeParams& params, int64_t first) {
  StateList list;
  const int64_t count = std::min(params.num_states - first, kStatesPerLaunch);
  for (int64_t i = 0; i < count; ++i) {
    const TensorView& view = params.outs[first + i];
    MergeState& state = list.states[i];
    state.data = view.data;
    state.lse = params.lses[first + i];
    std::copy(view.strides.begin(), view.strides.end(), state.strides);
    state.dtype = view.dtype;
  }
  return list;
}

}  // namespace

// Whatever passes the validation.
Status supports_merge(const MergeParams&) { return {}; }
Status supports_combine(const CombineParams&) { return {}; }

int64_t merge_workspace_bytes(const MergeParams& params) {
  if (params.num_states <= kStatesPerLaunch) return 0;
  return params.num_states * static_cast<int64_t>(sizeof(MergeState));
}

Status merge(const MergeParams& params, const Target& target) {
  const TensorView& shape = params.outs[0];
  const int64_t num_results = shape.shape[0] * shape.shape[1];
  if (num_results == 0) return {};
  const cudaStream_t stream = stream_of(target);
  MergeCall call;
  call.listed = nullptr;
  call.list = list_states(params, 0);
  call.num_rows = shape.shape[0];
  call.num_heads = shape.shape[1];
  call.dim = static_cast<int32_t>(shape.shape[2]);
  call.num_states = static_cast<int32_t>(params.num_states);
  call.state_form = params.state_form;
  call.sinks = params.sinks;
  call.output = OutputView(params.output);
  if (params.num_states > kStatesPerLaunch) {
    auto* listed = reinterpret_cast<MergeState*>(target.workspace);
    for (int64_t first = 0; first < params.num_states; first += kStatesPerLaunch) {
      const auto count =
          static_cast<int32_t>(std::min(params.num_states - first, kStatesPerLaunch));
      list_states_kernel<<<1, 64, 0, stream>>>(list_states(params, first), count, listed + first);
      if (Status s = launched("list_states_kernel"); !s.ok()) return s;
    }
    call.listed = listed;
  }
  static_assert(kMaxMergeStates * sizeof(double) + kMaxHeadDim * sizeof(float) < 48 * 1024);
  merge_kernel<<<grid_of(num_results), kThreads,
                 static_cast<size_t>(params.num_states) * sizeof(double), stream>>>(call);
  return launched("merge_kernel");
}

Status combine(const CombineParams& params, const Target& target) {
  const int64_t num_results = params.out.shape[0] * params.out.shape[1];
  if (num_results == 0) return {};
  combine_kernel<<<grid_of(num_results), kThreads, 0, stream_of(target)>>>(
      {StridedTensor(params.out), params.lses, params.num_ranks, params.rank, params.lse_form,
       params.sinks, params.total_lse});
  return launched("combine_kernel");
}

}  // namespace larder::kernels::cuda
