// A pool's layers in device memory for benchmarks, with the blocks of several calls at random
// places, and the tables that name them.
#pragma once

#include <algorithm>
#include <cstring>
#include <memory>
#include <numeric>
#include <optional>
#include <random>
#include <span>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/bench/ceilings.h"
#include "tests/bench/gpu_timing.h"

namespace larder::test {

inline constexpr int64_t kCheckedTokens = 64;  // at the beginning and at the end of a call

// Decode scales at which normally distributed values use the formats' range.
inline constexpr float kScale = 0.0125f;

// A range of tokens of one call.
struct TokenRange {
  int64_t first = 0;
  int64_t count = 0;
};

// What is compared with the CPU's row: the first and the last tokens of a call, in whole blocks.
inline std::vector<TokenRange> checked_ranges(int64_t tokens) {
  if (tokens <= kCheckedTokens) return {{0, tokens}};
  return {{0, kCheckedTokens}, {tokens - kCheckedTokens, kCheckedTokens}};
}

inline int64_t stored_token_bytes(const AttentionGeometry& geometry) {
  return page_layout(geometry).page_bytes / geometry.block_tokens;
}

inline std::string first_difference(std::span<const std::byte> actual,
                                    std::span<const std::byte> expected, const std::string& what) {
  LARDER_CHECK(actual.size() == expected.size());
  const auto [a, b] = std::mismatch(actual.begin(), actual.end(), expected.begin());
  if (a == actual.end()) return {};
  std::ostringstream text;
  text << what << " differs at byte " << a - actual.begin() << " of " << actual.size() << ": "
       << std::to_integer<int>(*a) << ", expected " << std::to_integer<int>(*b);
  return text.str();
}

// Blocks of `buffers` calls of `tokens` each, every call with blocks of its own, shuffled over a
// pool that has a quarter more.
class GpuPool {
 public:
  GpuPool(const AttentionGeometry& geometry, int64_t tokens, int64_t buffers)
      : tokens_(tokens),
        blocks_per_call_((tokens + geometry.block_tokens - 1) / geometry.block_tokens),
        order_(shuffled(std::max<int64_t>(1024, buffers * blocks_per_call_ * 5 / 4))),
        memory_(std::ssize(order_) * page_layout(geometry).page_bytes * geometry.num_layers),
        blocks_(order_) {
    layer_.base = memory_.data();
    layer_.geometry = geometry;
    layer_.page = page_layout(geometry);
    layer_.block_stride_bytes = layer_.page.page_bytes * geometry.num_layers;
    layer_.num_blocks = std::ssize(order_);
    layer_.k_scale = layer_.v_scale = kScale;
  }

  const kernels::LayerView& layer() const { return layer_; }
  int64_t blocks_per_call() const { return blocks_per_call_; }
  int64_t bytes() const { return memory_.bytes(); }
  std::byte* data() const { return memory_.data(); }
  // In device memory: the list or table of a call.
  const int32_t* blocks_of(int64_t buffer) const {
    return blocks_.as<int32_t>() + buffer * blocks_per_call_;
  }
  int64_t slot(int64_t buffer, int64_t token) const {
    const int64_t tokens = layer_.geometry.block_tokens;
    return int64_t{order_[static_cast<size_t>(buffer * blocks_per_call_ + token / tokens)]} *
               tokens +
           token % tokens;
  }
  // [buffers, tokens]
  template <typename Int>
  std::vector<Int> slots(int64_t buffers) const {
    std::vector<Int> result;
    for (int64_t buffer = 0; buffer < buffers; ++buffer)
      for (int64_t token = 0; token < tokens_; ++token)
        result.push_back(static_cast<Int>(slot(buffer, token)));
    return result;
  }
  // The blocks of a range that begins with a block, of call 0, one after another on the host.
  std::vector<std::byte> blocks_on_host(const TokenRange& range) const {
    const int64_t tokens = layer_.geometry.block_tokens;
    const int64_t stride = layer_.block_stride_bytes;
    std::vector<std::byte> result;
    for (int64_t token = range.first; token < range.first + range.count; token += tokens) {
      const auto block = to_host(layer_.base + slot(0, token) / tokens * stride, stride);
      result.insert(result.end(), block.begin(), block.end());
    }
    return result;
  }
  // The layer with such blocks as its memory.
  kernels::LayerView layer_on_host(std::vector<std::byte>& blocks) const {
    kernels::LayerView layer = layer_;
    layer.base = blocks.data();
    layer.num_blocks = std::ssize(blocks) / layer.block_stride_bytes;
    return layer;
  }

 private:
  static std::vector<int32_t> shuffled(int64_t count) {
    std::vector<int32_t> order(static_cast<size_t>(count));
    std::iota(order.begin(), order.end(), 0);
    std::mt19937 engine(7);
    std::shuffle(order.begin(), order.end(), engine);
    return order;
  }

  int64_t tokens_;
  int64_t blocks_per_call_;
  std::vector<int32_t> order_;
  DeviceMemory memory_;
  DeviceMemory blocks_;
  kernels::LayerView layer_;
};

// Adds every CUDA row of a table that takes the call; `params_of` gives a buffer's parameters, all
// with the same shapes. The last refusal if none takes it.
template <typename Params, typename ParamsOf>
Status add_rows(Item& item, std::span<const kernels::Kernel<Params>> table,
                const ParamsOf& params_of) {
  Status refusal;
  for (const kernels::Kernel<Params>& row : table) {
    if (row.backend != kernels::Backend::kCuda) continue;
    const Params params = params_of(0);
    if (Status s = row.supports(params); !s.ok()) {
      refusal = s;
      continue;
    }
    const int64_t bytes = row.workspace_bytes == nullptr ? 0 : row.workspace_bytes(params);
    const auto workspace = std::make_shared<DeviceMemory>(bytes);
    item.variants.push_back(
        {std::string(row.name), [&row, params_of, workspace, bytes](int64_t buffer, void* stream) {
           kernels::Target target;
           target.backend = kernels::Backend::kCuda;
           target.stream = stream;
           target.workspace = workspace->data();
           target.workspace_bytes = bytes;
           return row.launch(params_of(buffer), target);
         }});
  }
  return item.variants.empty() ? refusal : Status();
}

// The formats of an item as text: "nvfp4", or an MLA row.
inline std::string format_of(const AttentionGeometry& geometry) {
  return std::string(geometry.mla_row == MlaRow::kNone ? name(geometry.k_format)
                                                       : name(geometry.mla_row));
}

inline AttentionGeometry attention(KvFormat format, int32_t heads, int32_t dim,
                                   int32_t block_tokens = 16, int32_t layers = 1) {
  return {layers, heads, block_tokens, dim, dim, format, format};
}

inline json shape_fields(const std::string& op, const AttentionGeometry& geometry, int64_t tokens) {
  return {{"op", op},
          {"format", format_of(geometry)},
          {"heads", geometry.num_kv_heads},
          {"dim", geometry.k_dim},
          {"layers", geometry.num_layers},
          {"block_tokens", geometry.block_tokens},
          {"tokens", tokens}};
}

void bench_append(Bench& bench);
void bench_gather(Bench& bench);
void bench_convert(Bench& bench);
void bench_blocks(Bench& bench);
void bench_host_copies(Bench& bench);
void bench_attend(Bench& bench);

}  // namespace larder::test
