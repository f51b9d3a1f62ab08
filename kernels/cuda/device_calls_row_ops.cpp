// The ops of DeviceCalls on rows: append and gather.
#include <algorithm>
#include <cstring>
#include <functional>
#include <unordered_set>
#include <vector>

#include "kernels/cuda/device_calls_gpu.h"
#include "kernels/cuda/short_table.h"
#include "kernels/validate.h"

namespace larder::kernels::cuda {
namespace {

constexpr Op<AppendParams> kAppend = {validate_append, append_kernels, run_append};
constexpr Op<GatherParams> kGather = {validate_gather, gather_kernels, run_gather};

// The kernel knows no order of rows, so each slot may be named once: by its last row.
std::vector<int64_t> last_of_each(const AppendParams& call) {
  std::vector<int64_t> result;
  result.reserve(static_cast<size_t>(call.num_slots));
  for (int64_t row = 0; row < call.num_slots; ++row) result.push_back(slot_of(call, row));
  if (std::adjacent_find(result.begin(), result.end(), std::greater_equal<>()) == result.end())
    return result;
  std::unordered_set<int64_t> seen;
  for (auto slot = result.rbegin(); slot != result.rend(); ++slot)
    if (*slot >= 0 && !seen.insert(*slot).second) *slot = -1;
  return result;
}

// Of a table of cosines or sines, the rows of the call's positions, dense and in the order of the
// call; those of rows that are skipped are zeros.
std::vector<std::byte> rows_of_positions(const AppendParams& call, const void* table) {
  const Rope& rope = call.rope;
  const int64_t element_bytes = dtype_bytes(rope.table_dtype);
  const auto row_bytes = static_cast<size_t>(rope.dim / 2 * element_bytes);
  std::vector<std::byte> rows(static_cast<size_t>(call.num_slots) * row_bytes);
  for (int64_t row = 0; row < call.num_slots; ++row) {
    if (slot_of(call, row) < 0) continue;
    const int64_t position = rope.positions != nullptr     ? rope.positions[row]
                             : rope.positions32 != nullptr ? rope.positions32[row]
                                                           : row;
    std::memcpy(rows.data() + static_cast<size_t>(row) * row_bytes,
                static_cast<const std::byte*>(table) + position * rope.table_stride * element_bytes,
                row_bytes);
  }
  return rows;
}

// What the staging of a rotation copies from.
struct RopeRows {
  std::vector<std::byte> cosines;
  std::vector<std::byte> sines;
};

// Of tables that the device cannot use, the call's rows alone go there, which then need no
// positions.
void stage_rope(StagedCall& memory, const AppendParams& call, Rope& rope, RopeRows& rows) {
  if (rope.dim == 0 || call.num_slots == 0) return;
  if (rope.cos != nullptr) {
    const int64_t bytes =
        ((rope.table_rows - 1) * rope.table_stride + rope.dim / 2) * dtype_bytes(rope.table_dtype);
    const void* cosines = memory.device_address("rope.cos", rope.cos, bytes);
    const void* sines = memory.device_address("rope.sin", rope.sin, bytes);
    if (cosines == nullptr || sines == nullptr) {
      memory.needs_host("rope.cos", rope.cos).needs_host("rope.sin", rope.sin);
      if (!memory.status().ok()) return;
      rows.cosines = rows_of_positions(call, call.rope.cos);
      rows.sines = rows_of_positions(call, call.rope.sin);
      rope.cos = rows.cosines.data();
      rope.sin = rows.sines.data();
      rope.positions = nullptr;
      rope.positions32 = nullptr;
      rope.table_stride = rope.dim / 2;
      rope.table_rows = call.num_slots;
      memory.bytes("rope.cos", rope.cos, static_cast<int64_t>(rows.cosines.size()));
      memory.bytes("rope.sin", rope.sin, static_cast<int64_t>(rows.sines.size()));
      return;
    }
    rope.cos = cosines;
    rope.sin = sines;
  }
  memory.table("rope.positions", rope.positions, call.num_slots);
  memory.table("rope.positions32", rope.positions32, call.num_slots);
}

// The call, layer by layer; what layers share is the first's.
std::vector<AppendParams> layers_of(const AppendParams& call) {
  std::vector<AppendParams> layers = {call};
  for (int64_t i = 0; i < call.num_further_layers; ++i) layers.push_back(further_append(call, i));
  layers.front().further_layers = nullptr;
  layers.front().num_further_layers = 0;
  for (AppendParams& layer : layers) layer.k.shape[0] = layer.v.shape[0] = call.num_slots;
  return layers;
}

// Adds rows [first, first + count) to ranges in rising order.
void add_rows(std::vector<RowRange>& ranges, int64_t first, int64_t count) {
  if (count == 0) return;
  if (!ranges.empty() && ranges.back().first + ranges.back().count == first)
    ranges.back().count += count;
  else
    ranges.push_back({first, count});
}

// Rows that a gather call writes.
std::vector<RowRange> gathered_rows(const GatherParams& params) {
  std::vector<RowRange> ranges;
  int64_t next = 0;
  for (int64_t s = 0; s < params.num_seqs; ++s) {
    const int64_t first = params.rows_per_sequence > 0 ? s * params.rows_per_sequence : next;
    const int64_t count = params.seq_lens[s] - first_token_of(params, s);
    add_rows(ranges, first, count);
    next = first + count;
  }
  for (int64_t i = 0; i < params.num_slots; ++i)
    if (params.slots[i] >= 0) add_rows(ranges, i, 1);
  return ranges;
}

}  // namespace

// Layers whose tensors lie alike go together, as they do when all are staged or none is.
Status GpuCalls::launch_layers(std::vector<AppendParams>& layers) {
  AppendParams& first = layers.front();
  std::vector<FurtherLayer> further;
  bool are_alike = true;
  for (size_t i = 1; i < layers.size(); ++i) {
    AppendParams& layer = layers[i];
    layer.slots = first.slots;
    layer.slots32 = first.slots32;
    layer.rope = first.rope;
    are_alike &= layer.k.strides == first.k.strides && layer.v.strides == first.v.strides;
    further.push_back({layer.layer.base, layer.k.data, layer.v.data, layer.layer.key_offset,
                       layer.layer.k_scale, layer.layer.v_scale});
  }
  if (are_alike) {
    first.further_layers = further.data();
    first.num_further_layers = static_cast<int64_t>(further.size());
    return launch(kAppend, first, stream_, nullptr, nullptr);
  }
  for (const AppendParams& layer : layers)
    if (Status s = launch(kAppend, layer, stream_, nullptr, nullptr); !s.ok()) return s;
  return {};
}

Status GpuCalls::append(const AppendParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    memory.needs_host("slots", call.slots).needs_host("slots32", call.slots32);
    memory.needs_host("further_layers", call.further_layers);
    if (call.rope.dim != 0)
      memory.needs_host("rope.positions", call.rope.positions)
          .needs_host("rope.positions32", call.rope.positions32);
    if (!memory.status().ok()) return memory.status();
    if (Status s = validate_append(call); !s.ok()) return s;
    // Now, as layers may be launched one after another.
    if (Status s = check_further_layers(call); !s.ok()) return s;
    const std::vector<int64_t> slots = last_of_each(call);
    std::vector<AppendParams> layers = layers_of(call);
    AppendParams& first = layers.front();
    first.slots = slots.data();
    first.slots32 = nullptr;
    memory.table("slots", first.slots, first.num_slots);
    RopeRows rope_rows;
    stage_rope(memory, call, first.rope, rope_rows);
    for (AppendParams& layer : layers) {
      memory.tensor("k", Way::kIn, layer.k);
      memory.tensor("v", Way::kIn, layer.v);
    }
    return run_staged(memory, [&] { return launch_layers(layers); });
  });
}

