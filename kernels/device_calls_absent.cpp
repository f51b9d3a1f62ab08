// A build without CUDA.
#include "kernels/device_calls.h"

namespace larder::kernels {

Result<std::unique_ptr<DeviceCalls>> DeviceCalls::create(const std::string&, void*) {
  return {ErrorCode::kUnsupported,
          "this build has no CUDA kernels: it was configured without nvcc"};
}

}  // namespace larder::kernels
