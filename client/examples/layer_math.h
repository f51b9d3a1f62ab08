// The arithmetic of a decoder layer between its matrix products. Plain float32.
#pragma once

#include <cstdint>
#include <span>
#include <vector>

#include "client/examples/weights.h"

namespace larder::examples {

// x / sqrt(mean(x^2) + epsilon) * weight, row by row.
Matrix rms_norm(const Matrix& x, const RowVector& weight, float epsilon);

// Cosines and sines of one batch's rows, used by every layer.
struct RopeTable {
  Matrix cosines;  // [num_rows, head_dim / 2]
  Matrix sines;    // [num_rows, head_dim / 2]
};

// theta^(-2i / head_dim) for i < head_dim / 2, computed in float32 as the models were trained.
std::vector<float> rope_frequencies(int32_t head_dim, float theta);

// angle(row, i) = positions[row] * frequency i, in float32 likewise.
RopeTable make_rope_table(std::span<const int32_t> positions, int32_t head_dim, float theta);

// Rotates every head of every row in place, in the rotate-half form: element i is paired with
// element i + head_dim / 2. x: [num_rows, num_heads * head_dim].
void apply_rope(const RopeTable& table, Matrix& x);

// silu(gate) * up, into gate.
void swiglu(Matrix& gate, const Matrix& up);

// Nearest even. A NaN stays a NaN.
uint16_t bf16_bits(float value);
std::vector<uint16_t> round_to_bf16(const Matrix& x);

}  // namespace larder::examples
