// A call on a group's memory, wherever it lies: on the CPU, or on the GPU that `device` stands for.
#pragma once

#include <cstring>
#include <span>

#include "kernels/device_calls.h"
#include "kernels/kernel_table.h"

namespace larder::kernels {

inline Status run_on(DeviceCalls* device, const AppendParams& params) {
  return device == nullptr ? run_append(params) : device->append(params);
}
inline Status run_on(DeviceCalls* device, const GatherParams& params) {
  return device == nullptr ? run_gather(params) : device->gather(params);
}
inline Status run_on(DeviceCalls* device, const AttendParams& params) {
  return device == nullptr ? run_attend(params) : device->attend(params);
}
inline Status run_on(DeviceCalls* device, const SparseMlaParams& params) {
  return device == nullptr ? run_sparse_mla(params) : device->sparse_mla(params);
}
inline Status run_on(DeviceCalls* device, const ConvertParams& params) {
  return device == nullptr ? run_convert(params) : device->convert(params);
}
inline Status run_on(DeviceCalls* device, const CopyParams& params) {
  return device == nullptr ? run_copy(params) : device->copy(params);
}
inline Status run_on(DeviceCalls* device, const ScrubParams& params) {
  return device == nullptr ? run_scrub(params) : device->scrub(params);
}
inline Status run_on(DeviceCalls* device, const ChecksumParams& params) {
  return device == nullptr ? run_checksum(params) : device->checksum(params);
}

// Bytes of pools and host memory, as they are. Done when it returns.
inline Status copy_bytes_on(DeviceCalls* device, std::span<const ByteCopy> copies) {
  if (device != nullptr) return device->copy_bytes(copies);
  for (const ByteCopy& copy : copies) std::memcpy(copy.to, copy.from, copy.size_bytes);
  return {};
}

}  // namespace larder::kernels
