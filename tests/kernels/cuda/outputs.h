// What the tests of attend, sparse_mla and merge on CUDA share: outputs of every dtype and layout,
// uploads, and the comparison of a GPU's result with the CPU row's.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <sstream>
#include <string>
#include <vector>

#include "kernels/kernel_table.h"
#include "tests/support/gpu.h"
#include "tests/support/nvfp4_pool.h"

namespace larder::test {

// Copies of host arrays in device memory, for as long as it lives. An empty array is nullptr.
class Uploads {
 public:
  template <typename T>
  T* operator()(const std::vector<T>& values) {
    if (values.empty()) return nullptr;
    return all_.emplace_back(values).template data<T>();
  }
  void check_guards() const {
    for (const DeviceBytes& bytes : all_) bytes.check_guards();
  }

 private:
  std::deque<DeviceBytes> all_;
};

enum class Layout { kDense, kHeadsFirst, kGaps, kPadded };

// [rows, heads, elements] of a dtype. kGaps: with room after each element, head and row; kPadded:
// with room after each head and row, 8 elements or an odd multiple of them.
inline TensorView view_of(void* data, Dtype dtype, Layout layout, int64_t rows, int64_t heads,
                          int64_t elements) {
  TensorView view = dense_tensor(data, dtype, rows, heads, elements);
  if (layout == Layout::kHeadsFirst)
    view.strides = {elements, std::max<int64_t>(rows, 1) * elements, 1};
  if (layout == Layout::kGaps) {
    const int64_t head = 2 * elements + 3;
    view.strides = {heads * head + 5, head, 2};
  }
  if (layout == Layout::kPadded) {
    const int64_t head = elements + 8;
    view.strides = {heads * head + 24, head, 1};
  }
  return view;
}
inline size_t view_bytes(const TensorView& view) {
  return static_cast<size_t>(tensor_extent_bytes(view)->end);
}

struct OutputSpec {
  Dtype dtype = Dtype::kFp32;
  Layout layout = Layout::kDense;
  bool wants_lse = true;
  LseForm lse_form;
  float out_scale = 0.25f;
  float out_sf_scale = 96.0f;
  int64_t out_sf_first_row = 0;
};

struct Outputs {
  std::vector<std::byte> out;
  std::vector<float> lse;
  std::vector<uint8_t> sf;
};

inline kernels::AttentionOutput output_of(const OutputSpec& spec, int64_t rows, int64_t heads,
                                          int64_t dim) {
  kernels::AttentionOutput output;
  const int64_t elements = spec.dtype == Dtype::kE2m1x2 ? dim / 2 : dim;
  output.out = view_of(nullptr, spec.dtype, spec.layout, rows, heads, elements);
  output.lse_form = spec.lse_form;
  output.out_scale = spec.out_scale;
  output.out_sf_scale = spec.out_sf_scale;
  output.out_sf_first_row = spec.out_sf_first_row;
  return output;
}

// Poisoned memory for it.
inline Outputs poisoned(const kernels::AttentionOutput& output, bool wants_lse = true) {
  Outputs made;
  made.out.assign(view_bytes(output.out), std::byte{0xFF});
  if (wants_lse) {
    made.lse.resize(static_cast<size_t>(output.out.shape[0] * output.out.shape[1]));
    std::memset(made.lse.data(), 0xFF, made.lse.size() * 4);
  }
  made.sf.assign(static_cast<size_t>(out_sf_bytes(output)), 0xFF);
  return made;
}

inline void point_to(kernels::AttentionOutput& output, std::byte* out, float* lse, uint8_t* sf) {
  output.out.data = out;
  output.lse = lse;
  output.out_sf = sf;
}

// Device memory of a call's results, and of what it found wrong.
struct DeviceOutputs {
  explicit DeviceOutputs(const Outputs& host)
      : out(host.out), lse(host.lse), sf(host.sf), faults(std::vector<kernels::CallFaults>(1)) {}
  void point(kernels::AttentionOutput& output) const {
    point_to(output, out.data(), lse.size() == 0 ? nullptr : lse.data<float>(),
             sf.size() == 0 ? nullptr : sf.data<uint8_t>());
  }
  Outputs read() const { return {out.read(), lse.read<float>(), sf.read<uint8_t>()}; }
  uint32_t fault_count() const { return faults.read<kernels::CallFaults>()[0].count; }

