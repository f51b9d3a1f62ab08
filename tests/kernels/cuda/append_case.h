// Appends on the GPU of every kind: what every CUDA row that takes a call leaves in the layers
// equals what the CPU's appends, one layer at a time, leave there.
#pragma once

#include <algorithm>
#include <limits>
#include <memory>
#include <set>
#include <string_view>
#include <vector>

#include "tests/kernels/cuda/every_row.h"

namespace larder::test {

using kernels::AppendParams;
using kernels::FurtherLayer;

inline constexpr int64_t kRopeTableRows = 400;

struct AppendCase {
  AttentionGeometry geometry;
  Encoder encoder = Encoder::kReference;
  KeyTransform transform = KeyTransform::kNone;
  Dtype k_dtype = Dtype::kBf16;
  Dtype v_dtype = Dtype::kBf16;
  int64_t rows = 9;
  int64_t further_rows = 0;  // of k and v after those that have a slot
  int slot_bits = 64;
  int num_layers = 1;
  bool wrong = false;    // slots past the pool, blocks without the right, positions that cannot be
  bool aligned = false;  // memory, strides and scales as tuned rows take them
  int32_t rope_dim = 0;  // 0: no rotation
  bool interleaved = false;
  bool with_tables = false;
  Dtype table_dtype = Dtype::kBf16;
  int position_bits = 64;  // 0: row i has row i of the tables
};

// Anything but the geometry, the transform and what is turned.
inline AppendCase any_append(std::mt19937_64& engine) {
  AppendCase c;
  c.encoder = pick(engine, {Encoder::kReference, Encoder::kReference, Encoder::kFourOverSix,
                            Encoder::kBestScale});
  c.k_dtype = pick(engine, {Dtype::kBf16, Dtype::kBf16, Dtype::kFp16, Dtype::kFp32});
  c.v_dtype = draw(engine, 0, 3) == 0 ? pick(engine, {Dtype::kBf16, Dtype::kFp16}) : c.k_dtype;
  c.further_rows = pick<int64_t>(engine, {0, 0, 3});
  c.interleaved = draw(engine, 0, 1) == 0;
  c.with_tables = draw(engine, 0, 1) == 0;
  c.table_dtype = pick(engine, {Dtype::kBf16, Dtype::kFp16, Dtype::kFp32});
  c.position_bits = c.with_tables ? pick(engine, {0, 32, 64}) : pick(engine, {32, 64});
  c.slot_bits = pick(engine, {32, 64});
  c.num_layers = static_cast<int>(draw(engine, 1, 4));
  c.wrong = draw(engine, 0, 2) == 0;
  return c;
}

inline std::string text_of(const AppendCase& c) {
  std::ostringstream text;
  text << "K " << name(c.k_dtype) << " V " << name(c.v_dtype) << " rows " << c.rows << " layers "
       << c.num_layers << " slots of " << c.slot_bits << " bits rope dim " << c.rope_dim
       << (c.interleaved ? " interleaved" : " in halves") << " tables " << c.with_tables << " of "
       << name(c.table_dtype) << " positions of " << c.position_bits << " bits wrong " << c.wrong
       << " aligned " << c.aligned;
  return text.str();
}

// Slots and positions, as they are and as the CPU, which is asked nothing wrong, gets them.
struct AppendTables {
  std::vector<int64_t> slots, good_slots, positions, wrong;

  AppendTables(const AppendCase& c, int64_t num_blocks, const PointOfUse& use,
               std::mt19937_64& engine) {
    draw_slots(c, num_blocks * c.geometry.block_tokens, engine);
    draw_positions(c, engine);
    for (size_t row = 0; row < slots.size(); ++row) {
      const int64_t slot = slots[row];
      const int64_t position = positions[row];
      const bool takes_slot = slot >= 0 && use.may(slot / c.geometry.block_tokens, true);
      const bool takes_position =
          c.rope_dim == 0 || (position >= 0 && (!c.with_tables || position < kRopeTableRows));
      if (slot >= 0 && !takes_slot) wrong.push_back(slot);
      if (takes_slot && !takes_position) wrong.push_back(position);
      good_slots.push_back(takes_slot && takes_position ? slot : -1);
    }
  }

