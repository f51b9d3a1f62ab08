// allocator/cuda_abi.h against the toolkit's cuda.h: built where there is one.
#include "allocator/cuda_abi.h"

#include <cuda.h>
#include <type_traits>

#include <doctest/doctest.h>

namespace larder::cuda {
namespace {

// Parameters and results are passed in the same way: as many, of the same size, pointers as
// pointers. (Types of structs and enums cannot be the same; their contents are compared below.)
template <typename Ours, typename Theirs>
constexpr bool kPassedAlike =
    sizeof(Ours) == sizeof(Theirs) && std::is_pointer_v<Ours> == std::is_pointer_v<Theirs>;
template <typename Ours, typename Theirs>
constexpr bool kSameCall = false;
template <typename R1, typename... A1, typename R2, typename... A2>
requires(sizeof...(A1) == sizeof...(A2)) constexpr bool kSameCall<R1 (*)(A1...), R2 (*)(A2...)> =
    kPassedAlike<R1, R2> && (kPassedAlike<A1, A2> && ...);

#define LARDER_CUDA_ENTRY(member, symbol, parameters) \
  static_assert(kSameCall<decltype(EntryPoints::member), decltype(&::symbol)>, #symbol);
LARDER_CUDA_ENTRIES(LARDER_CUDA_ENTRY)
#undef LARDER_CUDA_ENTRY

TEST_CASE("codes and options have the values of cuda.h") {
  CHECK(kSuccess == CUDA_SUCCESS);
  CHECK(kInvalidValue == CUDA_ERROR_INVALID_VALUE);
  CHECK(kOutOfMemory == CUDA_ERROR_OUT_OF_MEMORY);
  CHECK(kNotInitialized == CUDA_ERROR_NOT_INITIALIZED);
  CHECK(kNoDevice == CUDA_ERROR_NO_DEVICE);
  CHECK(kInvalidDevice == CUDA_ERROR_INVALID_DEVICE);
  CHECK(kNotPermitted == CUDA_ERROR_NOT_PERMITTED);
  CHECK(kAttributeVirtualMemory == CU_DEVICE_ATTRIBUTE_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED);
  CHECK(kAttributePosixFds == CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED);
  CHECK(kAllocationPinned == CU_MEM_ALLOCATION_TYPE_PINNED);
  CHECK(kHandlePosixFd == CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR);
  CHECK(kLocationDevice == CU_MEM_LOCATION_TYPE_DEVICE);
  CHECK(kAccessReadWrite == CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
  CHECK(kGranularityMinimum == CU_MEM_ALLOC_GRANULARITY_MINIMUM);
}

TEST_CASE("structs have the form of cuda.h") {
  static_assert(sizeof(Uuid) == sizeof(CUuuid));
  static_assert(sizeof(MemoryLocation) == sizeof(CUmemLocation));
  CHECK(offsetof(MemoryLocation, type) == offsetof(CUmemLocation, type));
  CHECK(offsetof(MemoryLocation, id) == offsetof(CUmemLocation, id));
  static_assert(sizeof(AllocationProperties) == sizeof(CUmemAllocationProp));
  static_assert(alignof(AllocationProperties) == alignof(CUmemAllocationProp));
  CHECK(offsetof(AllocationProperties, type) == offsetof(CUmemAllocationProp, type));
  CHECK(offsetof(AllocationProperties, requested_handle_types) ==
        offsetof(CUmemAllocationProp, requestedHandleTypes));
  CHECK(offsetof(AllocationProperties, location) == offsetof(CUmemAllocationProp, location));
  CHECK(offsetof(AllocationProperties, win32_meta_data) ==
        offsetof(CUmemAllocationProp, win32HandleMetaData));
  CHECK(offsetof(AllocationProperties, flags.compression_type) ==
        offsetof(CUmemAllocationProp, allocFlags.compressionType));
  CHECK(offsetof(AllocationProperties, flags.gpu_direct_rdma_capable) ==
        offsetof(CUmemAllocationProp, allocFlags.gpuDirectRDMACapable));
  CHECK(offsetof(AllocationProperties, flags.usage) ==
        offsetof(CUmemAllocationProp, allocFlags.usage));
  static_assert(sizeof(AccessDescription) == sizeof(CUmemAccessDesc));
  CHECK(offsetof(AccessDescription, location) == offsetof(CUmemAccessDesc, location));
  CHECK(offsetof(AccessDescription, flags) == offsetof(CUmemAccessDesc, flags));
}

}  // namespace
}  // namespace larder::cuda
