// Rows of floats to stored bytes on the device: every format, encoder and MLA row, and the
// transforms of keys. Operations are IEEE, in the written order, and never fused but where
// __fmaf_rn stands, so that the bytes are those of the plain definitions in kernels/cpu.
//
// A warp has one row at a time, in shared memory. Each group of 16 values is followed by an unused
// float: groups that lanes read side by side then lie in different banks.
#pragma once

#include <cfloat>
#include <cstdint>

#include "kernels/cuda/codes.cuh"
#include "kernels/kernel_table.h"
#include "kernels/params.h"

namespace larder::kernels::cuda {

inline constexpr int kWarp = 32;
inline constexpr int kGroup = kNvfp4GroupElements;
inline constexpr int kRowFloats = kMaxHeadDim + kMaxHeadDim / kGroup;

// Where value i of a row lies in the warp's shared memory.
__device__ inline int place(int i) { return i + i / kGroup; }

// Sums and products whose NaNs have the bits that x86 gives them, as the sign of a NaN reaches
// nvfp4 codes and its payload 16-bit formats: that of the first operand which is one, made quiet;
// else, as from inf - inf, the negative one without payload. A GPU's are all alike.
__device__ inline float with_nan_of(float a, float b, float result) {
  if (!isnan(result)) return result;
  if (isnan(a)) return __uint_as_float(__float_as_uint(a) | 0x400000u);
  if (isnan(b)) return __uint_as_float(__float_as_uint(b) | 0x400000u);
  return __uint_as_float(0xFFC00000u);
}
__device__ inline float sum(float a, float b) { return with_nan_of(a, b, __fadd_rn(a, b)); }
__device__ inline float difference(float a, float b) { return with_nan_of(a, b, __fsub_rn(a, b)); }
__device__ inline float product(float a, float b) { return with_nan_of(a, b, __fmul_rn(a, b)); }

// 1 / sqrt(n) of a power of two, correctly rounded.
__device__ inline float rotation_factor(int n) {
  const int log2 = 31 - __clz(n);
  const float even = __uint_as_float(static_cast<uint32_t>(127 - log2 / 2) << 23);
  return log2 % 2 != 0 ? even * 0.707106781186547524f : even;
}

// The Hadamard transform of kernels/cpu/rotate.h by one warp, which has written all values and
// passed a __syncwarp. Ends with another. NaNs become the positive quiet one.
__device__ inline void rotate(float* values, int dim, int lane) {
  const int n = dim & -dim;  // rotation_dim, the largest power of two that divides it
  for (int h = 1; h < n; h *= 2) {
    for (int pair = lane; pair < dim / 2; pair += kWarp) {
      const int i = (pair & -h) * 2 | (pair & (h - 1));
      const float a = values[place(i)];
      const float b = values[place(i + h)];
      values[place(i)] = __fadd_rn(a, b);
      values[place(i + h)] = __fsub_rn(a, b);
    }
    __syncwarp();
  }
  const float factor = rotation_factor(n);
  for (int i = lane; i < dim; i += kWarp) {
    const float value = __fmul_rn(values[place(i)], factor);
    values[place(i)] = isnan(value) ? __uint_as_float(0x7FC00000u) : value;
  }
  __syncwarp();
}

__device__ inline void store_u16(uint16_t bits, uint8_t* target) {
  if ((reinterpret_cast<uintptr_t>(target) & 1) == 0) {
    *reinterpret_cast<uint16_t*>(target) = bits;
  } else {
    target[0] = static_cast<uint8_t>(bits);
    target[1] = static_cast<uint8_t>(bits >> 8);
  }
}

__device__ inline uint8_t e4m3_quotient(float value, float scale) {
  return e4m3_bits(__fdiv_rn(value, scale));
}

struct Nvfp4Scale {
  uint8_t byte;   // E4M3, never negative, never NaN
  float inverse;  // what values are multiplied with before they are rounded to E2M1
};

// The largest magnitude, NaNs left out.
__device__ inline float group_amax(const float* values /* [16] */) {
  float amax = 0.0f;
  for (int i = 0; i < kGroup; ++i)
    if (fabsf(values[i]) > amax) amax = fabsf(values[i]);
  return amax;
}

// NaN (inf / inf) becomes the largest scale.
__device__ inline uint8_t scale_byte(float wanted) {
  const uint8_t byte = e4m3_bits(wanted);
  return byte < 0x7E ? byte : 0x7E;
}

// 1 / (the scale's value * factor), and 0 for the scale 0.
__device__ inline float scale_inverse(uint8_t byte, float factor) {
  return byte == 0 ? 0.0f : __fdiv_rn(1.0f, __fmul_rn(e4m3_value(byte), factor));
}

__device__ inline Nvfp4Scale reference_scale(float amax, float global_scale) {
  const uint8_t byte = scale_byte(__fdiv_rn(amax, __fmul_rn(6.0f, global_scale)));
  return {byte, scale_inverse(byte, global_scale)};
}

// The scale that maps amax to `largest`: 6 or 4.
__device__ inline Nvfp4Scale four_over_six_scale(float amax, float largest, float global_scale) {
  const float encode_scale = __fdiv_rn(1.0f, global_scale);
  const float share = __fmul_rn(amax, __fdiv_rn(1.0f, largest));
  const uint8_t byte = scale_byte(__fmul_rn(encode_scale, share));
  return {byte, scale_inverse(byte, __fdiv_rn(1.0f, encode_scale))};
}

// NaN where a value is NaN.
__device__ inline float four_over_six_error(const float* values /* [16] */, float inverse) {
  const float decode_scale = inverse != 0.0f ? __fdiv_rn(1.0f, inverse) : 0.0f;
  const auto miss = [=](float value) {
    return __fmaf_rn(e2m1_value(e2m1_code(__fmul_rn(value, inverse))), decode_scale, -value);
  };
  float error = 0.0f;
  for (int i = 0; i < kGroup; i += 2) {
    const float x = miss(values[i]);
    const float y = miss(values[i + 1]);
    error = __fadd_rn(error, __fmaf_rn(x, x, __fmul_rn(y, y)));
  }
  return error;
}

__device__ inline Nvfp4Scale four_over_six(const float* values /* [16] */, float global_scale) {
  const float amax = group_amax(values);
  const Nvfp4Scale six = four_over_six_scale(amax, 6.0f, global_scale);
  const Nvfp4Scale four = four_over_six_scale(amax, 4.0f, global_scale);
  return four_over_six_error(values, four.inverse) < four_over_six_error(values, six.inverse) ? four
                                                                                              : six;
}

// Whether errors are those in halves: see kernels/cpu/nvfp4_search.h.
__device__ inline bool best_scale_uses_halves(uint8_t middle, float global_scale) {
  return middle >= 4 && middle <= 0x75 && global_scale >= 0x1p-64f && global_scale <= 0x1p64f;
}

// 2^14 times the power of two that brings amax into [1, 2).
__device__ inline float best_scale_power(float amax) {
  return __uint_as_float((254u + 14u) * 0x800000u - (__float_as_uint(amax) & 0x7F800000u));
}

__device__ inline float best_scale_half_error(const float* values /* [16] */, float global_scale,
                                              float decoded, float power) {
  const __half back = __float2half_rn(__fmul_rn(__fmul_rn(decoded, global_scale), power));
  const __half forward = __float2half_rn(__fdiv_rn(1.0f, __half2float(back)));
  const float k = __fmul_rn(power, 0x1p-14f);
  __half sums[2] = {__ushort_as_half(0), __ushort_as_half(0)};
  for (int i = 0; i < kGroup; ++i) {
    const float magnitude = isnan(values[i]) ? 0.0f : fabsf(values[i]);
    const __half value = __float2half_rn(__fmul_rn(magnitude, k));
    const uint32_t y = min(uint32_t{__half_as_ushort(__hmul_rn(value, forward))}, 0x0E00u);
    const __half stored = __ushort_as_half(static_cast<uint16_t>((y + 0x100u) & 0xFE00u));
    const __half miss = __hfma(stored, back, __hneg(value));
    sums[i % 2] = __hfma(miss, miss, sums[i % 2]);
  }
  return __half2float(__hadd_rn(sums[0], sums[1]));
}

// In units of the tensor's scale; a NaN adds 0.
__device__ inline float best_scale_float_error(const float* values /* [16] */, float unit,
                                               float decoded, float inverse) {
  float error = 0.0f;
  for (int i = 0; i < kGroup; ++i) {
    const float magnitude = isnan(values[i]) ? 0.0f : fabsf(values[i]);
    const float stored = e2m1_value(e2m1_code(__fmul_rn(magnitude, inverse)) & 7u);
    const float miss = __fsub_rn(__fmul_rn(stored, decoded), __fmul_rn(magnitude, unit));
    error = __fadd_rn(error, __fmul_rn(miss, miss));
  }
  return error;
}

// Bytes are tried in the order of their distance from the reference's, the lower one of two first:
// 0, -1, 1, -2, 2, -3, 3, 4, ..., 9. Of equal errors the first stays.
__device__ inline Nvfp4Scale best_scale(const float* values /* [16] */, float global_scale) {
  const float amax = group_amax(values);
  const Nvfp4Scale middle = reference_scale(amax, global_scale);
  const bool halves = best_scale_uses_halves(middle.byte, global_scale);
  const float unit = __fdiv_rn(1.0f, global_scale);
  Nvfp4Scale best = middle;
  float least = 0.0f;
  for (int i = 0; i < 13; ++i) {
    const int step = i > 6 ? i - 3 : (i + 1) / 2 * (i % 2 != 0 ? -1 : 1);
    const int byte = middle.byte + step;
    if (byte < 0 || byte > 0x7E) continue;
    const float decoded = e4m3_value(static_cast<uint8_t>(byte));
    const float inverse = scale_inverse(static_cast<uint8_t>(byte), global_scale);
    const float error =
        halves ? best_scale_half_error(values, global_scale, decoded, best_scale_power(amax))
               : best_scale_float_error(values, unit, decoded, inverse);
    if (step != 0 && !(error < least)) continue;
    least = error;
    best = {static_cast<uint8_t>(byte), inverse};
  }
  return best;
}

// The sign comes from the value: the product may be a NaN that has another (0 * inf).
__device__ inline void encode_codes(const float* values /* [16] */, float inverse,
                                    uint8_t* data /* [8] */) {
  uint32_t words[2] = {0, 0};
  for (int i = 0; i < kGroup; ++i) {
    const uint32_t code =
        (e2m1_code(__fmul_rn(values[i], inverse)) & 7u) | (__float_as_uint(values[i]) >> 31) << 3;
    words[i / 8] |= code << 4 * (i % 8);
  }
  if ((reinterpret_cast<uintptr_t>(data) & 3) == 0) {
    reinterpret_cast<uint32_t*>(data)[0] = words[0];
    reinterpret_cast<uint32_t*>(data)[1] = words[1];
  } else {
    for (int i = 0; i < kGroup / 2; ++i)
      data[i] = static_cast<uint8_t>(words[i / 4] >> 8 * (i % 4));
  }
}

__device__ inline void encode_group(Encoder encoder, const float* values /* [16] */,
                                    float global_scale, uint8_t* data /* [8] */, uint8_t* scale) {
  const Nvfp4Scale chosen = encoder == Encoder::kFourOverSix ? four_over_six(values, global_scale)
                            : encoder == Encoder::kBestScale
                                ? best_scale(values, global_scale)
                                : reference_scale(group_amax(values), global_scale);
  encode_codes(values, chosen.inverse, data);
  *scale = chosen.byte;
}

// A K or V row by one warp. `encoder` and `scales` count for nvfp4 only.
__device__ inline void encode_row(KvFormat format, Encoder encoder, const float* values, int dim,
                                  float scale, uint8_t* data, uint8_t* scales, int lane) {
  switch (format) {
    case KvFormat::kBf16:
      for (int i = lane; i < dim; i += kWarp) store_u16(bf16_bits(values[place(i)]), data + 2 * i);
      return;
    case KvFormat::kFp16:
      for (int i = lane; i < dim; i += kWarp) store_u16(fp16_bits(values[place(i)]), data + 2 * i);
      return;
    case KvFormat::kFp8E4m3:
      for (int i = lane; i < dim; i += kWarp) data[i] = e4m3_quotient(values[place(i)], scale);
      return;
    case KvFormat::kFp8E5m2:
      for (int i = lane; i < dim; i += kWarp)
        data[i] = e5m2_bits(__fdiv_rn(values[place(i)], scale));
      return;
    case KvFormat::kNvfp4:
      for (int group = lane; group < dim / kGroup; group += kWarp)
        encode_group(encoder, values + place(group * kGroup), scale, data + group * (kGroup / 2),
                     scales + group);
      return;
  }
}

// Of a group of latent values: rounded up, and at least 2^-9.
__device__ inline Nvfp4Scale nvfp4_ds_scale(float amax) {
  const float wanted = fmaxf(__fdiv_rn(amax, 6.0f), 0x1p-9f);
  uint8_t byte = e4m3_bits(wanted);
  if (e4m3_value(byte) < wanted && byte < 0x7E) ++byte;
  return {byte, __fdiv_rn(1.0f, e4m3_value(byte))};
}

// Where the scale of latent group g lies: see MlaRow.
__device__ inline int nvfp4_ds_scale_place(int group) {
  return 320 + 8 * (group & 3) + (group >> 2);
}

// Lane g has latent group g, of 32.
__device__ inline void encode_nvfp4_ds_row(const float* values, uint8_t* row, int lane) {
  static_assert(kMlaLatentDim == kWarp * kGroup);
  const float* group = values + place(lane * kGroup);
  const Nvfp4Scale scale = nvfp4_ds_scale(group_amax(group));
  encode_codes(group, scale.inverse, row + lane * (kGroup / 2));
  row[nvfp4_ds_scale_place(lane)] = scale.byte;
  for (int i = lane; i < kMlaRopeDim; i += kWarp)
    row[256 + i] = e4m3_bits(values[place(kMlaLatentDim + i)]);
}

// Of a tile of 128 latent values.
__device__ inline float fp8_ds_scale(float amax) {
  return fmaxf(__fdiv_rn(fminf(amax, FLT_MAX), 448.0f), FLT_MIN);
}

// The 8 lanes of a tile of 128 latent values share its maximum.
__device__ inline void encode_fp8_ds_row(const float* values, uint8_t* row, int lane) {
  float amax = group_amax(values + place(lane * kGroup));
  for (int apart = 1; apart < 8; apart *= 2)
    amax = fmaxf(amax, __shfl_xor_sync(0xFFFFFFFFu, amax, apart));
  const float scale = fp8_ds_scale(amax);
  for (int tile = 0; tile < 4; ++tile) {
    const float tile_scale = __shfl_sync(0xFFFFFFFFu, scale, 8 * tile);
    for (int i = 128 * tile + lane; i < 128 * (tile + 1); i += kWarp)
      row[i] = e4m3_quotient(values[place(i)], tile_scale);
    if (lane < 4)
      row[512 + 4 * tile + lane] = static_cast<uint8_t>(__float_as_uint(tile_scale) >> 8 * lane);
  }
  for (int i = lane; i < kMlaRopeDim; i += kWarp)
    store_u16(bf16_bits(values[place(kMlaLatentDim + i)]), row + 528 + 2 * i);
}

// By one warp, from 576 values: latent, then rope. `k_scale` counts for fp8_mla alone.
__device__ inline void encode_mla_row(MlaRow format, const float* values, float k_scale,
                                      uint8_t* row, int lane) {
  switch (format) {
    case MlaRow::kNvfp4Ds:
      return encode_nvfp4_ds_row(values, row, lane);
    case MlaRow::kFp8Ds:
      return encode_fp8_ds_row(values, row, lane);
    case MlaRow::kFp8:
      for (int i = lane; i < kMlaKeyDim; i += kWarp)
        row[i] = e4m3_quotient(values[place(i)], k_scale);
      return;
    case MlaRow::kBf16:
      for (int i = lane; i < kMlaKeyDim; i += kWarp)
        store_u16(bf16_bits(values[place(i)]), row + 2 * i);
      return;
    case MlaRow::kNone:
      return;
  }
}

}  // namespace larder::kernels::cuda
