// What the tests of CUDA rows share: random tensors and layers that exist on the host and on the
// device, rights and faults, and comparisons that name the first differences.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstring>
#include <functional>
#include <random>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <doctest/doctest.h>

#include "kernels/cpu/bf16.h"
#include "kernels/kernel_table.h"
#include "tests/support/gpu.h"
#include "tests/support/nvfp4_pool.h"
#include "tests/support/random.h"

namespace larder::test {

inline int64_t draw(std::mt19937_64& engine, int64_t from, int64_t to) {
  return std::uniform_int_distribution<int64_t>(from, to)(engine);
}
template <typename T>
T pick(std::mt19937_64& engine, std::initializer_list<T> values) {
  return values.begin()[draw(engine, 0, static_cast<int64_t>(values.size()) - 1)];
}

// Bytes that differ, the first three of them and where they lie; "" for none.
inline std::string differences(const std::vector<std::byte>& got,
                               const std::vector<std::byte>& expected,
                               const std::function<std::string(int64_t)>& place = nullptr) {
  std::ostringstream text;
  if (got.size() != expected.size())
    text << got.size() << " bytes instead of " << expected.size() << "; ";
  int64_t count = 0;
  for (size_t i = 0; i < std::min(got.size(), expected.size()); ++i) {
    if (got[i] == expected[i] || ++count > 3) continue;
    text << "byte " << i;
    if (place) text << " (" << place(static_cast<int64_t>(i)) << ")";
    text << " is " << std::to_integer<int>(got[i]) << " instead of "
         << std::to_integer<int>(expected[i]) << "; ";
  }
  if (count > 0) text << count << " of " << expected.size() << " bytes differ";
  return text.str();
}

// Which row of a page a byte of a pool belongs to.
inline std::string place_in_pool(const kernels::LayerView& layer, int64_t byte) {
  const AttentionGeometry& g = layer.geometry;
  const PageLayout& page = layer.page;
  int64_t offset = byte % layer.block_stride_bytes;
  std::ostringstream text;
  text << "block " << byte / layer.block_stride_bytes;
  if (offset >= page.page_bytes) {
    text << " after its page";
  } else if (g.mla_row != MlaRow::kNone) {
    const int64_t row_bytes = mla_row_bytes(g.mla_row);
    text << " token " << offset / row_bytes << " byte " << offset % row_bytes;
  } else {
    const bool is_v = offset >= page.v_data_offset_bytes;
    const bool is_scale = offset >= (is_v ? page.v_scale_offset_bytes : page.k_scale_offset_bytes);
    if (is_v) offset -= is_scale ? page.v_scale_offset_bytes : page.v_data_offset_bytes;
    if (!is_v) offset -= is_scale ? page.k_scale_offset_bytes : page.k_data_offset_bytes;
    const KvFormat format = is_v ? g.v_format : g.k_format;
    const int32_t dim = is_v ? g.v_dim : g.k_dim;
    const int64_t row_bytes = is_scale ? row_scale_bytes(format, dim) : row_data_bytes(format, dim);
    const int64_t row = offset / row_bytes;
    text << (is_v ? " V" : " K") << (is_scale ? " scales" : " data") << " head "
         << row / g.block_tokens << " token " << row % g.block_tokens << " byte "
         << offset % row_bytes;
  }
  return text.str();
}

inline void store_float(Dtype dtype, float value, std::byte* to) {
  const uint16_t half =
      dtype == Dtype::kBf16 ? kernels::float_to_bf16(value) : kernels::float_to_fp16(value);
  std::memcpy(to, dtype == Dtype::kFp32 ? static_cast<const void*>(&value) : &half,
              static_cast<size_t>(dtype_bytes(dtype)));
}

// Values of every kind for one row: ordinary ones, any bits, zeros, tiny, huge, ordinary ones with
// special ones among them, E2M1 values and the middles between them, so that rounding and the
// choice of scales meet ties, or groups of 16 from zeros over subnormal numbers to the largest.
inline void fill_row(std::byte* bytes, int64_t step_bytes, Dtype dtype, int64_t count,
                     std::mt19937_64& engine) {
  std::normal_distribution<float> normal;
  const int64_t kind = draw(engine, 0, 10);
  float amplitude = kind == 2 ? 1e-40f : kind == 3 ? 1e38f : kind == 4 ? 0.0f : 3.0f;
  const float step = pick(engine, {1.0f, 0.5f, 0.37f, 0.02f, 5.0f, 1e-3f, 1.25f});
  const int64_t zeros = pick<int64_t>(engine, {0, 1, 6});  // for each other value
  for (int64_t i = 0; i < count; ++i) {
    if ((kind == 8 || kind == 9) && i % 16 == 0)
      amplitude =
          draw(engine, 0, 4) == 0
              ? 0.0f
              : std::ldexp(1.0f, static_cast<int>(dtype == Dtype::kFp16 ? draw(engine, -24, 15)
                                                                        : draw(engine, -140, 127)));
    float value = normal(engine) * amplitude;
    if (kind == 6 || kind == 7) {
      value = step * pick(engine, {0.25f, 0.5f, 0.75f, 1.0f, 1.25f, 1.5f, 1.75f, 2.0f, 2.5f, 3.0f,
                                   3.5f, 4.0f, 5.0f, 6.0f});
      if (draw(engine, 0, zeros) > 0) value = 0;
      if (draw(engine, 0, 1) == 0) value = -value;
    }
    uint32_t bits = 0;
    std::memcpy(&bits, &value, sizeof bits);
    if (kind == 1 || ((kind == 5 || kind == 9) && draw(engine, 0, 7) == 0)) {
      bits = static_cast<uint32_t>(engine());
      if (draw(engine, 0, 3) == 0)
        bits = pick<uint32_t>(engine, {0x7F800000, 0xFF800000, 0x7FC00000, 0xFFC00001, 0x7F800001,
                                       0xFFA50000, 0, 0x80000000, 1, 0x80000001, 0x7F7FFFFF});
      if (dtype == Dtype::kFp16 && draw(engine, 0, 1) == 0) bits = bits >> 3 & 0x1FFFFFFF;
      if (dtype != Dtype::kFp32) bits >>= 16;
    } else if (dtype != Dtype::kFp32) {
      bits = dtype == Dtype::kBf16 ? kernels::float_to_bf16(value) : kernels::float_to_fp16(value);
    }
    std::memcpy(bytes + i * step_bytes, &bits, static_cast<size_t>(dtype_bytes(dtype)));
  }
}

// A tensor with random strides (any order of axes, gaps, negative ones), all bytes 0xFF. With a
// unit above 1 rows are dense, and the other strides multiples of it where dim is.
class AnyTensor {
 public:
  AnyTensor(Dtype dtype, int64_t rows, int64_t heads, int64_t dim, bool dense,
            std::mt19937_64& engine, int64_t unit = 1)
      : view_(dense_tensor(nullptr, dtype, rows, heads, dim)) {
    int64_t span = rows * heads * dim;
    if (!dense && rows > 0) {
      std::array<size_t, 3> order = {2, 1, 0};
      if (draw(engine, 0, 1) == 0)
        std::shuffle(order.begin() + (unit > 1 ? 1 : 0), order.end(), engine);
      span = 1;
      for (const size_t axis : order) {
        const bool is_row = unit > 1 && axis == 2;
        const int64_t gap = draw(engine, 0, 1) == 0 || is_row ? 0 : draw(engine, 1, 3) * unit;
        const int64_t stride =
            unit > 1 && !is_row ? (span + unit - 1) / unit * unit + gap : span + gap;
        const int64_t length = stride * (view_.shape[axis] - 1);
        const bool negative = draw(engine, 0, 3) == 0 && !is_row;
        view_.strides[axis] = negative ? -stride : stride;
        if (negative) origin_ += length;
        span += length;
      }
    }
    bytes.assign(static_cast<size_t>(span * dtype_bytes(dtype)), std::byte{0xFF});
  }
  void fill(std::mt19937_64& engine) {
    const int64_t size = dtype_bytes(view_.dtype);
    for (int64_t row = 0; row < view_.shape[0]; ++row)
      for (int64_t head = 0; head < view_.shape[1]; ++head)
        fill_row(bytes.data() + (origin_ + row * view_.strides[0] + head * view_.strides[1]) * size,
                 view_.strides[2] * size, view_.dtype, view_.shape[2], engine);
  }
  // The strides of axes with one entry, which nobody should look at.
  void loosen() {
    for (const int axis : {0, 1})
      if (view_.shape[axis] == 1) view_.strides[axis] = 3;
  }
  // Of the same bytes on the host or on the device.
  TensorView view(std::byte* base) const {
    TensorView result = view_;
    result.data = base + origin_ * dtype_bytes(view_.dtype);
    return result;
  }
  TensorView host() { return view(bytes.data()); }

