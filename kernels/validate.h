// Private to kernels: the checks that the validate_* functions of several ops share.
//
// All arithmetic on values from a call is in 64 bits and cannot overflow: lengths are int32, and
// products of shapes and strides are checked.
#pragma once

#include <string_view>

#include "kernels/params.h"
#include "larder/status.h"

namespace larder::kernels {

inline constexpr ErrorCode kInvalid = ErrorCode::kInvalidArgument;

bool is_aligned(const void* pointer, int64_t bytes);
Status validate_layer(const LayerView& layer);

// The part of it that says where pages lie. The geometry's fields are checked already.
Status validate_layer_memory(const LayerView& layer);

// A tensor of [rows, num_heads, dim]. `num_heads` <= 0 leaves the number of heads to the caller.
Status validate_tensor(std::string_view field, const TensorView& view, int64_t num_heads,
                       int64_t dim);

// As validate_tensor, of a dtype that kernels read: bf16, fp16 or fp32.
Status validate_float_tensor(std::string_view field, const TensorView& view, int64_t num_heads,
                             int64_t dim);

// An array that may be absent: aligned to its elements.
Status validate_array(std::string_view field, const void* data, int64_t element_bytes);
// One that must be there if it has elements.
Status validate_array(std::string_view field, const void* data, int64_t element_bytes,
                      int64_t count);

// Rows on top of each other are no use where a call writes, and would let a small call ask for
// endless work.
Status validate_written(std::string_view field, const TensorView& view);

// The output of [num_rows, num_heads, dim] values, in any output dtype.
Status validate_output(const AttentionOutput& output, int64_t num_rows, int64_t num_heads,
                       int64_t dim);

}  // namespace larder::kernels