Status GpuCalls::gather(const GatherParams& call) {
  return with_device([&]() -> Status {
    StagedCall memory(context_->device());
    memory.needs_host("slots", call.slots).needs_host("seq_lens", call.seq_lens);
    memory.needs_host("first_tokens", call.first_tokens);
    if (const Status& s = memory.needs_host("block_table", call.block_table).status(); !s.ok())
      return s;
    if (Status s = validate_gather(call); !s.ok()) return s;
    const std::vector<RowRange> written = gathered_rows(call);
    if (written.empty()) return {};
    const ShortTable table = short_table(call.block_table, call.block_table_stride, call.seq_lens,
                                         call.num_seqs, call.layer.geometry.block_tokens);
    GatherParams params = call;
    params.block_table = table.entries.data();
    params.block_table_stride = table.stride;
    memory.table("block_table", params.block_table, params.num_seqs * table.stride);
    memory.table("seq_lens", params.seq_lens, params.num_seqs);
    memory.table("first_tokens", params.first_tokens, params.num_seqs);
    memory.table("slots", params.slots, params.num_slots);
    // Rows past the last token need no scratch; but as many as slots there must be.
    const int64_t rows = std::max(params.num_slots, written.back().first + written.back().count);
    for (TensorView* out : {&params.k_out, &params.v_out})
      out->shape[0] = std::min(out->shape[0], rows);
    memory.tensor_rows("k_out", params.k_out, written);
    memory.tensor_rows("v_out", params.v_out, written);
    return run_staged(kGather, memory, params);
  });
}

Status GpuCalls::append_on(const AppendParams& params, void* stream, const BlockRights* rights,
                           CallFaults* faults) {
  return launch_on(kAppend, params, stream, rights, faults);
}

Status GpuCalls::gather_on(const GatherParams& params, void* stream, const BlockRights* rights,
                           CallFaults* faults) {
  return launch_on(kGather, params, stream, rights, faults);
}

}  // namespace larder::kernels::cuda
