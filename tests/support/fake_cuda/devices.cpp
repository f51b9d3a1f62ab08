// The entry points about the driver and its devices, and the control of the fake.
#include <cstdio>
#include <limits>
#include <unistd.h>

#include "tests/support/fake_cuda/fake_cuda.h"
#include "tests/support/fake_cuda/state.h"

namespace fake_cuda {

using namespace larder::cuda;

State& state() {
  static State the_driver;
  return the_driver;
}

bool count_call(State& state) {
  ++state.calls;
  return state.calls >= state.fail_first && state.calls <= state.fail_last;
}

std::optional<Result> refuse(State& state) {
  if (count_call(state)) return state.fail_with;
  if (!state.config || state.initialized_by != ::getpid()) return kNotInitialized;
  return std::nullopt;
}

namespace {

// A call about a device: what it has to return at once, if anything.
std::optional<Result> refuse_device(State& state, Device device, const void* out) {
  if (const std::optional<Result> refused = refuse(state)) return refused;
  if (out == nullptr) return kInvalidValue;
  if (!state.config->has_device(device)) return kInvalidDevice;
  return std::nullopt;
}

struct ErrorText {
  Result code;
  const char* name;
  const char* text;
};
constexpr ErrorText kErrors[] = {
    {kSuccess, "CUDA_SUCCESS", "no error"},
    {kInvalidValue, "CUDA_ERROR_INVALID_VALUE", "invalid argument"},
    {kOutOfMemory, "CUDA_ERROR_OUT_OF_MEMORY", "out of memory"},
    {kNotInitialized, "CUDA_ERROR_NOT_INITIALIZED", "initialization error"},
    {kNoDevice, "CUDA_ERROR_NO_DEVICE", "no CUDA-capable device is detected"},
    {kInvalidDevice, "CUDA_ERROR_INVALID_DEVICE", "invalid device ordinal"},
    {kNotPermitted, "CUDA_ERROR_NOT_PERMITTED", "operation not permitted"},
};

Result find_error(Result error, const char* ErrorText::*member, const char** out) {
  for (const ErrorText& entry : kErrors) {
    if (entry.code != error) continue;
    *out = entry.*member;
    return kSuccess;
  }
  *out = nullptr;
  return kInvalidValue;
}

}  // namespace

extern "C" {

FAKE_CUDA_EXPORT void fake_cuda_fail_at(int k, int error) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  driver.fail_first = driver.fail_last = k > 0 ? driver.calls + k : 0;
  driver.fail_with = error;
}

FAKE_CUDA_EXPORT void fake_cuda_fail_from(int k, int error) {
  fake_cuda_fail_at(k, error);
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  driver.fail_last = std::numeric_limits<int64_t>::max();
}

FAKE_CUDA_EXPORT void fake_cuda_books(FakeCudaBooks* books) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  *books = {static_cast<int64_t>(driver.handles.size()),
            static_cast<int64_t>(driver.mappings.size()),
            static_cast<int64_t>(driver.reservations.size()), driver.calls,
            driver.config ? driver.books().taken_bytes() : 0};
}

Result cuInit(unsigned int flags) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (driver.calls == 0 && driver.fail_last == 0) {
    driver.fail_first = driver.fail_last = environment_number("FAKE_CUDA_FAIL_AT", 0);
    driver.fail_with = static_cast<int>(environment_number("FAKE_CUDA_FAIL_WITH", kOutOfMemory));
  }
  if (count_call(driver)) return driver.fail_with;
  if (flags != 0) return kInvalidValue;
  // A fork cannot start the driver again: it has what its parent had.
  if (driver.initialized_by != 0 && driver.initialized_by != ::getpid()) return kNotInitialized;
  const std::optional<Config> config = read_config();
  if (!config) return kNotPermitted;
  if (config->uuids.empty()) return kNoDevice;
  driver.config = config;
  driver.initialized_by = ::getpid();
  return kSuccess;
}

Result cuDriverGetVersion(int* version) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (count_call(driver)) return driver.fail_with;
  if (version == nullptr) return kInvalidValue;
  *version = 13000;
  return kSuccess;
}

Result cuGetErrorName(Result error, const char** name) {
  return find_error(error, &ErrorText::name, name);
}

Result cuGetErrorString(Result error, const char** text) {
  return find_error(error, &ErrorText::text, text);
}

Result cuDeviceGetCount(int* count) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse(driver)) return *refused;
  if (count == nullptr) return kInvalidValue;
  *count = static_cast<int>(driver.config->uuids.size());
  return kSuccess;
}

Result cuDeviceGet(Device* device, int ordinal) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse_device(driver, ordinal, device)) return *refused;
  *device = ordinal;
  return kSuccess;
}

Result cuDeviceGetUuid_v2(Uuid* uuid, Device device) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse_device(driver, device, uuid)) return *refused;
  *uuid = driver.config->uuids[static_cast<size_t>(device)];
  return kSuccess;
}

Result cuDeviceGetName(char* name, int size, Device device) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse_device(driver, device, name)) return *refused;
  if (size <= 0) return kInvalidValue;
  std::snprintf(name, static_cast<size_t>(size), "Fake GPU %d", device);
  return kSuccess;
}

Result cuDeviceTotalMem_v2(size_t* bytes, Device device) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse_device(driver, device, bytes)) return *refused;
  *bytes = static_cast<size_t>(driver.config->memory_bytes);
  return kSuccess;
}

Result cuDeviceGetAttribute(int* value, int attribute, Device device) {
  State& driver = state();
  const std::lock_guard lock(driver.mutex);
  if (const auto refused = refuse_device(driver, device, value)) return *refused;
  if (attribute == kAttributeVirtualMemory)
    *value = driver.config->without == "vmm" ? 0 : 1;
  else if (attribute == kAttributePosixFds)
    *value = driver.config->without == "fds" ? 0 : 1;
  else
    return kInvalidValue;
  return kSuccess;
}

}  // extern "C"

}  // namespace fake_cuda
