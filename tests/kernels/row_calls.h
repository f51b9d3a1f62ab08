// What the tests of append and gather share: a pool with random rows, and calls on it.
#pragma once

#include <cstdint>
#include <cstring>
#include <random>
#include <vector>

#include "kernels/cpu/bf16.h"
#include "kernels/kernel_table.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::test {

inline std::vector<float> normal_values(std::mt19937_64& engine, int64_t count,
                                        float amplitude = 1) {
  std::normal_distribution<float> normal(0, amplitude);
  std::vector<float> values(static_cast<size_t>(count));
  for (float& x : values) x = normal(engine);
  return values;
}

inline std::vector<int64_t> consecutive_slots(int64_t first, int64_t count) {
  std::vector<int64_t> slots;
  for (int64_t i = 0; i < count; ++i) slots.push_back(first + i);
  return slots;
}

// Dense float rows [slots.size(), heads, dim] of K and V into the pool; of MLA latent and rope.
inline Status append(Pool& pool, std::vector<float>& k, std::vector<float>& v,
                     const std::vector<int64_t>& slots) {
  const AttentionGeometry& g = pool.geometry();
  const bool is_mla = g.mla_row != MlaRow::kNone;
  const auto rows = static_cast<int64_t>(slots.size());
  kernels::AppendParams params;
  params.layer = pool.layer();
  params.k = dense_tensor(k.data(), Dtype::kFp32, rows, g.num_kv_heads, is_mla ? 512 : g.k_dim);
  params.v = dense_tensor(v.data(), Dtype::kFp32, rows, g.num_kv_heads, is_mla ? 64 : g.v_dim);
  params.slots = slots.data();
  params.num_slots = rows;
  return kernels::run_append(params);
}

// [rows, heads, dim] of bf16, fp16 or fp32 bits of the values.
inline std::vector<std::byte> to_dtype(const std::vector<float>& values, Dtype dtype) {
  std::vector<std::byte> bytes(values.size() * static_cast<size_t>(dtype_bytes(dtype)));
  for (size_t i = 0; i < values.size(); ++i) {
    const uint16_t bits = dtype == Dtype::kBf16 ? kernels::float_to_bf16(values[i])
                                                : kernels::float_to_fp16(values[i]);
    if (dtype == Dtype::kFp32)
      std::memcpy(bytes.data() + 4 * i, &values[i], 4);
    else
      std::memcpy(bytes.data() + 2 * i, &bits, 2);
  }
  return bytes;
}

}  // namespace larder::test
