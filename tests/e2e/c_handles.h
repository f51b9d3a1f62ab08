// Handles of the C API that destroy themselves, and small calls on them that fail the test.
#pragma once

#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include "larder/larder.h"
#include "tests/support/node.h"
#include "tests/support/random.h"

namespace larder::test {

inline constexpr int64_t kDim = 64;
inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

template <auto kDestroy>
struct Destroy {
  void operator()(auto* handle) const { kDestroy(handle); }
};
using CClient = std::unique_ptr<larder_client, Destroy<larder_client_destroy>>;
using CPool = std::unique_ptr<larder_pool, Destroy<larder_pool_destroy>>;
using CSequence = std::unique_ptr<larder_sequence, Destroy<larder_sequence_destroy>>;

inline std::string error() { return larder_last_error(); }
#define REQUIRE_OK(call) REQUIRE_MESSAGE((call) == LARDER_OK, error())

inline CClient connect(const Node& node, int64_t deadline_us = 10'000'000) {
  larder_client_options options = LARDER_CLIENT_OPTIONS_INIT;
  options.deadline_us = deadline_us;
  const std::string socket = node.socket();
  options.socket_path = socket.c_str();
  larder_client* client = nullptr;
  REQUIRE_OK(larder_connect(&options, &client));
  return CClient(client);
}

// The same pool as small_pool().
inline larder_pool_options c_small_pool(const char* name, larder_execution execution) {
  larder_pool_options options = LARDER_POOL_OPTIONS_INIT;
  options.name = name;
  options.model = "test";
  options.geometry = {2, 1, 16, kDim, kDim, LARDER_KV_FORMAT_NVFP4, LARDER_KV_FORMAT_NVFP4, 0};
  options.num_blocks = 8;
  options.execution = execution;
  return options;
}

inline CPool open_pool(const CClient& client, const larder_pool_options& options) {
  larder_pool* pool = nullptr;
  REQUIRE_OK(larder_open_pool(client.get(), &options, &pool));
  return CPool(pool);
}

inline CSequence begin(const CPool& pool) {
  larder_sequence* sequence = nullptr;
  REQUIRE_OK(larder_sequence_begin(pool.get(), &sequence));
  return CSequence(sequence);
}

inline larder_tensor rows(std::vector<float>& values, int64_t heads = 1) {
  return larder_dense_tensor(values.data(), LARDER_DTYPE_FP32,
                             static_cast<int64_t>(values.size()) / (heads * kDim), heads, kDim);
}
inline void append_all(const CSequence& sequence, std::vector<float>& k, std::vector<float>& v) {
  const larder_tensor keys = rows(k);
  const larder_tensor values = rows(v);
  REQUIRE_OK(larder_sequence_extend(sequence.get(), keys.shape[0]));
  for (int layer = 0; layer < 2; ++layer)
    REQUIRE_OK(larder_sequence_append(sequence.get(), layer, &keys, &values));
}

inline std::vector<int32_t> block_ids(const CSequence& sequence) {
  size_t count = 0;
  REQUIRE_OK(larder_sequence_block_ids(sequence.get(), nullptr, 0, &count));
  std::vector<int32_t> ids(count);
  REQUIRE_OK(larder_sequence_block_ids(sequence.get(), ids.data(), ids.size(), &count));
  return ids;
}

inline std::vector<std::byte> layer_bytes(const CPool& pool, int32_t layer,
                                          const std::vector<int32_t>& ids) {
  larder_pool_info info = LARDER_POOL_INFO_INIT;
  REQUIRE_OK(larder_pool_get_info(pool.get(), &info));
  std::vector<std::byte> bytes(ids.size() * static_cast<size_t>(info.page_bytes));
  REQUIRE_OK(larder_pool_read_pages(pool.get(), layer, ids.data(), ids.size(), bytes.data(),
                                    bytes.size()));
  return bytes;
}

inline larder_group_stats stats_of(const CPool& pool) {
  larder_group_stats stats = {};
  size_t count = 0;
  REQUIRE_OK(larder_pool_stats(pool.get(), &stats, 1, &count));
  REQUIRE(count == 1);
  return stats;
}

}  // namespace larder::test
