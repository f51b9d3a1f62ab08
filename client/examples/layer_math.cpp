#include "client/examples/layer_math.h"

#include <bit>
#include <cmath>

#include "larder/check.h"

namespace larder::examples {

Matrix rms_norm(const Matrix& x, const RowVector& weight, float epsilon) {
  LARDER_CHECK(x.cols() == weight.size(), x.cols(), weight.size());
  Matrix out(x.rows(), x.cols());
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const float mean_square = x.row(row).squaredNorm() / static_cast<float>(x.cols());
    const float inverse = 1.0f / std::sqrt(mean_square + epsilon);
    out.row(row) = (x.row(row).array() * inverse * weight.array()).matrix();
  }
  return out;
}

std::vector<float> rope_frequencies(int32_t head_dim, float theta) {
  const int32_t half = head_dim / 2;
  std::vector<float> frequencies(static_cast<size_t>(half));
  for (int32_t i = 0; i < half; ++i)
    frequencies[static_cast<size_t>(i)] =
        1.0f / std::pow(theta, static_cast<float>(2 * i) / static_cast<float>(head_dim));
  return frequencies;
}

RopeTable make_rope_table(std::span<const int32_t> positions, int32_t head_dim, float theta) {
  const int32_t half = head_dim / 2;
  const std::vector<float> frequencies = rope_frequencies(head_dim, theta);
  const auto num_rows = static_cast<Eigen::Index>(positions.size());
  RopeTable table = {Matrix(num_rows, half), Matrix(num_rows, half)};
  for (Eigen::Index row = 0; row < num_rows; ++row) {
    for (int32_t i = 0; i < half; ++i) {
      const float angle = static_cast<float>(positions[static_cast<size_t>(row)]) *
                          frequencies[static_cast<size_t>(i)];
      table.cosines(row, i) = std::cos(angle);
      table.sines(row, i) = std::sin(angle);
    }
  }
  return table;
}

void apply_rope(const RopeTable& table, Matrix& x) {
  const Eigen::Index half = table.cosines.cols();
  LARDER_CHECK(x.rows() == table.cosines.rows() && x.cols() % (2 * half) == 0, x.rows(), x.cols());
  for (Eigen::Index row = 0; row < x.rows(); ++row) {
    const auto cosine = table.cosines.row(row).array();
    const auto sine = table.sines.row(row).array();
    for (Eigen::Index head = 0; head < x.cols(); head += 2 * half) {
      auto low = x.row(row).segment(head, half).array();
      auto high = x.row(row).segment(head + half, half).array();
      const Eigen::Array<float, 1, Eigen::Dynamic> rotated = low * cosine - high * sine;
      high = high * cosine + low * sine;
      low = rotated;
    }
  }
}

void swiglu(Matrix& gate, const Matrix& up) {
  gate.array() *= up.array() / (1.0f + (-gate.array()).exp());
}

uint16_t bf16_bits(float value) {
  const auto bits = std::bit_cast<uint32_t>(value);
  if (std::isnan(value)) return static_cast<uint16_t>((bits >> 16) | 0x40);
  return static_cast<uint16_t>((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);
}

std::vector<uint16_t> round_to_bf16(const Matrix& x) {
  std::vector<uint16_t> out(static_cast<size_t>(x.size()));
  for (size_t i = 0; i < out.size(); ++i) out[i] = bf16_bits(x.data()[i]);
  return out;
}

}  // namespace larder::examples