  DeviceBytes out, lse, sf, faults;
};

// Collects what differs; the first few are printed, with `what` in front.
class Differences {
 public:
  explicit Differences(std::string what) : what_(std::move(what)) {}
  ~Differences() {
    INFO(what_);
    INFO(text_.str());
    CHECK(count_ == 0);
  }
  template <typename... Parts>
  void add(const Parts&... parts) {
    if (++count_ > 4) return;
    ((text_ << parts << ' '), ...);
    text_ << '\n';
  }

 private:
  std::string what_;
  std::ostringstream text_;
  int64_t count_ = 0;
};

inline bool same_kind(double a, double b) {
  if (std::isnan(a) || std::isnan(b)) return std::isnan(a) && std::isnan(b);
  return (!std::isinf(a) && !std::isinf(b)) || a == b;
}

// Codes of sign and magnitude as integers in the order of their values.
inline int code_order(int code, int sign_bit) {
  return (code & sign_bit) != 0 ? -(code & (sign_bit - 1)) : code;
}

inline double element(const std::vector<std::byte>& bytes, Dtype dtype, int64_t index) {
  uint16_t half = 0;
  float single = 0;
  if (dtype == Dtype::kFp32) {
    std::memcpy(&single, bytes.data() + 4 * index, 4);
    return single;
  }
  std::memcpy(&half, bytes.data() + 2 * index, 2);
  return dtype == Dtype::kBf16 ? bf16_value(half) : fp16_value(half);
}

// How far a result may be from the CPU row's: of each row and head. Numbers that are not finite,
// zeros of rows without keys and their LSE must be equal.
struct Tolerance {
  double out = 2e-4;           // relative L2, before the output is rounded
  double lse = 1e-4;           // absolute
  double lse_relative = 4e-7;  // of |lse|, added
};

// One row and head of a float dtype: NaN and infinities alike, then the relative L2 distance.
// Returns whether that is more than usual, but not once a step of the output's rounding is taken
// from each error: so it is where many elements are near a boundary, of one key for instance.
// The distance is relative to the row's norm, or to `least_norm` (squares both) where that is more.
inline bool compare_row(const TensorView& view, const Outputs& expected, const Outputs& got,
                        int64_t row, int64_t head, const Tolerance& allowed, double least_norm,
                        Differences& differences) {
  // Two roundings of nearly the same value may be a step apart: up to 2^-7 or 2^-10 of it, and
  // half of that of a whole row.
  const bool is_half = view.dtype == Dtype::kFp16;
  const double step = view.dtype == Dtype::kFp32 ? 0.0 : is_half ? 0x1p-10 : 0x1p-7;
  const double usual = view.dtype == Dtype::kFp32 ? 0.0 : is_half ? 8e-4 : 3.8e-3;
  const double tolerance = allowed.out + usual;
  double squares = 0, further = 0, norm = 0;
  for (int64_t i = 0; i < view.shape[2]; ++i) {
    const int64_t at = row * view.strides[0] + head * view.strides[1] + i * view.strides[2];
    const double a = element(expected.out, view.dtype, at);
    const double b = element(got.out, view.dtype, at);
    if (!same_kind(a, b)) {
      differences.add("out[", row, head, i, "] expected", a, "got", b);
      return false;
    }
    if (!std::isfinite(a)) continue;
    const double beyond = std::max(0.0, std::fabs(a - b) - step * std::fabs(a));
    squares += (a - b) * (a - b);
    further += beyond * beyond;
    norm += a * a;
  }
  norm = std::max(norm, least_norm);
  if (squares <= tolerance * tolerance * norm) return false;
  if (view.dtype != Dtype::kFp32 && further <= allowed.out * allowed.out * norm) return true;
  differences.add("out[", row, head, "] relative distance", std::sqrt(squares / norm), "above",
                  tolerance);
  return false;
}

// A row of few dims may nearly vanish, as values of both signs are added up: its norm is then not
// taken to be less than a quarter of what rows have on average. Squared; 0 for rows of many dims.
inline double least_row_norm(const TensorView& view, const Outputs& expected) {
  const auto& [rows, heads, dims] = view.shape;
  if (dims >= 16 || rows == 0 || heads == 0) return 0;
  double norm = 0;
  for (int64_t row = 0; row < rows; ++row)
    for (int64_t head = 0; head < heads; ++head)
      for (int64_t i = 0; i < dims; ++i) {
        const int64_t at = row * view.strides[0] + head * view.strides[1] + i * view.strides[2];
        const double value = element(expected.out, view.dtype, at);
        if (std::isfinite(value)) norm += value * value;
      }
  return norm / static_cast<double>(rows * heads) / 16;
}

inline void compare_rows(const TensorView& view, const Outputs& expected, const Outputs& got,
                         const Tolerance& allowed, Differences& differences) {
  int64_t steps = 0;
  const double least_norm = least_row_norm(view, expected);
  for (int64_t row = 0; row < view.shape[0]; ++row)
    for (int64_t head = 0; head < view.shape[1]; ++head)
      steps += compare_row(view, expected, got, row, head, allowed, least_norm, differences);
  const int64_t total = view.shape[0] * view.shape[1];
  if (steps > 4 + total / 50) differences.add(steps, "of", total, "rows are a rounding step apart");
}

// Codes: a value next to a rounding boundary may be a step away, but few are.
inline void compare_codes(const TensorView& view, const Outputs& expected, const Outputs& got,
                          Differences& differences) {
  const bool is_pair = view.dtype == Dtype::kE2m1x2;
  int64_t steps = 0, total = 0;
  for (int64_t row = 0; row < view.shape[0]; ++row)
    for (int64_t head = 0; head < view.shape[1]; ++head)
      for (int64_t i = 0; i < view.shape[2]; ++i) {
        const auto at = static_cast<size_t>(row * view.strides[0] + head * view.strides[1] +
                                            i * view.strides[2]);
        const int a = std::to_integer<int>(expected.out[at]);
        const int b = std::to_integer<int>(got.out[at]);
        const int sign = is_pair ? 8 : 0x80;
        int step = std::abs(code_order(is_pair ? a & 15 : a, sign) -
                            code_order(is_pair ? b & 15 : b, sign));
        if (is_pair) step = std::max(step, std::abs(code_order(a >> 4, 8) - code_order(b >> 4, 8)));
        steps += step > 0;
        ++total;
        if (step > 1) differences.add("code[", row, head, i, "] expected", a, "got", b);
      }
  if (steps > 4 + total / 50) differences.add(steps, "of", total, "codes are a step apart");
}

// The whole of the memory: what no element lies in must be as it was.
inline void compare_gaps(const TensorView& view, const Outputs& got, Differences& differences) {
  const int64_t bytes = dtype_bytes(view.dtype);
  if (static_cast<int64_t>(got.out.size()) == view.shape[0] * view.shape[1] * view.shape[2] * bytes)
    return;
  std::vector<bool> used(got.out.size());
  for (int64_t row = 0; row < view.shape[0]; ++row)
    for (int64_t head = 0; head < view.shape[1]; ++head)
      for (int64_t i = 0; i < view.shape[2]; ++i)
        for (int64_t byte = 0; byte < bytes; ++byte)
          used[static_cast<size_t>(
              (row * view.strides[0] + head * view.strides[1] + i * view.strides[2]) * bytes +
              byte)] = true;
  for (size_t at = 0; at < used.size(); ++at)
    if (!used[at] && got.out[at] != std::byte{0xFF})
      differences.add("written between elements at byte", at);
}

inline void compare_outputs(const kernels::AttentionOutput& output, const Outputs& expected,
                            const Outputs& got, const std::string& what,
                            const Tolerance& allowed = {}) {
  Differences differences(what);
  const TensorView& view = output.out;
  if (view.dtype == Dtype::kFp8E4m3 || view.dtype == Dtype::kE2m1x2)
    compare_codes(view, expected, got, differences);
  else
    compare_rows(view, expected, got, allowed, differences);
  compare_gaps(view, got, differences);
  for (size_t i = 0; i < expected.lse.size(); ++i) {
    const double a = expected.lse[i];
    const double b = got.lse[i];
    if (!same_kind(a, b) ||
        (std::isfinite(a) && std::fabs(a - b) > allowed.lse + allowed.lse_relative * std::fabs(a)))
      differences.add("lse[", i, "] expected", a, "got", b);
  }
  for (size_t i = 0; i < expected.sf.size(); ++i)
    if (std::abs(int{expected.sf[i]} - int{got.sf[i]}) > 1)
      differences.add("out_sf[", i, "] expected", int{expected.sf[i]}, "got", int{got.sf[i]});
}

}  // namespace larder::test
