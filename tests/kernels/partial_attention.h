// Partial results to be merged, and the whole that they must give.
#pragma once

#include <functional>
#include <limits>
#include <utility>
#include <vector>

#include "tests/kernels/attend_call.h"

namespace larder::test {

// Attention of three query rows over 256 keys, whole and as partial results over some of the keys.
struct Parts {
  explicit Parts(std::mt19937_64& engine)
      : batch({1, 2, 16, 32, 32, KvFormat::kBf16, KvFormat::kNvfp4}, 6, {{3, 256}}, engine) {
    batch.causal = false;
    batch.sinks = {0.5f, -1.0f, 3.0f, 7.0f, 0.0f, -std::numeric_limits<float>::infinity()};
  }

  // Keys of which `chosen` says true, by a mask.
  test::AttendResult part(const std::function<bool(int)>& chosen) {
    std::vector<bool> bits;
    for (int row = 0; row < 3; ++row)
      for (int key = 0; key < 256; ++key) bits.push_back(chosen(key));
    batch.set_mask(0, bits);
    const std::vector<float> sinks = std::exchange(batch.sinks, {});
    batch.partial = true;
    test::AttendResult result = batch.run();
    batch.partial = false;
    batch.sinks = sinks;
    return result;
  }

  test::AttendBatch batch;
};

}  // namespace larder::test
