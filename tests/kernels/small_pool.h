// A bf16 pool of one KV head and a few tokens whose K and V elements are set one by one.
#pragma once

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "tests/kernels/attend_call.h"

namespace larder::test {

struct SmallPool {
  explicit SmallPool(int32_t dim, int32_t block_tokens = 4)
      : pool({1, 1, block_tokens, dim, dim, KvFormat::kBf16, KvFormat::kBf16}, 1, std::byte{0}) {}

  void set(Side side, int64_t token, size_t d, float value) {
    const uint16_t bits = std::isnan(value) ? 0x7FC0 : nearest_bf16(value);
    std::memcpy(pool.bytes().data() + pool.data_offset(side, token, 0) + 2 * static_cast<int>(d),
                &bits, 2);
  }

  // One query head; as many rows as q holds, the last tokens of the sequence. `change` sets
  // options.
  AttendResult run(std::vector<float> q, int32_t seq_len, float scale,
                   const std::function<void(kernels::AttendParams&)>& change = {}) {
    const int64_t dim = pool.geometry().k_dim;
    const auto rows = static_cast<int32_t>(q.size()) / static_cast<int32_t>(dim);
    AttendResult result;
    result.out.assign(q.size(), NAN);
    result.lse.assign(static_cast<size_t>(rows), NAN);
    const int32_t block = 0;
    kernels::AttendParams params;
    params.layer = pool.layer();
    params.q = dense_tensor(q.data(), Dtype::kFp32, rows, 1, dim);
    params.output.out = dense_tensor(result.out.data(), Dtype::kFp32, rows, 1, dim);
    params.output.lse = result.lse.data();
    params.q_lens = &rows;
    params.seq_lens = &seq_len;
    params.num_seqs = 1;
    params.block_table = &block;
    params.block_table_stride = 1;
    params.scale = scale;
    if (change) change(params);
    const Status status = kernels::run_attend(params);
    LARDER_CHECK(status.ok(), status.to_string());
    return result;
  }

  Pool pool;
};

}  // namespace larder::test
