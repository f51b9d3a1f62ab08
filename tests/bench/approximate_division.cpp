// How many nvfp4 bytes depend on the last bits of a division?
//
//   approximate_division [groups]
//
// The reference encoder divides twice: amax / (6 * global scale), whose result is rounded to the
// scale byte, and 1 / (scale * global scale), whose product with each element is rounded to a code.
// GPU libraries take approximations there that are 1 or 2 units in the last place off. This encodes
// random groups with each step moved by so much, and counts what changes. Elements that are bf16
// hit midpoints exactly: there a single unit decides.
#include <bit>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <random>

#include "kernels/cpu/bf16.h"
#include "kernels/cpu/nvfp4.h"

namespace larder::kernels {
namespace {

struct Counts {
  int64_t scale_bytes = 0;
  int64_t data_bytes = 0;
  int64_t groups = 0;  // with any difference
};

float move(float value, int ulps) {
  if (value == 0.0f || std::isinf(value)) return value;
  return std::bit_cast<float>(std::bit_cast<uint32_t>(value) + static_cast<uint32_t>(ulps));
}

Nvfp4Scale moved_scale(float amax, float global_scale, int quotient_ulps, int inverse_ulps) {
  Nvfp4Scale scale;
  scale.byte = float_to_e4m3(move(amax / (6.0f * global_scale), quotient_ulps));
  const float decoded = kE4m3Values[scale.byte];
  if (decoded > 0.0f) scale.inverse = move(1.0f / (decoded * global_scale), inverse_ulps);
  return scale;
}

void count(const float* values, float global_scale, int quotient_ulps, int inverse_ulps,
           Counts& counts) {
  const float amax = nvfp4_amax(values);
  const Nvfp4Scale exact = nvfp4_scale(amax, global_scale);
  const Nvfp4Scale moved = moved_scale(amax, global_scale, quotient_ulps, inverse_ulps);
  if (exact.byte == moved.byte && exact.inverse == moved.inverse) return;
  std::byte exact_data[kNvfp4GroupBytes];
  std::byte moved_data[kNvfp4GroupBytes];
  encode_nvfp4_codes_ref(values, exact.inverse, exact_data);
  encode_nvfp4_codes_ref(values, moved.inverse, moved_data);
  int64_t different = 0;
  for (int i = 0; i < kNvfp4GroupBytes; ++i) different += exact_data[i] != moved_data[i];
  counts.scale_bytes += exact.byte != moved.byte;
  counts.data_bytes += different;
  counts.groups += exact.byte != moved.byte || different != 0;
}

void report(int64_t num_groups, float global_scale, bool is_bf16) {
  std::printf("global scale %g, %lld groups of 16 %s values\n", static_cast<double>(global_scale),
              static_cast<long long>(num_groups), is_bf16 ? "bf16" : "fp32");
  for (const int ulps : {-2, -1, 1, 2})
    for (const bool quotient : {true, false}) {
      std::mt19937_64 engine(1);
      std::normal_distribution<float> normal;
      Counts counts;
      for (int64_t i = 0; i < num_groups; ++i) {
        float values[kNvfp4GroupElements];
        for (float& x : values) {
          x = normal(engine);
          if (is_bf16) x = bf16_to_float(float_to_bf16(x));
        }
        count(values, global_scale, quotient ? ulps : 0, quotient ? 0 : ulps, counts);
      }
      std::printf("  %-10s %+d ulp: %lld scale bytes, %lld data bytes, %lld groups\n",
                  quotient ? "quotient" : "reciprocal", ulps,
                  static_cast<long long>(counts.scale_bytes),
                  static_cast<long long>(counts.data_bytes), static_cast<long long>(counts.groups));
    }
}

}  // namespace
}  // namespace larder::kernels

int main(int argc, char** argv) {
  const int64_t num_groups = argc > 1 ? std::atoll(argv[1]) : 200'000;
  for (const bool is_bf16 : {true, false})
    for (const float global_scale : {1.0f, 0.37f, 4.0f / 448.0f})
      larder::kernels::report(num_groups, global_scale, is_bf16);
}
