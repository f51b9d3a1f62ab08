// What tests that make the same calls in process and on request share.
#pragma once

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <vector>

#include "larder/client.h"

namespace larder::test {

inline constexpr float kNan = std::numeric_limits<float>::quiet_NaN();
inline constexpr std::array<Execution, 2> kExecutions = {Execution::kInProcess,
                                                         Execution::kOnRequest};

// Bits, so that a NaN equals itself.
inline std::vector<uint32_t> bits(const std::vector<float>& values) {
  std::vector<uint32_t> result(values.size());
  std::memcpy(result.data(), values.data(), values.size() * sizeof(float));
  return result;
}

// All values, as rows of heads.
inline TensorView view(std::vector<float>& values, int64_t heads, int64_t dim) {
  return dense_tensor(values.data(), Dtype::kFp32,
                      static_cast<int64_t>(values.size()) / (heads * dim), heads, dim);
}

}  // namespace larder::test
