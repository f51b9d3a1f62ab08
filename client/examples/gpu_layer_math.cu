// Every kernel: one CTA per row, whose threads go through the row's elements. What a CTA moves is
// its row, once in and once out; memory-bound, and a small part of a pass beside the products.
#include <cuda_bf16.h>

#include "client/examples/gpu_layer_math.h"
#include "client/examples/gpu_memory.h"

namespace larder::examples {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / 32;

// The sum over the CTA, in every thread. `parts` is free for use before and after.
__device__ float sum_over_block(float value, float* parts) {
  for (int lane = 16; lane > 0; lane /= 2) value += __shfl_xor_sync(0xffffffffu, value, lane);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  float sum = 0;
  for (int warp = 0; warp < kWarps; ++warp) sum += parts[warp];
  return sum;
}

__device__ uint16_t bf16_bits(float value) {
  return __bfloat16_as_ushort(__float2bfloat16_rn(value));
}

__global__ void __launch_bounds__(kThreads)
    embed_kernel(const float* __restrict__ embedding, const int32_t* __restrict__ tokens,
                 float* __restrict__ out, int32_t width) {
  const int64_t row = blockIdx.x;
  const float* const from = embedding + int64_t{tokens[row]} * width;
  for (int32_t i = threadIdx.x; i < width; i += kThreads) out[row * width + i] = from[i];
}

__global__ void __launch_bounds__(kThreads)
    rms_norm_kernel(const float* __restrict__ x, const int32_t* __restrict__ from,
                    const float* __restrict__ weight, float epsilon, float* __restrict__ out,
                    int32_t width) {
  __shared__ float parts[kWarps];
  const int64_t row = blockIdx.x;
  const float* const values = x + (from == nullptr ? row : int64_t{from[row]}) * width;
  float squares = 0;
  for (int32_t i = threadIdx.x; i < width; i += kThreads) squares += values[i] * values[i];
  const float mean_square = sum_over_block(squares, parts) / static_cast<float>(width);
  const float inverse = 1.0f / sqrtf(mean_square + epsilon);
  for (int32_t i = threadIdx.x; i < width; i += kThreads)
    out[row * width + i] = values[i] * inverse * weight[i];
}

// A thread has a pair of elements that are half a head apart.
__global__ void __launch_bounds__(kThreads)
    rotate_and_round_kernel(float* __restrict__ qkv, const int32_t* __restrict__ positions,
                            const float* __restrict__ frequencies, uint16_t* __restrict__ key_bits,
                            uint16_t* __restrict__ value_bits, HeadCounts heads) {
  const int64_t row = blockIdx.x;
  const int32_t half = heads.dim / 2;
  const auto position = static_cast<float>(positions[row]);
  const int64_t kv_row = row * heads.kv * heads.dim;
  const int32_t num_pairs = (heads.query + 2 * heads.kv) * half;
  float* const row_values = qkv + row * 2 * num_pairs;
  for (int32_t pair = threadIdx.x; pair < num_pairs; pair += kThreads) {
    const int32_t head = pair / half;
    const int32_t i = pair % half;
    float* const head_values = row_values + int64_t{head} * heads.dim;
    float low = head_values[i];
    float high = head_values[i + half];
    const bool is_value = head >= heads.query + heads.kv;
    if (!is_value) {
      float sine = 0;
      float cosine = 0;
      sincosf(position * frequencies[i], &sine, &cosine);
      const float rotated = low * cosine - high * sine;
      high = high * cosine + low * sine;
      low = rotated;
    }
    if (head < heads.query) {
      head_values[i] = low;
      head_values[i + half] = high;
      continue;
    }
    const int32_t kv_head = head - heads.query - (is_value ? heads.kv : 0);
    uint16_t* const bits =
        (is_value ? value_bits : key_bits) + kv_row + int64_t{kv_head} * heads.dim;
    bits[i] = bf16_bits(low);
    bits[i + half] = bf16_bits(high);
  }
}

__global__ void __launch_bounds__(kThreads)
    swiglu_kernel(const float* __restrict__ gate_up, float* __restrict__ out, int32_t width) {
  const int64_t row = blockIdx.x;
  const float* const gates = gate_up + row * 2 * width;
  const float* const ups = gates + width;
  for (int32_t i = threadIdx.x; i < width; i += kThreads)
    out[row * width + i] = gates[i] * (ups[i] / (1.0f + expf(-gates[i])));
}

// A grid has at least one CTA, so a call with no rows launches none.
template <typename... Parameters, typename... Arguments>
void launch(const char* name, void (*kernel)(Parameters...), int64_t rows, cudaStream_t stream,
            Arguments... arguments) {
  if (rows == 0) return;
  kernel<<<static_cast<unsigned>(rows), kThreads, 0, stream>>>(arguments...);
  check_cuda(cudaGetLastError(), name);
}

}  // namespace

void gpu_embed(const float* embedding, const int32_t* tokens, float* out, int64_t rows,
               int32_t width, cudaStream_t stream) {
  launch("embed_kernel", embed_kernel, rows, stream, embedding, tokens, out, width);
}

void gpu_rms_norm(const float* x, const int32_t* from, const float* weight, float epsilon,
                  float* out, int64_t rows, int32_t width, cudaStream_t stream) {
  launch("rms_norm_kernel", rms_norm_kernel, rows, stream, x, from, weight, epsilon, out, width);
}

void gpu_rotate_and_round(float* qkv, const int32_t* positions, const float* frequencies,
                          uint16_t* key_bits, uint16_t* value_bits, const HeadCounts& heads,
                          int64_t rows, cudaStream_t stream) {
  launch("rotate_and_round_kernel", rotate_and_round_kernel, rows, stream, qkv, positions,
         frequencies, key_bits, value_bits, heads);
}

void gpu_swiglu(const float* gate_up, float* out, int64_t rows, int32_t width,
                cudaStream_t stream) {
  launch("swiglu_kernel", swiglu_kernel, rows, stream, gate_up, out, width);
}

}  // namespace larder::examples