 private:
  // Distinct, as of equal slots it is open on a GPU which row stays; neighbours or far apart, and a
  // few skipped.
  void draw_slots(const AppendCase& c, int64_t pool_slots, std::mt19937_64& engine) {
    const int64_t largest = c.slot_bits == 32 ? std::numeric_limits<int32_t>::max()
                                              : std::numeric_limits<int64_t>::max();
    const bool in_order = draw(engine, 0, 1) == 0;
    const int64_t first = draw(engine, 0, pool_slots - 1);
    std::set<int64_t> taken;
    for (int64_t row = 0; row < c.rows; ++row) {
      int64_t slot = in_order ? (first + row) % pool_slots : draw(engine, 0, pool_slots - 1);
      if (draw(engine, 0, 7) == 0 || !taken.insert(slot).second)
        slot = pick<int64_t>(engine, {-1, -7, -largest - 1});
      if (c.wrong && draw(engine, 0, 5) == 0)
        slot = pick<int64_t>(engine, {pool_slots, pool_slots + 1, largest});
      slots.push_back(slot);
    }
  }
  void draw_positions(const AppendCase& c, std::mt19937_64& engine) {
    constexpr int64_t kInt32Max = std::numeric_limits<int32_t>::max();
    for (int64_t row = 0; row < c.rows; ++row) {
      int64_t position = c.position_bits == 0
                             ? row
                             : draw(engine, 0, c.with_tables ? kRopeTableRows - 1 : 1'000'000);
      if (c.wrong && c.position_bits != 0 && draw(engine, 0, 5) == 0)
        position = c.with_tables ? pick<int64_t>(engine, {-1, kRopeTableRows, kInt32Max})
                                 : pick<int64_t>(engine, {-1, -kInt32Max - 1});
      positions.push_back(position);
    }
  }
};

// cos | sin in rows with a gap; as vLLM's cache where there is none.
struct RopeTables {
  std::vector<std::byte> bytes;
  int64_t stride;
  int64_t sin_offset_bytes;
  RopeTables(const AppendCase& c, std::mt19937_64& engine)
      : stride(c.rope_dim + pick<int64_t>(engine, {0, 0, 1, 8})),
        sin_offset_bytes(c.rope_dim / 2 * dtype_bytes(c.table_dtype)) {
    const int64_t size = dtype_bytes(c.table_dtype);
    bytes.assign(static_cast<size_t>(kRopeTableRows * stride * size), std::byte{0xFF});
    std::normal_distribution<float> normal;
    for (int64_t row = 0; row < kRopeTableRows; ++row)
      for (int32_t i = 0; i < c.rope_dim; ++i)
        store_float(c.table_dtype, normal(engine), bytes.data() + (row * stride + i) * size);
  }
  void set(const AppendCase& c, const std::byte* base, Rope& rope) const {
    if (!c.with_tables) return;
    rope.cos = base;
    rope.sin = base + sin_offset_bytes;
    rope.table_dtype = c.table_dtype;
    rope.table_stride = stride;
    rope.table_rows = kRopeTableRows;
  }
};

// Layers of one block stride, each with scales, offsets and rows of its own.
struct AppendLayers {
  std::vector<std::unique_ptr<TwinLayer>> twins;
  std::vector<std::vector<std::byte>> k, v;
  std::vector<DeviceBytes> device_k, device_v;
  AnyTensor k_shape, v_shape;

