// A pool of bytes for kernel tests, and codecs that share nothing with the kernels: values come
// from the definition of each format, rounding from a search for the nearest value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "kernels/params.h"

namespace larder::test {

double e4m3_value(int byte);  // NaN for 0x7F and 0xFF
double e2m1_value(int code);
double bf16_value(uint16_t bits);
double fp16_value(uint16_t bits);
double e5m2_value(int byte);  // infinite for 0x7C and 0xFC, NaN above them
uint16_t nearest_bf16(float value);
// Nearest byte or code, ties to the even one, saturating; the sign is kept.
int nearest_e4m3(double value);
int nearest_e5m2(double value);
uint16_t nearest_fp16(double value);  // to infinity from 65520 on
int nearest_e2m1(double value);       // a NaN gives a zero with its sign

struct Nvfp4Group {
  uint8_t data[8];
  uint8_t scale;
  bool operator==(const Nvfp4Group&) const = default;
};
// 16 values by the expressions of formats.md 1.5(a), in float with IEEE division.
Nvfp4Group nvfp4_group(const float* values, float global_scale);

// The 576 values of an MLA row (formats.md 5); k_scale counts for fp8_mla.
std::vector<double> mla_values(MlaRow format, const std::byte* row, double k_scale);

enum class Side { kK, kV };

// One layer with its own memory. Blocks are `extra_stride_bytes` further apart than a page.
class Pool {
 public:
  Pool(const AttentionGeometry& geometry, int64_t num_blocks, std::byte fill = std::byte{0xFF},
       int64_t extra_stride_bytes = 0);
  Pool(const Pool&) = delete;  // layer_ points into bytes_
  Pool& operator=(const Pool&) = delete;

  const kernels::LayerView& layer() const { return layer_; }
  kernels::LayerView& layer() { return layer_; }
  std::vector<std::byte>& bytes() { return bytes_; }
  const AttentionGeometry& geometry() const { return layer_.geometry; }

  // Where the bytes of one row lie in bytes(), by the page formula of formats.md 2.2.
  int64_t data_offset(Side side, int64_t slot, int64_t head) const;
  int64_t scale_offset(Side side, int64_t slot, int64_t head) const;
  int64_t dim(Side side) const;

  // The row as a reader of the format sees it, the tensor's scale included.
  std::vector<double> read(Side side, int64_t slot, int64_t head) const;

  // Pools of MLA rows: where a row lies, and its 576 values.
  int64_t mla_offset(int64_t slot) const;
  std::vector<double> read_mla(int64_t slot) const;

 private:
  KvFormat format(Side side) const;

  std::vector<std::byte> bytes_;
  kernels::LayerView layer_;
};

}  // namespace larder::test
