// The scale of a finite group of 16 values for each encoder, as encode.cuh finds it, with few
// instructions: divisions by what a call has once become Divisors, rounding is round_to_e2m1.
#pragma once

#include "kernels/cuda/append_call.cuh"

namespace larder::kernels::cuda {

template <Encoder kEncoder>
struct ScaleSearch;

template <>
struct ScaleSearch<Encoder::kReference> {
  __device__ static Nvfp4Scale scale_of(const Group& group, const TensorScale& scale) {
    const uint32_t byte = positive_scale_byte(quotient(group.amax, scale.six));
    const float inverse = reciprocal_of(__fmul_rn(positive_scale_value(byte), scale.one.value));
    return {static_cast<uint8_t>(byte), byte == 0 ? 0.0f : inverse};
  }
};

template <>
struct ScaleSearch<Encoder::kFourOverSix> {
  __device__ static Nvfp4Scale candidate(float amax, float share, const TensorScale& scale) {
    const float encode_scale = scale.one.reciprocal;
    const uint32_t byte = positive_scale_byte(__fmul_rn(encode_scale, __fmul_rn(amax, share)));
    const float inverse =
        reciprocal_of(__fmul_rn(positive_scale_value(byte), reciprocal_of(encode_scale)));
    return {static_cast<uint8_t>(byte), byte == 0 ? 0.0f : inverse};
  }

  template <bool kClamp>
  __device__ static float error(const Group& group, float inverse) {
    const float decode_scale = inverse != 0.0f ? reciprocal_of(inverse) : 0.0f;
    float error = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroup; i += 2) {
      const auto miss = [&](float value) {
        const float stored = round_to_e2m1<kClamp>(value, inverse).value();
        return __fmaf_rn(stored, decode_scale, -fabsf(value));
      };
      const float x = miss(group.values[i]);
      const float y = miss(group.values[i + 1]);
      error = __fadd_rn(error, __fmaf_rn(x, x, __fmul_rn(y, y)));
    }
    return error;
  }

  __device__ static Nvfp4Scale scale_of(const Group& group, const TensorScale& scale) {
    const Nvfp4Scale six = candidate(group.amax, 1.0f / 6.0f, scale);
    const Nvfp4Scale four = candidate(group.amax, 0.25f, scale);
    const bool clamp = may_saturate(six.byte) || may_saturate(four.byte);
    const bool four_is_better =
        clamp ? error<true>(group, four.inverse) < error<true>(group, six.inverse)
              : error<false>(group, four.inverse) < error<false>(group, six.inverse);
    return four_is_better ? four : six;
  }
};

// The errors of best_scale in half precision (kernels/cpu/nvfp4_search.h), of two scales at once:
// one in the low halves, one in the high ones. Each is used for an element in 5 instructions.
// Nothing is flushed, and nothing fused but what __hfma2 fuses: the bits are those of the plain
// definition.
struct HalfErrors {
  __half2 minus[8];  // -|values| in units of 1 / k
  float unit;  // what E4M3 values times 2^-120 have to be multiplied with: twice, see scales()

  __device__ static uint32_t bits_of(__half2 pair) {
    return *reinterpret_cast<const uint32_t*>(&pair);
  }
  __device__ static __half2 halves_of(uint32_t bits) {
    return *reinterpret_cast<const __half2*>(&bits);
  }

  __device__ HalfErrors(const Group& group, float global_scale) {
    // 2^14 k: the power of two that brings amax into [2^14, 2^15).
    const uint32_t exponent = __float_as_uint(group.amax) & 0x7F800000u;
    const float power = __uint_as_float((254u + 14u) * 0x800000u - exponent);
    const float minus_k = __fmul_rn(power, -0x1p-14f);
#pragma unroll
    for (int i = 0; i < 8; ++i)
      minus[i] = __floats2half2_rn(__fmul_rn(fabsf(group.values[2 * i]), minus_k),
                                   __fmul_rn(fabsf(group.values[2 * i + 1]), minus_k));
    unit = __fmul_rn(global_scale, power);
  }

  // `back` of two scale bytes, and the negative of `forward`: -1 / back. The approximate reciprocal
  // is off by one in its last place at most. That of a half with its 11 bits is never nearer than
  // two to where the rounding to half turns, so the result is the correctly rounded one.
  struct Scales {
    __half2 minus_forward;
    __half2 back;
  };
  __device__ Scales scales(uint32_t a, uint32_t b) const {
    const auto one = [&](uint32_t byte) { return __fmul_rn(positive_scale_value(byte), unit); };
    const auto minus_reciprocal = [](__half value) {
      float result;
      asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(-__half2float(value)));
      return result;
    };
    const __half2 back = __floats2half2_rn(one(a), one(b));
    return {
        __floats2half2_rn(minus_reciprocal(__low2half(back)), minus_reciprocal(__high2half(back))),
        back};
  }

  // Adds the squared misses of two elements, each under its scale, to `sum`. kCut: products of 7
  // and more may occur.
  template <bool kCut>
  __device__ static __half2 add(__half2 minus_values, __half2 minus_forward, __half2 back,
                                __half2 sum) {
    __half2 y = __hmul2_rn(minus_values, minus_forward);
    if (kCut) y = __hmin2(y, halves_of(0x0E000E00u));
    const __half2 stored = halves_of((bits_of(y) + 0x01000100u) & 0xFE00FE00u);
    const __half2 miss = __hfma2(stored, back, minus_values);
    return __hfma2(miss, miss, sum);
  }

  template <bool kCut>
  __device__ __half2 of_two(uint32_t a, uint32_t b) const {
    const Scales two = scales(a, b);
    __half2 even = halves_of(0);
    __half2 odd = halves_of(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) {
      even = add<kCut>(__low2half2(minus[i]), two.minus_forward, two.back, even);
      odd = add<kCut>(__high2half2(minus[i]), two.minus_forward, two.back, odd);
    }
    return __hadd2_rn(even, odd);
  }

  // Of one scale, in both halves: even elements in the low halves, odd ones in the high ones.
  __device__ __half2 of_one(uint32_t byte) const {
    const Scales one = scales(byte, byte);
    __half2 sums = halves_of(0);
#pragma unroll
    for (int i = 0; i < 8; ++i) sums = add<true>(minus[i], one.minus_forward, one.back, sums);
    return __hadd2_rn(sums, __lowhigh2highlow(sums));
  }
};

