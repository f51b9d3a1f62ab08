// The checks of arrays and outputs that attention ops share.
#include "kernels/kernel_table.h"
#include "kernels/refuse.h"
#include "kernels/validate.h"

namespace larder::kernels {
namespace {

// out of e2m1x2 and its scales: a pair per byte, groups of 16 values.
Status validate_nvfp4_output(const AttentionOutput& output, int64_t num_rows, int64_t num_heads,
                             int64_t dim) {
  if (dim % kNvfp4GroupElements != 0)
    return refuse(kInvalid, "out: dtype is e2m1x2 with a dim of ", dim, ": expected a multiple of ",
                  kNvfp4GroupElements);
  if (Status s = validate_scale("out_sf_scale", output.out_sf_scale); !s.ok()) return s;
  if (output.out_sf_first_row < 0)
    return refuse(kInvalid, "out_sf_first_row is ", output.out_sf_first_row,
                  ": expected 0 or more");
  if (output.out_sf == nullptr && num_rows > 0)
    return refuse(kInvalid, "out_sf is null with ", num_rows, " rows of e2m1x2");
  // What the last tile needs, rounded up generously.
  int64_t bytes = 0;
  if (__builtin_add_overflow(num_rows, output.out_sf_first_row, &bytes) ||
      __builtin_add_overflow(bytes, int64_t{127}, &bytes) ||
      __builtin_mul_overflow(bytes, num_heads * dim / kNvfp4GroupElements + 3, &bytes))
    return refuse(kInvalid, "out_sf_first_row is ", output.out_sf_first_row, " with ", num_rows,
                  " rows: the scales pass 2^63 bytes");
  return {};
}

}  // namespace

Status validate_float_tensor(std::string_view field, const TensorView& view, int64_t num_heads,
                             int64_t dim) {
  if (view.dtype == Dtype::kFp8E4m3 || view.dtype == Dtype::kE2m1x2)
    return refuse(kInvalid, field, ": dtype is ", name(view.dtype),
                  ", which is for outputs only: expected bf16, fp16 or fp32");
  return validate_tensor(field, view, num_heads, dim);
}

Status validate_array(std::string_view field, const void* data, int64_t element_bytes) {
  if (is_aligned(data, element_bytes)) return {};
  return refuse(kInvalid, field, " is not aligned to ", element_bytes, " bytes");
}

Status validate_array(std::string_view field, const void* data, int64_t element_bytes,
                      int64_t count) {
  if (data == nullptr && count > 0)
    return refuse(kInvalid, field, " is null: ", count, " entries are needed");
  return validate_array(field, data, element_bytes);
}

Status validate_written(std::string_view field, const TensorView& view) {
  for (size_t axis = 0; axis < 3; ++axis)
    if (view.shape[axis] > 1 && view.strides[axis] == 0)
      return refuse(kInvalid, field, ": the stride of axis ", axis, " is 0 with size ",
                    view.shape[axis]);
  return {};
}

Status validate_output(const AttentionOutput& output, int64_t num_rows, int64_t num_heads,
                       int64_t dim) {
  const bool is_nvfp4 = output.out.dtype == Dtype::kE2m1x2;
  if (is_nvfp4) {
    if (Status s = validate_nvfp4_output(output, num_rows, num_heads, dim); !s.ok()) return s;
  }
  if (Status s = validate_tensor("out", output.out, num_heads, is_nvfp4 ? dim / 2 : dim); !s.ok())
    return s;
  if (output.out.shape[0] != num_rows)
    return refuse(kInvalid, "out has ", output.out.shape[0], " rows: expected ", num_rows);
  if (Status s = validate_written("out", output.out); !s.ok()) return s;
  if (output.out.dtype == Dtype::kFp8E4m3) {
    if (Status s = validate_scale("out_scale", output.out_scale); !s.ok()) return s;
  }
  return validate_array("lse", output.lse, alignof(float));
}

}  // namespace larder::kernels
