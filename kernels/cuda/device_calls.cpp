// The life of DeviceCalls, its workspaces, and what is no op.
#include "kernels/device_calls.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "kernels/cuda/device_calls_gpu.h"
#include "kernels/cuda/launch.h"
#include "kernels/refuse.h"
#include "kernels/validate.h"

namespace larder::kernels {

Result<std::unique_ptr<DeviceCalls>> DeviceCalls::create(const std::string& device_uuid,
                                                         void* stream) {
  Result<std::shared_ptr<cuda::Context>> context = cuda::Context::open(device_uuid);
  if (!context) return context.status();
  auto calls = std::make_unique<cuda::GpuCalls>(*context);
  if (Status s = calls->open(stream); !s.ok()) return s;
  return std::unique_ptr<DeviceCalls>(std::move(calls));
}

namespace cuda {
namespace {

constexpr int64_t kWorkspaceStep = 1ll << 20;

// Frees with the device current, which keeps the context until then.
HeldMemory held(std::byte* memory, std::shared_ptr<Context> context,
                cudaError_t (*release)(void* memory)) {
  return {memory, [context = std::move(context), release](std::byte* bytes) {
            const Context::Current current(*context);
            if (!current.status().ok()) return;
            // What fails here fails with the context, and the next call says so.
            if (release(bytes) != cudaSuccess) (void)cudaGetLastError();
          }};
}

Status check_size(std::string_view field, const void* memory, int64_t size_bytes) {
  if (size_bytes < 1) return refuse(kInvalid, "size_bytes is ", size_bytes, ": expected 1 or more");
  if (memory == nullptr) return refuse(kInvalid, field, " is null with ", size_bytes, " bytes");
  return {};
}

}  // namespace

Status GpuCalls::open(void* stream) {
  const Status status = with_device([&]() -> Status {
    if (const cudaError_t error = cudaEventCreateWithFlags(&probe_, cudaEventDisableTiming);
        error != cudaSuccess)
      return to_status("cudaEventCreateWithFlags", error);
    stream_ = static_cast<cudaStream_t>(stream);
    if (stream != nullptr) return {};
    if (Status s = to_status("cudaStreamCreateWithFlags",
                             cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking));
        !s.ok())
      return s;
    owns_stream_ = true;
    return {};
  });
  if (status.ok()) return {};
  return {ErrorCode::kUnavailable, status.message()};
}

GpuCalls::~GpuCalls() {
  const Context::Current current(*context_);
  if (!current.status().ok()) return;
  // Errors are those of a dead context, whose memory has gone with it.
  if (probe_ != nullptr && (owns_stream_ || stream_ != nullptr))
    (void)cudaStreamSynchronize(stream_);
  stager_.release();
  for (const auto& [stream, workspace] : workspaces_) (void)cudaFree(workspace.data);
  for (std::byte* workspace : kept_workspaces_) (void)cudaFree(workspace);
  if (probe_ != nullptr) (void)cudaEventDestroy(probe_);
  if (owns_stream_) (void)cudaStreamDestroy(stream_);
  (void)cudaGetLastError();
}

Status GpuCalls::remember(Status status) {
  if (status.code() != ErrorCode::kInternal) return status;
  const cudaError_t state = cudaEventQuery(probe_);
  if (state != cudaSuccess && state != cudaErrorNotReady) dead_ = status;
  (void)cudaGetLastError();
  return status;
}

Status GpuCalls::ask_capturing(cudaStream_t stream, bool& is_capturing) {
  cudaStreamCaptureStatus state = cudaStreamCaptureStatusNone;
  const cudaError_t error = cudaStreamIsCapturing(stream, &state);
  is_capturing = state != cudaStreamCaptureStatusNone;
  return to_status("cudaStreamIsCapturing", error);
}

Status GpuCalls::reserve_workspace(int64_t bytes, Target& target) {
  if (bytes == 0) return {};
  const cudaStream_t stream = stream_of(target);
  bool is_capturing = false;
  if (Status s = ask_capturing(stream, is_capturing); !s.ok()) return s;
  Workspace& workspace = workspaces_[stream];
  if (bytes > workspace.size_bytes) {
    if (is_capturing)
      return refuse(ErrorCode::kResourceExhausted, "the call needs a workspace of ", bytes,
                    " bytes, and that of the stream, which is being captured, has ",
                    workspace.size_bytes, ": make the call once before the capture");
    // Grows by a half at least, so that slowly growing calls allocate seldom.
    const int64_t size = std::max(bytes, workspace.size_bytes + workspace.size_bytes / 2) /
                             kWorkspaceStep * kWorkspaceStep +
                         kWorkspaceStep;
    if (Status s = to_status("workspace", cudaStreamSynchronize(stream)); !s.ok()) return s;
    void* memory = nullptr;
    if (const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(size));
        error != cudaSuccess)
      return allocation_failed("workspace", size, error);
    if (workspace.is_captured)
      kept_workspaces_.push_back(workspace.data);
    else if (workspace.data != nullptr)
      (void)cudaFree(workspace.data);
    workspace = {static_cast<std::byte*>(memory), size, false};
  }
  workspace.is_captured |= is_capturing;
  target.workspace = workspace.data;
  target.workspace_bytes = workspace.size_bytes;
  return {};
}

