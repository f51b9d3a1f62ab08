// Tensors as replay files write them: a shape and a rule for the values, made when a step runs.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <variant>
#include <vector>

#include "client/ctl/replay/fields.h"
#include "larder/tensor.h"

namespace larder::replay {

inline constexpr int64_t kMaxTensorElements = int64_t{1} << 27;  // strides included
inline constexpr size_t kMaxTensorSets = 4096;

// The generator of every random value: state = state * 1664525 + 1013904223 mod 2^32 before each
// draw, which is (state >> 8) / 2^24.
class Lcg {
 public:
  explicit Lcg(uint32_t seed) : state_(seed) {}
  double next() {
    state_ = state_ * 1664525u + 1013904223u;
    return static_cast<double>(state_ >> 8) / 16777216.0;
  }

 private:
  uint32_t state_;
};

struct Fill {
  double value = 0;
};
struct Listed {
  std::vector<double> values;  // row-major
};
struct PerToken {
  std::vector<double> values;  // [shape[0]]
};
struct PerDim {
  std::vector<double> values;  // [last axis]
};
struct Uniform {
  uint32_t seed = 0;
  double low = 0;
  double high = 0;
};
// Irwin-Hall: std * 2 * (u1 + u2 + u3 - 1.5).
struct Normal {
  uint32_t seed = 0;
  double std = 0;
};
struct Bits {
  std::vector<uint8_t> bytes;  // little-endian, row-major
};
// Overwrites the elements whose indices match; an axis without an index matches entirely.
struct SetElements {
  std::array<std::optional<int64_t>, 3> at;
  double to = 0;
};

struct TensorSpec {
  Dtype dtype = Dtype::kBf16;
  size_t rank = 3;                           // of `shape` as it was written
  std::array<int64_t, 3> shape = {0, 0, 0};  // missing axes at the end have size 1
  std::variant<Fill, Listed, PerToken, PerDim, Uniform, Normal, Bits> source;
  std::vector<SetElements> sets;
  std::optional<std::array<int64_t, 3>> strides;  // in elements; gaps are filled with NaN

  int64_t num_elements() const { return shape[0] * shape[1] * shape[2]; }
};

// A tensor of `rank` axes; of 1 to 3 where rank is 0.
TensorSpec parse_tensor(const Cursor& cursor, size_t rank = 3, Dtype otherwise = Dtype::kBf16);

// Memory and the view of it.
struct Tensor {
  std::vector<std::byte> memory;
  TensorView view;
};
Tensor make_tensor(const TensorSpec& spec);
Tensor make_dense_tensor(Dtype dtype, const std::array<int64_t, 3>& shape, double fill);

// The elements in row-major order, as the dtype holds them.
std::vector<float> elements_of(const TensorView& view);
std::vector<float> elements_of(const TensorSpec& spec);

}  // namespace larder::replay
