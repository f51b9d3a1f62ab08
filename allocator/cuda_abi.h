// The part of the CUDA driver's binary interface that we call, declared by ourselves so that
// nothing of ours needs the CUDA toolkit to build. The names and the values are those of cuda.h,
// which tests/allocator/cuda_abi_test.cpp compares them with. Everything here is stable: the driver
// keeps old programs working, and changes what a struct means only under a new name of the
// function.
#pragma once

#include <cstddef>
#include <cstdint>

namespace larder::cuda {

using Result = int;                       // CUresult
using Device = int;                       // CUdevice: an ordinal
using Address = unsigned long long;       // CUdeviceptr
using MemoryHandle = unsigned long long;  // CUmemGenericAllocationHandle

inline constexpr Result kSuccess = 0;
inline constexpr Result kInvalidValue = 1;
inline constexpr Result kOutOfMemory = 2;
inline constexpr Result kNotInitialized = 3;
inline constexpr Result kNoDevice = 100;
inline constexpr Result kInvalidDevice = 101;
inline constexpr Result kNotPermitted = 800;

inline constexpr int kAttributeVirtualMemory = 102;  // CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_...
inline constexpr int kAttributePosixFds = 103;       // CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_...
inline constexpr int kAllocationPinned = 1;          // CU_MEM_ALLOCATION_TYPE_PINNED
inline constexpr int kHandlePosixFd = 1;             // CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR
inline constexpr int kLocationDevice = 1;            // CU_MEM_LOCATION_TYPE_DEVICE
inline constexpr int kAccessReadWrite = 3;           // CU_MEM_ACCESS_FLAGS_PROT_READWRITE
inline constexpr int kGranularityMinimum = 0;        // CU_MEM_ALLOC_GRANULARITY_MINIMUM

struct Uuid {  // CUuuid
  unsigned char bytes[16];
};
static_assert(sizeof(Uuid) == 16);

struct MemoryLocation {  // CUmemLocation
  int type = kLocationDevice;
  int id = 0;  // the device's ordinal
};
static_assert(sizeof(MemoryLocation) == 8);

struct AllocationProperties {  // CUmemAllocationProp
  int type = kAllocationPinned;
  int requested_handle_types = kHandlePosixFd;
  MemoryLocation location;
  void* win32_meta_data = nullptr;
  struct {
    unsigned char compression_type = 0;
    unsigned char gpu_direct_rdma_capable = 0;
    unsigned short usage = 0;
    unsigned char reserved[4] = {};
  } flags;
};
static_assert(sizeof(AllocationProperties) == 32 &&
              offsetof(AllocationProperties, win32_meta_data) == 16 &&
              offsetof(AllocationProperties, flags) == 24);

struct AccessDescription {  // CUmemAccessDesc
  MemoryLocation location;
  int flags = kAccessReadWrite;
};
static_assert(sizeof(AccessDescription) == 12);

// The entry points, each once: LARDER_CUDA_ENTRY(member, symbol, parameters).
#define LARDER_CUDA_ENTRIES(LARDER_CUDA_ENTRY)                                                     \
  LARDER_CUDA_ENTRY(init, cuInit, (unsigned int flags))                                            \
  LARDER_CUDA_ENTRY(driver_get_version, cuDriverGetVersion, (int* version))                        \
  LARDER_CUDA_ENTRY(get_error_name, cuGetErrorName, (Result error, const char** name))             \
  LARDER_CUDA_ENTRY(get_error_string, cuGetErrorString, (Result error, const char** text))         \
  LARDER_CUDA_ENTRY(device_get_count, cuDeviceGetCount, (int* count))                              \
  LARDER_CUDA_ENTRY(device_get, cuDeviceGet, (Device * device, int ordinal))                       \
  LARDER_CUDA_ENTRY(device_get_uuid, cuDeviceGetUuid_v2, (Uuid * uuid, Device device))             \
  LARDER_CUDA_ENTRY(device_get_name, cuDeviceGetName, (char* name, int size, Device device))       \
  LARDER_CUDA_ENTRY(device_total_memory, cuDeviceTotalMem_v2, (size_t * bytes, Device device))     \
  LARDER_CUDA_ENTRY(device_get_attribute, cuDeviceGetAttribute,                                    \
                    (int* value, int attribute, Device device))                                    \
  LARDER_CUDA_ENTRY(get_allocation_granularity, cuMemGetAllocationGranularity,                     \
                    (size_t * bytes, const AllocationProperties* properties, int option))          \
  LARDER_CUDA_ENTRY(create, cuMemCreate,                                                           \
                    (MemoryHandle * handle, size_t size_bytes,                                     \
                     const AllocationProperties* properties, unsigned long long flags))            \
  LARDER_CUDA_ENTRY(release, cuMemRelease, (MemoryHandle handle))                                  \
  LARDER_CUDA_ENTRY(                                                                               \
      export_to_shareable_handle, cuMemExportToShareableHandle,                                    \
      (void* shareable, MemoryHandle handle, int handle_type, unsigned long long flags))           \
  LARDER_CUDA_ENTRY(import_from_shareable_handle, cuMemImportFromShareableHandle,                  \
                    (MemoryHandle * handle, void* shareable, int handle_type))                     \
  LARDER_CUDA_ENTRY(address_reserve, cuMemAddressReserve,                                          \
                    (Address * address, size_t size_bytes, size_t alignment_bytes, Address hint,   \
                     unsigned long long flags))                                                    \
  LARDER_CUDA_ENTRY(address_free, cuMemAddressFree, (Address address, size_t size_bytes))          \
  LARDER_CUDA_ENTRY(map, cuMemMap,                                                                 \
                    (Address address, size_t size_bytes, size_t offset_bytes, MemoryHandle handle, \
                     unsigned long long flags))                                                    \
  LARDER_CUDA_ENTRY(unmap, cuMemUnmap, (Address address, size_t size_bytes))                       \
  LARDER_CUDA_ENTRY(                                                                               \
      set_access, cuMemSetAccess,                                                                  \
      (Address address, size_t size_bytes, const AccessDescription* descriptions, size_t count))

// A pointer to each, under its member's name.
struct EntryPoints {
// NOLINTNEXTLINE(bugprone-macro-parentheses): they would be other declarations
#define LARDER_CUDA_ENTRY(member, symbol, parameters) Result(*member) parameters = nullptr;
  LARDER_CUDA_ENTRIES(LARDER_CUDA_ENTRY)
#undef LARDER_CUDA_ENTRY
};

}  // namespace larder::cuda
