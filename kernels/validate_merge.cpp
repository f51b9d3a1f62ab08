// The checks of merge and combine calls.
#include "kernels/kernel_table.h"
#include "kernels/refuse.h"
#include "kernels/validate.h"

namespace larder::kernels {
namespace {

// A tensor of results: any number of heads and any dim within the limits.
Status validate_result_shape(std::string_view field, const TensorView& view) {
  const auto& [num_rows, num_heads, dim] = view.shape;
  if (num_rows >= 0 && num_heads >= 1 && num_heads <= kMaxQueryHeads && dim >= 1 &&
      dim <= kMaxHeadDim)
    return {};
  return refuse(kInvalid, field, " is [", num_rows, ", ", num_heads, ", ", dim,
                "]: expected [rows, up to ", kMaxQueryHeads, ", up to ", kMaxHeadDim, "]");
}

Status validate_count(std::string_view field, int64_t count) {
  if (count >= 1 && count <= kMaxMergeStates) return {};
  return refuse(kInvalid, field, " is ", count, ": expected 1 to ", kMaxMergeStates);
}

// Whether an element of one lies where the other has another element, as far as their beginning
// tells: a view may be read and then overwritten only if it is the same view.
bool same_places(const TensorView& a, const TensorView& b) {
  if (a.dtype != b.dtype) return false;
  for (size_t axis = 0; axis < 3; ++axis)
    if (a.shape[axis] > 1 && a.strides[axis] != b.strides[axis]) return false;
  return true;
}

Status validate_state(const MergeParams& params, int64_t state) {
  const TensorView& first = params.outs[0];
  const TensorView& out = params.outs[state];
  const std::string field = "outs[" + std::to_string(state) + "]";
  if (Status s = validate_float_tensor(field, out, first.shape[1], first.shape[2]); !s.ok())
    return s;
  if (out.shape[0] != first.shape[0])
    return refuse(kInvalid, field, " has ", out.shape[0], " rows: outs[0] has ", first.shape[0]);
  if (Status s = validate_array("lses[" + std::to_string(state) + "]", params.lses[state],
                                alignof(float), first.shape[0]);
      !s.ok())
    return s;
  const AttentionOutput& output = params.output;
  if (out.data == output.out.data && first.shape[0] > 0 && !same_places(out, output.out))
    return refuse(kInvalid, "out begins where ", field,
                  " does, with another dtype or other strides: expected the same view, or other "
                  "memory");
  if (params.lses[state] == output.lse && output.lse != nullptr &&
      params.state_form.heads_first != output.lse_form.heads_first)
    return refuse(kInvalid, "lse is the memory of lses[", state,
                  "] in another order of rows and heads: expected the same order, or other memory");
  return {};
}

}  // namespace

Status validate_merge(const MergeParams& params) {
  if (Status s = validate_count("num_states", params.num_states); !s.ok()) return s;
  if (Status s = validate_array("outs", params.outs, alignof(TensorView), params.num_states);
      !s.ok())
    return s;
  if (Status s = validate_array("lses", params.lses, alignof(float*), params.num_states); !s.ok())
    return s;
  if (params.state_form.includes_sink)
    return refuse(kInvalid, "state_form includes sinks: states are merged without them");
  if (Status s = validate_result_shape("outs[0]", params.outs[0]); !s.ok()) return s;
  const auto& [num_rows, num_heads, dim] = params.outs[0].shape;
  if (Status s = validate_output(params.output, num_rows, num_heads, dim); !s.ok()) return s;
  if (Status s = validate_array("sinks", params.sinks, alignof(float)); !s.ok()) return s;
  for (int64_t state = 0; state < params.num_states; ++state)
    if (Status s = validate_state(params, state); !s.ok()) return s;
  return {};
}

Status validate_combine(const CombineParams& params) {
  if (Status s = validate_result_shape("out", params.out); !s.ok()) return s;
  const auto& [num_rows, num_heads, dim] = params.out.shape;
  if (Status s = validate_float_tensor("out", params.out, num_heads, dim); !s.ok()) return s;
  if (Status s = validate_written("out", params.out); !s.ok()) return s;
  if (Status s = validate_count("num_ranks", params.num_ranks); !s.ok()) return s;
  if (params.rank < 0 || params.rank >= params.num_ranks)
    return refuse(kInvalid, "rank is ", params.rank, ": expected 0 to ", params.num_ranks - 1);
  int64_t num_lses = 0;
  if (__builtin_mul_overflow(num_rows, num_heads * params.num_ranks, &num_lses))
    return refuse(kInvalid, "out has ", num_rows, " rows: the lses pass 2^63 entries");
  if (Status s = validate_array("lses", params.lses, alignof(float), num_lses); !s.ok()) return s;
  if (Status s = validate_array("sinks", params.sinks, alignof(float)); !s.ok()) return s;
  return validate_array("total_lse", params.total_lse, alignof(float));
}

}  // namespace larder::kernels