  std::vector<std::byte> bytes;

 private:
  TensorView view_;
  int64_t origin_ = 0;
};

// A layer on the host and its copy on the device, which begins `lead` bytes after an aligned
// address. An aligned one begins, like all of its blocks, at multiples of 16.
class TwinLayer {
 public:
  TwinLayer(const AttentionGeometry& geometry, int64_t num_blocks, std::mt19937_64& engine,
            bool aligned = false)
      : pool(geometry, num_blocks, std::byte{0xFF}, any_gap(geometry, engine, aligned)),
        lead_(aligned ? pick<int64_t>(engine, {0, 16, 48})
                      : pick<int64_t>(engine, {0, 0, 1, 2, 8})) {}
  kernels::LayerView& host() { return pool.layer(); }
  // Copies what the host has now.
  kernels::LayerView device() {
    std::vector<std::byte> all(static_cast<size_t>(lead_), std::byte{0xFF});
    all.insert(all.end(), pool.bytes().begin(), pool.bytes().end());
    memory_.clear();
    memory_.emplace_back(all);
    kernels::LayerView layer = pool.layer();
    layer.base = memory_[0].data() + lead_;
    if (layer.key_offset != nullptr) {
      memory_.emplace_back(key_offset);
      layer.key_offset = memory_[1].data<float>();
    }
    return layer;
  }
  std::vector<std::byte> read() const {
    std::vector<std::byte> all = memory_[0].read();
    for (int64_t i = 0; i < lead_; ++i) CHECK(all[static_cast<size_t>(i)] == std::byte{0xFF});
    all.erase(all.begin(), all.begin() + lead_);
    return all;
  }
  void set_transform(KeyTransform transform, std::mt19937_64& engine) {
    const AttentionGeometry& g = pool.geometry();
    host().key_transform = transform;
    if (!is_centred(transform)) return;
    std::normal_distribution<float> normal;
    for (int64_t i = 0; i < int64_t{g.num_kv_heads} * g.k_dim; ++i)
      key_offset.push_back(draw(engine, 0, 99) == 0 ? INFINITY : normal(engine));
    host().key_offset = key_offset.data();
  }

