// The checks of append calls: rows, slots, rotation and further layers.
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "kernels/checked_int64.h"
#include "kernels/kernel_table.h"
#include "kernels/refuse.h"
#include "kernels/validate.h"

namespace larder::kernels {
namespace {

Status validate_source(std::string_view field, const TensorView& view, int64_t num_heads,
                       int64_t dim) {
  if (Status s = validate_tensor(field, view, num_heads, dim); !s.ok()) return s;
  return validate_float_dtype(field, view.dtype);
}

Status validate_append_slots(const AppendParams& params, Tables tables) {
  if (params.slots32 == nullptr)
    return validate_slots(params.layer, "slots", params.slots, params.num_slots, tables);
  if (params.slots != nullptr)
    return refuse(kInvalid, "slots32 is given with slots: expected one of the two");
  return validate_slots(params.layer, "slots32", params.slots32, params.num_slots, tables);
}

Status validate_table(std::string_view field, const Rope& rope, const void* table) {
  if (!is_aligned(table, dtype_bytes(rope.table_dtype)))
    return refuse(kInvalid, field, " is not aligned to the ", dtype_bytes(rope.table_dtype),
                  " bytes of ", name(rope.table_dtype));
  return {};
}

Status validate_tables(const Rope& rope) {
  if (rope.cos == nullptr || rope.sin == nullptr)
    return refuse(
        kInvalid,
        rope.cos == nullptr ? "rope.cos is null with rope.sin" : "rope.sin is null with rope.cos",
        ": expected both tables or none");
  if (static_cast<size_t>(rope.table_dtype) >= kDtypeNames.size())
    return refuse(kInvalid, "rope.table_dtype is ", static_cast<int>(rope.table_dtype),
                  ": expected bf16, fp16 or fp32");
  if (Status s = validate_float_dtype("rope.cos", rope.table_dtype); !s.ok()) return s;
  if (Status s = validate_table("rope.cos", rope, rope.cos); !s.ok()) return s;
  if (Status s = validate_table("rope.sin", rope, rope.sin); !s.ok()) return s;
  if (rope.table_rows < 1)
    return refuse(kInvalid, "rope.table_rows is ", rope.table_rows, ": expected 1 or more");
  if (rope.table_stride < rope.dim / 2)
    return refuse(kInvalid, "rope.table_stride is ", rope.table_stride, ": a row has ",
                  rope.dim / 2, " values");
  const CheckedInt64 bytes =
      (CheckedInt64(rope.table_rows) * rope.table_stride) * dtype_bytes(rope.table_dtype);
  if (!bytes.fits)
    return refuse(kInvalid, "rope.table_stride is ", rope.table_stride, " with ", rope.table_rows,
                  " rows: the tables pass 2^63 bytes");
  return {};
}

template <typename Position>
Status validate_positions(std::string_view field, const AppendParams& params,
                          const Position* positions, Tables tables) {
  if (Status s = validate_array(field, positions, alignof(Position)); !s.ok()) return s;
  if (tables == Tables::kDevice) return {};
  const bool has_tables = params.rope.cos != nullptr;
  for (int64_t row = 0; row < params.num_slots; ++row) {
    if (slot_of(params, row) < 0) continue;
    if (positions[row] < 0)
      return refuse(kInvalid, field, "[", row, "] is ", positions[row], ": expected 0 or more");
    if (has_tables && positions[row] >= params.rope.table_rows)
      return refuse(kInvalid, field, "[", row, "] is ", positions[row], ": the tables have ",
                    params.rope.table_rows, " rows");
  }
  return {};
}

// The slots have been checked.
Status validate_rope(const AppendParams& params, Tables tables) {
  const Rope& rope = params.rope;
  if (rope.dim == 0) return {};
  const AttentionGeometry& geometry = params.layer.geometry;
  const int32_t largest =
      std::min(geometry.mla_row != MlaRow::kNone ? kMlaRopeDim : geometry.k_dim, kMaxRopeDim);
  if (rope.dim < 0 || rope.dim % 2 != 0 || rope.dim > largest)
    return refuse(kInvalid, "rope.dim is ", rope.dim, ": expected an even number from 0 to ",
                  largest);
  const bool has_tables = rope.cos != nullptr || rope.sin != nullptr;
  if (has_tables)
    if (Status s = validate_tables(rope); !s.ok()) return s;
  if (!has_tables && !(std::isfinite(rope.theta) && rope.theta > 1))
    return refuse(kInvalid, "rope.theta is ", rope.theta, ": expected a finite number > 1");
  if (rope.positions != nullptr && rope.positions32 != nullptr)
    return refuse(kInvalid, "rope.positions32 is given with rope.positions: expected one of them");
  if (rope.positions != nullptr)
    return validate_positions("rope.positions", params, rope.positions, tables);
  if (rope.positions32 != nullptr)
    return validate_positions("rope.positions32", params, rope.positions32, tables);
  if (!has_tables && params.num_slots > 0)
    return refuse(kInvalid, "rope.positions is null with num_slots ", params.num_slots,
                  ": expected a position for each, or tables");
  if (has_tables && rope.table_rows < params.num_slots)
    return refuse(kInvalid, "rope.table_rows is ", rope.table_rows,
                  ": without positions there is "
                  "a row for each of the ",
                  params.num_slots, " slots");
  return {};
}

Status validate_further_layers(const AppendParams& params) {
  if (params.num_further_layers < 0 || params.num_further_layers >= kMaxLayers)
    return refuse(kInvalid, "num_further_layers is ", params.num_further_layers, ": expected 0 to ",
                  kMaxLayers - 1);
  if (params.num_further_layers > 0 && params.further_layers == nullptr)
    return refuse(kInvalid, "further_layers is null with num_further_layers ",
                  params.num_further_layers);
  const bool has_rows = params.k.shape[0] > 0;
  for (int64_t i = 0; i < params.num_further_layers; ++i) {
    const FurtherLayer& layer = params.further_layers[i];
    const std::string field = "further_layers[" + std::to_string(i) + "]";
    for (const auto& [name, data, dtype] :
         {std::tuple(".k", layer.k, params.k.dtype), std::tuple(".v", layer.v, params.v.dtype)}) {
      if (has_rows && data == nullptr)
        return refuse(kInvalid, field, name, " is null with ", params.k.shape[0], " rows");
      if (!is_aligned(data, dtype_bytes(dtype)))
        return refuse(kInvalid, field, name, " is not aligned to the ", dtype_bytes(dtype),
                      " bytes of ", larder::name(dtype));
    }
    if (!is_aligned(layer.key_offset, alignof(float)))
      return refuse(kInvalid, field, ".key_offset is not aligned to 4 bytes");
    if (Status s = validate_scale(field + ".k_scale", layer.k_scale); !s.ok()) return s;
    if (Status s = validate_scale(field + ".v_scale", layer.v_scale); !s.ok()) return s;
  }
  return {};
}

}  // namespace

Status check_further_layers(const AppendParams& params) {
  if (params.num_further_layers == 0) return {};
  const LayerView& first = params.layer;
  std::vector<uintptr_t> bases = {reinterpret_cast<uintptr_t>(first.base)};
  for (int64_t i = 0; i < params.num_further_layers; ++i) {
    const FurtherLayer& layer = params.further_layers[i];
    if (first.num_blocks > 0 && layer.base == nullptr)
      return refuse(kInvalid, "further_layers[", i, "].base is null with ", first.num_blocks,
                    " blocks");
    if (is_centred(first.key_transform) && layer.key_offset == nullptr)
      return refuse(kInvalid, "further_layers[", i, "].key_offset is null with key_transform ",
                    name(first.key_transform));
    bases.push_back(reinterpret_cast<uintptr_t>(layer.base));
  }
  if (first.num_blocks == 0) return {};
  std::sort(bases.begin(), bases.end());
  const auto page_bytes = static_cast<uintptr_t>(first.page.page_bytes);
  for (size_t i = 1; i < bases.size(); ++i)
    if (bases[i] - bases[i - 1] < page_bytes)
      return refuse(kInvalid, "two layers begin ", bases[i] - bases[i - 1],
                    " bytes apart: expected the ", page_bytes, " bytes of a page at least");
  return {};
}

Status validate_append(const AppendParams& params, Tables tables) {
  const AttentionGeometry& geometry = params.layer.geometry;
  if (Status s = validate_layer(params.layer); !s.ok()) return s;
  const bool is_mla = geometry.mla_row != MlaRow::kNone;
  if (Status s = validate_source("k", params.k, geometry.num_kv_heads,
                                 is_mla ? kMlaLatentDim : geometry.k_dim);
      !s.ok())
    return s;
  if (Status s = validate_source("v", params.v, geometry.num_kv_heads,
                                 is_mla ? kMlaRopeDim : geometry.v_dim);
      !s.ok())
    return s;
  if (params.v.shape[0] != params.k.shape[0])
    return refuse(kInvalid, "v has ", params.v.shape[0], " rows: k has ", params.k.shape[0]);
  if (params.num_slots < 0 || params.num_slots > params.k.shape[0])
    return refuse(kInvalid, "num_slots is ", params.num_slots, ": k has ", params.k.shape[0],
                  " rows");
  if (Status s = validate_append_slots(params, tables); !s.ok()) return s;
  if (Status s = validate_rope(params, tables); !s.ok()) return s;
  return validate_further_layers(params);
}

}  // namespace larder::kernels