template <>
struct ScaleSearch<Encoder::kBestScale> {
  // A candidate's place in the order of the tries, and its step: of equal errors the least stays.
  __device__ static constexpr uint32_t label(int step) {
    const int place = step > 3 ? step + 3 : step > 0 ? 2 * step : -2 * step - (step < 0 ? 1 : 0);
    return static_cast<uint32_t>(16 * place + step + 3);
  }

  // The best of each half so far.
  struct Best {
    __half2 errors;
    uint32_t labels;
    __device__ void consider(__half2 found, int a, int b) {
      const uint32_t better = __hlt2_mask(found, errors);
      labels = (better & (label(a) | label(b) << 16)) | (~better & labels);
      errors = __hmin2(found, errors);
    }
  };

  // For middle bytes from 4 to 0x75 and a finite group. In each half the tries are in their order.
  __device__ static uint32_t best_byte(const Group& group, float global_scale, uint32_t middle) {
    const HalfErrors errors(group, global_scale);
    Best best = {errors.of_two<false>(middle, middle + 1), label(0) | label(1) << 16};
    best.consider(errors.of_two<true>(middle - 2, middle - 3), -2, -3);
    best.consider(errors.of_two<false>(middle + 2, middle + 3), 2, 3);
    best.consider(errors.of_two<false>(middle + 4, middle + 5), 4, 5);
    best.consider(errors.of_two<false>(middle + 6, middle + 7), 6, 7);
    best.consider(errors.of_two<false>(middle + 8, middle + 9), 8, 9);
    // Errors are not negative, so they are ordered as their bits are.
    const uint32_t found = HalfErrors::bits_of(best.errors);
    const uint32_t low = __byte_perm(found, best.labels, 0x1054);
    const uint32_t high = __byte_perm(found, best.labels, 0x3276);
    const uint32_t lower =
        __byte_perm(HalfErrors::bits_of(errors.of_one(middle - 1)), label(-1), 0x1054);
    return middle + (min(min(low, high), lower) & 15u) - 3u;
  }

  __device__ static Nvfp4Scale scale_of(const Group& group, const TensorScale& scale) {
    const uint32_t middle = positive_scale_byte(quotient(group.amax, scale.six));
    if (middle - 4u > 0x71u) return search_in_floats(group, scale, static_cast<int>(middle));
    const uint32_t byte = best_byte(group, scale.one.value, middle);
    return {static_cast<uint8_t>(byte),
            reciprocal_of(__fmul_rn(positive_scale_value(byte), scale.one.value))};
  }

  // For other middle bytes. Zeros are common there, and have no errors to compare.
  __device__ static float error(const Group& group, float unit, float decoded, float inverse) {
    float error = 0.0f;
#pragma unroll
    for (int i = 0; i < kGroup; ++i) {
      const float stored = round_to_e2m1<true>(group.values[i], inverse).value();
      const float miss =
          __fsub_rn(__fmul_rn(stored, decoded), __fmul_rn(fabsf(group.values[i]), unit));
      error = __fadd_rn(error, __fmul_rn(miss, miss));
    }
    return error;
  }

  __device__ static Nvfp4Scale search_in_floats(const Group& group, const TensorScale& scale,
                                                int middle) {
    if (!(group.amax > 0.0f)) return {};
    Nvfp4Scale best = {};
    float least = 0.0f;
    for (int i = 0; i < 13; ++i) {
      const int step = i > 6 ? i - 3 : (i + 1) / 2 * (i % 2 != 0 ? -1 : 1);
      const int byte = middle + step;
      if (byte < 0 || byte > 0x7E) continue;
      const float decoded = positive_scale_value(static_cast<uint32_t>(byte));
      const float inverse = byte == 0 ? 0.0f : reciprocal_of(__fmul_rn(decoded, scale.one.value));
      const float found = error(group, scale.one.reciprocal, decoded, inverse);
      if (step != 0 && !(found < least)) continue;
      least = found;
      best = {static_cast<uint8_t>(byte), inverse};
    }
    return best;
  }
};

}  // namespace larder::kernels::cuda
