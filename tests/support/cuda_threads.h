// CUDA device code on the host, compiled as plain C++: what the device side offers beyond the
// language, and CTAs whose threads take turns. Included before every header with device code, in
// programs that hold nothing else. One CTA at a time, on one host thread.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_runtime_api.h>
#include <functional>
#include <math.h>  // not <cmath>: device code has the names without std
#include <string>
#include <type_traits>
#include <vector_types.h>

// For the compiler of device code alone. What the standard library does with the attribute of this
// name comes before.
#undef __noinline__
#define __noinline__
#define __builtin_assume(condition)

extern uint3 threadIdx, blockIdx;
extern dim3 blockDim, gridDim;

namespace larder::test {

// Which thread of which CTA code is run as.
struct CudaPlace {
  int grid = 1;  // CTAs
  int cta = 0;
  int threads = 32;  // of a CTA, whole warps up to 32
  int thread = 0;
};

// Runs `body`, which must not throw, as each thread of the CTA. All threads of a warp, or of the
// CTA, have to meet where code of the device has them meet; a barrier that some never come to ends
// the program.
void run_cta(const CudaPlace& place, const std::function<void()>& body);

// From here on the caller is that thread, and alone in its warp.
void be_thread(const CudaPlace& place);

// Hands a value to the warp's other threads; returns those of all lanes. Until the next call.
const uint64_t* exchange_in_warp(uint64_t value);
void meet_in_warp();
void meet_in_cta();
int lane_of_warp();

template <typename T>
T shuffle_in_warp(T value, int from) {
  static_assert(sizeof(T) <= sizeof(uint64_t));
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = exchange_in_warp(bits)[from & 31];
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

}  // namespace larder::test

inline void __syncthreads() { larder::test::meet_in_cta(); }
inline void __syncwarp() { larder::test::meet_in_warp(); }
template <typename T>
T __shfl_sync(unsigned /*lanes*/, T value, int from) {
  return larder::test::shuffle_in_warp(value, from);
}
template <typename T>
T __shfl_up_sync(unsigned /*lanes*/, T value, int step) {
  const int lane = larder::test::lane_of_warp();
  return larder::test::shuffle_in_warp(value, lane >= step ? lane - step : lane);
}
inline bool __all_sync(unsigned /*lanes*/, bool holds) {
  const uint64_t* all = larder::test::exchange_in_warp(holds ? 1 : 0);
  return std::all_of(all, all + 32, [](uint64_t one) { return one != 0; });
}

inline uint32_t __umulhi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>(uint64_t{a} * b >> 32);
}
inline int __clz(int value) {
  return value == 0 ? 32 : __builtin_clz(static_cast<unsigned>(value));
}
inline float __uint_as_float(uint32_t bits) {
  float value = 0.0f;
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
inline uint32_t __float_as_uint(float value) {
  uint32_t bits = 0;
  std::memcpy(&bits, &value, sizeof bits);
  return bits;
}
inline float __fadd_rn(float a, float b) { return a + b; }
template <typename T>
T atomicAdd(T* value, T more) {
  const T before = *value;
  *value += more;
  return before;
}

// Not std's, which take two of one type.
template <typename A, typename B>
std::common_type_t<A, B> min(A a, B b) {
  return b < a ? b : a;
}
template <typename A, typename B>
std::common_type_t<A, B> max(A a, B b) {
  return a < b ? b : a;
}
