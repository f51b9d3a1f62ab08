// Private to kernels/cuda: the error of a launch as a Status.
#pragma once

#include <cuda_runtime_api.h>
#include <string>
#include <string_view>

#include "kernels/target.h"
#include "larder/status.h"

namespace larder::kernels::cuda {

inline cudaStream_t stream_of(const Target& target) {
  return static_cast<cudaStream_t>(target.stream);
}

// INTERNAL with the error's name and sentence. Clears it, unless it is one that stays with the
// context.
inline Status to_status(std::string_view what, cudaError_t error) {
  if (error == cudaSuccess) return {};
  (void)cudaGetLastError();
  return {ErrorCode::kInternal,
          std::string(what) + ": " + cudaGetErrorName(error) + ", " + cudaGetErrorString(error)};
}

// After <<<>>>.
inline Status launched(std::string_view kernel) { return to_status(kernel, cudaGetLastError()); }

}  // namespace larder::kernels::cuda