Status GpuCalls::wait() {
  return with_device([&] { return to_status("the stream", cudaStreamSynchronize(stream_)); });
}

bool GpuCalls::is_done() {
  bool done = true;
  // An error is wait()'s to tell.
  (void)with_device([&]() -> Status {
    done = cudaStreamQuery(stream_) != cudaErrorNotReady;
    (void)cudaGetLastError();
    return {};
  });
  return done;
}

Result<DeviceArray> GpuCalls::copy_to_device(const void* bytes, int64_t size_bytes) {
  DeviceArray array;
  if (Status s = check_size("bytes", bytes, size_bytes); !s.ok()) return s;
  if (Status s = with_device([&]() -> Status {
        void* memory = nullptr;
        if (const cudaError_t error = cudaMalloc(&memory, static_cast<size_t>(size_bytes));
            error != cudaSuccess)
          return allocation_failed("device array", size_bytes, error);
        array = {held(static_cast<std::byte*>(memory), context_, cudaFree), size_bytes};
        if (Status copied =
                to_status("copy to the device",
                          cudaMemcpyAsync(memory, bytes, static_cast<size_t>(size_bytes),
                                          cudaMemcpyDefault, stream_));
            !copied.ok())
          return copied;
        return to_status("copy to the device", cudaStreamSynchronize(stream_));
      });
      !s.ok())
    return s;
  return array;
}

Result<RegisteredMemory> GpuCalls::register_host_memory(void* memory, int64_t size_bytes) {
  RegisteredMemory registered;
  if (Status s = check_size("memory", memory, size_bytes); !s.ok()) return s;
  if (Status s = with_device([&]() -> Status {
        const cudaError_t error =
            cudaHostRegister(memory, static_cast<size_t>(size_bytes),
                             cudaHostRegisterPortable | cudaHostRegisterMapped);
        if (error == cudaErrorHostMemoryAlreadyRegistered) {
          (void)cudaGetLastError();
          return refuse(ErrorCode::kBusy, "host memory of ", size_bytes,
                        " bytes is registered with CUDA already");
        }
        if (error == cudaErrorMemoryAllocation) {
          (void)cudaGetLastError();
          return refuse(ErrorCode::kResourceExhausted, "host memory of ", size_bytes,
                        " bytes cannot be registered: the system has no more to pin");
        }
        if (error != cudaSuccess) return to_status("cudaHostRegister", error);
        registered.memory = held(static_cast<std::byte*>(memory), context_, cudaHostUnregister);
        registered.size_bytes = size_bytes;
        void* on_device = nullptr;
        if (Status mapped = to_status("cudaHostGetDevicePointer",
                                      cudaHostGetDevicePointer(&on_device, memory, 0));
            !mapped.ok())
          return mapped;
        registered.on_device = static_cast<std::byte*>(on_device);
        return {};
      });
      !s.ok())
    return s;
  return registered;
}

