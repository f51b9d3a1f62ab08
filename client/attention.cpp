// Merging of attention results: on tensors of this process, whichever pool they came from.
#include "larder/attention.h"

#include <string>
#include <vector>

#include "kernels/kernel_table.h"

namespace larder {
namespace {

Status check_sinks(std::span<const float> sinks, const TensorView& out) {
  if (sinks.empty() || static_cast<int64_t>(sinks.size()) == out.shape[1]) return {};
  return {ErrorCode::kInvalidArgument, "sinks has " + std::to_string(sinks.size()) +
                                           " entries, out has " + std::to_string(out.shape[1]) +
                                           " heads"};
}

}  // namespace

Status merge_states(std::span<const AttentionState> states, const TensorView& out, float* lse,
                    const MergeOptions& options) {
  if (Status status = check_sinks(options.sinks, out); !status.ok()) return status;
  std::vector<TensorView> outs;
  std::vector<const float*> lses;
  for (const AttentionState& state : states) {
    outs.push_back(state.out);
    lses.push_back(state.lse);
  }
  kernels::MergeParams params;
  params.outs = outs.data();
  params.lses = lses.data();
  params.num_states = static_cast<int64_t>(states.size());
  params.state_form = options.state_form;
  params.sinks = options.sinks.empty() ? nullptr : options.sinks.data();
  params.output.out = out;
  params.output.lse = lse;
  params.output.lse_form = options.lse_form;
  params.output.out_scale = options.out_scale;
  return kernels::run_merge(params);
}

Status combine_rank(const TensorView& out, std::span<const float> lses, int64_t num_ranks,
                    int64_t rank, float* total_lse, const CombineOptions& options) {
  if (Status status = check_sinks(options.sinks, out); !status.ok()) return status;
  kernels::CombineParams params;
  params.out = out;
  params.lses = lses.data();
  params.num_ranks = num_ranks;
  params.rank = rank;
  params.lse_form = options.lse_form;
  params.sinks = options.sinks.empty() ? nullptr : options.sinks.data();
  params.total_lse = total_lse;
  if (Status status = kernels::validate_combine(params); !status.ok()) return status;
  // The shape has been checked, so the product of rows and heads fits.
  const int64_t per_rank = out.shape[0] * out.shape[1];
  const auto entries = static_cast<int64_t>(lses.size());
  if (per_rank == 0 ? entries != 0 : entries % per_rank != 0 || entries / per_rank != num_ranks)
    return {ErrorCode::kInvalidArgument,
            "lses has " + std::to_string(entries) + " entries, expected num_ranks " +
                std::to_string(num_ranks) + " times " + std::to_string(per_rank)};
  return kernels::run_combine(params);
}

}  // namespace larder
