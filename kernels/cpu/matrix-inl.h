// The two small matrix operations of attend, once per vector target of Highway.

#if defined(LARDER_KERNELS_CPU_MATRIX_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef LARDER_KERNELS_CPU_MATRIX_INL_H_
#undef LARDER_KERNELS_CPU_MATRIX_INL_H_
#else
#define LARDER_KERNELS_CPU_MATRIX_INL_H_
#endif

#include <cstdint>

#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace larder::kernels::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;

struct MultiplyAdd {
  int64_t k_begin;
  int64_t k_end;
  const float* a;  // [rows, k]
  int64_t a_stride;
  const float* b;  // [k, columns]
  int64_t b_stride;
  float* c;  // [rows, columns]
  int64_t c_stride;
};

// kRows rows from `row` and kVectors vectors of columns from `column`, sums kept in registers.
template <int kRows, int kVectors>
HWY_INLINE void multiply_add_block(const MultiplyAdd& m, int64_t row, int64_t column) {
  const hn::ScalableTag<float> d;
  using V = hn::Vec<hn::ScalableTag<float>>;
  const auto lanes = static_cast<int64_t>(hn::Lanes(d));
  const float* a = m.a + row * m.a_stride;
  const float* b = m.b + column;
  float* c = m.c + row * m.c_stride + column;
  V sums[kRows][kVectors];
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::LoadU(d, c + r * m.c_stride + v * lanes);
  for (int64_t k = m.k_begin; k < m.k_end; ++k) {
    V columns[kVectors];
    for (int v = 0; v < kVectors; ++v) columns[v] = hn::LoadU(d, b + k * m.b_stride + v * lanes);
    for (int r = 0; r < kRows; ++r) {
      const V factor = hn::Set(d, a[r * m.a_stride + k]);
      for (int v = 0; v < kVectors; ++v) sums[r][v] = hn::MulAdd(factor, columns[v], sums[r][v]);
    }
  }
  for (int r = 0; r < kRows; ++r)
    for (int v = 0; v < kVectors; ++v) hn::StoreU(sums[r][v], d, c + r * m.c_stride + v * lanes);
}

// c += a * b over k in [k_begin, k_end). num_columns is a multiple of 16. Every element is summed
// in rising k with one fused (where the target has it) operation a step, so its bits do not depend
// on the number of rows or columns that are computed together.
inline void multiply_add(const MultiplyAdd& m, int64_t num_rows, int64_t num_columns) {
  const auto lanes = static_cast<int64_t>(hn::Lanes(hn::ScalableTag<float>()));
  int64_t column = 0;
  for (; column + 4 * lanes <= num_columns; column += 4 * lanes) {
    int64_t row = 0;
    for (; row + 4 <= num_rows; row += 4) {
#if HWY_MAX_BYTES >= 64
      multiply_add_block<4, 4>(m, row, column);
#else  // 16 registers
      multiply_add_block<4, 2>(m, row, column);
      multiply_add_block<4, 2>(m, row, column + 2 * lanes);
#endif
    }
    for (; row < num_rows; ++row) multiply_add_block<1, 4>(m, row, column);
  }
  for (; column < num_columns; column += lanes) {
    int64_t row = 0;
    for (; row + 4 <= num_rows; row += 4) multiply_add_block<4, 1>(m, row, column);
    for (; row < num_rows; ++row) multiply_add_block<1, 1>(m, row, column);
  }
}

// out[column][0..3] = in[0..3][column] for a number of columns that is a multiple of 4.
inline void transpose_four_rows(const float* in, int64_t in_stride, int64_t num_columns, float* out,
                                int64_t out_stride) {
#if HWY_TARGET == HWY_SCALAR
  for (int64_t column = 0; column < num_columns; ++column)
    for (int64_t row = 0; row < 4; ++row)
      out[column * out_stride + row] = in[row * in_stride + column];
#else
  const hn::FixedTag<float, 4> d;
  const hn::Repartition<double, decltype(d)> d_pair;
  for (int64_t column = 0; column < num_columns; column += 4) {
    const auto row0 = hn::LoadU(d, in + column);
    const auto row1 = hn::LoadU(d, in + in_stride + column);
    const auto row2 = hn::LoadU(d, in + 2 * in_stride + column);
    const auto row3 = hn::LoadU(d, in + 3 * in_stride + column);
    const auto low01 = hn::BitCast(d_pair, hn::InterleaveLower(d, row0, row1));
    const auto low23 = hn::BitCast(d_pair, hn::InterleaveLower(d, row2, row3));
    const auto high01 = hn::BitCast(d_pair, hn::InterleaveUpper(d, row0, row1));
    const auto high23 = hn::BitCast(d_pair, hn::InterleaveUpper(d, row2, row3));
    float* target = out + column * out_stride;
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d_pair, low01, low23)), d, target);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d_pair, low01, low23)), d, target + out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveLower(d_pair, high01, high23)), d,
               target + 2 * out_stride);
    hn::StoreU(hn::BitCast(d, hn::InterleaveUpper(d_pair, high01, high23)), d,
               target + 3 * out_stride);
  }
#endif
}

}  // namespace larder::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // the toggled guard
