// Private to kernels/cuda: a device by its UUID, its primary context, and the driver's functions,
// found at run time so that nothing links libcuda.
#pragma once

#include <cuda.h>
#include <cuda_runtime_api.h>
#include <memory>
#include <string>
#include <string_view>

#include "larder/status.h"

namespace larder::kernels::cuda {

struct Driver {
  decltype(&cuGetErrorName) error_name = nullptr;
  decltype(&cuDeviceGet) device = nullptr;
  decltype(&cuDevicePrimaryCtxRetain) retain = nullptr;
  decltype(&cuDevicePrimaryCtxRelease) release = nullptr;
  decltype(&cuCtxPushCurrent) push = nullptr;
  decltype(&cuCtxPopCurrent) pop = nullptr;
  decltype(&cuStreamWriteValue64) write_word = nullptr;
  decltype(&cuStreamWaitValue64) wait_word = nullptr;

  // `code` unless the result is success.
  Status to_status(ErrorCode code, std::string_view what, CUresult result) const;
};

class Context {
 public:
  static Result<std::shared_ptr<Context>> open(const std::string& device_uuid);
  Context(const Driver& driver, int device, CUcontext context)
      : driver_(driver), device_(device), context_(context) {}
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  int device() const { return device_; }
  const Driver& driver() const { return driver_; }

  // While it lives, the device is the thread's current one, and calls that allocate or wait are
  // allowed although a capture goes on somewhere. cudaSetDevice would not do: to set the previous
  // device again is to create a context there.
  class Current {
   public:
    explicit Current(const Context& context);
    ~Current();
    Current(const Current&) = delete;
    Current& operator=(const Current&) = delete;
    const Status& status() const { return status_; }

   private:
    const Context& context_;
    Status status_;
    cudaStreamCaptureMode mode_ = cudaStreamCaptureModeRelaxed;
  };

 private:
  Driver driver_;
  int device_;
  CUcontext context_;
};

}  // namespace larder::kernels::cuda