Result<IpcMemory> GpuCalls::open_ipc_memory(const IpcHandle& handle, int64_t size_bytes) {
  static_assert(sizeof(cudaIpcMemHandle_t) == sizeof(IpcHandle));
  IpcMemory opened;
  if (size_bytes < 1) return refuse(kInvalid, "size_bytes is ", size_bytes, ": expected 1 or more");
  if (Status s = with_device([&]() -> Status {
        cudaIpcMemHandle_t native;
        std::memcpy(&native, handle.data(), handle.size());
        void* memory = nullptr;
        const cudaError_t error =
            cudaIpcOpenMemHandle(&memory, native, cudaIpcMemLazyEnablePeerAccess);
        if (error == cudaErrorInvalidValue || error == cudaErrorInvalidResourceHandle) {
          (void)cudaGetLastError();
          return refuse(kInvalid, "the IPC handle is none of memory that another process has (",
                        cudaGetErrorName(error), ")");
        }
        if (error != cudaSuccess) return to_status("cudaIpcOpenMemHandle", error);
        opened = {held(static_cast<std::byte*>(memory), context_, cudaIpcCloseMemHandle),
                  size_bytes};
        return {};
      });
      !s.ok())
    return s;
  return opened;
}

Result<DeviceMemoryInfo> GpuCalls::memory_info() {
  size_t free_bytes = 0;
  size_t total_bytes = 0;
  if (Status s = with_device(
          [&] { return to_status("cudaMemGetInfo", cudaMemGetInfo(&free_bytes, &total_bytes)); });
      !s.ok())
    return s;
  return DeviceMemoryInfo{static_cast<int64_t>(free_bytes), static_cast<int64_t>(total_bytes)};
}

Status GpuCalls::find_word(const uint64_t* word, CUdeviceptr& address) {
  if (word == nullptr) return refuse(kInvalid, "word is null");
  if (Status s = validate_array("word", word, alignof(uint64_t)); !s.ok()) return s;
  cudaPointerAttributes attributes{};
  if (const cudaError_t error = cudaPointerGetAttributes(&attributes, word); error != cudaSuccess)
    return to_status("word", error);
  if (attributes.devicePointer == nullptr)
    return refuse(kInvalid,
                  "word lies in memory that the device cannot use: expected registered "
                  "host memory or device memory");
  address = reinterpret_cast<CUdeviceptr>(attributes.devicePointer);
  return {};
}

namespace {

Status word_status(const Driver& driver, std::string_view what, CUresult result) {
  return driver.to_status(
      result == CUDA_ERROR_NOT_SUPPORTED ? ErrorCode::kUnsupported : ErrorCode::kInternal, what,
      result);
}

}  // namespace

Status GpuCalls::write_word(void* stream, uint64_t* word, uint64_t value) {
  return with_device([&]() -> Status {
    CUdeviceptr address = 0;
    if (Status s = find_word(word, address); !s.ok()) return s;
    const Driver& driver = context_->driver();
    return word_status(driver, "cuStreamWriteValue64",
                       driver.write_word(static_cast<CUstream>(stream), address, value,
                                         CU_STREAM_WRITE_VALUE_DEFAULT));
  });
}

Status GpuCalls::wait_word(void* stream, uint64_t* word, uint64_t value) {
  return with_device([&]() -> Status {
    CUdeviceptr address = 0;
    if (Status s = find_word(word, address); !s.ok()) return s;
    const Driver& driver = context_->driver();
    return word_status(
        driver, "cuStreamWaitValue64",
        driver.wait_word(static_cast<CUstream>(stream), address, value, CU_STREAM_WAIT_VALUE_GEQ));
  });
}

}  // namespace cuda
}  // namespace larder::kernels
