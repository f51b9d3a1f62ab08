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
  if (format == KvFormat::kNvfp4) return dim / 2;
  return format == KvFormat::kFp8E4m3 || format == KvFormat::kFp8E5m2 ? dim : 2 * dim;
}

uint16_t load_u16(const std::byte* source) {
  return static_cast<uint16_t>(std::to_integer<int>(source[0]) | std::to_integer<int>(source[1])
                                                                     << 8);
}

// Element i of packed E2M1 codes.
double nvfp4_value(const std::byte* data, size_t i) {
  const int pair = std::to_integer<int>(data[i / 2]);
  return e2m1_value(i % 2 == 0 ? pair & 15 : pair >> 4);
}

// Element i of a row, without the tensor's scale.
double stored_value(KvFormat format, const std::byte* data, const std::byte* scales, size_t i) {
  switch (format) {
    case KvFormat::kBf16:
      return bf16_value(load_u16(data + 2 * i));
    case KvFormat::kFp16:
      return fp16_value(load_u16(data + 2 * i));
    case KvFormat::kFp8E4m3:
      return e4m3_value(std::to_integer<int>(data[i]));
    case KvFormat::kFp8E5m2:
      return e5m2_value(std::to_integer<int>(data[i]));
    case KvFormat::kNvfp4:
      return nvfp4_value(data, i) * e4m3_value(std::to_integer<int>(scales[i / 16]));
  }
  return std::numeric_limits<double>::quiet_NaN();
}

bool has_scale(KvFormat format) { return format != KvFormat::kBf16 && format != KvFormat::kFp16; }

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

double fp16_value(uint16_t bits) {
  const int exponent = (bits >> 10) & 31;
  const int mantissa = bits & 1023;
  double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -24) : std::ldexp(1024 + mantissa, exponent - 25);
  if (exponent == 31)
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  return (bits & 0x8000) != 0 ? -magnitude : magnitude;
}

double e5m2_value(int byte) {
  const int exponent = (byte >> 2) & 31;
  const int mantissa = byte & 3;
  double magnitude =
      exponent == 0 ? std::ldexp(mantissa, -16) : std::ldexp(4 + mantissa, exponent - 17);
  if (exponent == 31)
    magnitude = mantissa == 0 ? std::numeric_limits<double>::infinity()
                              : std::numeric_limits<double>::quiet_NaN();
  return (byte & 0x80) != 0 ? -magnitude : magnitude;
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

int nearest_e5m2(double value) {
  const int sign = std::signbit(value) ? 0x80 : 0;
  return sign | nearest_index(std::fabs(value), 0x7C, e5m2_value);
}

uint16_t nearest_fp16(double value) {
  const int sign = std::signbit(value) ? 0x8000 : 0;
  const double size = std::fabs(value);
  if (size >= 65520) return static_cast<uint16_t>(sign | 0x7C00);
  if (std::isnan(value)) return static_cast<uint16_t>(sign);
  // Between 2^exponent and its double, and below 2^-13, values are 2^(exponent - 10) apart.
  const int exponent = size < 0x1p-14 ? -14 : std::ilogb(size);
  const int low = (exponent + 14) * 1024 + static_cast<int>(std::ldexp(size, 10 - exponent));
  const int high = low + 1;
  const double down = size - fp16_value(static_cast<uint16_t>(low));
  const double up = fp16_value(static_cast<uint16_t>(high)) - size;
  return static_cast<uint16_t>(sign | (up < down || (up == down && high % 2 == 0) ? high : low));
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

std::vector<double> mla_values(MlaRow format, const std::byte* row, double k_scale) {
  const auto e4m3 = [&](size_t at) { return e4m3_value(std::to_integer<int>(row[at])); };
  std::vector<double> values(576);
  for (size_t i = 0; i < values.size(); ++i) {
    const bool latent = i < 512;
    const size_t group = i / 16;
    float tile_scale = 0;
    switch (format) {
      case MlaRow::kNvfp4Ds:
        values[i] = latent ? nvfp4_value(row, i) * e4m3(320 + 8 * (group % 4) + group / 4)
                           : e4m3(256 + i - 512);
        break;
      case MlaRow::kFp8Ds:
        if (latent) std::memcpy(&tile_scale, row + 512 + 4 * (i / 128), sizeof(tile_scale));
        values[i] = latent ? e4m3(i) * tile_scale : bf16_value(load_u16(row + 528 + 2 * (i - 512)));
        break;
      case MlaRow::kFp8:
        values[i] = e4m3(i) * k_scale;
        break;
      case MlaRow::kBf16:
        values[i] = bf16_value(load_u16(row + 2 * i));
        break;
      case MlaRow::kNone:
        values[i] = std::numeric_limits<double>::quiet_NaN();
        break;
    }
  }
  return values;
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
  const std::byte* scales = bytes_.data() + scale_offset(side, slot, head);
  const double scale = side == Side::kK ? layer_.k_scale : layer_.v_scale;
  for (size_t i = 0; i < row.size(); ++i)
    row[i] = stored_value(format(side), data, scales, i) * (has_scale(format(side)) ? scale : 1.0);
  return row;
}

int64_t Pool::mla_offset(int64_t slot) const {
  const int64_t row_bytes[] = {0, 352, 656, 576, 1152};
  const AttentionGeometry& g = geometry();
  return slot / g.block_tokens * layer_.block_stride_bytes +
         slot % g.block_tokens * row_bytes[static_cast<size_t>(g.mla_row)];
}

std::vector<double> Pool::read_mla(int64_t slot) const {
  return mla_values(geometry().mla_row, bytes_.data() + mla_offset(slot), layer_.k_scale);
}

}  // namespace larder::test