  Pool pool;
  std::vector<float> key_offset;

 private:
  static int64_t any_gap(const AttentionGeometry& geometry, std::mt19937_64& engine, bool aligned) {
    if (!aligned) return pick<int64_t>(engine, {0, 0, 1, 6, 64, 1000});
    return (16 - page_layout(geometry).page_bytes % 16) % 16 + pick<int64_t>(engine, {0, 16, 1024});
  }

  int64_t lead_;
  std::vector<DeviceBytes> memory_;
};

// Rights of a caller to the blocks of a pool, and what its calls found wrong.
class PointOfUse {
 public:
  // Without rights every block may be used.
  PointOfUse(int64_t num_blocks, bool with_rights, std::mt19937_64& engine)
      : faults_(sizeof(kernels::CallFaults)), with_rights_(with_rights) {
    for (int64_t i = 0; i < num_blocks; ++i)
      words_.push_back(with_rights ? pick<uint64_t>(engine, {kOwn, kOwn, kOwn, kShared, 5}) : kOwn);
    device_words_.emplace_back(words_);
    rights_ = {device_words_[0].data<uint64_t>(), kOwn, kShared};
  }
  bool may(int64_t block, bool write) const {
    if (block < 0 || block >= static_cast<int64_t>(words_.size())) return false;
    const uint64_t word = words_[static_cast<size_t>(block)];
    return word == kOwn || (!write && word == kShared);
  }
  kernels::Target target(cudaStream_t stream = nullptr) {
    REQUIRE(cudaMemset(faults_.data(), 0, faults_.size()) == cudaSuccess);
    kernels::Target target;
    target.backend = kernels::Backend::kCuda;
    target.stream = stream;
    target.rights = with_rights_ ? &rights_ : nullptr;
    target.faults = faults_.data<kernels::CallFaults>();
    return target;
  }
  kernels::CallFaults faults() const { return faults_.read<kernels::CallFaults>()[0]; }
  // The first value is one of those that were wrong.
  void check(const std::vector<int64_t>& wrong) const {
    const kernels::CallFaults found = faults();
    CHECK(found.count == wrong.size());
    if (wrong.empty() || found.count == 0) return;
    CAPTURE(found.first_value);
    CHECK(std::find(wrong.begin(), wrong.end(), found.first_value) != wrong.end());
  }

