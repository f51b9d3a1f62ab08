#include "client/examples/gpu_products.h"

namespace larder::examples {
namespace {

// What NVIDIA recommends for Hopper and later; earlier GPUs take less of it.
constexpr int64_t kWorkspaceBytes = int64_t{32} << 20;

void check_cublas(cublasStatus_t status, const std::string& call) {
  if (status == CUBLAS_STATUS_SUCCESS) return;
  throw GpuError(
      status == CUBLAS_STATUS_ALLOC_FAILED ? ErrorCode::kResourceExhausted : ErrorCode::kInternal,
      call + ": " + cublasGetStatusName(status) + ", " + cublasGetStatusString(status));
}

}  // namespace

GpuProducts::GpuProducts(cudaStream_t stream) : workspace_(kWorkspaceBytes) {
  check_cublas(cublasCreate(&handle_), "cublasCreate");
  try {
    // The stream comes first: it resets the workspace.
    check_cublas(cublasSetStream(handle_, stream), "cublasSetStream");
    check_cublas(
        cublasSetWorkspace(handle_, workspace_.data(), static_cast<size_t>(workspace_.size())),
        "cublasSetWorkspace");
    check_cublas(cublasSetMathMode(handle_, CUBLAS_PEDANTIC_MATH), "cublasSetMathMode");
  } catch (const GpuError&) {
    (void)cublasDestroy(handle_);
    throw;
  }
}

GpuProducts::~GpuProducts() { (void)cublasDestroy(handle_); }

// cuBLAS is column-major: what it sees are the transposes, out^T = weight * x^T.
void GpuProducts::linear(const float* x, const float* weight, float* out, int64_t rows,
                         int64_t inputs, int64_t outputs, bool adds) {
  const float one = 1.0f;
  const float kept = adds ? 1.0f : 0.0f;
  const auto m = static_cast<int>(outputs);
  const auto n = static_cast<int>(rows);
  const auto k = static_cast<int>(inputs);
  check_cublas(
      cublasSgemm(handle_, CUBLAS_OP_T, CUBLAS_OP_N, m, n, k, &one, weight, k, x, k, &kept, out, m),
      "cublasSgemm(" + std::to_string(rows) + " rows, " + std::to_string(inputs) + " to " +
          std::to_string(outputs) + ")");
}

}  // namespace larder::examples
