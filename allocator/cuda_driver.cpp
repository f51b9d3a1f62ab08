#include "allocator/cuda_driver.h"

#include <algorithm>
#include <array>
#include <dlfcn.h>

namespace larder {
namespace {

constexpr int kUuidDigits = 32;

// "GPU-" and 8-4-4-4-12 digits.
std::string uuid_text(const cuda::Uuid& uuid) {
  constexpr char kDigits[] = "0123456789abcdef";
  std::string text = "GPU-";
  for (size_t i = 0; i < sizeof uuid.bytes; ++i) {
    if (i == 4 || i == 6 || i == 8 || i == 10) text += '-';
    text += kDigits[uuid.bytes[i] >> 4];
    text += kDigits[uuid.bytes[i] & 15];
  }
  return text;
}

char lower(char c) { return c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c; }

// In the form of uuid_text(); empty for what is no UUID.
std::string normal_uuid(std::string_view text) {
  std::string lowered(text);
  std::transform(lowered.begin(), lowered.end(), lowered.begin(), lower);
  std::string_view rest = lowered;
  if (rest.starts_with("gpu-") || rest.starts_with("mig-")) rest.remove_prefix(4);
  if (rest.size() != kUuidDigits + 4) return {};
  for (size_t i = 0; i < rest.size(); ++i) {
    const bool dash = i == 8 || i == 13 || i == 18 || i == 23;
    const bool digit = (rest[i] >= '0' && rest[i] <= '9') || (rest[i] >= 'a' && rest[i] <= 'f');
    if (dash ? rest[i] != '-' : !digit) return {};
  }
  return "GPU-" + std::string(rest);
}

}  // namespace

Result<std::shared_ptr<const CudaDriver>> CudaDriver::load(const std::string& library) {
  std::shared_ptr<CudaDriver> driver(new CudaDriver());
  if (Status status = driver->resolve(library); !status.ok()) return status;
  if (Status status = driver->start(library); !status.ok()) return status;
  return std::shared_ptr<const CudaDriver>(std::move(driver));
}

Status CudaDriver::resolve(const std::string& library) {
  // Never closed, see above.
  void* const handle = ::dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (handle == nullptr)
    return {ErrorCode::kUnavailable, "no CUDA driver: " + std::string(::dlerror())};
  const char* missing = nullptr;
#define LARDER_CUDA_ENTRY(member, symbol, parameters)                                  \
  calls_.member = reinterpret_cast<decltype(calls_.member)>(::dlsym(handle, #symbol)); \
  if (calls_.member == nullptr) missing = #symbol;
  LARDER_CUDA_ENTRIES(LARDER_CUDA_ENTRY)
#undef LARDER_CUDA_ENTRY
  if (missing == nullptr) return {};
  return {ErrorCode::kUnavailable, "the CUDA driver " + library + " has no " + missing +
                                       "; CUDA 11.4 (driver 470) or newer is needed"};
}

Status CudaDriver::start(const std::string& library) {
  const auto failed = [&](const char* function, cuda::Result result) {
    return Status(ErrorCode::kUnavailable, "the CUDA driver " + library + " does not work: " +
                                               error(function, "", result).what());
  };
  if (const cuda::Result result = calls_.init(0); result != cuda::kSuccess)
    return failed("cuInit", result);
  if (const cuda::Result result = calls_.driver_get_version(&version_); result != cuda::kSuccess)
    return failed("cuDriverGetVersion", result);
  int count = 0;
  if (const cuda::Result result = calls_.device_get_count(&count); result != cuda::kSuccess)
    return failed("cuDeviceGetCount", result);
  if (count == 0) return {ErrorCode::kUnavailable, "the CUDA driver " + library + " has no device"};
  for (int ordinal = 0; ordinal < count; ++ordinal)
    if (Status status = add_device(ordinal); !status.ok()) return status;
  return {};
}

Status CudaDriver::add_device(int ordinal) {
  const auto failed = [&](const char* function, cuda::Result result) {
    return Status(ErrorCode::kUnavailable,
                  error(function, "device " + std::to_string(ordinal), result).what());
  };
  cuda::Device device = 0;
  if (const cuda::Result result = calls_.device_get(&device, ordinal); result != cuda::kSuccess)
    return failed("cuDeviceGet", result);
  cuda::Uuid uuid{};
  if (const cuda::Result result = calls_.device_get_uuid(&uuid, device); result != cuda::kSuccess)
    return failed("cuDeviceGetUuid_v2", result);
  std::array<char, 256> name{};
  if (const cuda::Result result =
          calls_.device_get_name(name.data(), static_cast<int>(name.size()) - 1, device);
      result != cuda::kSuccess)
    return failed("cuDeviceGetName", result);
  size_t bytes = 0;
  if (const cuda::Result result = calls_.device_total_memory(&bytes, device);
      result != cuda::kSuccess)
    return failed("cuDeviceTotalMem_v2", result);
  devices_.push_back({device, uuid_text(uuid), name.data(), static_cast<int64_t>(bytes)});
  return {};
}

Result<CudaDevice> CudaDriver::find_device(std::string_view uuid) const {
  const std::string wanted = normal_uuid(uuid);
  if (wanted.empty())
    return {ErrorCode::kInvalidArgument,
            "device is \"" + std::string(uuid) +
                "\", but must be a UUID like GPU-01234567-89ab-cdef-0123-456789abcdef"};
  std::string present;
  for (const CudaDevice& device : devices_) {
    if (device.uuid == wanted) return device;
    present += (present.empty() ? "" : ", ") + device.uuid + " (" + device.name + ")";
  }
  return {ErrorCode::kNotFound,
          "there is no device " + std::string(uuid) + ", but there are " + present};
}

CudaError CudaDriver::error(const char* function, const std::string& arguments,
                            cuda::Result result) const {
  return {function, arguments, result, error_name(result)};
}

std::string CudaDriver::error_name(cuda::Result result) const {
  const char* name = nullptr;
  if (calls_.get_error_name(result, &name) != cuda::kSuccess || name == nullptr)
    return "CUDA error " + std::to_string(result);
  return name;
}

}  // namespace larder
