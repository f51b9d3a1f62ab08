#include "kernels/cuda/device_calls_context.h"

#include <algorithm>
#include <array>
#include <cctype>

#include "kernels/refuse.h"

namespace larder::kernels::cuda {
namespace {

constexpr auto kUnavailable = ErrorCode::kUnavailable;

Status unavailable(std::string_view what, cudaError_t error) {
  (void)cudaGetLastError();
  return refuse(kUnavailable, what, ": ", cudaGetErrorName(error), ", ", cudaGetErrorString(error));
}

// The driver's function as it has been since CUDA 12.0.
template <typename Function>
Status find(const char* name, Function& function) {
  void* address = nullptr;
  cudaDriverEntryPointQueryResult result = cudaDriverEntryPointSymbolNotFound;
  const cudaError_t error =
      cudaGetDriverEntryPointByVersion(name, &address, 12000, cudaEnableDefault, &result);
  if (error != cudaSuccess) return unavailable(name, error);
  if (result != cudaDriverEntryPointSuccess || address == nullptr)
    return refuse(kUnavailable, "the driver has no ", name, " of CUDA 12.0: expected a newer one");
  function = reinterpret_cast<Function>(address);
  return {};
}

Result<Driver> find_driver() {
  Driver driver;
  if (Status s = find("cuGetErrorName", driver.error_name); !s.ok()) return s;
  if (Status s = find("cuDeviceGet", driver.device); !s.ok()) return s;
  if (Status s = find("cuDevicePrimaryCtxRetain", driver.retain); !s.ok()) return s;
  if (Status s = find("cuDevicePrimaryCtxRelease", driver.release); !s.ok()) return s;
  if (Status s = find("cuCtxPushCurrent", driver.push); !s.ok()) return s;
  if (Status s = find("cuCtxPopCurrent", driver.pop); !s.ok()) return s;
  if (Status s = find("cuStreamWriteValue64", driver.write_word); !s.ok()) return s;
  if (Status s = find("cuStreamWaitValue64", driver.wait_word); !s.ok()) return s;
  return driver;
}

// 32 lower-case hex digits, or nothing.
std::string uuid_digits(std::string_view text) {
  for (const std::string_view prefix : {"GPU-", "MIG-"})
    if (text.starts_with(prefix)) {
      text.remove_prefix(prefix.size());
      break;
    }
  std::string digits;
  for (const char c : text) {
    if (c == '-') continue;
    if (std::isxdigit(static_cast<unsigned char>(c)) == 0) return {};
    digits += static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  return digits.size() == 32 ? digits : std::string();
}

std::string uuid_digits(const cudaUUID_t& uuid) {
  constexpr std::string_view kHex = "0123456789abcdef";
  std::string digits;
  for (const char c : uuid.bytes) {
    const auto byte = static_cast<unsigned char>(c);
    digits += kHex[byte >> 4];
    digits += kHex[byte & 15];
  }
  return digits;
}

// "GPU-8-4-4-4-12".
std::string uuid_text(const std::string& digits) {
  std::string text = "GPU-";
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i == 8 || i == 12 || i == 16 || i == 20) text += '-';
    text += digits[i];
  }
  return text;
}

Result<int> find_device(const std::string& device_uuid) {
  const std::string wanted = uuid_digits(std::string_view(device_uuid));
  if (wanted.empty())
    return refuse(ErrorCode::kInvalidArgument, "device_uuid is \"", device_uuid,
                  "\": expected GPU- or MIG- and a UUID, or its 32 hex digits");
  int count = 0;
  if (const cudaError_t error = cudaGetDeviceCount(&count); error != cudaSuccess)
    return unavailable("no CUDA device can be used", error);
  std::string others;
  for (int device = 0; device < count; ++device) {
    cudaDeviceProp properties;
    if (const cudaError_t error = cudaGetDeviceProperties(&properties, device);
        error != cudaSuccess)
      return unavailable("cudaGetDeviceProperties", error);
    const std::string digits = uuid_digits(properties.uuid);
    if (digits == wanted) return device;
    others += (others.empty() ? "" : ", ") + uuid_text(digits);
  }
  return refuse(kUnavailable, "no device has the UUID ", device_uuid, ": this process sees ",
                others.empty() ? "none" : others);
}

}  // namespace

Status Driver::to_status(ErrorCode code, std::string_view what, CUresult result) const {
  if (result == CUDA_SUCCESS) return {};
  const char* text = nullptr;
  if (error_name(result, &text) != CUDA_SUCCESS || text == nullptr) text = "unknown error";
  return refuse(code, what, ": ", text, " (", static_cast<int>(result), ")");
}

Result<std::shared_ptr<Context>> Context::open(const std::string& device_uuid) {
  Result<int> index = find_device(device_uuid);
  if (!index) return index.status();
  Result<Driver> driver = find_driver();
  if (!driver) return driver.status();
  CUdevice device = 0;
  if (Status s = driver->to_status(kUnavailable, "cuDeviceGet of " + device_uuid,
                                   driver->device(&device, *index));
      !s.ok())
    return s;
  CUcontext context = nullptr;
  if (Status s = driver->to_status(kUnavailable, "cuDevicePrimaryCtxRetain of " + device_uuid,
                                   driver->retain(&context, device));
      !s.ok())
    return s;
  return std::make_shared<Context>(*driver, *index, context);
}

Context::~Context() {
  CUdevice device = 0;
  if (driver_.device(&device, device_) == CUDA_SUCCESS) (void)driver_.release(device);
}

Context::Current::Current(const Context& context) : context_(context) {
  const Driver& driver = context.driver_;
  status_ =
      driver.to_status(ErrorCode::kInternal, "cuCtxPushCurrent", driver.push(context.context_));
  // Swaps the thread's mode with ours.
  if (status_.ok()) (void)cudaThreadExchangeStreamCaptureMode(&mode_);
}

Context::Current::~Current() {
  if (!status_.ok()) return;
  (void)cudaThreadExchangeStreamCaptureMode(&mode_);
  CUcontext popped = nullptr;
  (void)context_.driver_.pop(&popped);
}

}  // namespace larder::kernels::cuda