 private:
  static constexpr uint64_t kOwn = 0x100000002;
  static constexpr uint64_t kShared = 0x300000004;
  std::vector<uint64_t> words_;
  std::vector<DeviceBytes> device_words_;
  DeviceBytes faults_;
  kernels::BlockRights rights_;
  bool with_rights_;
};

inline kernels::AppendParams append_of(const kernels::LayerView& layer, const TensorView& k,
                                       const TensorView& v, const int64_t* slots,
                                       int64_t num_slots) {
  kernels::AppendParams params;
  params.layer = layer;
  params.k = k;
  params.v = v;
  params.slots = slots;
  params.num_slots = num_slots;
  return params;
}

inline void check_ok(const Status& status) { CHECK_MESSAGE(status.ok(), status.to_string()); }

inline int32_t any_dim(KvFormat format, bool rotated, std::mt19937_64& engine) {
  if (format == KvFormat::kNvfp4 || rotated)
    return pick(engine, {16, 64, 80, 96, 112, 128, 192, 256, 512, 576, 1024});
  return pick(engine, {1, 7, 33, 64, 80, 96, 112, 128, 192, 256, 512, 576, 1000});
}

// Up to 16 heads and 1024 tokens, of pages that are not too large for many cases.
inline AttentionGeometry any_geometry(KvFormat k, KvFormat v, bool rotated,
                                      std::mt19937_64& engine) {
  AttentionGeometry g;
  g.num_layers = 1;
  g.k_format = k;
  g.v_format = v;
  g.k_dim = any_dim(k, rotated, engine);
  g.v_dim = any_dim(v, false, engine);
  g.block_tokens = pick(engine, {1, 3, 16, 16, 64, 1024});
  do g.num_kv_heads = static_cast<int32_t>(draw(engine, 1, 16));
  while (g.num_kv_heads > 1 && page_layout(g).page_bytes > 300'000);
  return g;
}

inline float any_scale(std::mt19937_64& engine) {
  return pick(engine, {1.0f, 0.37f, 0.02f, 1.1754944e-38f, 3.0e38f, 1e-3f, 5.0f});
}

inline std::string text_of(const kernels::LayerView& layer) {
  const AttentionGeometry& g = layer.geometry;
  std::ostringstream text;
  text << "K " << name(g.k_format) << " V " << name(g.v_format) << " MLA " << name(g.mla_row)
       << " dims " << g.k_dim << ", " << g.v_dim << " heads " << g.num_kv_heads << " block_tokens "
       << g.block_tokens << " encoder " << name(layer.encoder) << " transform "
       << name(layer.key_transform) << " scales " << layer.k_scale << ", " << layer.v_scale
       << " block stride " << layer.block_stride_bytes << " seed " << seed();
  return text.str();
}

}  // namespace larder::test
