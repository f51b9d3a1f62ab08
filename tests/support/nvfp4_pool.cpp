#include "tests/support/nvfp4_pool.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstring>
#include <limits>

namespace larder::test {
namespace {

// Index of the nearest of `count` rising values, ties to the even index.
template <typename Value>
int nearest_index(double magnitude, int count, Value value) {
  // Far beyond the largest value all distances would round to one number.
  magnitude = std::min(magnitude, value(count - 1));
  int best = 0;
  for (int i = 1; i < count; ++i) {
    const double before = std::fabs(value(best) - magnitude);
    const double after = std::fabs(value(i) - magnitude);
    if (after < before || (after == before && i % 2 == 0)) best = i;
  }
  return best;
}

int64_t row_bytes(KvFormat format, int64_t dim) {
  return format == KvFormat::kNvfp4 ? dim / 2 : 2 * dim;
}

int64_t group_bytes(KvFormat format, int64_t dim) {
  return format == KvFormat::kNvfp4 ? dim / 16 : 0;
}

}  // namespace

double e4m3_value(int byte) {
  const int exponent = (byte >> 3) & 15;
  const int mantissa = byte & 7;
  if (exponent == 15 && mantissa == 7) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -9) : std::ldexp(8 + mantissa, exponent - 10);
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
}

double e2m1_value(int code) {
  const int exponent = (code >> 1) & 3;
  const int mantissa = code & 1;
  const double magnitude = exponent == 0 ? mantissa * 0.5 : std::ldexp(2 + mantissa, exponent - 2);
  return (code & 8) != 0 ? -magnitude : magnitude;
}

double bf16_value(uint16_t bits) {
  const int exponent = (bits >> 7) & 255;
  const int mantissa = bits & 127;
  double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -133) : std::ldexp(128 + mantissa, exponent - 134);
  if (exponent == 255)
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

uint16_t nearest_bf16(float value) {
  const auto below = static_cast<uint16_t>(std::bit_cast<uint32_t>(value) >> 16);
  const double down = std::fabs(bf16_value(below) - value);
  const auto above = static_cast<uint16_t>(below + 1);
  const double up = std::fabs(bf16_value(above) - value);
  if (std::isinf(value)) return below;
  if (up < down || (up == down && above % 2 == 0)) return above;
  return below;
}

int nearest_e4m3(double value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  return sign | nearest_index(std::fabs(value), 0x7F, e4m3_value);
}

int nearest_e2m1(double value) {
  const int sign = std::signbit(value) ? 8 : 0;
  if (std::isnan(value)) return sign;
  return sign | nearest_index(std::fabs(value), 8, e2m1_value);
}

Nvfp4Group nvfp4_group(const float* values, float global_scale) {
  float amax = 0;
  for (int i = 0; i < 16; ++i)
    if (!std::isnan(values[i])) amax = std::max(amax, std::fabs(values[i]));
  Nvfp4Group group{};
  group.scale = static_cast<uint8_t>(nearest_e4m3(amax / (6.0f * global_scale)));
  const auto scale = static_cast<float>(e4m3_value(group.scale));
  const float inverse = scale > 0 ? 1.0f / (scale * global_scale) : 0.0f;
  for (int i = 0; i < 16; ++i) {
    const float product = values[i] * inverse;
    group.data[i / 2] =
        static_cast<uint8_t>(group.data[i / 2] | nearest_e2m1(product) << (i % 2 * 4));
  }
  return group;
}

Pool::Pool(const AttentionGeometry& geometry, int64_t num_blocks, std::byte fill,
           int64_t extra_stride_bytes) {
  layer_.geometry = geometry;
  layer_.page = page_layout(geometry);
  layer_.block_stride_bytes = layer_.page.page_bytes + extra_stride_bytes;
  layer_.num_blocks = num_blocks;
  // Not one byte more than the last page needs, so that a sanitizer sees a read past it.
  const int64_t size_bytes =
      num_blocks == 0 ? 0 : (num_blocks - 1) * layer_.block_stride_bytes + layer_.page.page_bytes;
  bytes_.assign(static_cast<size_t>(size_bytes), fill);
  layer_.base = bytes_.data();
}

KvFormat Pool::format(Side side) const {
  return side == Side::kK ? geometry().k_format : geometry().v_format;
}

int64_t Pool::dim(Side side) const {
  return side == Side::kK ? geometry().k_dim : geometry().v_dim;
}

int64_t Pool::data_offset(Side side, int64_t slot, int64_t head) const {
  const AttentionGeometry& g = geometry();
  const int64_t rows = int64_t{g.num_kv_heads} * g.block_tokens;
  const int64_t k_bytes =
      rows * (row_bytes(g.k_format, g.k_dim) + group_bytes(g.k_format, g.k_dim));
  return slot / g.block_tokens * layer_.block_stride_bytes + (side == Side::kV ? k_bytes : 0) +
         (head * g.block_tokens + slot % g.block_tokens) * row_bytes(format(side), dim(side));
}

int64_t Pool::scale_offset(Side side, int64_t slot, int64_t head) const {
  const AttentionGeometry& g = geometry();
  const int64_t rows = int64_t{g.num_kv_heads} * g.block_tokens;
  const int64_t row = head * g.block_tokens + slot % g.block_tokens;
  const int64_t region = data_offset(side, slot, head) - row * row_bytes(format(side), dim(side));
  return region + rows * row_bytes(format(side), dim(side)) +
         row * group_bytes(format(side), dim(side));
}

std::vector<double> Pool::read(Side side, int64_t slot, int64_t head) const {
  const int64_t count = dim(side);
  std::vector<double> row(static_cast<size_t>(count));
  const std::byte* data = bytes_.data() + data_offset(side, slot, head);
  if (format(side) == KvFormat::kBf16) {
    for (size_t i = 0; i < row.size(); ++i) {
      uint16_t bits = 0;
      std::memcpy(&bits, data + 2 * i, sizeof(bits));
      row[i] = bf16_value(bits);
    }
    return row;
  }
  const std::byte* scales = bytes_.data() + scale_offset(side, slot, head);
  const double global_scale = side == Side::kK ? layer_.k_scale : layer_.v_scale;
  for (size_t i = 0; i < row.size(); ++i) {
    const int pair = std::to_integer<int>(data[i / 2]);
    const int code = i % 2 == 0 ? pair & 15 : pair >> 4;
    row[i] = e2m1_value(code) * e4m3_value(std::to_integer<int>(scales[i / 16])) * global_scale;
  }
  return row;
}

}  // namespace larder::test
