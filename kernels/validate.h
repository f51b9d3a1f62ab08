// Private to kernels: the checks that the validate_* functions of several ops share.
//
// All arithmetic on values from a call is in 64 bits and cannot overflow: lengths are int32, and
// products of shapes and strides are checked.
#pragma once

#include <string_view>

#include "kernels/params.h"
#include "kernels/refuse.h"
#include "kernels/target.h"
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

// bf16, fp16 or fp32.
Status validate_float_dtype(std::string_view field, Dtype dtype);

// An array that may be absent: aligned to its elements.
Status validate_array(std::string_view field, const void* data, int64_t element_bytes);
// One that must be there if it has elements.
Status validate_array(std::string_view field, const void* data, int64_t element_bytes,
                      int64_t count);

Status refuse_slot(const LayerView& layer, std::string_view field, int64_t row, int64_t slot);

// Slots of 64 or 32 bits, which must be there if there are any.
template <typename Slot>
Status validate_slots(const LayerView& layer, std::string_view field, const Slot* slots,
                      int64_t num_slots, Tables tables) {
  if (num_slots > 0 && slots == nullptr)
    return refuse(kInvalid, field, " is null with num_slots ", num_slots);
  if (Status s = validate_array(field, slots, alignof(Slot)); !s.ok()) return s;
  if (tables == Tables::kDevice) return {};
  const int64_t pool_slots = layer.num_blocks * layer.geometry.block_tokens;
  for (int64_t i = 0; i < num_slots; ++i)
    if (slots[i] >= pool_slots) return refuse_slot(layer, field, i, slots[i]);
  return {};
}

// Of an append, what is needed where the pool is mapped: the further layers' memory and key
// offsets, and that no two layers lie on top of each other as far as two of them are less than a
// page apart.
Status check_further_layers(const AppendParams& params);

// Rows on top of each other are no use where a call writes, and would let a small call ask for
// endless work.
Status validate_written(std::string_view field, const TensorView& view);

// The output of [num_rows, num_heads, dim] values, in any output dtype.
Status validate_output(const AttentionOutput& output, int64_t num_rows, int64_t num_heads,
                       int64_t dim);

}  // namespace larder::kernels