  AppendLayers(const AppendCase& c, int64_t num_blocks, std::mt19937_64& engine)
      : k_shape(c.k_dtype, c.rows + c.further_rows, c.geometry.num_kv_heads,
                c.geometry.mla_row != MlaRow::kNone ? 512 : c.geometry.k_dim,
                draw(engine, 0, 1) == 0, engine, c.aligned ? 8 : 1),
        v_shape(c.v_dtype, c.rows + c.further_rows, c.geometry.num_kv_heads,
                c.geometry.mla_row != MlaRow::kNone ? 64 : c.geometry.v_dim,
                draw(engine, 0, 1) == 0, engine, c.aligned ? 8 : 1) {
    if (draw(engine, 0, 1) == 0) {
      k_shape.loosen();
      v_shape.loosen();
    }
    while (twins.size() < static_cast<size_t>(c.num_layers)) {
      auto twin = std::make_unique<TwinLayer>(c.geometry, num_blocks, engine, c.aligned);
      if (!twins.empty() && twin->host().block_stride_bytes != twins[0]->host().block_stride_bytes)
        continue;
      twin->host().encoder = c.encoder;
      for (float* scale : {&twin->host().k_scale, &twin->host().v_scale})
        *scale = c.aligned ? pick(engine, {1.0f, 0.37f, 0.02f, 1e-6f, 300.0f}) : any_scale(engine);
      twin->set_transform(c.transform, engine);
      twins.push_back(std::move(twin));
      k_shape.fill(engine);
      v_shape.fill(engine);
      k.push_back(k_shape.bytes);
      v.push_back(v_shape.bytes);
      device_k.emplace_back(k.back());
      device_v.emplace_back(v.back());
    }
  }
  // The layers on the device, with the bytes that the host has now.
  AppendParams on_device(std::vector<FurtherLayer>& further) {
    AppendParams params;
    further.clear();
    for (size_t i = 0; i < twins.size(); ++i) {
      const kernels::LayerView layer = twins[i]->device();
      const TensorView k_view = k_shape.view(device_k[i].data());
      const TensorView v_view = v_shape.view(device_v[i].data());
      if (i == 0) {
        params.layer = layer;
        params.k = k_view;
        params.v = v_view;
      } else {
        further.push_back(
            {layer.base, k_view.data, v_view.data, layer.key_offset, layer.k_scale, layer.v_scale});
      }
    }
    params.further_layers = further.data();
    params.num_further_layers = static_cast<int64_t>(further.size());
    return params;
  }
  // The pools' bytes after the CPU's appends; the twins keep what they have.
  std::vector<std::vector<std::byte>> expected(const AppendCase& c, const AppendTables& tables,
                                               const Rope& rope) {
    std::vector<std::vector<std::byte>> results;
    for (size_t i = 0; i < twins.size(); ++i) {
      std::vector<std::byte>& bytes = twins[i]->pool.bytes();
      const std::vector<std::byte> before = bytes;
      AppendParams params = append_of(twins[i]->host(), k_shape.view(k[i].data()),
                                      v_shape.view(v[i].data()), tables.good_slots.data(), c.rows);
      params.rope = rope;
      if (c.position_bits != 0) params.rope.positions = tables.positions.data();
      check_ok(run_append(params));
      results.push_back(bytes);
      std::copy(before.begin(), before.end(), bytes.begin());
    }
    return results;
  }
  void check(const std::vector<std::vector<std::byte>>& expected) const {
    for (size_t i = 0; i < twins.size(); ++i) {
      const kernels::LayerView& layer = twins[i]->host();
      const std::string text = differences(twins[i]->read(), expected[i], [&layer](int64_t byte) {
        return place_in_pool(layer, byte);
      });
      CHECK_MESSAGE(text.empty(),
                    "append, layer " << i << " of " << text_of(layer) << ": " << text);
    }
  }
};

// The names of the CUDA rows that have taken the call.
inline std::vector<std::string_view> run_append_case(const AppendCase& c, std::mt19937_64& engine) {
  const int64_t num_blocks = c.rows / c.geometry.block_tokens + 2;
  PointOfUse use(num_blocks, c.wrong, engine);
  AppendLayers layers(c, num_blocks, engine);
  const AppendTables tables(c, num_blocks, use, engine);
  const RopeTables rope_tables(c, engine);
  CAPTURE(text_of(c));
  Rope rope;
  rope.dim = c.rope_dim;
  rope.interleaved = c.interleaved;
  rope.theta = pick(engine, {10000.0, 500000.0, 1.25});
  rope_tables.set(c, rope_tables.bytes.data(), rope);
  const auto expected = layers.expected(c, tables, rope);

  const auto narrowed = [](const std::vector<int64_t>& values) {
    return std::vector<int32_t>(values.begin(), values.end());
  };
  const DeviceBytes slots(tables.slots), slots32(narrowed(tables.slots));
  const DeviceBytes positions(tables.positions), positions32(narrowed(tables.positions));
  const DeviceBytes cache(rope_tables.bytes);
  rope_tables.set(c, cache.data(), rope);
  if (c.position_bits == 64) rope.positions = positions.data<int64_t>();
  if (c.position_bits == 32) rope.positions32 = positions32.data<int32_t>();
  std::vector<FurtherLayer> further;
  return on_every_row<AppendParams>(
      kernels::append_kernels(), use.target(),
      [&] {
        (void)use.target();  // clears the faults
        AppendParams params = layers.on_device(further);
        if (c.slot_bits == 64)
          params.slots = slots.data<int64_t>();
        else
          params.slots32 = slots32.data<int32_t>();
        params.num_slots = c.rows;
        params.rope = rope;
        check_ok(validate_append(params, kernels::Tables::kDevice));
        return params;
      },
      [&] {
        layers.check(expected);
        use.check(tables.wrong);
      });
}

}  // namespace larder::test
