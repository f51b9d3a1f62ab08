// A call on a group's memory, wherever it lies: on the CPU, or on the GPU that `device` stands for.
#pragma once

#include <cstring>
#include <span>
#include <vector>

#include "kernels/cpu/stretches.h"
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

// Whole blocks, all layers, to or from host memory where they lie one after another without gaps.
// The ids are in range, and the blocks mapped. Done when it returns.
inline Status copy_blocks_on(DeviceCalls* device, const BlocksView& view,
                             std::span<const int32_t> blocks, std::byte* host, bool to_pool) {
  const cpu::Stretches stretches = cpu::stretches_of(view);
  std::vector<ByteCopy> copies;
  for (const int32_t block : blocks)
    for (int64_t i = 0; i < stretches.count; ++i) {
      std::byte* const pool = cpu::block_of(view, block) + i * stretches.stride_bytes;
      copies.push_back(
          {to_pool ? pool : host, to_pool ? host : pool, static_cast<size_t>(stretches.bytes)});
      host += stretches.bytes;
    }
  return copy_bytes_on(device, copies);
}

}  // namespace larder::kernels
