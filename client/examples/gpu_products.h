// Matrix products by cuBLAS, in float32 as on the CPU: no TF32, no emulation.
#pragma once

#include <cstdint>
#include <cublas_v2.h>

#include "client/examples/gpu_memory.h"

namespace larder::examples {

// Used by one thread, in one stream, which must outlive it. Throws GpuError. Can be captured: the
// workspace is its own.
class GpuProducts {
 public:
  explicit GpuProducts(cudaStream_t stream);
  ~GpuProducts();
  GpuProducts(const GpuProducts&) = delete;
  GpuProducts& operator=(const GpuProducts&) = delete;

  // out = x * weight^T, or out + that where `adds`. Dense, row-major, in device memory.
  void linear(const float* x,       // [rows, inputs]
              const float* weight,  // [outputs, inputs]
              float* out,           // [rows, outputs]
              int64_t rows, int64_t inputs, int64_t outputs, bool adds = false);

 private:
  DeviceArray<std::byte> workspace_;
  cublasHandle_t handle_ = nullptr;
};

}  // namespace larder::examples
