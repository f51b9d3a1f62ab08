#include "kernels/cpu/merge.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "kernels/cpu/lse.h"
#include "kernels/kernel_table.h"

// clang-format off
#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/merge.cpp"
#include <hwy/foreach_target.h>  // before highway.h
#include <hwy/highway.h>
#include "kernels/cpu/output-inl.h"
#include "kernels/cpu/rows-inl.h"
// clang-format on

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

// NaN and +inf are what broken or empty results of other libraries carry: such a state has no keys.
inline double counted_lse(float value, LseForm form) {
  const double lse = cpu::lse_from_form(value, form);
  return std::isfinite(lse) ? lse : cpu::kNoKeys;
}

// One row and head.
struct MergeSpace {
  MergeSpace(int64_t num_states, int64_t dim)
      : weights(static_cast<size_t>(num_states)),
        sums(static_cast<size_t>(dim)),
        values(static_cast<size_t>(dim)) {}

  // The LSEs in `weights` -> exp(lse - max), 0 for a state that does not count.
  void weigh() {
    const double max = *std::max_element(weights.begin(), weights.end());
    weight_sum = 0.0;
    for (double& value : weights) {
      value = value == cpu::kNoKeys ? 0.0 : std::exp(value - max);
      weight_sum += value;
    }
    lse = weight_sum == 0.0 ? cpu::kNoKeys : max + std::log(weight_sum);
  }

  std::vector<double> weights;  // [num_states]
  double weight_sum = 0.0;
  double lse = cpu::kNoKeys;  // log of the sum of exp(lse) over the states
  std::vector<double> sums;   // [dim]
  std::vector<float> values;  // [dim]
};

// What is left of the whole after the sink, 1 without one.
inline double kept_of(double lse, const float* sinks, int64_t head) {
  return sinks == nullptr || lse == cpu::kNoKeys ? 1.0 : cpu::sink_factor(lse, sinks[head]);
}

void merge_row(const MergeParams& params, int64_t row, int64_t head, MergeSpace& space) {
  const auto& [num_rows, num_heads, dim] = params.outs[0].shape;
  const int64_t index = cpu::lse_index(params.state_form, row, head, num_rows, num_heads);
  for (size_t state = 0; state < space.weights.size(); ++state)
    space.weights[state] = counted_lse(params.lses[state][index], params.state_form);
  space.weigh();
  const double kept = kept_of(space.lse, params.sinks, head);

  double* sums = space.sums.data();
  float* values = space.values.data();
  std::fill_n(sums, dim, -0.0);  // which leaves what is added to it as it is, -0 too
  for (size_t state = 0; state < space.weights.size(); ++state) {
    const double weight = space.weights[state];
    if (weight == 0.0) continue;
    const TensorView& out = params.outs[state];
    load_floats(out.dtype, view_row(out, row, head), view_stride(out), dim, values);
    for (int64_t i = 0; i < dim; ++i) sums[i] += weight * values[i];
  }
  const bool is_zero = space.weight_sum == 0.0 || kept == 0.0;
  for (int64_t i = 0; i < dim; ++i)
    values[i] = is_zero ? 0.0f : static_cast<float>(sums[i] / space.weight_sum * kept);
  // The output may be a state's memory, of which only this row and head has been read.
  store_output(params.output, row, head, values, dim);
  store_lse(params.output, row, head, space.lse, params.sinks);
}

void merge_on_target(const MergeParams& params) {
  const auto& [num_rows, num_heads, dim] = params.outs[0].shape;
  MergeSpace space(params.num_states, dim);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t head = 0; head < num_heads; ++head) merge_row(params, row, head, space);
}

void combine_row(const CombineParams& params, int64_t row, int64_t head, MergeSpace& space) {
  const auto& [num_rows, num_heads, dim] = params.out.shape;
  const int64_t index = cpu::lse_index(params.lse_form, row, head, num_rows, num_heads);
  for (int64_t rank = 0; rank < params.num_ranks; ++rank)
    space.weights[static_cast<size_t>(rank)] =
        counted_lse(params.lses[rank * num_rows * num_heads + index], params.lse_form);
  space.weigh();
  const double weight = space.weights[static_cast<size_t>(params.rank)];
  const double factor =
      weight == 0.0 ? 0.0 : weight / space.weight_sum * kept_of(space.lse, params.sinks, head);

  float* values = space.values.data();
  std::byte* out = view_row(params.out, row, head);
  load_floats(params.out.dtype, out, view_stride(params.out), dim, values);
  for (int64_t i = 0; i < dim; ++i)
    values[i] = factor == 0.0 ? 0.0f : static_cast<float>(values[i] * factor);
  store_floats(params.out.dtype, values, view_stride(params.out), dim, out);
  if (params.total_lse != nullptr)
    params.total_lse[index] = cpu::lse_to_form(
        space.lse, params.lse_form, params.sinks == nullptr ? nullptr : params.sinks + head);
}

void combine_on_target(const CombineParams& params) {
  const auto& [num_rows, num_heads, dim] = params.out.shape;
  MergeSpace space(params.num_ranks, dim);
  for (int64_t row = 0; row < num_rows; ++row)
    for (int64_t head = 0; head < num_heads; ++head) combine_row(params, row, head, space);
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace larder::kernels {

HWY_EXPORT(merge_on_target);
HWY_EXPORT(combine_on_target);

namespace cpu {

// Whatever passes the validation.
Status supports_merge(const MergeParams&) { return {}; }
Status supports_combine(const CombineParams&) { return {}; }

void merge(const MergeParams& params) { HWY_DYNAMIC_DISPATCH(merge_on_target)(params); }
void combine(const CombineParams& params) { HWY_DYNAMIC_DISPATCH(combine_on_target)(params); }

}  // namespace cpu
}  // namespace larder::kernels
#endif
