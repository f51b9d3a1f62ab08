// DeviceCalls: the ops on one GPU, one call after another in one stream.
//
// Two kinds of calls. The plain ones (append, gather, ...) take tables on the host, which are
// validated, and tensors and arrays anywhere: pageable host memory is staged, memory that the
// device can use (its own, managed, registered) is used where it lies. The *_on ones take tables
// and tensors in device memory and add nothing but the workspace, so they can be captured.
//
// The pool (layer.base, view.base) and layer.key_offset are device memory in every call. No CUDA
// type is named here; a build without CUDA has `create` alone, which refuses.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>

#include "kernels/params.h"
#include "kernels/target.h"
#include "larder/status.h"

namespace larder::kernels {

// Memory that is given back, on its device, when its owner goes; move-only. It may outlive the
// DeviceCalls that it came from.
using HeldMemory = std::unique_ptr<std::byte, std::function<void(std::byte*)>>;

// A copy of host bytes in device memory: key offsets, for example.
struct DeviceArray {
  HeldMemory memory;
  int64_t size_bytes = 0;
};

// Host memory of the caller that every GPU of the process can use until this goes. The memory must
// outlive this.
struct RegisteredMemory {
  HeldMemory memory;               // on the host; the owner is of the registration
  std::byte* on_device = nullptr;  // the same bytes as kernels address them
  int64_t size_bytes = 0;
};

// Device memory of another process, mapped here.
struct IpcMemory {
  HeldMemory memory;
  int64_t size_bytes = 0;  // as the caller said: CUDA's handle does not tell
};

using IpcHandle = std::array<std::byte, 64>;  // a cudaIpcMemHandle_t

struct ByteCopy {
  std::byte* to = nullptr;
  const std::byte* from = nullptr;
  size_t size_bytes = 0;
};

struct DeviceMemoryInfo {
  int64_t free_bytes = 0;
  int64_t total_bytes = 0;
};

// One thread at a time. The caller's current device is the same after a call as before it; an error
// that another library left for cudaGetLastError is cleared.
//
// Refusals: as validate_* and run_* say; INVALID_ARGUMENT for memory of another device;
// RESOURCE_EXHAUSTED with sizes when memory for staging or workspace is not there; INTERNAL for
// what CUDA reports. Nothing is written in the first three. An error after which the device's
// context is dead (an illegal address, for example) is the answer to every later call too.
class DeviceCalls {
 public:
  // The device with this UUID: "GPU-" or "MIG-" and a UUID, or its 32 hex digits. `stream` is a
  // cudaStream_t of the device's primary context, which must outlive this, or nullptr: an own one
  // that does not wait for the default stream. INVALID_ARGUMENT for text that is no UUID,
  // UNAVAILABLE with the reason when the device cannot be used, UNSUPPORTED in a build without
  // CUDA.
  static Result<std::unique_ptr<DeviceCalls>> create(const std::string& device_uuid,
                                                     void* stream = nullptr);
  virtual ~DeviceCalls() = default;  // waits for its stream
  DeviceCalls(const DeviceCalls&) = delete;
  DeviceCalls& operator=(const DeviceCalls&) = delete;

  // Calls with tables on the host: slots, lengths, block tables, lists of blocks, mask_offsets and
  // topk_lens. Work before the call that made device or registered memory ready must be ordered
  // before the stream. What was pageable has been read, and tables have been copied, when the call
  // returns; if the call writes pageable memory, all of it is done then, else wait() or the stream
  // tells. Of pageable tensors only elements of the result are written, so neighbours in a strided
  // tensor are left alone; but out_sf is written as a whole, with the bytes of other rows as they
  // were. Of an append's rows with one slot the last stays.
  virtual Status append(const AppendParams& params) = 0;
  virtual Status gather(const GatherParams& params) = 0;
  virtual Status attend(const AttendParams& params) = 0;
  virtual Status sparse_mla(const SparseMlaParams& params) = 0;
  virtual Status merge(const MergeParams& params) = 0;
  virtual Status combine(const CombineParams& params) = 0;
  virtual Status convert(const ConvertParams& params) = 0;
  virtual Status copy(const CopyParams& params) = 0;
  virtual Status scrub(const ScrubParams& params) = 0;
  virtual Status checksum(const ChecksumParams& params) = 0;

