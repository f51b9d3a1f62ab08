// The arithmetic of a decoder layer between its matrix products (layer_math.h), on a GPU: float32,
// dense, row-major, every pointer in device memory. Enqueued in the stream, nothing is waited for,
// and it can be captured. Throws GpuError where a launch fails.
#pragma once

#include <cstdint>
#include <cuda_runtime_api.h>

namespace larder::examples {

// out[i] = embedding[tokens[i]]; tokens are below the number of its rows.
void gpu_embed(const float* embedding,  // [256, width]
               const int32_t* tokens,   // [rows]
               float* out,              // [rows, width]
               int64_t rows, int32_t width, cudaStream_t stream);

// out[i] = rms_norm of x[from[i]], or of x[i] where `from` is nullptr.
void gpu_rms_norm(const float* x,             // [any, width]
                  const int32_t* from,        // [rows] or nullptr
                  const float* weight,        // [width]
                  float epsilon, float* out,  // [rows, width]
                  int64_t rows, int32_t width, cudaStream_t stream);

// Heads of one row of queries, keys and values, one after another.
struct HeadCounts {
  int32_t query = 0;
  int32_t kv = 0;  // of keys, and of values
  int32_t dim = 0;
  int32_t width() const { return (query + 2 * kv) * dim; }
};

// The rotary embedding of queries, in place, and of keys, whose result is rounded to bf16, as are
// the values.
void gpu_rotate_and_round(float* qkv,                // [rows, heads.width()]
                          const int32_t* positions,  // [rows]
                          const float* frequencies,  // [heads.dim / 2]
                          uint16_t* key_bits,        // [rows, heads.kv * heads.dim]
                          uint16_t* value_bits,      // the same
                          const HeadCounts& heads, int64_t rows, cudaStream_t stream);

// out = silu(gate) * up.
void gpu_swiglu(const float* gate_up,  // [rows, 2 * width]: gate, then up
                float* out,            // [rows, width]
                int64_t rows, int32_t width, cudaStream_t stream);

}  // namespace larder::examples