  // Calls whose every pointer is one that the device can use (merge: outs and lses, append:
  // further_layers are arrays on the host, of device pointers), in any stream of the device:
  // nullptr is the default stream. Nothing is staged or waited for. Each stream has a workspace, so
  // calls in different streams may run at the same time. In a stream that is being captured the
  // workspace cannot grow: make the call once before the capture, else it is RESOURCE_EXHAUSTED. A
  // workspace that a capture took lives as long as this, so graphs must not run after it, nor at
  // the same time as other calls in the stream they were captured in.
  virtual Status append_on(const AppendParams& params, void* stream,
                           const BlockRights* rights = nullptr, CallFaults* faults = nullptr) = 0;
  virtual Status gather_on(const GatherParams& params, void* stream,
                           const BlockRights* rights = nullptr, CallFaults* faults = nullptr) = 0;
  virtual Status attend_on(const AttendParams& params, void* stream,
                           const BlockRights* rights = nullptr, CallFaults* faults = nullptr) = 0;
  virtual Status sparse_mla_on(const SparseMlaParams& params, void* stream,
                               const BlockRights* rights = nullptr,
                               CallFaults* faults = nullptr) = 0;
  virtual Status merge_on(const MergeParams& params, void* stream) = 0;
  virtual Status combine_on(const CombineParams& params, void* stream) = 0;
  virtual Status convert_on(const ConvertParams& params, void* stream,
                            const BlockRights* rights = nullptr, CallFaults* faults = nullptr) = 0;
  virtual Status copy_on(const CopyParams& params, void* stream,
                         const BlockRights* rights = nullptr, CallFaults* faults = nullptr) = 0;
  virtual Status scrub_on(const ScrubParams& params, void* stream,
                          const BlockRights* rights = nullptr, CallFaults* faults = nullptr) = 0;
  virtual Status checksum_on(const ChecksumParams& params, void* stream,
                             const BlockRights* rights = nullptr, CallFaults* faults = nullptr) = 0;

  // Bytes between device memory and host memory of any kind, or within either, in order as far as
  // copies touch the same bytes. Done when it returns. Those that do not, to or from pinned or
  // registered memory, go to the driver as batches.
  virtual Status copy_bytes(std::span<const ByteCopy> copies) = 0;

  // The stream of the plain calls, a cudaStream_t.
  virtual void* stream() const = 0;
  // Until all work in the stream is done; INTERNAL with what went wrong in it.
  virtual Status wait() = 0;
  // Whether wait() would return at once, be it with an error.
  virtual bool is_done() = 0;
  virtual bool is_dead() const = 0;

  // Complete when they return.
  virtual Result<DeviceArray> copy_to_device(const void* bytes, int64_t size_bytes) = 0;
  // BUSY if some of it is registered already.
  virtual Result<RegisteredMemory> register_host_memory(void* memory, int64_t size_bytes) = 0;
  // Another process's cudaMalloc allocation, from its beginning. Not from this process.
  virtual Result<IpcMemory> open_ipc_memory(const IpcHandle& handle, int64_t size_bytes) = 0;
  virtual Result<DeviceMemoryInfo> memory_info() = 0;

  // In the stream's order: write a 64-bit word once all work before it is visible; let the work
  // after it wait until the word is `value` or later (the difference, as a signed number, is not
  // negative). The word lies in registered host memory or device memory. UNSUPPORTED where the
  // driver or the device cannot.
  virtual Status write_word(void* stream, uint64_t* word, uint64_t value) = 0;
  virtual Status wait_word(void* stream, uint64_t* word, uint64_t value) = 0;

 protected:
  DeviceCalls() = default;
};

}  // namespace larder::kernels
